"""What a machine was measured to do, for plans of clusters of such machines."""

from __future__ import annotations

import functools
import json
import os
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from unison.planning.hardware import Device, Link
from unison.runtime.launching import launch
from unison.strategies import MultiWorkerMirroredStrategy
from unison.strategies.context import get_replica_context


class Calibration(NamedTuple):
    """What was measured on a machine, with one thread a process.

    Attributes:
        device: A core, and its share of the memory.
        link: The exchange between processes: seconds a message, and bytes per second.
        cores: How many cores the machine has.
    """

    device: Device
    link: Link
    cores: int

    def write(self, path: str) -> None:
        """Writes it as JSON."""
        told = {
            "device": self.device._asdict(),
            "link": self.link._asdict(),
            "cores": self.cores,
        }
        pathlib.Path(path).write_text(json.dumps(told, indent=2) + "\n")


def read_calibration(path: str) -> Calibration:
    """Returns what `Calibration.write` wrote.

    Raises:
        ValueError: The file holds something else.
    """
    try:
        told: dict[str, Any] = json.loads(pathlib.Path(path).read_text())
        return Calibration(Device(**told["device"]), Link(**told["link"]), int(told["cores"]))
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise ValueError(
            "Expected a file that `unison plan --calibrate FILE` wrote. Received: "
            f"{path!r}: {type(error).__name__}: {error}."
        ) from error


def calibrate(timeout: float = 120.0) -> Calibration:
    """Measures this machine: two processes that compute and exchange at once, for some seconds.

    Args:
        timeout: Seconds after which it is given up.

    Raises:
        TimeoutError: It took longer.
    """
    measured = launch(_measure, workers=_PROCESSES, timeout=timeout)
    flops = min(own[0] for own in measured)
    memory_rate = min(own[1] for own in measured)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    seconds = {size: max(own[2][size] for own in measured) for size in _SUMMED}
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (cores or 1)
    device = Device("cpu", memory, memory_rate, flops, flops, 1.0, is_measured=True)
    return Calibration(device, _fitted(seconds), cores or 1)


_PROCESSES = 2
#: The bytes that are summed.
_SUMMED = (2**14, 2**19, 2**24)
#: Sums that follow each other; from one, a call of the program is taken off.
_SUMS = 5
_ROUNDS = 15
#: Seconds that a sum takes at least: less is noise.
_LEAST = 1e-6
#: Rows and columns of the matrices that are multiplied.
_WIDTH = 1024
#: Floats of each array of the update.
_UPDATED = 2**20


def _fitted(seconds: dict[int, float]) -> Link:
    """Returns the latency and the rate that explain what sums of two processes took.

    A ring of two sends a message each way, and the bytes once. Relative residuals count.
    """
    sizes, taken = np.array(list(seconds)), np.array(list(seconds.values()))
    terms = np.stack([np.full(len(sizes), 2.0), sizes], axis=1) / taken[:, None]
    (latency, seconds_a_byte), *_ = np.linalg.lstsq(terms, np.ones(len(sizes)))
    if min(latency, seconds_a_byte) <= 0:  # too noisy to tell the two apart
        latency, seconds_a_byte = taken[0] / 2, taken[-1] / sizes[-1]
    return Link("measured", 1 / float(seconds_a_byte), float(latency))


def _measure() -> tuple[float, float, dict[int, float]]:
    """Returns a worker's operations and bytes per second, and the seconds of a sum by its bytes."""
    strategy = MultiWorkerMirroredStrategy()
    once, again = _sums_of(1), _sums_of(_SUMS)
    sums = {}
    for size in _SUMMED:
        array = jnp.ones(size // 4)
        seconds = [
            _timed(functools.partial(strategy.run, program, (array,))) for program in (once, again)
        ]
        sums[size] = max((seconds[1] - seconds[0]) / (_SUMS - 1), _LEAST)
    matrix = jnp.ones((_WIDTH, _WIDTH))
    product = jax.jit(lambda left: left @ left)
    flops = 2 * _WIDTH**3 / _timed(lambda: product(matrix))
    arrays = [jnp.ones(_UPDATED) for _ in range(4)]
    update = jax.jit(_update)
    rate = 7 * arrays[0].nbytes / _timed(lambda: update(*arrays))
    return flops, rate, sums


def _update(weights: jax.Array, mean: jax.Array, square: jax.Array, gradient: jax.Array) -> Any:
    """Adam's: four arrays are read, three written."""
    mean = 0.9 * mean + 0.1 * gradient
    square = 0.99 * square + 0.01 * gradient**2
    return weights - 0.001 * mean / (jnp.sqrt(square) + 1e-7), mean, square


def _sums_of(times: int) -> Callable[[jax.Array], jax.Array]:
    """Returns a function that sums an array over the workers, again and again."""

    def sum_again(array: jax.Array) -> jax.Array:
        context = get_replica_context()
        assert context is not None
        for _ in range(times):
            array = context.all_reduce("SUM", array) * 0.5
        return array

    return sum_again


def _timed(call: Callable[[], Any]) -> float:
    """Returns the median of the seconds of a call, after two that are not counted."""
    taken = []
    for index in range(_ROUNDS + 2):
        begin = time.perf_counter()
        jax.block_until_ready(jax.tree.leaves(call()))
        if index > 1:
            taken.append(time.perf_counter() - begin)
    return statistics.median(taken)
