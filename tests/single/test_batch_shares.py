"""`batch_shares`: replicas that get unequal parts of a global batch, given or by measured speed.

Whatever the parts, the result is that of one device on the same global batches. The tests say
nothing about times; `python -m benchmarks shares` measures them.
"""

import itertools
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import unison
from keras_comparison import assert_close, assert_same_outcome, regression_data, run_training_under
from unison.data import (
    AutoShardPolicy,
    Dataset,
    InputContext,
    InputOptions,
    InputReplicationMode,
    Options,
    ReplicaShares,
    Shares,
    distribute_dataset,
    workers_in_threads,
)
from unison.errors import OpError
from unison.program.single_replica import alone
from unison.runtime.devices import default_devices
from unison.runtime.placement import REPLICA_AXIS, Placement
from unison.strategies import batch_shares
from unison.strategies.batch_shares import MeasuredShares, Pace, balanced


def mirrored(shares, replicas: int = 2) -> unison.MirroredStrategy:
    devices = [f"CPU:{index}" for index in range(replicas)]
    return unison.MirroredStrategy(devices, batch_shares=shares)


def parts_of(strategy, dataset) -> list[list[list[int]]]:
    distributed = strategy.experimental_distribute_dataset(dataset)
    return [[part.tolist() for part in batch.values] for batch in distributed]


# -- how a batch is divided ----------------------------------------------------------------


@pytest.mark.parametrize("proportions", [(3, 1), (1, 0, 0.5), (0, 1), (0.1, 0.2, 0.3, 0.4), (7,)])
def test_the_parts_are_a_whole_batch_and_none_is_an_example_off_its_share(proportions):
    for examples in range(40):
        counts = np.array(Shares(examples, len(proportions), proportions).counts)
        exact = examples * np.array(proportions) / sum(proportions)
        assert counts.sum() == examples
        assert (np.abs(counts - exact) < 1 + 1e-9).all()
        assert not counts[exact == 0].any()


def test_shares_may_be_given_one_a_replica():
    strategy = mirrored([3, 1])
    assert strategy.batch_shares == (0.75, 0.25)
    assert parts_of(strategy, [np.arange(8)]) == [[[0, 1, 2, 3, 4, 5], [6, 7]]]


def test_without_shares_the_parts_are_equal():
    assert mirrored(None, 4).batch_shares == (0.25,) * 4


@pytest.mark.parametrize(
    "shares", [[1, 2, 3], [-1, 2], [0, 0], [float("nan"), 1], [float("inf"), 1], ["1", 2], "fast"]
)
def test_shares_that_are_none_are_refused(shares):
    with pytest.raises(ValueError, match=r"2 numbers \(one per replica\).*\"measured\". Received"):
        mirrored(shares)


def test_shares_of_one_replica_change_nothing():
    strategy = mirrored("measured", 1)
    assert strategy.batch_shares == (1.0,)
    with pytest.raises(ValueError, match="of several replicas"):
        strategy.measure_batch_shares(lambda: 1)


# -- datasets ------------------------------------------------------------------------------


def test_datasets_are_divided_by_the_shares_up_to_the_last_batch():
    dataset = Dataset.range(14).map(lambda x: x + 0).batch(8)
    expected = [[[0, 1, 2, 3, 4, 5], [6, 7]], [[8, 9, 10, 11, 12], [13]]]
    assert parts_of(mirrored([3, 1]), dataset) == expected


def test_a_replica_with_a_share_of_zero_gets_nothing():
    dataset = Dataset.range(3).batch(2)
    assert parts_of(mirrored([0, 1, 1], 3), dataset) == [[[], [0], [1]], [[], [2], []]]


def test_a_stream_of_examples_is_divided_by_the_shares():
    options = Options(auto_shard_policy=AutoShardPolicy.OFF)
    dataset = Dataset.range(10).batch(4)
    assert parts_of(mirrored([1, 3]), dataset.with_options(options)) == [
        [[0], [1, 2, 3]],
        [[4], [5, 6, 7]],
        [[8], [9]],
    ]


def test_specs_of_unequal_parts_do_not_tell_their_sizes():
    def sizes(shares):
        dataset = Dataset.range(8).batch(4, drop_remainder=True)
        spec = mirrored(shares).experimental_distribute_dataset(dataset)
        return spec.element_spec.value_specs[0].shape

    assert sizes([1, 1]) == (2,)
    assert sizes([3, 1]) == (None,)
    assert sizes("measured") == (None,)


def in_workers(function):
    """What a function of each of two workers, threads of one replica each, returns."""
    with ThreadPoolExecutor(2) as threads:
        return [*threads.map(function, workers_in_threads(2))]


@pytest.mark.parametrize("shares", [(3, 1), (1, 9), (0, 1)])
@pytest.mark.parametrize("size", [4, 5])
@pytest.mark.parametrize("is_mapped", [True, False])
def test_workers_read_their_shares_of_every_batch(shares, size, is_mapped):
    def dataset():
        numbers = Dataset.range(23).shuffle(23, seed=2)
        return (numbers.map(lambda x: x + 0) if is_mapped else numbers).batch(size)

    def read(workers):
        placement = Placement(default_devices()[:1])
        given = ReplicaShares(shares)
        return [x.tolist() for x in distribute_dataset(dataset(), placement, None, workers, given)]

    steps = zip(*in_workers(read), strict=True)
    for (first, second), batch in zip(steps, dataset(), strict=True):
        assert first + second == batch.tolist()
        assert len(first) == Shares(len(batch), 2, shares).counts[0]


@pytest.mark.parametrize("ahead", [0, 1, 3])
@pytest.mark.parametrize("is_mapped", [True, False])
def test_shares_that_change_divide_later_batches_on_all_workers_alike(ahead, is_mapped):
    def dataset():
        numbers = Dataset.range(60).shuffle(60, seed=3)
        return (numbers.map(lambda x: x * 1) if is_mapped else numbers).batch(6).repeat(1)

    def read(workers):
        shares = ReplicaShares((1, 1))
        options = InputOptions(
            experimental_fetch_to_device=ahead > 0,
            experimental_per_replica_buffer_size=max(ahead, 1),
        )
        placement = Placement(default_devices()[:1])
        distributed = distribute_dataset(dataset(), placement, options, workers, shares)
        seen = []
        for _ in range(2):
            shares.proportions = (1, 1)
            for number, batch in enumerate(distributed):
                seen.append(batch.tolist())
                if number == 2:
                    shares.proportions = (5, 1)
        return seen

    seen = in_workers(read)
    together = [first + second for first, second in zip(*seen, strict=True)]
    whole = dataset()
    assert together == [batch.tolist() for _ in range(2) for batch in whole]
    sizes = [len(batch) for batch in seen[0]]
    assert sizes == [*[3] * (3 + ahead), *[5] * (7 - ahead)] * 2


def test_a_pass_goes_on_under_other_shares():
    def dataset():
        return Dataset.range(20).shuffle(20, seed=1).map(lambda x: x + 0).batch(4)

    iterator = iter(mirrored([1, 1]).experimental_distribute_dataset(dataset()))
    begin = [next(iterator) for _ in range(2)]
    other = iter(mirrored([3, 1]).experimental_distribute_dataset(dataset()))
    other.set_state(iterator.get_state())
    rest = [*other]
    assert [len(part) for part in rest[0].values] == [3, 1]
    seen = [x for batch in [*begin, *rest] for part in batch.values for x in part.tolist()]
    assert seen == [x for batch in dataset() for x in batch.tolist()]


def test_a_worker_without_a_share_of_its_own_files_is_refused():
    def distribute(workers):
        options = Options(auto_shard_policy=AutoShardPolicy.OFF)
        dataset = Dataset.range(8).batch(4).with_options(options)
        shares = ReplicaShares((1, 0))
        return distribute_dataset(dataset, Placement(default_devices()[:1]), None, workers, shares)

    with pytest.raises(ValueError, match="worker 1 gets none of 4 examples"):
        in_workers(distribute)


def test_a_dataset_function_is_told_the_replicas_share():
    own = InputOptions(experimental_replication_mode=InputReplicationMode.PER_REPLICA)
    batches = mirrored([3, 1]).distribute_datasets_from_function(
        lambda context: Dataset.range(12).batch(context.get_per_replica_batch_size(8)), own
    )
    assert [len(part) for part in next(iter(batches)).values] == [6, 2]


def test_one_size_for_replicas_of_different_shares_is_refused():
    with pytest.raises(ValueError, match=r"\[2.0, 6.0\].*PER_REPLICA"):
        mirrored([3, 1]).distribute_datasets_from_function(
            lambda context: Dataset.range(12).batch(context.get_per_replica_batch_size(8))
        )
    with pytest.raises(ValueError, match=r"\[7.5\]"):
        InputContext(2, 0, 2, batch_shares=[0.75]).get_per_replica_batch_size(10)


# -- Keras ---------------------------------------------------------------------------------

X, Y = regression_data(75)
WEIGHTS = np.linspace(0.0, 2.0, 75, dtype="float32")


def network():
    model = keras.Sequential([keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"], weighted_metrics=["mse"])
    return model


def train(model):
    history = model.fit(
        X, Y, sample_weight=WEIGHTS, batch_size=16, epochs=2, verbose=0, validation_data=(X, Y)
    ).history
    return {
        **history,
        "evaluate": model.evaluate(X, Y, batch_size=20, verbose=0),
        "predict": model.predict(X, batch_size=20, verbose=0),
    }


@pytest.fixture(scope="module")
def of_one_device():
    return run_training_under(unison.OneDeviceStrategy("CPU:0"), network, train)


@pytest.mark.parametrize("shares", [(3, 1), (0, 5, 0, 1), (0.7, 0.2, 0.09, 0.01)], ids=str)
def test_keras_trains_as_on_one_device(shares, of_one_device):
    outcome = run_training_under(mirrored(shares, len(shares)), network, train)
    assert_same_outcome(outcome, of_one_device)


def test_keras_trains_on_datasets_as_on_one_device(of_one_device):
    def train_on_datasets(model):
        examples = Dataset.from_tensor_slices((X, Y, WEIGHTS)).batch(16)
        return model.fit(examples, epochs=2, verbose=0, shuffle=False).history

    alone_too = run_training_under(unison.OneDeviceStrategy("CPU:0"), network, train_on_datasets)
    outcome = run_training_under(mirrored([1, 4]), network, train_on_datasets)
    assert_same_outcome(outcome, alone_too)


@pytest.mark.parametrize("is_synchronized", [True, False])
@pytest.mark.parametrize("shares", [(1, 0), (0, 1)])
def test_statistics_are_those_of_the_replicas_that_get_examples(shares, is_synchronized):
    def build():
        layer = unison.keras.BatchNormalization(synchronized=is_synchronized)
        model = keras.Sequential([layer, keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    def fit(model):
        return model.fit(X, Y, batch_size=16, verbose=0, shuffle=False).history

    expected = run_training_under(unison.OneDeviceStrategy("CPU:0"), build, fit)
    assert_same_outcome(run_training_under(mirrored(shares), build, fit), expected)


def test_small_steps_run_together_under_shares():
    strategy = mirrored([3, 1])
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = network()
    calls = []
    spread = strategy.placement.spread

    def noted(stacked):
        if isinstance(stacked, list):  # of batches
            calls.append(stacked)
        return spread(stacked)

    strategy.placement.spread = noted
    model.fit(X[:64], Y[:64], batch_size=8, verbose=0)
    assert len(calls) == 1  # for 8 steps


def test_a_custom_loop_sums_the_gradients_of_the_whole_batch():
    def run(strategy):
        with strategy.scope():
            weight = unison.Variable(np.ones((6, 1), "float32"))

        def step(batch):
            x, y = batch

            def loss(w):
                return jnp.sum((x @ w - y) ** 2) / 16

            gradient = unison.get_replica_context().all_reduce(
                "SUM", jax.grad(loss)(weight.value())
            )
            weight.assign(weight - 0.1 * gradient)
            return loss(weight.value())

        batches = strategy.experimental_distribute_dataset(
            Dataset.from_tensor_slices((X, Y)).batch(16)
        )
        losses = [strategy.reduce("SUM", strategy.run(step, (b,)), axis=None) for b in batches]
        return [np.array(losses), weight.numpy()]

    assert_close(run(mirrored([5, 1])), run(mirrored(None, 1)))


# -- measured shares -----------------------------------------------------------------------


def test_every_example_goes_where_it_is_done_first():
    paces = [Pace(0.0, 1.0), Pace(4.0, 2.0), Pace(100.0, 1.0)]
    counts = balanced(paces, 20)
    assert sum(counts) == 20
    slowest = max(pace.seconds(n) for pace, n in zip(paces, counts, strict=True) if n)
    for replica, count in enumerate(counts):
        if count:  # to give one example away would make another replica as slow
            others = [p.seconds(n + 1) for p, n in zip(paces, counts, strict=True)]
            assert min(others[:replica] + others[replica + 1 :]) >= slowest - 1e-9


def measured(paces, examples=64, shares=None):
    shares = shares or MeasuredShares(len(paces), batch_shares.InputWorkers())
    shares.choose(examples, paces)
    return shares


def test_a_replica_that_takes_three_times_as_long_gets_a_quarter():
    shares = measured([Pace(0.0, 1e-3), Pace(0.0, 3e-3)])
    assert Shares(64, 2, shares.proportions).counts == (48, 16)


def test_small_differences_change_nothing():
    assert measured([Pace(0.0, 1e-3), Pace(0.0, 1.15e-3)]).proportions == (1, 1)
    assert measured([Pace(0.0, 1e-6), Pace(0.0, 3e-6)]).proportions == (1, 1)


def test_shares_follow_a_replica_that_recovers():
    shares = measured([Pace(0.0, 1e-3), Pace(0.0, 3e-3)])
    measured([Pace(0.0, 1e-3), Pace(0.0, 1e-3)], shares=shares)
    assert Shares(64, 2, shares.proportions).counts == (32, 32)


def test_measurements_are_rare_and_rarer_with_every_change(monkeypatch):
    monkeypatch.setattr(batch_shares, "_SECONDS", 0.0)
    shares = MeasuredShares(2, batch_shares.InputWorkers())
    clock = itertools.count()
    monkeypatch.setattr(batch_shares.time, "perf_counter", lambda: float(next(clock)))
    due = []
    for step in range(1000):
        if shares.is_due():
            due.append(step)
            slow = len(due) % 2  # in turn
            monkeypatch.setattr(
                batch_shares,
                "_seconds_of",
                lambda parts, slow=slow: [(1.0, 2.0), (3.0, 6.0)][:: (-1) ** slow],
            )
            shares.measure(64, lambda count: [lambda: None, lambda: None])
    gaps = np.diff(due)
    assert due[0] == 3
    assert (gaps > 10).all()
    assert (np.diff(gaps) > 0).all()


def test_a_replica_by_itself_computes_all_but_the_collectives():
    def part(x, w):
        total = jax.lax.psum(x @ w, REPLICA_AXIS)
        rows = jax.lax.all_gather(total, REPLICA_AXIS, tiled=True)
        total += jax.lax.axis_index(REPLICA_AXIS)
        return jax.lax.psum_scatter(rows, REPLICA_AXIS, tiled=True), total

    x, w = np.ones((4, 3), "float32"), np.ones((3, 2), "float32")
    trace = jax.make_jaxpr(part, axis_env=[(REPLICA_AXIS, 4)])(x, w)
    by_itself = jax.make_jaxpr(alone(trace))(3, x, w)
    assert [aval.shape for aval in by_itself.out_avals] == [(4, 2), (4, 2)]
    operations = str(by_itself)
    assert "dot_general" in operations
    assert "psum" not in operations
    assert "all_gather" not in operations
    np.testing.assert_array_equal(alone(trace)(3, x, w)[1], np.full((4, 2), 6.0))


def test_a_replica_by_itself_computes_loops_and_branches_without_their_collectives():
    def part(x):
        def scanned(carry, row):
            rows = jax.lax.all_gather(row * carry, REPLICA_AXIS, tiled=True)
            mine = jax.lax.psum_scatter(rows, REPLICA_AXIS, tiled=True)
            return jax.lax.psum(carry, REPLICA_AXIS), mine + jax.lax.axis_index(REPLICA_AXIS)

        carry, rows = jax.lax.scan(scanned, jnp.float32(1.0), x)
        total = jax.lax.while_loop(
            lambda total: jax.lax.pmax(total, REPLICA_AXIS)[0] < 10,
            lambda total: total + jax.lax.psum(jnp.ones(2), REPLICA_AXIS),
            rows[0],
        )
        return jax.lax.cond(
            carry > 0, lambda t: jax.lax.pmax(t, REPLICA_AXIS), lambda t: t + 1.0, total
        )

    x = np.ones((4, 2), "float32")
    trace = jax.make_jaxpr(part, axis_env=[(REPLICA_AXIS, 4)])(x)
    assert "all_gather" in str(trace)
    np.testing.assert_array_equal(jax.jit(alone(trace))(3, x)[0], [10.0, 10.0])
    operations = str(jax.make_jaxpr(alone(trace))(3, x))
    assert not [
        name for name in ("psum", "pmax", "all_gather", "reduce_scatter") if name in operations
    ]


def test_an_error_of_measuring_is_told_to_the_others_who_wait():
    def measure(workers):
        def parts(count):
            calls = itertools.count()

            def part():
                if workers.index == 1 and next(calls) > 0:  # it was compiled
                    raise ValueError("out of memory")

            return [part]

        MeasuredShares(2, workers).measure(64, parts)

    with ThreadPoolExecutor(2) as threads:
        first, second = [threads.submit(measure, w) for w in workers_in_threads(2, patience=20)]
        with pytest.raises(ValueError, match="out of memory"):
            second.result(60)
        with pytest.raises(OpError, match=r"measuring its pace: ValueError: out of memory"):
            first.result(60)


@pytest.fixture
def second_replica_is_slow(monkeypatch):
    """Lets measurements find that the second replica takes four times as long."""
    monkeypatch.setattr(batch_shares, "_SECONDS", 0.0)
    measure = batch_shares._seconds_of

    def seconds_of(parts):
        measured = measure(parts)
        assert np.shape(measured) == (2, 2)  # of replicas, of sizes
        return [(1.0, 2.0), (4.0, 8.0)]

    monkeypatch.setattr(batch_shares, "_seconds_of", seconds_of)


def test_fit_measures_and_trains_as_on_one_device(second_replica_is_slow, of_one_device, caplog):
    strategy = mirrored("measured")
    with caplog.at_level("INFO", "unison"):
        outcome = run_training_under(strategy, network, train)
    assert strategy.batch_shares == (0.8125, 0.1875)
    assert "The replicas get 13:3 of the global batch" in caplog.text
    assert_same_outcome(outcome, of_one_device)


def test_a_custom_loop_says_when_to_measure(second_replica_is_slow):
    strategy = mirrored("measured")
    with strategy.scope():
        weight = unison.Variable(
            np.ones((6, 1), "float32"), aggregation=unison.VariableAggregation.SUM
        )

    def step(x):
        weight.assign_add(jnp.sum(x, axis=0)[:, None])
        return unison.get_replica_context().all_reduce("SUM", jnp.sum(x @ weight.value()))

    (batch,) = strategy.experimental_distribute_dataset([X[:16]])
    before = weight.numpy()
    assert strategy.measure_batch_shares(step, (batch,)) == strategy.batch_shares
    assert strategy.batch_shares == (0.8125, 0.1875)
    np.testing.assert_array_equal(weight.numpy(), before)
    (batch,) = strategy.experimental_distribute_dataset([X[:16]])
    assert [len(part) for part in batch.values] == [13, 3]


def test_measuring_needs_a_batch():
    with pytest.raises(ValueError, match="Measuring takes a batch"):
        mirrored("measured").measure_batch_shares(lambda: 1)
