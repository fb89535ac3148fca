"""`Recording`: what JAX's profiler sees in this process."""

from __future__ import annotations

import collections
import pathlib
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

from unison.profiling.regions import Programs

#: Events of the profiler itself and of its threads, which are left out.
_NOISE = ("ThreadpoolListener::", "end: ", "MutexLock", "ThunkExecutor::", "$profiler.py")


class Slice(NamedTuple):
    """An event with a duration.

    Attributes:
        track: The thread or stream.
        name: Its name.
        begin: When it began, in seconds since 1970 by this process's clock.
        seconds: The duration.
        device: For an operation: the number of its device, if known.
        program: For an operation: the name of its program.
        region: For an operation: its region of the step, if it is in one.
    """

    track: str
    name: str
    begin: float
    seconds: float
    device: int | None = None
    program: str | None = None
    region: str | None = None


class Recording:
    """JAX's profiler, from `start` to `stop`. There may be one at a time.

    Args:
        folder: Where the profiler writes what TensorBoard's profile plugin shows.
        host_level: How much of the runtime is recorded, from 0 to 3; the operations of CPU
            devices are, from 1 on.
        python_level: 1 to record every call of a Python function, which adds overhead.
    """

    def __init__(self, folder: Any, host_level: int = 2, python_level: int = 0):
        self._folder = pathlib.Path(folder)
        self._options = jax.profiler.ProfileOptions()
        self._options.host_tracer_level = host_level
        self._options.python_tracer_level = python_level
        self._known: set[tuple[pathlib.Path, int]] = set()

    def start(self) -> None:
        """Begins to record.

        Raises:
            RuntimeError: The profiler is recording already.
        """
        self._known = set(self._files())
        jax.profiler.start_trace(str(self._folder), profiler_options=self._options)

    def stop(self) -> None:
        """Ends the recording, and writes it."""
        jax.profiler.stop_trace()

    def slices(self) -> list[Slice]:
        """Returns what was recorded, once it is written."""
        programs = Programs(jax.local_devices())
        new = sorted(set(self._files()) - self._known)
        return [piece for path, _ in new for piece in _slices_of(path, programs)]

    def _files(self) -> Iterator[tuple[pathlib.Path, int]]:
        """Returns the files, and when they were written: two within a second have one name."""
        for path in self._folder.glob("plugins/profile/*/*.xplane.pb"):
            yield path, path.stat().st_mtime_ns


def _slices_of(path: pathlib.Path, programs: Programs) -> Iterator[Slice]:
    with warnings.catch_warnings():
        # Some jaxlibs end the process where a warning about their own types is an error.
        warnings.simplefilter("ignore", DeprecationWarning)
        planes = list(jax.profiler.ProfileData.from_file(str(path)).planes)
        begin = 0.0
        for plane in planes:
            begin = dict(plane.stats).get("profile_start_time", begin)
        found = [
            _slice(plane.name, line.name, begin, event)
            for plane in planes
            for line in plane.lines
            for event in line.events
            if event.duration_ns > 0 and not event.name.startswith(_NOISE)
        ]
    executed: dict[Any, set[str]] = collections.defaultdict(set)
    for number, piece in found:
        if piece.program is not None:
            executed[number, piece.program].add(piece.name)
    regions = {key: programs.regions(key[1], names) for key, names in executed.items()}
    for number, piece in found:
        of_program = regions.get((number, piece.program), {})
        yield piece._replace(region=of_program.get(piece.name))


def _slice(plane: str, line: str, begin: float, event: Any) -> tuple[Any, Slice]:
    """Returns an event without its region, and the number of its program."""
    stats = dict(event.stats)
    track = line if plane == "/host:CPU" else f"{plane} {line}"
    start, seconds = (begin + event.start_ns) * 1e-9, event.duration_ns * 1e-9
    name = stats.get("hlo_op", event.name)
    device, program = stats.get("device_ordinal"), stats.get("hlo_module")
    return stats.get("program_id"), Slice(track, name, start, seconds, device, program)
