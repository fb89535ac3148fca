"""`Recorder`: finds the loops of a program, and has their steps measured.

The steps are those of Keras' `fit`, and the calls of `strategy.run`. The program is not changed; it
is ended when the first of its loops has been measured.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from time import perf_counter
from typing import Any

import jax

from unison.benching.loops import Launch, Loop
from unison.benching.records import Record
from unison.cells import live_cells
from unison.program import ProgramCache
from unison.runtime.placement import Placement
from unison.strategies.batch_shares import examples_of
from unison.values import PerReplica, is_distributed

#: Seconds within which the last launch is done.
_LAST_LAUNCH = 60.0


class AllMeasured(SystemExit):
    """Ends the program, as `sys.exit` does."""

    def __init__(self) -> None:
        super().__init__(0)


class Recorder:
    """Records the steps of this process; a `StepObserver`.

    Args:
        warmup: The number of steps before measuring begins.
        steps: The minimum number of steps for the pace.
    """

    def __init__(self, warmup: int, steps: int):
        self._numbers = (warmup, steps)
        self._loops: dict[str, Loop] = {}
        self._launched: queue.SimpleQueue[tuple[Launch, Any] | None] = queue.SimpleQueue()
        self._waiter = threading.Thread(target=self._wait, name="unison-bench", daemon=True)
        self._waiter.start()

    def running(self, programs: ProgramCache) -> Callable[..., Any]:
        def run(function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
            placement = programs.placement
            loop = self._loop(getattr(function, "__qualname__", "a step"), placement)
            with loop.calling():
                result = programs(function, args, kwargs)
                shown = _smallest(result, placement)
                if shown is None:  # its variables are overwritten by the next step
                    jax.block_until_ready([cell.array for cell in live_cells(placement)])
                loop.launched(1, shown)
            loop.examples = loop.examples or _count_examples((args, kwargs), placement)
            if loop.is_measured_alone_next:
                loop.measure_alone(lambda: programs.parts_alone(function, args, kwargs))
                raise AllMeasured
            return result

        return run

    def training(self, trainer: Any, trains: bool) -> Callable[..., int]:
        def run(step: Any, batch: Any, may_wait: bool) -> int:
            if not trains:
                self._interrupt_others(None)
                return trainer.run_step(step, batch, may_wait)
            loop = self._loop(f"fit of {trainer.model.name}", trainer.strategy.placement)
            has_metrics = bool(trainer.metrics_cells())

            def on_launch(steps: int, state: list[jax.Array]) -> None:
                if not has_metrics:  # the next step overwrites all of it
                    jax.block_until_ready(state)
                # Metrics are kept for the logs, and are the last of the state.
                loop.launched(steps, state[-1] if has_metrics else None)

            step.on_launch = on_launch
            with loop.calling():
                # Launches that are timed one by one do not wait for others.
                examples = trainer.run_step(step, batch, may_wait and not loop.has_pace)
            loop.examples = max(loop.examples or 0, examples)  # the last batch may have fewer
            if loop.is_measured_alone_next:
                of_replica = -(-examples // trainer.strategy.num_replicas_in_sync)
                state = trainer.running.state
                loop.measure_alone(lambda: step.parts_alone(state, batch, of_replica))
                raise AllMeasured
            return examples

        return run

    def record(self) -> Record | None:
        """Ends the recording.

        Returns:
            The record of the loop with the most steps; None if no step has run.
        """
        self._launched.put(None)
        self._waiter.join(_LAST_LAUNCH)
        loops = self._loops.values()
        best = max(loops, key=lambda loop: (loop.is_known, loop.steps), default=None)
        return None if best is None else best.record()

    def _loop(self, name: str, placement: Placement) -> Loop:
        if name not in self._loops:
            self._loops[name] = Loop(name, placement, *self._numbers, self._watch)
        self._interrupt_others(name)
        return self._loops[name]

    def _interrupt_others(self, name: str | None) -> None:
        for other, loop in self._loops.items():
            if other != name:
                loop.interrupt()

    def _watch(self, launch: Launch, result: Any) -> None:
        self._launched.put((launch, result))

    def _wait(self) -> None:
        while (item := self._launched.get()) is not None:
            launch, result = item
            # An error is raised in the program as well, which reports it.
            with contextlib.suppress(Exception):
                jax.block_until_ready(result)
                launch.done = perf_counter()


def _smallest(result: Any, placement: Placement) -> jax.Array | None:
    """Returns the smallest array in the result of a step; None if there is none."""
    arrays: list[jax.Array] = []
    for leaf in jax.tree.leaves(result, is_leaf=is_distributed):
        array = leaf.stacked(placement) if isinstance(leaf, PerReplica) else leaf
        if isinstance(array, jax.Array):
            arrays.append(array)
    return min(arrays, key=lambda array: array.nbytes, default=None)


def _count_examples(tree: Any, placement: Placement) -> int | None:
    """Returns the number of examples in the arguments of a step, if it can be determined."""
    with contextlib.suppress(ValueError):
        return examples_of(tree, placement)
    if placement.num_replicas > 1:
        return None
    arrays = [leaf for leaf in jax.tree.leaves(tree) if getattr(leaf, "ndim", 0)]
    return arrays[0].shape[0] if arrays else None
