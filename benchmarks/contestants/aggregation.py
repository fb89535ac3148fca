"""A step that sums gradients over the replicas, in a jitted `shard_map`, of one process or several.

The other processes are children of the contestant, and run this module. They step when it does:
it tells them how often.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

import unison
from benchmarks.protocol import Contestant
from benchmarks.workloads import AggregationWork, from_json, to_json
from unison.runtime.placement import REPLICA_AXIS, Placement, scoped_placement

_MODULE = "benchmarks.contestants.aggregation"


class Aggregation(Contestant):
    """Steps as often as the work says; a round ends when all of its steps are done.

    Args:
        work: The workload.
        method: The name of an `AggregationMethod`; None for `psum` of the tree of gradients.
    """

    def __init__(self, work: AggregationWork, method: str | None):
        self._work = work
        port = _free_port()
        self._peers = [
            subprocess.Popen(
                [sys.executable, "-m", _MODULE, json.dumps([to_json(work), method, rank, port])],
                stdin=subprocess.PIPE,
                text=True,
            )
            for rank in range(1, work.processes)
        ]
        self._stepper = Stepper(work, method, 0, port)

    @property
    def versions(self) -> dict[str, str]:
        return {"jax": jax.__version__, "unison": unison.__version__}

    def facts(self) -> dict[str, Any]:
        return {"temporary_bytes": self._stepper.temporary_bytes}

    def round(self) -> float:
        for peer in self._peers:
            assert peer.stdin is not None
            print(self._work.steps, file=peer.stdin, flush=True)
        begin = time.perf_counter()
        self._stepper.run(self._work.steps)
        return (time.perf_counter() - begin) / self._work.steps * 1e6


class Stepper:
    """The part of one process.

    Args:
        work: The workload.
        method: As for `Aggregation`.
        rank: The index of this process.
        port: The port at which the first process coordinates the others.
    """

    def __init__(self, work: AggregationWork, method: str | None, rank: int, port: int):
        os.environ["NPROC"] = str(2 * work.devices)
        unison.set_logical_cpu_devices(work.devices)
        if work.processes > 1:
            jax.config.update("jax_num_cpu_devices", work.devices)
            jax.distributed.initialize(f"127.0.0.1:{port}", work.processes, rank)
            self._placement = Placement(jax.devices())
        else:
            self._placement = unison.MirroredStrategy().placement
        shape = (work.replicas, work.kibibytes * 256)  # of 4 bytes
        generator = np.random.default_rng(0)
        self._values = [generator.random(shape, np.float32) for _ in range(work.tensors)]
        self._losses = [self._spread(value) for value in self._values]
        self._weights = [self._spread(np.ones(shape, np.float32)) for _ in self._values]

        def step(weights: list[jax.Array], losses: list[jax.Array], rate: jax.Array) -> Any:
            # The gradients are computed in the program, as those of a model are.
            gradients = [loss[0] * 2 for loss in losses]
            if method is None:
                sums = lax.psum(gradients, REPLICA_AXIS)
            else:
                sums = unison.aggregate(gradients, method)
            return [w - rate * total for w, total in zip(weights, sums, strict=True)]

        replica, everywhere = PartitionSpec(REPLICA_AXIS), PartitionSpec()
        mapped = jax.shard_map(
            step,
            mesh=self._placement.mesh,
            in_specs=(replica, replica, everywhere),
            out_specs=replica,
            check_vma=False,
        )
        with scoped_placement(self._placement):
            lowered = jax.jit(mapped, donate_argnums=0).lower(
                self._weights, self._losses, np.float32(0)
            )
        self._compiled = lowered.compile()
        self._check()

    @property
    def temporary_bytes(self) -> int:
        """What the step needs beside its arguments and results, on one device."""
        return self._compiled.memory_analysis().temp_size_in_bytes

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self._step(0.0)

    def _step(self, rate: float) -> None:
        with self._placement.launch_lock:
            self._weights = self._compiled(self._weights, self._losses, np.float32(rate))
        jax.block_until_ready(self._weights)

    def _check(self) -> None:
        self._step(1.0)
        for weights, value in zip(self._weights, self._values, strict=True):
            expected = 1 - 2 * value.sum(axis=0)
            for shard in weights.addressable_shards:
                np.testing.assert_allclose(shard.data[0], expected, rtol=1e-5, atol=1e-5)

    def _spread(self, value: np.ndarray) -> jax.Array:
        sharding = self._placement.per_replica
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


if __name__ == "__main__":
    fields, *others = json.loads(sys.argv[1])
    stepper = Stepper(from_json(fields), *others)
    for line in sys.stdin:
        stepper.run(int(line))
