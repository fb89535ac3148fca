"""The latest checkpoint of a folder: the text file `checkpoint` next to the checkpoints."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Sequence

from unison.errors import (
    DataLossError,
    DeadlineExceededError,
    FailedPreconditionError,
    NotFoundError,
    OpError,
    PermissionDeniedError,
    UnavailableError,
)
from unison.runtime import process_group
from unison.runtime.elastic.lifecycle import happened
from unison.runtime.process_group import all_gather_json
from unison.storage import atomic, files
from unison.storage.decoding import plain_text, real_number
from unison.storage.file_systems import is_remote
from unison.storage.names import can_be_path, leads_inside
from unison.train.archive import SUFFIX
from unison.train.checkpoint_formats import open_checkpoint
from unison.train.sharded_archive import ShardedArchive

logger = logging.getLogger("unison")

_FILE = "checkpoint"
#: The fields whose values are names; the values of the others are times.
_NAMES = ("model_checkpoint_path", "all_model_checkpoint_paths")
_LINE = re.compile(r'(\w+): ("(?:[^"\\]|\\.)*"|[-+.\deE]+)')


@dataclasses.dataclass
class CheckpointState:
    """The content of the file `checkpoint` of a folder.

    Attributes:
        model_checkpoint_path: The latest checkpoint.
        all_model_checkpoint_paths: The checkpoints that may be deleted later, the oldest first.
        all_model_checkpoint_timestamps: The times of their writing, in seconds since the epoch.
        last_preserved_timestamp: The time of the last one that is never deleted.

    TF: the `CheckpointState` of `tf.train.get_checkpoint_state`.
    """

    model_checkpoint_path: str
    all_model_checkpoint_paths: list[str] = dataclasses.field(default_factory=list)
    all_model_checkpoint_timestamps: list[float] = dataclasses.field(default_factory=list)
    last_preserved_timestamp: float = 0.0


def latest_checkpoint(
    checkpoint_dir: str | os.PathLike, latest_filename: str | None = None
) -> str | None:
    """Returns the path of the latest checkpoint in a folder; None if there is none.

    It is read completely for verification. A corrupt one is skipped with a warning, and the
    previous one is tried. Of a checkpoint in parts, each process of a job verifies the index only;
    `CheckpointManager.restore_or_initialize` has them verify a share each, and agree.

    Args:
        checkpoint_dir: The folder.
        latest_filename: The name of the file with the latest path. Default: `checkpoint`.

    TF: `tf.train.latest_checkpoint`.
    """
    state = get_checkpoint_state(checkpoint_dir, latest_filename)
    return None if state is None else next(_whole_ones(_newest_first(state)), None)


def agreed_checkpoint(latest: str | None) -> str | None:
    """Returns the newest valid checkpoint that all processes see: `latest`, or an earlier one.

    With one process, `latest`. Otherwise, all must call this.

    Args:
        latest: The newest one that this process sees.

    Raises:
        DataLossError: Some see checkpoints, but there is none that all of them see.
        DeadlineExceededError: Timed out waiting for a process.
    """
    if not process_group.is_of_several():
        return latest
    if latest is not None:
        latest = next(_whole_ones(_from(latest), in_shares=True, others_too=False), None)
    name = None if latest is None else os.path.basename(latest)
    names = all_gather_json(name, "Restoring the latest checkpoint")
    if len(set(names)) == 1:
        return latest
    folder = None if latest is None else os.path.dirname(latest)
    seen = [
        os.path.basename(path)
        for path in _whole_ones(() if latest is None else _from(latest), in_shares=True)
    ]
    seen_by_all = all_gather_json(seen, "Restoring a checkpoint that all see")
    common = [name for name in seen_by_all[0] if all(name in others for others in seen_by_all)]
    if not common:
        raise DataLossError(
            message="The workers see different checkpoints, and none that all of them see: "
            + "; ".join(
                f"worker {i}: {', '.join(found) or 'none'}" for i, found in enumerate(seen_by_all)
            )
            + ". Let them share the folder, copy it to those that lack it, or delete it "
            "everywhere to start again."
        )
    return os.path.join(folder or "", common[0])


def _from(latest: str) -> Iterator[str]:
    """Yields a checkpoint, and the older ones in its folder."""
    state = get_checkpoint_state(os.path.dirname(latest))
    paths = list(_newest_first(state)) if state is not None else [latest]
    yield from paths[paths.index(latest) :] if latest in paths else paths


def _whole_ones(
    paths: Iterable[str], in_shares: bool = False, others_too: bool = True
) -> Iterator[str]:
    """Yields the valid checkpoints; others are skipped with warnings.

    Args:
        paths: Their paths.
        in_shares: Whether the processes of the job divide the verification of those that are in
            parts, and then agree.
        others_too: Whether those that are not in parts are read: one that has been found already
            need not be.
    """
    for path in paths:
        try:
            archive = open_checkpoint(path)
            if in_shares and isinstance(archive, ShardedArchive):
                archive.verify_share(process_group.index(), process_group.count())
            elif others_too:
                archive.verify()
        except (DeadlineExceededError, PermissionDeniedError, UnavailableError):
            raise  # it may be whole, and an older one in its place would lose what has been done
        except OpError as error:
            logger.warning("Skipping checkpoint %s: %s", path, error)
        else:
            yield path


def get_checkpoint_state(
    checkpoint_dir: str | os.PathLike, latest_filename: str | None = None
) -> CheckpointState | None:
    """Returns the content of the file `checkpoint` of a folder; None if there is none.

    Paths outside of the folder are left out, with a warning.

    Raises:
        ValueError: The file does not name the latest checkpoint.

    TF: `tf.train.get_checkpoint_state`.
    """
    folder = os.fspath(checkpoint_dir)
    path = os.path.join(folder, latest_filename or _FILE)
    if not is_remote(folder) and os.path.islink(path) and not leads_inside(path, folder or "."):
        logger.warning("Ignoring %s, which is a link of what is not in its folder.", path)
        return None
    try:
        with files.open_to_read(path) as file:
            content = file.read()
    except (NotFoundError, FailedPreconditionError):  # the latter: a folder, or in no folder
        return None
    fields: dict[str, list] = {}
    try:
        for line in filter(None, map(str.strip, content.decode().splitlines())):
            matched = _LINE.fullmatch(line)
            if matched is None:
                raise ValueError(f"it has the line {line[:80]!r}")
            value = json.loads(matched[2])
            read = plain_text if matched[1] in _NAMES else real_number
            fields.setdefault(matched[1], []).append(read(value))
    except ValueError as error:
        logger.warning("Ignoring %s, which cannot be read: %s", path, error)
        return None
    if not fields.get("model_checkpoint_path"):
        raise ValueError(f"{path} does not name the latest checkpoint. Delete it, and save again.")
    latest = _paths_inside(folder, fields["model_checkpoint_path"][:1], path)
    if not latest:
        return None
    names = fields.get("all_model_checkpoint_paths", [])
    times = fields.get("all_model_checkpoint_timestamps", [])
    kept = _paths_inside(folder, names, path)
    return CheckpointState(
        latest[0],
        kept,
        times if len(kept) == len(names) else [],
        fields.get("last_preserved_timestamp", [0.0])[0],
    )


def _is_inside(path: str, folder: str) -> bool:
    """Whether a checkpoint is in a local folder, also if it, or its file, is a symbolic link."""
    return all(leads_inside(each, folder or ".") for each in (path, path + SUFFIX))


def _paths_inside(folder: str, names: Sequence[str], where: str) -> list[str]:
    """Returns the paths in a file, without those outside of the folder."""
    inside = []
    for name in names:
        path = os.path.join(folder, name)
        if not can_be_path(name):
            leads_out = True
        elif is_remote(folder):
            leads_out = name.startswith("/") or ".." in name.split("/") or is_remote(name)
        else:
            leads_out = not _is_inside(path, folder)
        if leads_out:
            _warn_of_outside(where, name)
        else:
            inside.append(path)
    return inside


def _warn_of_outside(where: str, name: str) -> None:
    logger.warning(
        "%s names the checkpoint %r, which is not in its folder, and is ignored. Restore it by its "
        "own path if you trust who has written the file.",
        where,
        name[:200],
    )


def update_checkpoint_state(
    folder: str,
    latest: str,
    kept: Sequence[str] | None = None,
    timestamps: Sequence[float] = (),
    last_preserved: float | None = None,
) -> None:
    """Writes the file `checkpoint` of a folder.

    Args:
        folder: The folder.
        latest: The path of the latest checkpoint in it.
        kept: The paths of those that may be deleted later. Default: the latest.
        timestamps: The times of their writing.
        last_preserved: The time of the last one that is never deleted.
    """
    name = {
        path: json.dumps(os.path.relpath(path, folder or ".")) for path in (latest, *(kept or ()))
    }
    lines = [f"model_checkpoint_path: {name[latest]}"]
    lines += [f"all_model_checkpoint_paths: {name[path]}" for path in kept or (latest,)]
    lines += [f"all_model_checkpoint_timestamps: {timestamp!r}" for timestamp in timestamps]
    if last_preserved is not None:
        lines.append(f"last_preserved_timestamp: {last_preserved!r}")
    with atomic.replacing(os.path.join(folder, _FILE)) as file:
        file.write("".join(f"{line}\n" for line in lines).encode())
        happened("checkpoint")


def _newest_first(state: CheckpointState) -> Iterator[str]:
    """Yields the latest checkpoint, the others in the file, and those with smaller numbers."""
    latest = state.model_checkpoint_path
    known = [
        latest,
        *(path for path in reversed(state.all_model_checkpoint_paths) if path != latest),
    ]
    yield from known
    folder, name = os.path.split(latest)
    stem, _, number = name.rpartition("-")
    pattern = re.compile(re.escape(stem) + rf"-(\d+)({re.escape(SUFFIX)})?")  # a file, a folder
    found = filter(None, map(pattern.fullmatch, files.names_in(folder)))
    numbers = sorted({int(match[1]) for match in found}, reverse=True)
    for other in numbers:
        path = os.path.join(folder, f"{stem}-{other}")
        if path in known or not number.isdigit() or other >= int(number):
            continue
        if is_remote(folder) or _is_inside(path, folder):
            yield path
        else:
            _warn_of_outside(folder, path)
