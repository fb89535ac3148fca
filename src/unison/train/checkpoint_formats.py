"""Opening a checkpoint of Unison or TensorFlow."""

from __future__ import annotations

import os

from unison.errors import NotFoundError
from unison.storage import files
from unison.train.archive import SUFFIX, Archive
from unison.train.record_archive import RecordArchive
from unison.train.tensor_bundle import TensorBundle, is_tensor_bundle

AnyArchive = Archive | TensorBundle | RecordArchive

#: The number of bytes of a file that identify its format.
_TAIL = 8


def open_checkpoint(prefix: str) -> AnyArchive:
    """Opens a checkpoint.

    Args:
        prefix: Its path, without `.index`.

    Raises:
        NotFoundError: It does not exist.
        DataLossError: It is corrupt.
    """
    try:
        with files.open_to_read(prefix + SUFFIX) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - _TAIL, 0))
            if is_tensor_bundle(file.read()):
                file.seek(0)
                return TensorBundle(prefix, file.read())
    except NotFoundError:
        pass  # for which an archive raises a better error
    return Archive(prefix)
