"""The measurements of a machine, for plans of clusters of such machines."""

from __future__ import annotations

import functools
import json
import os
import pathlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from unison.planning.hardware import Device, Link
from unison.runtime.launching import launch
from unison.storage.decoding import (
    parsed_json,
    plain_dict,
    plain_list,
    plain_text,
    real_number,
    whole_number,
)
from unison.strategies import MultiWorkerMirroredStrategy
from unison.strategies.current import get_replica_context


class Calibration(NamedTuple):
    """The measurements of a machine, with one thread per process.

    Attributes:
        device: A core, and its share of the memory.
        link: The exchange between processes: seconds a message, and bytes per second.
        cores: The number of cores of the machine.
        shared_link: The exchange between processes that take turns on the cores.
    """

    device: Device
    link: Link
    cores: int
    shared_link: Link

    def link_between(self, processes: int) -> Link:
        """Returns the link between so many processes of the machine."""
        return self.link if processes <= self.cores else self.shared_link

    def turns(self, processes: int) -> float:
        """Returns how many of a number of processes on the machine share a core."""
        return max(1.0, processes / self.cores)

    def write(self, path: str) -> None:
        """Writes it as JSON."""
        told = {
            "device": self.device._asdict(),
            "link": self.link._asdict(),
            "cores": self.cores,
            "shared_link": self.shared_link._asdict(),
        }
        pathlib.Path(path).write_text(json.dumps(told, indent=2) + "\n")


def read_calibration(path: str) -> Calibration:
    """Reads a file that `Calibration.write` has written.

    Raises:
        ValueError: The file holds something else.
    """
    try:
        told = plain_dict(parsed_json(pathlib.Path(path).read_bytes()))
        return Calibration(
            _device_of(plain_dict(told["device"])),
            _link_of(plain_dict(told["link"])),
            whole_number(told["cores"], least=1),
            _link_of(plain_dict(told["shared_link"])),
        )
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise ValueError(
            "Expected a file that `unison plan --calibrate FILE` wrote. Received: "
            f"{path!r}: {type(error).__name__}: {error}."
        ) from error


def _device_of(told: dict[str, Any]) -> Device:
    rates = [plain_list(pair, 2) for pair in plain_list(told.get("cache_rates", []))]
    numbers = {"memory", "memory_rate", "flops", "flops_32", "reached"}
    others = {"name", "is_measured", "cache_rates", "kernel_seconds"}
    if not numbers <= told.keys() <= numbers | others:
        raise ValueError(f"expected a device with {sorted(numbers)}, received {sorted(told)[:20]}")
    return Device(
        name=plain_text(told["name"]),
        is_measured=bool(told.get("is_measured", False)),
        cache_rates=tuple((_positive(size), _positive(rate)) for size, rate in rates),
        kernel_seconds=real_number(told.get("kernel_seconds", 0.0), least=0.0),
        **{name: _positive(told[name]) for name in numbers},
    )


def _link_of(told: dict[str, Any]) -> Link:
    latency = real_number(told["latency"], least=0.0)
    return Link(plain_text(told["name"]), _positive(told["rate"]), latency)


def _positive(value: Any) -> float:
    return real_number(value, least=_LEAST_RATE)


def calibrate(timeout: float = 300.0) -> Calibration:
    """Measures this machine for some seconds; for minutes where others use its cores, too.

    Two processes compute and exchange at once; then twice as many as there are cores exchange.

    Args:
        timeout: Seconds after which it is given up.

    Raises:
        TimeoutError: It took longer.
    """
    end = time.monotonic() + timeout
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cores = cores or 1
    measured = launch(_measure, workers=_PROCESSES, timeout=timeout)
    flops = statistics.mean(own[0] for own in measured)
    rates = {size: statistics.mean(own[1][size] for own in measured) for size in measured[0][1]}
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / cores
    device = Device(
        name="cpu",
        memory=memory,
        memory_rate=rates[max(rates)],
        flops=flops,
        flops_32=flops,
        reached=1.0,
        is_measured=True,
        cache_rates=tuple((float(size), rate) for size, rate in rates.items()),
    )
    fastest = max(rates.values())
    link = _fitted([own[2] for own in measured], fastest)
    shared_link = link
    if (crowd := _TURNS * cores) <= _MOST_PROCESSES:
        sums = launch(_measure_sums, workers=crowd, timeout=end - time.monotonic())
        shared_link = _fitted(sums, fastest, turns=_TURNS)
    return Calibration(device, link, cores, shared_link)


#: The minimum of a rate or a size: none is zero.
_LEAST_RATE = 1e-30

_PROCESSES = 2
#: The number of processes that share a core in the measurement; and its maximum.
_TURNS = 2
_MOST_PROCESSES = 16
#: The bytes that are summed.
_SUMMED = (2**14, 2**19, 2**24)
#: Sums that follow each other in a program.
_SUMS = 5
#: Rows and columns of the matrices that are multiplied before each.
_BETWEEN_SUMS = 512
_ROUNDS = 15
#: Seconds that a sum takes at least: less is noise.
_LEAST = 1e-6
#: Rows and columns of the matrices that are multiplied.
_WIDTH = 1024
#: The number of floats of each of the four arrays of an update: from cached to uncached sizes.
_UPDATED = tuple(2**power for power in range(18, 23, 2))
_ARRAYS = 4


def _fitted(seconds: Sequence[dict[int, float]], fastest: float, turns: float = 1.0) -> Link:
    """Returns the latency and the rate that fit the durations of sums, by their bytes.

    Of n processes a ring sends 2 (n - 1) messages, and 2 (n - 1) / n of the bytes. Relative
    residuals count.

    Args:
        seconds: What each process measured.
        fastest: The bytes per second of caches. No sum is faster: where one seems to be, others
            used the cores meanwhile.
        turns: The number of processes that share a core.
    """
    count = len(seconds)
    sizes = np.array(list(seconds[0]))
    taken = np.array([max(own[size] for own in seconds) for size in seconds[0]])
    messages = np.full(len(sizes), 2.0 * (count - 1) * turns)
    sent = 2 * (count - 1) / count * turns * sizes
    taken = np.maximum(taken, sent / fastest)
    terms = np.stack([messages, sent], axis=1) / taken[:, None]
    (latency, seconds_a_byte), *_ = np.linalg.lstsq(terms, np.ones(len(sizes)))
    if min(latency, seconds_a_byte) <= 0:  # too noisy to tell the two apart
        latency, seconds_a_byte = taken[0] / messages[0], taken[-1] / sent[-1]
    return Link("measured", 1 / float(seconds_a_byte), float(latency))


def _measure() -> tuple[float, dict[int, float], dict[int, float]]:
    """Returns the measurements of a worker.

    Its operations per second; by the bytes in use, those that an update reads and writes per
    second; and by its bytes, the seconds of a sum.
    """
    sums = _measure_sums()
    matrix = jnp.ones((_WIDTH, _WIDTH))
    product = jax.jit(lambda left: left @ left)
    flops = 2 * _WIDTH**3 / _timed(lambda: product(matrix))
    return flops, _update_rates(), sums


def _measure_sums() -> dict[int, float]:
    """Returns the seconds of a sum over workers that compute before each, by its bytes."""
    strategy = MultiWorkerMirroredStrategy()
    matrix = jnp.ones((_BETWEEN_SUMS, _BETWEEN_SUMS))
    both, products = _products(sums_too=True), _products(sums_too=False)
    sums = {}
    for size in _SUMMED:
        arguments = jnp.ones(size // 4), matrix
        of_both, of_products = (
            _timed(functools.partial(strategy.run, program, arguments))
            for program in (both, products)
        )
        sums[size] = max((of_both - of_products) / _SUMS, _LEAST)
    return sums


def _update_rates() -> dict[int, float]:
    """Returns the bytes per second of updates, as XLA counts them in plans, by the bytes in use."""
    update = jax.jit(_update, donate_argnums=(0, 1, 2))  # in place, as in training
    starting = _timed(_in_place(update, 1))
    rates = {}
    for count in _UPDATED:
        array = jax.ShapeDtypeStruct((count,), "float32")
        costs: Any = update.lower(*_ARRAYS * [array]).compile().cost_analysis()
        seconds = _timed(_in_place(update, count)) - starting
        rates[_ARRAYS * 4 * count] = costs["bytes accessed"] / max(seconds, _LEAST)
    return rates


def _in_place(update: Callable[..., Any], count: int) -> Callable[[], list[jax.Array]]:
    """Returns a function that updates the same `count` weights each time."""
    *state, gradient = (jnp.ones(count) for _ in range(_ARRAYS))

    def call() -> list[jax.Array]:
        nonlocal state
        state = update(*state, gradient)
        return state

    return call


def _update(
    weights: jax.Array, mean: jax.Array, square: jax.Array, gradient: jax.Array
) -> list[jax.Array]:
    """Adam's."""
    mean = 0.9 * mean + 0.1 * gradient
    square = 0.99 * square + 0.01 * gradient**2
    return [weights - 0.001 * mean / (jnp.sqrt(square) + 1e-7), mean, square]


def _products(sums_too: bool) -> Callable[..., jax.Array]:
    """Returns a function of an array and a matrix, all ones, that multiplies, and sums the array.

    Workers that share a core wait for each other longer where they have something to compute.
    """

    def multiply_and_sum(array: jax.Array, matrix: jax.Array) -> jax.Array:
        context = get_replica_context()
        assert context is not None
        for _ in range(_SUMS):
            # Each takes the result of the previous one; ones stay ones.
            matrix = (matrix @ matrix) * (array[0] / len(matrix))
            array = array * matrix[0, 0]
            if sums_too:
                array = context.all_reduce("SUM", array) / context.num_replicas_in_sync
        return array

    return multiply_and_sum


def _timed(call: Callable[[], Any]) -> float:
    """Returns the median of the seconds of a call, after two that are not counted."""
    taken = []
    for index in range(_ROUNDS + 2):
        begin = time.perf_counter()
        jax.block_until_ready(jax.tree.leaves(call()))
        if index > 1:
            taken.append(time.perf_counter() - begin)
    return statistics.median(taken)
