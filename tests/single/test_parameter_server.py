"""Variables on parameter servers and functions on workers; all of them threads of this process."""

import contextlib
import functools
import gc
import os
import socket
import time

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import unison
from connections import Squatter
from left_over import Since
from parameter_server_threads import free_addresses, until
from unison.errors import CancelledError, DeadlineExceededError, OutOfRangeError
from unison.net.array_messages import Connection
from unison.net.connecting import connect
from unison.net.secret import key
from unison.parameter_server import (
    ClusterCoordinator,
    FixedShardsPartitioner,
    ParameterServerStrategy,
    Server,
    current_worker_index,
    messages,
    read_rows,
    shards_of,
    workers,
)
from unison.parameter_server.store import ServerLostError
from unison.runtime.cluster import ClusterSpec
from unison.runtime.cluster_resolvers import SimpleClusterResolver


def test_updates_of_several_workers_all_count(started):
    strategy, coordinator = started(workers=3, servers=2)
    with strategy.scope():
        total = unison.Variable(np.zeros(5, np.float32))

    def add(x):
        total.assign_add(x * jnp.ones(5))
        return x * 2

    values = [coordinator.schedule(add, args=(float(x),)) for x in range(40)]
    coordinator.join()
    assert coordinator.done()
    np.testing.assert_array_equal(total.numpy(), np.full(5, sum(range(40)), np.float32))
    assert [float(value.fetch()) for value in values] == [2.0 * x for x in range(40)]
    assert coordinator.trace_count == 1


@pytest.mark.parametrize("shards", [1, 2])
def test_rows_that_several_workers_add_to_all_count(started, shards):
    strategy, coordinator = started(
        workers=2, servers=2, partitioner=FixedShardsPartitioner(shards)
    )
    with strategy.scope():
        table = unison.Variable(np.zeros((6, 2), np.float32))
        counts = unison.Variable(np.zeros(6, np.int32))

    def add(row):
        rows = jnp.stack([row, row, 5])  # twice to one, and all to the last one
        table.scatter_add(unison.IndexedSlices(jnp.ones((3, 2)), rows))
        counts.scatter_sub(unison.IndexedSlices(jnp.ones(3, jnp.int32), rows))

    for call in range(100):
        coordinator.schedule(add, args=(call % 4,))
    coordinator.join()
    expected = np.array([50, 50, 50, 50, 0, 100], np.float32)
    np.testing.assert_array_equal(table.numpy(), np.stack([expected, expected], 1))
    np.testing.assert_array_equal(counts.numpy(), -expected)


def test_a_variable_is_read_and_assigned_by_the_coordinator(started):
    strategy, _ = started(servers=2, partitioner=FixedShardsPartitioner(2))
    with strategy.scope():
        table = unison.Variable(np.arange(12.0, dtype=np.float32).reshape(6, 2))
        number = unison.Variable(3)
    assert [(s.server, s.start, s.stop) for s in table.cell.shards] == [(0, 0, 3), (1, 3, 6)]
    np.testing.assert_array_equal(table.value(), np.arange(12.0).reshape(6, 2))
    table.assign(np.ones((6, 2), np.float32))
    table.assign_add(np.full((6, 2), 0.5, np.float32))
    number.assign_add(4)
    assert np.all(table.numpy() == 1.5)
    assert int(number) == 7
    np.testing.assert_array_equal(table[4:], np.full((2, 2), 1.5))
    assert float(strategy.run(lambda: table.value().sum())) == 18.0


def build(name):
    """A model with an embedding, its optimizer and a metric, all with the same initial values."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((3,), dtype="int32"),
            keras.layers.Embedding(200, 4),
            keras.layers.Flatten(),
            keras.layers.Dense(5, activation="relu"),
            keras.layers.Dense(1),
        ]
    )
    optimizer = OPTIMIZERS[name]()
    optimizer.build(model.trainable_variables)
    return model, optimizer, keras.metrics.MeanSquaredError()


OPTIMIZERS = {
    "SGD": lambda: keras.optimizers.SGD(0.05),
    "Adagrad": lambda: keras.optimizers.Adagrad(0.05),
    "Adam": lambda: keras.optimizers.Adam(0.01),
    "clipped": lambda: keras.optimizers.SGD(0.5, global_clipnorm=0.1),
    "Lamb": lambda: keras.optimizers.Lamb(0.01),
}


def replica_step(model, optimizer, metric, x, y):
    def loss_of(weights):
        predicted, _ = model.stateless_call(weights, [], x)
        return ((predicted - y) ** 2).mean(), predicted

    weights = [variable.value for variable in model.trainable_variables]
    (loss, predicted), gradients = jax.value_and_grad(loss_of, has_aux=True)(weights)
    optimizer.apply(gradients, model.trainable_variables)
    metric.update_state(y, predicted)
    return loss


def batches(count, rows=200):
    rng = np.random.default_rng(0)
    return [
        (
            # Rows come several times in a batch.
            rng.integers(0, rows, (8, 3)).astype("int32") // 7 * 7,
            rng.normal(size=(8, 1)).astype("float32"),
        )
        for _ in range(count)
    ]


def trained(strategy, name, steps, run):
    """Returns the losses and final weights of `steps` steps that `run` runs."""
    with strategy.scope():
        model, optimizer, metric = build(name)
    losses = run(functools.partial(replica_step, model, optimizer, metric), steps)
    # Not `get_weights`: once `unison.tf` is imported, that has the shards.
    weights = [variable.numpy() for variable in model.trainable_variables]
    return losses, weights, float(metric.result())


def on_one_device(name, steps):
    strategy = unison.OneDeviceStrategy("CPU:0")
    return trained(
        strategy, name, steps, lambda step, n: [float(strategy.run(step, b)) for b in batches(n)]
    )


def on_servers(started, name, steps, **cluster):
    strategy, coordinator = started(**cluster)

    def run(step, count):
        given = batches(count)
        iterator = iter(coordinator.create_per_worker_dataset(lambda: iter(given)))

        def scheduled(batches_of_worker):
            return strategy.run(step, args=next(batches_of_worker))

        values = [coordinator.schedule(scheduled, args=(iterator,)) for _ in range(count)]
        coordinator.join()
        return [float(value.fetch()) for value in values]

    return trained(strategy, name, steps, run), coordinator


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("name", ["SGD", "Adagrad"])
def test_training_on_servers_equals_training_on_one_device(started, name, shards):
    partitioner = FixedShardsPartitioner(2) if shards > 1 else None
    (losses, weights, metric), _ = on_servers(
        started, name, 4, servers=shards, partitioner=partitioner
    )
    expected_losses, expected_weights, expected_metric = on_one_device(name, 4)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    assert metric == pytest.approx(expected_metric, rel=1e-5)
    for own, expected in zip(weights, expected_weights, strict=True):
        np.testing.assert_allclose(own, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["Adam", "clipped"])
def test_a_sparse_update_equals_the_dense_one_in_the_rows_that_it_touches(started, name):
    (_, (table, *others), _), coordinator = on_servers(started, name, 1)
    _, (expected_table, *expected_others), _ = on_one_device(name, 1)
    np.testing.assert_allclose(table, expected_table, rtol=1e-5, atol=1e-6)
    for own, expected in zip(others, expected_others, strict=True):
        np.testing.assert_allclose(own, expected, rtol=1e-5, atol=1e-6)
    (program,) = coordinator._dispatcher.functions.programs
    assert [table["rows"] for table in program.description["tables"]] == [24]


def test_rows_travel_instead_of_the_table(started):
    moved = {}
    for rows in (200, 20000):
        strategy, coordinator = started(workers=1, servers=2, partitioner=FixedShardsPartitioner(2))
        with strategy.scope():
            table = unison.Variable(np.ones((rows, 8), np.float32))

        def step(ids, table=table):
            def loss_of(values):
                return (values[ids] ** 2).sum()

            loss, gradient = jax.value_and_grad(loss_of)(table.value())
            table.assign_sub(0.25 * gradient)
            return loss

        ids = np.array([3, 150, 3, 7], np.int32)
        losses = [coordinator.schedule(step, args=(ids,)) for _ in range(5)]
        coordinator.join()
        # 1 -> 0.5 where a row is looked up once; twice: 1 - 2 * 0.5 = 0.
        assert [float(loss.fetch()) for loss in losses[:2]] == [32.0, 4.0]
        value = table.numpy()
        assert np.all(value[3] == 0)
        assert np.all(value[[7, 150]] == 0.5**5)
        assert np.all(np.delete(value, [3, 7, 150], axis=0) == 1)

        def traffic(strategy=strategy):
            answers = strategy.store.ask_all("status").values()
            return sum(a["sent_bytes"] + a["received_bytes"] for a in answers)

        before = traffic()
        for _ in range(20):
            coordinator.schedule(step, args=(ids,))
        coordinator.join()
        moved[rows] = traffic() - before
    assert moved[20000] < moved[200] + 500  # numbers of rows have more digits
    assert moved[200] < 20 * 2000


def test_an_optimizer_that_needs_whole_tables_is_told_of(started, caplog):
    (losses, _, _), _ = on_servers(started, "Lamb", 3)
    assert "needs all of it" in caplog.text
    np.testing.assert_allclose(losses, on_one_device("Lamb", 3)[0], rtol=1e-5)


def test_slots_lie_beside_their_variables_and_never_travel(started):
    strategy, coordinator = started(servers=3)
    with strategy.scope():
        model, optimizer, _ = build("Adam")
    kernel = model.trainable_variables[1]
    slots = [v for v in optimizer.variables if v.shape == kernel.shape]
    assert len(slots) == 2
    assert {slot.cell.shards[0].server for slot in slots} == {kernel.cell.shards[0].server}

    def step():
        gradients = [jnp.ones(v.shape) for v in model.trainable_variables]
        strategy.run(optimizer.apply, args=(gradients, model.trainable_variables))

    coordinator.schedule(step)
    coordinator.join()
    (program,) = coordinator._dispatcher.functions.programs
    pulled = {shard[1] for shards in program.description["pulled"] for shard in shards}
    assert pulled.isdisjoint(slot.cell.shards[0].key for slot in slots)


def test_a_function_may_take_several_batches(started):
    _, coordinator = started()
    iterator = iter(coordinator.create_per_worker_dataset(lambda: iter([np.arange(3.0)] * 6)))

    def step(batches_of_worker):
        return sum(next(batches_of_worker).sum() for _ in range(3))

    values = [coordinator.schedule(step, args=(iterator,)) for _ in range(2)]
    assert [float(value) for value in coordinator.fetch(values)] == [9.0, 9.0]


def test_a_batch_of_another_shape_makes_another_program(started):
    _, coordinator = started()
    dataset = unison.data.Dataset.range(10).batch(4)
    iterator = iter(coordinator.create_per_worker_dataset(lambda: dataset))
    values = [coordinator.schedule(lambda own: next(own).sum(), args=(iterator,)) for _ in range(3)]
    assert [int(value.fetch()) for value in values] == [6, 22, 17]
    assert coordinator.trace_count == 2


def counting_from(first):
    return lambda: iter(np.arange(first, first + 100))


def test_one_program_serves_all_iterators(started):
    _, coordinator = started(workers=1)

    def step(own, other):
        return next(own) - next(other)

    def fetched(*iterators):
        return int(coordinator.schedule(step, args=iterators).fetch())

    ones, tens, thousands = (
        iter(coordinator.create_per_worker_dataset(counting_from(first))) for first in (1, 10, 1000)
    )
    assert fetched(ones, tens) == 1 - 10
    assert fetched(thousands, ones) == 1000 - 2
    assert fetched(tens, thousands) == 11 - 1001
    assert coordinator.trace_count == 1
    assert fetched(tens, tens) == 12 - 13  # an iterator that is passed twice is one
    assert coordinator.trace_count == 2


def test_an_iterator_gives_batches_to_functions_that_it_is_passed_to(started):
    _, coordinator = started(workers=1)
    iterator = iter(coordinator.create_per_worker_dataset(counting_from(0)))
    with pytest.raises(RuntimeError, match="Pass it to"):
        next(iterator)
    coordinator.schedule(lambda: next(iterator))
    with pytest.raises(RuntimeError, match="Pass it to"):
        coordinator.join()
    assert int(coordinator.schedule(lambda own: next(own), args=(iterator,)).fetch()) == 0


def test_the_dataset_of_an_iterator_that_is_dropped_is_dropped_everywhere(started):
    _, coordinator = started(workers=2)

    def total(own):
        return next(own).sum()

    def inputs():
        gc.collect()
        return sum(isinstance(found, workers._Input) for found in gc.get_objects())

    before = inputs()
    for _ in range(10):
        iterator = iter(coordinator.create_per_worker_dataset(counting_from(3)))
        coordinator.fetch([coordinator.schedule(total, args=(iterator,)) for _ in range(4)])
    coordinator.join()
    for _ in range(8):  # the workers are told with their next call
        coordinator.schedule(total, args=(iterator,))
        coordinator.join()
    assert len(coordinator._dispatcher.iterators) == 1
    assert inputs() - before <= 2
    assert coordinator.trace_count == 1


def test_a_dataset_that_cannot_be_pickled_is_streamed(started, caplog):
    _, coordinator = started(workers=1)
    lock = __import__("threading").Lock()  # cannot be pickled

    def make():
        with lock:
            return iter([{"x": np.float32(i), "y": (np.int32(i), None)} for i in range(3)])

    iterator = iter(coordinator.create_per_worker_dataset(make))

    def step(own):
        batch = next(own)
        return batch["x"] + batch["y"][0]

    values = [coordinator.schedule(step, args=(iterator,)) for _ in range(3)]
    assert [float(value.fetch()) for value in values] == [0.0, 2.0, 4.0]
    assert "cannot be pickled" in caplog.text


def test_the_end_of_a_dataset_is_an_error_that_join_raises(started):
    _, coordinator = started()
    iterator = iter(coordinator.create_per_worker_dataset(lambda: iter([np.ones(2)])))
    for _ in range(3):
        coordinator.schedule(lambda own: next(own).sum(), args=(iterator,))
    with pytest.raises(OutOfRangeError, match="no further batch"):
        coordinator.join()
    coordinator.join()  # it is raised once


def test_a_worker_knows_its_index(started):
    _, coordinator = started(workers=2)

    def make():
        return iter([np.int32(current_worker_index())] * 100)

    iterator = iter(coordinator.create_per_worker_dataset(make))

    def step(own):
        return next(own), current_worker_index()

    values = coordinator.fetch([coordinator.schedule(step, args=(iterator,)) for _ in range(40)])
    assert {int(of_dataset) for of_dataset, _ in values} <= {0, 1}
    assert all(int(of_dataset) == int(of_step) for of_dataset, of_step in values)
    assert current_worker_index() is None


def test_workers_draw_different_numbers_and_the_stream_goes_on(started):
    strategy, coordinator = started(workers=2)
    with strategy.scope():
        layer = keras.layers.Dropout(0.5, seed=1)

    def draw():
        return layer(jnp.ones(64), training=True)

    drawn = coordinator.fetch([coordinator.schedule(draw) for _ in range(12)])
    assert len({mask.tobytes() for mask in drawn}) == 12
    assert int(layer.seed_generator.state.numpy()[1]) == 12


def test_the_state_of_a_random_stream_is_not_divided(started):
    strategy, coordinator = started(servers=2, partitioner=FixedShardsPartitioner(2))
    with strategy.scope():
        layer = keras.layers.Dropout(0.5, seed=1)

    def draw():
        return layer(jnp.ones(64), training=True)

    masks = [coordinator.fetch(coordinator.schedule(draw)) for _ in range(2)]
    assert len({np.asarray(mask).tobytes() for mask in masks}) == 2
    assert layer.seed_generator.state.numpy().tolist() == [1, 2]


def test_no_worker_runs_further_ahead_than_it_may(started):
    _, coordinator = started(workers=2, max_staleness=2)

    def make():
        def batches():
            while True:
                if current_worker_index() == 0:
                    time.sleep(0.02)
                yield np.zeros(1)

        return batches()

    iterator = iter(coordinator.create_per_worker_dataset(make))

    def step(own):
        next(own)
        return current_worker_index()

    values = [coordinator.schedule(step, args=(iterator,)) for _ in range(60)]
    on_first = sum(int(worker) == 0 for worker in coordinator.fetch(values))
    assert abs(60 - 2 * on_first) <= 4


def test_an_error_calls_off_what_waits_and_has_the_workers_traceback(started):
    _, coordinator = started()

    def failing():
        raise_in_the_dataset = 0
        yield np.float32(1)
        yield np.float32(1 / raise_in_the_dataset)

    iterator = iter(coordinator.create_per_worker_dataset(failing))
    values = [coordinator.schedule(lambda own: next(own), args=(iterator,)) for _ in range(20)]
    with pytest.raises(unison.errors.UnknownError, match="raise_in_the_dataset") as raised:
        coordinator.join()
    assert "ZeroDivisionError" in str(raised.value)
    assert float(values[0].fetch()) == 1.0
    with pytest.raises(CancelledError):
        values[-1].fetch()
    value = coordinator.schedule(lambda: 3)
    assert int(value.fetch()) == 3


def test_what_cannot_be_scheduled_is_refused(started):
    strategy, coordinator = started()
    outside = unison.Variable(1.0)
    value = coordinator.schedule(lambda: 1.0)
    with pytest.raises(TypeError, match="needs a function"):
        coordinator.schedule(3)
    with pytest.raises(ValueError, match="cannot be the argument"):
        coordinator.schedule(lambda x: x, args=(value,))
    with pytest.raises(TypeError, match="as a tuple"):
        coordinator.schedule(lambda x: x, args=1.0)
    for function, error, text in (
        (lambda: outside.assign_add(1.0), ValueError, "not created in the scope"),
        (lambda: object(), TypeError, "must return arrays"),
        (lambda: 1 if strategy.run(lambda: jnp.ones(())) > 0 else 0, Exception, "lax.cond"),
    ):
        coordinator.schedule(function)
        with pytest.raises(error, match=text):
            coordinator.join()


def test_a_cluster_without_servers_or_workers_is_refused():
    for cluster, missing in (
        ({"worker": ["127.0.0.1:1"]}, "parameter servers"),
        ({"ps": ["127.0.0.1:1"]}, "workers"),
    ):
        with pytest.raises(ValueError, match=missing):
            ParameterServerStrategy(SimpleClusterResolver(ClusterSpec(cluster)))


def test_a_server_that_does_not_come_is_named():
    (address,) = free_addresses(1)
    cluster = ClusterSpec({"worker": [address], "ps": [address]})
    with pytest.raises(
        DeadlineExceededError,
        match=f"Parameter server 0 does not answer at {address}: timed out after",
    ):
        ParameterServerStrategy(SimpleClusterResolver(cluster), timeout_seconds=0.3)


def test_who_has_another_key_is_refused(monkeypatch):
    (address,) = free_addresses(1)
    cluster = ClusterSpec({"worker": ["127.0.0.1:1"], "ps": [address]})
    monkeypatch.setattr("unison.parameter_server.serving.key", lambda: b"another" * 4)
    server = Server(cluster, "ps", 0)
    try:
        with pytest.raises(unison.errors.UnauthenticatedError, match="another key"):
            ParameterServerStrategy(SimpleClusterResolver(cluster), timeout_seconds=5)
    finally:
        server.stop()


def test_a_stranger_that_says_nothing_gets_no_thread_and_keeps_nobody_out():
    (address,) = free_addresses(1)
    host, _, port = address.rpartition(":")
    since = Since()
    server = Server(ClusterSpec({"ps": [address]}), "ps", 0)
    with contextlib.ExitStack() as ends:
        ends.callback(server.stop)
        for _ in range(200):
            ends.enter_context(socket.create_connection((host, int(port))))
        connection = messages.connect(address, 20.0, "ps 0", role="pulse")
        ends.callback(connection.close)
        assert connection.ask("ping").kind == "alive"
        assert len(since.threads()) == 2  # that accepts, and of this connection


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_who_takes_the_local_name_of_a_server_gets_nothing():
    (address,) = free_addresses(1)
    squatter = Squatter(f"\0unison-{address}")
    server = Server(ClusterSpec({"ps": [address]}), "ps", 0)
    with contextlib.closing(squatter):
        try:
            connection = messages.connect(address, 20.0, "ps 0", role="pulse")
            assert connection.ask("ping").kind == "alive"
            connection.close()
        finally:
            server.stop()
        assert squatter.received() == b""


@pytest.mark.parametrize("said", [{}, {"role": 1}, {"role": "worker"}, {"role": [], "job": "j"}])
def test_who_does_not_say_what_it_is_is_told_so(said):
    (address,) = free_addresses(1)
    server = Server(ClusterSpec({"ps": [address]}), "ps", 0)
    try:
        with pytest.raises(RuntimeError, match=r"Expected one of .*'pulse'"):
            messages.connect(address, 20.0, "ps 0", **said)
    finally:
        server.stop()


@pytest.mark.parametrize("about", [{}, {"servers": 3}, {"servers": [], "patience": None}])
@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_who_does_not_introduce_itself_properly_ends_its_own_connection_only(about):
    said = {"role": "worker", "job": "j"} | about
    (address,) = free_addresses(1)
    server = Server(ClusterSpec({"worker": [address]}), "worker", 0)
    try:
        connection = messages.connect(address, 20.0, "worker 0", **said)
        with pytest.raises(unison.errors.UnavailableError):
            connection.receive()
        again = messages.connect(address, 20.0, "worker 0", role="pulse")
        assert again.ask("ping").kind == "alive"
        again.close()
    finally:
        server.stop()


def test_a_worker_that_is_stopped_does_not_warn_of_servers_that_are_gone(caplog):
    address, gone = free_addresses(2)
    since = Since()
    server = Server(ClusterSpec({"worker": [address], "ps": [gone]}), "worker", 0)
    said = {"role": "worker", "job": "j", "worker": 0, "servers": [gone], "patience": 1.0}
    with contextlib.closing(messages.connect(address, 20.0, "worker 0", **said)):
        server.stop()
        until(lambda: not since.threads(), "it still serves")
    assert not caplog.records


def test_another_version_is_refused_and_named(started):
    strategy, _ = started()
    host, _, port = strategy.store.addresses[0].rpartition(":")
    stream = connect((host, int(port)), key(), messages.CHANNEL, seconds=20.0)
    with (
        contextlib.closing(Connection(stream)) as connection,
        pytest.raises(RuntimeError, match=r"Expected .*'unison'.* Received: .*'0\.1'"),
    ):
        connection.ask("hello", role="worker", unison="0.1", jax="0.1", has_64_bits=False)


def test_text_is_a_part_of_the_program_and_arrays_of_text_are_refused(started):
    _, coordinator = started()

    def scaled(how, x):
        return 2 * x if how == "twice" else x

    values = [coordinator.schedule(scaled, args=(how, 3.0)) for how in ("twice", "once")]
    assert [float(value.fetch()) for value in values] == [6.0, 3.0]
    with pytest.raises(TypeError, match="Pass a str"):
        coordinator.schedule(scaled, args=(np.array(["twice"]), 3.0))


def test_only_a_parameter_server_strategy_has_a_coordinator():
    with pytest.raises(TypeError, match="needs a ParameterServerStrategy"):
        ClusterCoordinator(unison.OneDeviceStrategy("CPU:0"))


def test_the_shards_of_a_variable_are_read_and_assigned_one_by_one(started):
    strategy, _ = started(servers=2, partitioner=FixedShardsPartitioner(2))
    with strategy.scope():
        table = unison.Variable(np.arange(10.0, dtype=np.float32).reshape(5, 2))
    first, second = shards_of(table)
    assert (first.shape, first.offset, second.shape, second.offset) == ((3, 2), 0, (2, 2), 3)
    assert second.device == "/job:ps/replica:0/task:1/device:CPU:0"
    second.assign(np.full((2, 2), 7.0))
    np.testing.assert_array_equal(first, [[0, 1], [2, 3], [4, 5]])
    np.testing.assert_array_equal(table[2:], [[4, 5], [7, 7], [7, 7]])
    rows = read_rows(table, [[4, 0], [0, 2]])
    np.testing.assert_array_equal(rows, [[[7, 7], [0, 1]], [[0, 1], [4, 5]]])
    with pytest.raises(ValueError, match="from 0 to 4"):
        read_rows(table, [5])
    with pytest.raises(ValueError, match="ParameterServerStrategy"):
        shards_of(unison.Variable(1.0))


def test_a_push_that_comes_again_is_not_applied_again(started):
    strategy, coordinator = started()
    with strategy.scope():
        total = unison.Variable(np.zeros(3, np.float32))
    coordinator.schedule(lambda: total.assign_add(jnp.ones(3)))
    coordinator.join()
    ((update,),) = [p.description["updates"] for p in coordinator._dispatcher.functions.programs]
    fields = {"program": update["program"], "shard": 0, "has_rows": False}
    fields["encodings"] = update["encodings"]
    again = {"closure": 50, "settled": 2, "updates": [{**fields, "pushed_rows": update["rows"]}]}
    pushed = [np.ones(3, np.float32)] * len(update["rows"])
    answers = [strategy.store.ask({0: ("push", pushed, again)})[0] for _ in range(2)]
    assert [answer["is_repeated"] for answer in answers] == [False, True]
    # Nobody sends again what is settled, but a worker that was thought to be lost may.
    late = {**again, "closure": 1}
    assert strategy.store.ask({0: ("push", pushed, late)})[0]["is_repeated"]
    after = total.numpy()
    assert np.all(after == after[0])
    assert after[0] <= 2


def test_an_answer_beside_that_of_a_lost_server_is_not_taken_for_the_next_one(started):
    strategy, _ = started(servers=2)
    store = strategy.store
    with strategy.scope():
        variable = unison.Variable(np.ones(3, np.float32))
    (shard,) = variable.cell.shards
    lost = 1 - shard.server
    store._connections[lost].close()
    status = ("status", (), {})
    with pytest.raises(ServerLostError, match=f"Parameter server {lost}"):
        store.ask({shard.server: status, lost: status})
    np.testing.assert_array_equal(variable.numpy(), np.ones(3))


def test_variables_on_servers_are_saved_and_restored(started, tmp_path):
    strategy, coordinator = started(servers=2, partitioner=FixedShardsPartitioner(2))
    with strategy.scope():
        table = unison.Variable(np.arange(6.0, dtype=np.float32).reshape(3, 2))
    checkpoint = unison.train.Checkpoint(table=table)
    path = checkpoint.save(str(tmp_path / "saved"))
    coordinator.schedule(lambda: table.assign_add(jnp.ones((3, 2))))
    coordinator.join()
    assert float(table[0, 0]) == 1.0
    checkpoint.restore(path)
    np.testing.assert_array_equal(table.numpy(), np.arange(6.0).reshape(3, 2))


def test_what_a_deleted_variable_took_is_freed(started):
    strategy, _ = started()

    def kept():
        return strategy.store.ask_all("status")[0]["bytes"]

    with strategy.scope():
        large = unison.Variable(np.zeros(100_000, np.float32))
        assert kept() == 400_000
        del large
        gc.collect()
        small = unison.Variable(0.0)
    assert kept() == 4
    assert float(small) == 0.0


def test_calls_that_wait_when_the_coordinator_ends_are_called_off(started):
    _, coordinator = started()

    def slow():
        time.sleep(0.2)
        yield np.zeros(1)
        time.sleep(0.2)

    iterator = iter(coordinator.create_per_worker_dataset(slow))
    values = [coordinator.schedule(lambda own: next(own), args=(iterator,)) for _ in range(50)]
    coordinator.end()
    with pytest.raises(CancelledError):
        values[-1].fetch()
    with pytest.raises(CancelledError):
        coordinator.schedule(lambda: 1.0)
