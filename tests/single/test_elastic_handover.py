"""What a worker that joins gets of the others' state, and what a job goes on with that has ended.

The workers are placements of this process: two replicas each.
"""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import unison
from unison import VariableAggregation, VariableSynchronization
from unison.keras.trainer import trainer_of
from unison.runtime.elastic import ElasticPlacement
from unison.runtime.placement import scoped_placement
from unison.train.handover import Handover
from unison.train.keras_elastic import ElasticLoops

REPLICAS = 2


class Worker:
    """A worker's variables, of which the replicas have copies of their own."""

    def __init__(self, copies=(0, 0), how="SUM", dtype=np.float32, weight=0.0, replicas=REPLICAS):
        self.placement = ElasticPlacement(jax.devices()[:replicas], SimpleNamespace())
        with scoped_placement(self.placement):
            self.weight = unison.Variable(np.float32(weight))
        self.own = self.variable(copies, how, dtype)
        self.state = Handover(weight=self.weight, own=self.own)

    def variable(self, copies, how="SUM", dtype=np.float32):
        with scoped_placement(self.placement):
            made = unison.Variable(
                np.asarray(0, dtype),
                synchronization=VariableSynchronization.ON_READ,
                aggregation=VariableAggregation[how],
            )
        made.cell.put(self.placement.spread(np.asarray(copies, dtype)))
        return made

    def join(self, place, workers):
        """Makes this the worker at a place among so many."""
        self.placement.number(place * REPLICAS, workers * REPLICAS)
        return self

    @property
    def copies(self):
        return np.stack(self.own.cell.copies()).tolist()


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_whoever_joins_gets_nothing_of_a_sum(dtype):
    old, new = Worker((2, 5), dtype=dtype, weight=3), Worker((1, 1), dtype=dtype)
    new.state.unpack(old.state.pack())
    assert float(new.weight) == 3
    assert (old.copies, new.copies) == ([2, 5], [0, 0])


def test_whoever_joins_with_one_replica_gets_nothing_of_a_sum():
    old, new = Worker((2,), replicas=1), Worker((1,), replicas=1)
    new.state.unpack(old.state.pack())
    assert (old.copies, new.copies) == ([2], [0])


def test_a_state_of_a_loop_is_handed_over_so(two_replicas):
    with two_replicas.scope():
        seen = [
            unison.Variable(
                6.0,
                synchronization=VariableSynchronization.ON_READ,
                aggregation=VariableAggregation.SUM,
            )
            for _ in range(2)
        ]
        means = [keras.metrics.Mean() for _ in range(2)]
    for mean in means:
        two_replicas.run(lambda mean=mean: mean.update_state(4.0))
    old, new = [
        unison.elastic.State(step=0, seen=each, mean=mean)
        for each, mean in zip(seen, means, strict=True)
    ]
    old.step = 5
    new.unpack(old.pack())
    assert new.step == 5
    assert [float(each) for each in seen] == [12, 0]
    # A metric: what it has counted stays with who has counted it.
    assert [float(mean.count) for mean in means] == [2, 0]


@pytest.mark.parametrize("how", ["MEAN", "ONLY_FIRST_REPLICA"])
def test_whoever_joins_gets_what_the_other_reads_where_that_is_no_sum(how):
    old, new = Worker((2, 6), how), Worker((1, 1), how)
    new.state.unpack(old.state.pack())
    assert new.copies == ([4, 4] if how == "MEAN" else [2, 2])


@pytest.mark.parametrize("how", ["SUM", "MEAN", "ONLY_FIRST_REPLICA"])
def test_who_was_only_behind_keeps_its_own_copies(how):
    ahead, behind = Worker((2, 6), how, weight=3), Worker((1, 4), how)
    behind.state.unpack(ahead.state.pack(), keeps_part=True)
    assert float(behind.weight) == 3
    assert behind.copies == [1, 4]


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_sum_is_divided_among_those_who_go_on(workers):
    # None of the numbers of replicas divides it.
    left = [Worker((2, 5), dtype=np.int32, weight=3), Worker((1, 9), dtype=np.int32, weight=3)]
    parts = [worker.state.pack_part() for worker in left]
    going_on = [Worker((8, 8), dtype=np.int32).join(place, workers) for place in range(workers)]
    for worker in going_on:
        worker.state.resume(left[0].state.pack(), parts)
    assert [float(worker.weight) for worker in going_on] == [3] * workers
    assert sum(sum(worker.copies) for worker in going_on) == 17
    share = 17 // (workers * REPLICAS)
    assert going_on[0].copies[1] == share
    assert all(worker.copies == [share, share] for worker in going_on[1:])


def test_what_is_no_sum_is_read_of_all_who_have_left_it():
    one, other = Worker((2, 4), "MEAN"), Worker((9,), "MEAN", replicas=1)
    first, second = Worker((5, 6), "ONLY_FIRST_REPLICA"), Worker((7, 8), "ONLY_FIRST_REPLICA")
    mean, only_first = Worker((0, 0), "MEAN"), Worker((0, 0), "ONLY_FIRST_REPLICA")
    # Whoever was furthest has left what all have in common.
    mean.state.resume(other.state.pack(), [one.state.pack_part(), other.state.pack_part()])
    only_first.state.resume(
        second.state.pack(), [first.state.pack_part(), second.state.pack_part()]
    )
    assert mean.copies == [5, 5]
    assert only_first.copies == [5, 5]


def test_what_is_made_later_gets_its_share_then():
    old, module = Worker(), unison.Module()
    module.late = old.variable((2, 6))
    state = Handover(module=module)
    common, part = state.pack(), state.pack_part()

    def later(take):
        worker, module = Worker(), unison.Module()
        take(Handover(module=module))
        module.late = worker.variable((1, 1))
        return np.stack(module.late.cell.copies()).tolist()

    assert later(lambda state: state.unpack(common)) == [0, 0]
    assert later(lambda state: state.resume(common, [part, part])) == [8, 8]


def test_what_every_worker_has_of_all_is_handed_over_whole():
    old, new = Worker((2, 6)), Worker((1, 1))
    states = [Handover(lambda own=each.own: [own.cell], own=each.own) for each in (old, new)]
    assert states[0].pack_part() == b""
    states[1].unpack(states[0].pack())
    assert sum(new.copies) == 8


def test_fit_hands_over_what_a_step_assigns_outside_of_the_model(two_replicas):
    with two_replicas.scope():
        steps = unison.Variable(0.0, aggregation=VariableAggregation.MEAN)

        class Model(keras.Sequential):
            def train_step(self, data):
                steps.assign_add(1.0)
                return {"loss": 0.0}

        model = Model([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(np.ones((4, 1)), np.ones((4, 1)), batch_size=4, verbose=0)
    loops = SimpleNamespace(_model=model, _trainer=trainer_of(model), _place=None)
    held = ElasticLoops._handover(loops).pack()
    steps.assign(7.0)
    ElasticLoops._handover(loops).unpack(held)
    assert float(steps) == 1


def test_a_variable_of_one_process_is_handed_over_whole():
    def alone(value):
        return unison.Variable(
            value,
            synchronization=VariableSynchronization.ON_READ,
            aggregation=VariableAggregation.SUM,
        )

    old, new = alone(3.0), alone(1.0)
    state = Handover(own=old)
    assert state.pack_part() == b""
    Handover(own=new).unpack(state.pack())
    assert float(new) == 3


def test_parts_of_few_bits_are_summed_in_more():
    left = [Worker(copies, dtype=jnp.bfloat16) for copies in ((256, 0), (1, 0), (1, 0))]
    going_on = Worker(dtype=jnp.bfloat16)
    going_on.state.resume(left[0].state.pack(), [worker.state.pack_part() for worker in left])
    assert going_on.copies == [129, 129]
