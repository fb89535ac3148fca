"""The workers' traces and the merged trace, in Chrome's trace format, which Perfetto opens."""

from __future__ import annotations

import collections
import gzip
import json
import os
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from unison.profiling.clocks import Clock
from unison.profiling.recording import Slice
from unison.profiling.regions import REGIONS
from unison.storage.decoding import parsed_json, plain_list
from unison.storage.inflating import GZIP, inflated_within

#: The file of all workers in a trace's folder, and those of each.
MERGED = "trace.json.gz"
_OF_WORKER = "worker-{}.trace.json.gz"

#: The maximum size of a trace in a small file, and for each of its bytes: characters, and marks
#: between values, each of which is an object in memory. Traces have 17 and 2 for each byte.
_SMALL = 1 << 23
_FEW_MARKS = 1 << 18
_CHARACTERS_A_BYTE = 32
_MARKS_A_BYTE = 6

#: Intervals of a region with a gap below this are merged; in seconds.
_GAP = 20e-6


def write_worker(
    folder: str | os.PathLike[str], worker: int, clock: Clock, slices: Sequence[Slice]
) -> None:
    """Writes a worker's own trace, on the first worker's clock.

    Args:
        folder: The trace's folder.
        worker: The worker's number.
        clock: Its clock.
        slices: What it has recorded.
    """
    events = [*_names(worker, slices), *_events(worker, clock, slices)]
    about = {"worker": worker, "clock_ahead_s": clock.ahead, "clock_error_s": clock.error}
    _write(pathlib.Path(folder) / _OF_WORKER.format(worker), events, {"workers": [about]})


def forget_workers(folder: str | os.PathLike[str]) -> None:
    """Removes the workers' own traces of an earlier recording, which may have had more of them."""
    for path in _of_workers(folder):
        path.unlink(missing_ok=True)  # each of several workers does it


def _of_workers(folder: str | os.PathLike[str]) -> list[pathlib.Path]:
    """Returns the workers' own traces in a folder, in their order."""
    found = pathlib.Path(folder).glob(_OF_WORKER.format("*"))
    return sorted(found, key=lambda path: (len(path.name), path))


def merge(folder: str | os.PathLike[str]) -> pathlib.Path:
    """Merges the traces of workers in a folder, and returns the file, which Perfetto opens.

    `trace` does this where the workers share the folder. Where they do not, copy their
    `worker-N.trace.json.gz` into one folder, and call this.

    Raises:
        FileNotFoundError: There is none.
        ValueError: A file is no trace of a worker.
    """
    folder = pathlib.Path(folder)
    paths = _of_workers(folder)
    if not paths:
        raise FileNotFoundError(
            f"Expected traces of workers, {_OF_WORKER.format('N')}, in {folder}, as "
            "unison.profiling.trace writes them. Found none."
        )
    events: list[dict[str, Any]] = []
    workers: list[dict[str, Any]] = []
    for path in paths:
        try:
            said = parsed_json(_text_of(path))
            workers += plain_list(said["metadata"]["workers"])
            events += plain_list(said["traceEvents"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"Expected the trace of a worker in {path}, as unison.profiling.trace writes it. "
                f"Received a file that cannot be read so: {error!r}"
            ) from error
    return _write(folder / MERGED, events, {"workers": workers})


def _text_of(path: pathlib.Path) -> bytes:
    """Returns the JSON of a trace.

    Raises:
        ValueError: It is not compressed, or would take much more memory than traces of its size.
    """
    data = path.read_bytes()
    text = inflated_within(data, _SMALL + _CHARACTERS_A_BYTE * len(data), GZIP)
    marks = sum(map(text.count, (b",", b":", b"[", b"{")))
    most = _FEW_MARKS + _MARKS_A_BYTE * len(data)
    if marks > most:
        raise ValueError(f"expected at most {most} values in {len(data)} bytes, received {marks}")
    return text


def missing_workers(folder: str | os.PathLike[str], count: int) -> list[int]:
    """Returns which of so many workers have no trace in a folder."""
    there = pathlib.Path(folder)
    return [worker for worker in range(count) if not (there / _OF_WORKER.format(worker)).exists()]


def _write(path: pathlib.Path, events: list[dict[str, Any]], about: dict[str, Any]) -> pathlib.Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt", encoding="utf-8", compresslevel=5) as file:
        json.dump({"displayTimeUnit": "ms", "metadata": about, "traceEvents": events}, file)
    return path


def _tracks(slices: Iterable[Slice]) -> dict[str, int]:
    """Returns the numbers of the tracks: those of the regions first, in the order of a step."""
    devices = sorted({piece.device or 0 for piece in slices if piece.region})
    named = [_region_track(device, region) for device in devices for region in REGIONS]
    threads = dict.fromkeys(piece.track for piece in slices)
    return {name: number for number, name in enumerate([*named, *threads], start=1)}


def _region_track(device: int, region: str) -> str:
    return f"device {device}: {region}"


def _names(worker: int, slices: Sequence[Slice]) -> Iterator[dict[str, Any]]:
    def said(kind: str, number: int, **args: Any) -> dict[str, Any]:
        return {"ph": "M", "name": kind, "pid": worker, "tid": number, "args": args}

    yield said("process_name", 0, name=f"worker {worker}")
    yield said("process_sort_index", 0, sort_index=worker)
    for name, number in _tracks(slices).items():
        yield said("thread_name", number, name=name)
        yield said("thread_sort_index", number, sort_index=number)


def _events(worker: int, clock: Clock, slices: Sequence[Slice]) -> Iterator[dict[str, Any]]:
    tracks = _tracks(slices)

    def event(track: str, name: str, begin: float, seconds: float) -> dict[str, Any]:
        microseconds = round((begin - clock.ahead) * 1e6, 3)
        of_track = {"pid": worker, "tid": tracks[track], "name": name}
        return {"ph": "X", "ts": microseconds, "dur": round(seconds * 1e6, 3), **of_track}

    for piece in slices:
        said = event(piece.track, piece.name, piece.begin, piece.seconds)
        args = {"program": piece.program, "region": piece.region}
        said["args"] = {name: value for name, value in args.items() if value}
        yield said
    for (device, region), pieces in pieces_of_regions(slices).items():
        for begin, end in pieces:
            yield event(_region_track(device, region), region, begin, end - begin)


def seconds_of_regions(slices: Iterable[Slice]) -> dict[str, float]:
    """Returns how long a device was in each region, in the mean over the devices.

    Examples:
        >>> work = [Slice("a", "dot", 0.0, 1.0 + d, d, "step", "forward") for d in (0, 1)]
        >>> seconds_of_regions(work)
        {'forward': 1.5}
    """
    pieces = pieces_of_regions(slices)
    num_devices = len({device for device, _ in pieces})
    seconds: dict[str, float] = {}
    for (_, region), spans in pieces.items():
        of_device = sum(end - begin for begin, end in spans)
        seconds[region] = seconds.get(region, 0.0) + of_device / num_devices
    return seconds


def pieces_of_regions(
    slices: Iterable[Slice],
) -> dict[tuple[int, str], list[tuple[float, float]]]:
    """Returns when each device computed in each region: beginnings and ends, in order.

    Examples:
        >>> work = [Slice("a", "dot", b, 1.0, 0, "step", "forward") for b in (0.0, 0.5, 4.0)]
        >>> pieces_of_regions(work)
        {(0, 'forward'): [(0.0, 1.5), (4.0, 5.0)]}
    """
    found: dict[tuple[int, str], list[tuple[float, float]]] = collections.defaultdict(list)
    for piece in sorted(slices, key=lambda piece: piece.begin):
        if piece.region is None:
            continue
        pieces = found[piece.device or 0, piece.region]
        begin, end = piece.begin, piece.begin + piece.seconds
        if pieces and begin - pieces[-1][1] < _GAP:
            pieces[-1] = pieces[-1][0], max(end, pieces[-1][1])
        else:
            pieces.append((begin, end))
    return dict(found)
