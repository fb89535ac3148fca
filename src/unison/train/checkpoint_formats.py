"""Opening a checkpoint, whichever program has written it, and deleting one of Unison's."""

from __future__ import annotations

import contextlib
import os
import weakref

from unison.errors import NotFoundError
from unison.storage import files
from unison.storage.file_systems import is_remote
from unison.storage.temporary_folders import temporary_folder
from unison.train.archive import SUFFIX, Archive
from unison.train.orbax_archive import OrbaxArchive, is_orbax_folder
from unison.train.record_archive import RecordArchive
from unison.train.safetensors import INDEX_SUFFIX, SafetensorsArchive
from unison.train.safetensors import SUFFIX as SAFETENSORS_SUFFIX
from unison.train.sharded_archive import INDEX, ShardedArchive, remove_parts
from unison.train.tensor_bundle import TensorBundle, is_tensor_bundle, remove_data_files

AnyArchive = Archive | TensorBundle | RecordArchive | OrbaxArchive | SafetensorsArchive

#: The number of bytes of a file that identify its format.
_TAIL = 8


def open_checkpoint(prefix: str) -> AnyArchive:
    """Opens a checkpoint.

    Args:
        prefix: Its path, without `.index`: of a file, or a folder in Orbax's format; or that of a
            safetensors file.

    Raises:
        NotFoundError: It does not exist.
        DataLossError: It is corrupt.
    """
    if prefix.endswith((SAFETENSORS_SUFFIX, INDEX_SUFFIX)):
        return SafetensorsArchive(prefix)
    try:
        with files.open_to_read(prefix + SUFFIX) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - _TAIL, 0))
            if is_tensor_bundle(file.read()):
                file.seek(0)
                return TensorBundle(prefix, file.read())
    except NotFoundError:  # for which an archive raises a better error
        if files.exists(os.path.join(prefix, INDEX)):
            return _opened_folder(prefix)
        if not is_remote(prefix) and is_orbax_folder(prefix):
            return OrbaxArchive(prefix)
    return Archive(prefix)


def _opened_folder(prefix: str) -> ShardedArchive:
    archive = ShardedArchive(prefix, prefix)
    if not archive.is_remote_database:
        return archive
    # One that was copied there, or that an earlier release has written.
    with contextlib.ExitStack() as stack:
        copy = stack.enter_context(temporary_folder("checkpoint"))
        files.download(prefix, copy)
        archive = ShardedArchive(prefix, copy)
        weakref.finalize(archive, stack.pop_all().close)
        return archive


def remove_checkpoint(prefix: str) -> None:
    """Deletes a checkpoint that Unison has written, in any format, if it exists."""
    files.remove(prefix + SUFFIX)
    remove_data_files(prefix)
    remove_parts(prefix)
