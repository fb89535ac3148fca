"""Trains whole programs of `tests/programs` as asked, and times their epochs.

    python -m benchmarks.contestants.whole_programs MODULE REPLICAS

writes a line of JSON with its versions and the names of the programs, then reads lines,
`{"program": name, "more": number}`, and answers each with the seconds, of the wall and of the
processor, of a training that has so many epochs more than the program's own: `whole`, and `epoch`,
the median. It begins from an empty Keras session: functions are traced and compiled again.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

from parity.answers import use_logical_devices
from parity.whole_programs import load, names, strategy_of

#: How often the clocks are read for a training, and what they show: wall and processor.
_marks: list[tuple[float, float]] = []


def _mark() -> None:
    _marks.append((time.perf_counter(), time.process_time()))


def _marking_range(least: int) -> Any:
    """Returns `range`, which marks each round of loops that have `least` rounds or more."""

    def marked(numbers: range) -> Iterator[int]:
        for number in numbers:
            _mark()
            yield number
        _mark()

    def marking(*arguments: int) -> Any:
        numbers = range(*arguments)
        return marked(numbers) if len(numbers) >= least else numbers

    return marking


def _mark_epochs_of_fit(tf: Any) -> None:
    callbacks = tf.keras.callbacks.CallbackList
    on_epoch_begin = callbacks.on_epoch_begin

    def marking(self: Any, *args: Any, **kwargs: Any) -> None:
        _mark()
        on_epoch_begin(self, *args, **kwargs)

    callbacks.on_epoch_begin = marking


def _trained(train: Any, strategy: Any, more: int) -> dict[str, list[float]]:
    epochs = inspect.signature(train).parameters["epochs"].default + more
    train.__globals__["range"] = _marking_range(more)
    begin = time.perf_counter(), time.process_time()
    _marks.clear()
    train(strategy, epochs)
    whole = [time.perf_counter() - begin[0], time.process_time() - begin[1]]
    clocks = list(zip(*_marks, strict=True))
    between = [[later - at for at, later in itertools.pairwise(clock)] for clock in clocks]
    return {"whole": whole, "epoch": [statistics.median(seconds) for seconds in between]}


def main(module: str, replicas: str) -> None:
    tf = importlib.import_module(module)
    use_logical_devices(tf)
    _mark_epochs_of_fit(tf)
    strategy = strategy_of(tf, int(replicas))
    versions = {"tensorflow": tf.__version__, "keras": tf.keras.__version__}
    print(json.dumps({"versions": versions, "programs": names()}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        program = load(asked["program"], module)
        tf.keras.backend.clear_session()
        print(json.dumps(_trained(program.train, strategy, asked["more"])), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
