"""`TextLineDataset`: the lines of text files."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from unison.data.dataset import Dataset
from unison.data.files import TextLines
from unison.data.functions import ElementFunction
from unison.data.leaves import as_leaf, is_text
from unison.data.nesting import Interleave
from unison.data.plan import AUTOTUNE, Plan
from unison.data.sources import Elements, Slices
from unison.data.specs import Signature
from unison.data.structure import LEAF


class TextLineDataset(Dataset):
    """The lines of text files, as `bytes` without their ends.

    Args:
        filenames: The name of a file, several, or a dataset of names.
        compression_type: "GZIP", "ZLIB", or nothing.
        num_parallel_reads: How many files are read at a time, their lines in turn; default: one
            after the other.

    TF: `tf.data.TextLineDataset`.
    """

    def __init__(
        self,
        filenames: Any,
        compression_type: str | None = None,
        num_parallel_reads: int | None = None,
    ):
        super().__init__(text_lines(filenames, compression_type or "", num_parallel_reads))


def text_lines(filenames: Any, compression: str, num_parallel_reads: int | None) -> Plan:
    """Returns the plan of the lines of text files; see `TextLineDataset`."""
    if isinstance(filenames, Dataset):
        names = filenames.plan
    else:
        given = os.fspath(filenames) if isinstance(filenames, os.PathLike) else filenames
        leaf = as_leaf(given)
        if not is_text(leaf):
            raise TypeError(f"Expected the names of files, as text. Received: {filenames!r}")
        names = Slices((np.array([leaf], object) if isinstance(leaf, bytes) else leaf,), LEAF)
    if num_parallel_reads is None or num_parallel_reads == 1:
        return TextLines(names, compression)

    def lines_of(name: Any) -> Dataset:
        element = (name,)
        return Dataset(TextLines(Elements([element], Signature.of(element, LEAF)), compression))

    cycle = (os.cpu_count() or 1) if num_parallel_reads == AUTOTUNE else int(num_parallel_reads)
    function = ElementFunction(lines_of, "TextLineDataset", lambda leaf: leaf, as_leaf)
    return Interleave(names, function, cycle, 1, cycle)
