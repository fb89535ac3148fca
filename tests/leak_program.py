"""Loops that make and drop what a long job makes and drops, between two censuses.

    python tests/leak_program.py LOOP WARM_UP ROUNDS

After `WARM_UP` rounds, which make what is made once, a census is taken; after as many rounds as
`ROUNDS` more, another. It prints how long a round took, what each census found, and exits with 1
if something has leaked.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("UNISON_CPU_DEVICES", "2")

import keras
import numpy as np

import unison
from leaks import Census, census, process_tree, settled
from unison.data import Dataset
from unison.errors import InternalError
from unison.keras import step as compiled_steps
from unison.program import ProgramCache

#: How many programs a cache keeps here, of 256: so that rounds fill it soon.
KEPT = 4

#: How many bytes a round may add. JAX keeps the traces of its own functions (`jnp.mean`, ...) for
#: each shape, with plain `jax.jit` as well, until `jax.clear_caches()`: about 270 objects and 30 KB
#: in `run`, 1,300 objects and 250 KB in `fit` (plain Keras: 800 and 120 KB). A program that
#: is kept takes more than 1 MB, with Keras 3 MB.
BYTES_A_RETRACE = 150_000
BYTES_A_RETRACE_OF_KERAS = 500_000
BYTES_A_ROUND = 80_000
#: What the allocators may keep, whatever the number of rounds.
BYTES_KEPT = 24 << 20


def two_replicas_model() -> tuple[unison.MirroredStrategy, keras.Model]:
    strategy = unison.MirroredStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    return strategy, model


def fit(model: keras.Model, size: int) -> None:
    examples = np.ones((size, 4), np.float32), np.ones((size, 3), np.float32)
    model.fit(*examples, batch_size=size, verbose=0)


def retraces_of_run() -> Callable[[int], None]:
    """A replica function gets another shape each time."""
    strategy = unison.MirroredStrategy()
    programs = ProgramCache(strategy.placement, strategy.replica_context, capacity=KEPT)
    with strategy.scope():
        weights = unison.Variable(np.zeros(4), aggregation=unison.VariableAggregation.MEAN)

    def step(x: np.ndarray) -> object:
        weights.assign(0.9 * weights + x.sum(0))
        return (x @ weights.value()).mean()

    return lambda number: programs(step, (np.ones((number + 1, 4), np.float32),), {})


def retraces_of_fit() -> Callable[[int], None]:
    """`fit` gets another batch size each time."""
    _, model = two_replicas_model()
    model.compile("adam", "mse")
    return lambda number: fit(model, 2 * number + 2)


def recompiled_models() -> Callable[[int], None]:
    """One model is compiled again and again."""
    strategy, model = two_replicas_model()

    def one(number: int) -> None:
        with strategy.scope():
            model.compile("adam", "mse")
        fit(model, 8)

    return one


def strategies() -> Callable[[int], None]:
    """A strategy is made, used by `run`, a dataset and Keras, and dropped."""

    def one(number: int) -> None:
        strategy, model = two_replicas_model()
        with strategy.scope():
            total = unison.Variable(0.0, aggregation=unison.VariableAggregation.SUM)
            model.compile("adam", "mse")
        data = Dataset.from_tensor_slices(np.ones((8, 4), np.float32)).batch(4)
        for batch in strategy.experimental_distribute_dataset(data):
            strategy.run(lambda x: total.assign_add(x.sum()), (batch,))
        fit(model, 8)

    return one


def killed_data_workers() -> Callable[[int], None]:
    """A worker process of a dataset is killed; the dataset goes on with another one."""
    data = Dataset.range(10**9).map(lambda n: n + 1, 2, executor="process").batch(8)
    iterator = iter(data)

    def one(number: int) -> None:
        next(iterator)
        workers = [pid for pid in process_tree(os.getpid()) if is_data_worker(pid)]
        os.kill(workers[0], signal.SIGKILL)
        with contextlib.suppress(InternalError):
            last = time.monotonic() + 30
            while time.monotonic() < last:
                next(iterator)
            raise AssertionError("The death of a worker was not noticed.")

    return one


def is_data_worker(process: int) -> bool:
    with contextlib.suppress(OSError):
        return b"workers/start.py" in Path(f"/proc/{process}/cmdline").read_bytes()
    return False


#: The arrays that data workers have sent lie in slots, each with a mapping and its descriptor. How
#: many are in use differs from moment to moment.
SLOTS = {"descriptors": 4, "shared_memory": 4}

#: The loops, with how many bytes a round may add, and what else there may be more.
LOOPS: dict[str, tuple[Callable[[], Callable[[int], None]], int, dict[str, int]]] = {
    "retraces_of_run": (retraces_of_run, BYTES_A_RETRACE, {}),
    "retraces_of_fit": (retraces_of_fit, BYTES_A_RETRACE_OF_KERAS, {}),
    "recompiled_models": (recompiled_models, BYTES_A_ROUND, {}),
    "strategies": (strategies, BYTES_A_ROUND, {}),
    "killed_data_workers": (killed_data_workers, BYTES_A_ROUND, SLOTS),
}


def main(name: str, warm_up: int, rounds: int) -> int:
    loop, bytes_a_round, allowed = LOOPS[name]
    with tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir = os.environ["TMPDIR"] = folder
        one = loop()

        def taken() -> Census:
            return census(folders=[folder])

        for number in range(warm_up):
            one(number)
        before = taken()
        start = time.monotonic()
        for number in range(warm_up, warm_up + rounds):
            one(number)
        seconds = time.monotonic() - start
        memory = BYTES_KEPT + bytes_a_round * rounds
        after, found = settled(taken, before, memory, **allowed)
    print(f"{name}: {rounds} rounds, {seconds / rounds:.2f} s a round")
    for when, what in (("before", before), ("after", after)):
        print(f"{when}: {what.memory / 2**20:.1f} MiB, {dict(sorted(what.counts.items()))}")
    for line in found:
        print("LEAK", line)
    return 1 if found else 0


if __name__ == "__main__":
    with mock.patch.object(compiled_steps, "MOST_PROGRAMS", KEPT // 2):
        sys.exit(main(sys.argv[1], *map(int, sys.argv[2:])))
