"""Opening a checkpoint, ours or TensorFlow's."""

from __future__ import annotations

import os

from unison.errors import NotFoundError
from unison.storage import files
from unison.train.archive import SUFFIX, Archive
from unison.train.tensor_bundle import TensorBundle, is_tensor_bundle

AnyArchive = Archive | TensorBundle

#: How many bytes of a file say whose it is.
_TAIL = 8


def open_checkpoint(prefix: str) -> AnyArchive:
    """Opens a checkpoint.

    Args:
        prefix: Its path, without `.index`.

    Raises:
        NotFoundError: There is none.
        DataLossError: It is damaged.
    """
    try:
        with files.open_to_read(prefix + SUFFIX) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - _TAIL, 0))
            if is_tensor_bundle(file.read()):
                file.seek(0)
                return TensorBundle(prefix, file.read())
    except NotFoundError:
        pass  # of which an archive says more
    return Archive(prefix)
