"""The ceiling: a data-parallel training loop as one writes it in JAX with `shard_map`.

It does the work of `fit`: shuffled epochs, dropout, Adam, loss and accuracy over the epoch. It
is straightforward and good: one jitted step, donated state, nothing fetched before the epoch's
end, so that the host prepares batches while the devices compute. On CPUs it waits every few steps,
since XLA gets stuck there if too many are in flight.
"""

from __future__ import annotations

import operator
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks import training_data
from benchmarks.contestants import live_arrays
from benchmarks.contestants.hand_written_models import Model, Parameters, model_of
from benchmarks.protocol import Contestant
from benchmarks.workloads import FitWork

_AXIS = "replica"
_STEPS_IN_FLIGHT = 16
_OPTIMIZER = optax.adam(1e-3, eps=1e-7)


class _State(NamedTuple):
    """What a step reads and writes; all but the totals are equal on all replicas."""

    parameters: Parameters
    optimizer: Any
    key: jax.Array
    #: What batch normalization keeps, the replicas' mean.
    statistics: Any
    #: Sums over this replica's examples: the loss, and the right answers.
    totals: jax.Array


_WHOLE = PartitionSpec()
_SPECS = _State(_WHOLE, _WHOLE, _WHOLE, _WHOLE, PartitionSpec(_AXIS))


def build(work: FitWork) -> Contestant:
    return HandWrittenFit(work)


class HandWrittenFit(Contestant):
    """A round is one epoch."""

    def __init__(self, work: FitWork):
        self._work = work
        self._inputs, self._targets = training_data.load(work)
        self._shuffle = np.random.default_rng(0)
        devices = jax.device_count()
        mesh = jax.make_mesh((devices,), (_AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
        self._by_replica = NamedSharding(mesh, PartitionSpec(_AXIS))
        model = model_of(work)
        self._classifies = model.classifies
        self._step = _compiled_step(model, mesh)
        self._state = _initial_state(model, mesh)
        self._latest: dict[str, float] = {}
        self._live_bytes = 0

    @property
    def versions(self) -> dict[str, str]:
        return {"jax": jax.__version__, "optax": optax.__version__}

    def round(self) -> float:
        self._live_bytes = 0
        begin = time.perf_counter()
        self._latest = self._epoch()
        return self._work.examples / (time.perf_counter() - begin)

    def facts(self) -> dict[str, Any]:
        parts = jax.tree.leaves(self._state._replace(totals=None))
        facts = self._latest | {"state_bytes": sum(part.nbytes for part in parts)}
        facts |= live_arrays.peak_bytes()
        return facts | {"live_bytes": self._live_bytes} if self._live_bytes else facts

    def _epoch(self) -> dict[str, float]:
        state = self._state._replace(totals=self._zero_totals())
        order = self._shuffle.permutation(self._work.examples)
        for step, start in enumerate(range(0, self._work.examples, self._work.batch)):
            rows = order[start : start + self._work.batch]
            take = operator.itemgetter(rows)
            batch = jax.tree.map(take, (self._inputs, self._targets))
            state = self._step(state, *jax.device_put(batch, self._by_replica))
            if self._work.device == "cpu" and (step + 1) % _STEPS_IN_FLIGHT == 0:
                jax.block_until_ready(state.totals)
            if self._work.weighs:
                self._live_bytes = max(self._live_bytes, live_arrays.bytes_on_fullest_device())
        self._state = state
        loss, right = np.asarray(state.totals).sum(axis=0)
        if not self._classifies:
            return {"loss": float(loss / len(self._targets))}
        classified = self._targets.size
        return {"loss": float(loss / classified), "accuracy": float(right / classified)}

    def _zero_totals(self) -> jax.Array:
        return jax.device_put(np.zeros((jax.device_count(), 2), np.float32), self._by_replica)


def _initial_state(model: Model, mesh: jax.sharding.Mesh) -> _State:
    parameters = model.initial(jax.random.key(0))
    statistics = model.statistics() if model.statistics else None
    optimizer = _OPTIMIZER.init(parameters)
    state = _State(parameters, optimizer, jax.random.key(1), statistics, None)
    return jax.device_put(state, NamedSharding(mesh, PartitionSpec()))


def _compiled_step(model: Model, mesh: jax.sharding.Mesh) -> Any:
    def step(state: _State, inputs: Any, targets: jax.Array) -> _State:
        key, used = jax.random.split(state.key)
        used = jax.random.fold_in(used, lax.axis_index(_AXIS))

        def mean_loss(parameters: Parameters) -> tuple[jax.Array, Any]:
            statistics = state.statistics
            if model.statistics:
                outputs, statistics = model.outputs(parameters, inputs, used, statistics)
            else:
                outputs = model.outputs(parameters, inputs, used)
            losses = model.losses(outputs, targets)
            right = jnp.sum(jnp.argmax(outputs, -1) == targets) if model.classifies else 0
            totals = jnp.stack([losses.sum(), jnp.float32(right)])
            return losses.mean(), (totals, statistics)

        gradients, (totals, statistics) = jax.grad(mean_loss, has_aux=True)(state.parameters)
        gradients = jax.tree.map(lambda total: total / mesh.size, lax.psum(gradients, _AXIS))
        updates, optimizer = _OPTIMIZER.update(gradients, state.optimizer)
        parameters = optax.apply_updates(state.parameters, updates)
        statistics = lax.pmean(statistics, _AXIS)
        return _State(parameters, optimizer, key, statistics, state.totals + totals)

    # Without `check_vma`, the gradient of this replica's loss is this replica's own.
    on_all = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(_SPECS, PartitionSpec(_AXIS), PartitionSpec(_AXIS)),
        out_specs=_SPECS,
        check_vma=False,
    )
    return jax.jit(on_all, donate_argnums=0)
