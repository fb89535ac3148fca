"""A step that sums gradients over the replicas of one process or several, in a `shard_map`."""

from __future__ import annotations

import os
import time
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

import unison
from benchmarks import cluster
from benchmarks.protocol import Contestant
from benchmarks.workloads import AggregationWork
from unison.runtime.placement import REPLICA_AXIS, Placement, scoped_placement


class Aggregation(Contestant):
    """Steps as often as the work says; a round ends when all of its steps are done.

    Args:
        work: The workload.
        method: The name of an `AggregationMethod`; None for `psum` of the tree of gradients.
    """

    def __init__(self, work: AggregationWork, method: str | None):
        self._work = work
        os.environ["NPROC"] = str(2 * work.devices)
        unison.set_logical_cpu_devices(work.devices)
        if work.processes > 1:
            own = cluster.from_environment()
            jax.config.update("jax_num_cpu_devices", work.devices)
            jax.distributed.initialize(own.addresses[0], own.size, own.rank)
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
    def versions(self) -> dict[str, str]:
        return {"jax": jax.__version__, "unison": unison.__version__}

    def facts(self) -> dict[str, Any]:
        """What the step needs beside its arguments and results, on one device."""
        return {"temporary_bytes": self._compiled.memory_analysis().temp_size_in_bytes}

    def round(self) -> float:
        begin = time.perf_counter()
        for _ in range(self._work.steps):
            self._step(0.0)
        return (time.perf_counter() - begin) / self._work.steps * 1e6

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
