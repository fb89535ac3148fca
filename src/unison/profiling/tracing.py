"""`trace`: profiles all workers, and merges what they saw."""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib
from collections.abc import Iterator

from unison.profiling.clocks import compare_clocks
from unison.profiling.merging import (
    MERGED,
    forget_workers,
    merge,
    missing_workers,
    write_worker,
)
from unison.profiling.recording import Recording, Slice
from unison.runtime import process_group

logger = logging.getLogger("unison")


class Trace:
    """A trace of all workers, from `start` to `stop`, which all of them must call.

    Args:
        folder: Where it is written. The workers should share it.
        python: Whether every call of a Python function is recorded as well.
    """

    def __init__(self, folder: str | os.PathLike[str], python: bool = False):
        self._folder = pathlib.Path(folder)
        of_profiler = self._folder
        if process_group.count() > 1:  # two workers on one machine would write one file
            of_profiler = self._folder / f"worker-{process_group.index()}"
        self._recording = Recording(of_profiler, python_level=int(python))
        #: This worker's recording, once it has ended.
        self.slices: list[Slice] = []

    def start(self) -> None:
        """Begins to record."""
        self._recording.start()

    def cancel(self) -> None:
        """Ends the recording without the other workers: nothing is merged."""
        self._recording.stop()

    def stop(self) -> None:
        """Ends the recording, and writes the trace of all workers.

        Raises:
            DeadlineExceededError: Another worker has not called `stop`.
        """
        self._recording.stop()
        worker, count = process_group.index(), process_group.count()
        forget_workers(self._folder)  # before anybody writes: all compare their clocks first
        clocks = compare_clocks()
        self.slices = self._recording.slices()
        write_worker(self._folder, worker, clocks[worker], self.slices)
        process_group.all_gather_json(None, "The workers' traces")
        if worker != 0:
            return
        merge(self._folder)
        missing = missing_workers(self._folder, count)
        if missing:
            logger.warning(
                "The trace in %s is without workers %s: they have written theirs on other machines."
                " Copy their worker-N.trace.json.gz into one folder, and call "
                "unison.profiling.merge(folder).",
                self._folder,
                missing,
            )
        logger.info(
            "The trace of %d workers is in %s; their clocks agree to %.3g ms. "
            "https://ui.perfetto.dev opens it.",
            count - len(missing),
            self._folder / MERGED,
            1000 * max(clock.error for clock in clocks),
        )


@contextlib.contextmanager
def trace(folder: str | os.PathLike[str], python: bool = False) -> Iterator[None]:
    """Profiles what happens inside, on all workers, and merges it into one trace.

    The trace is `folder/trace.json.gz`, which https://ui.perfetto.dev opens (it stays in the
    browser). Each worker is a process in it; the regions of the steps (forward, backward,
    aggregate, update) come first, then its threads and streams with their operations. All times are
    by the first worker's clock. JAX's own files, for TensorBoard's profile plugin, are beside it.

    All workers must enter and leave the context at the same point of the program; if the block
    raises, nothing is merged. Wait inside for the results to be profiled
    (`jax.block_until_ready`), and leave out the first step, which compiles.

    Args:
        folder: Where the trace is written, in place of an earlier one. The workers should share
            it; see `merge`.
        python: Whether every call of a Python function is recorded as well.

    Raises:
        RuntimeError: The profiler is recording already.

    Examples:
        >>> import tempfile, jax, unison
        >>> strategy = unison.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> x = unison.PerReplica([1.0, 10.0])
        >>> with tempfile.TemporaryDirectory() as folder, unison.profiling.trace(folder):
        ...     _ = jax.block_until_ready(strategy.run(unison.aggregate, args=(x,)).values)
    """
    recording = Trace(folder, python)
    recording.start()
    try:
        yield
    except BaseException:
        recording.cancel()
        raise
    recording.stop()
