"""What a program can know about its input: how long it waits, and for which stage."""

import threading
import time

import keras
import numpy as np
import pytest

import unison
import unison.tf as tf
from unison.data import Dataset, timing, waited_seconds
from unison.data.plan import position_of
from unison.keras import InputStatistics


def slow(seconds):
    def function(*element):
        time.sleep(seconds)
        return element if len(element) > 1 else element[0]

    return function


def consume(dataset, seconds=0.0):
    iterator = iter(dataset)
    for _ in iterator:
        time.sleep(seconds)
    return iterator


def stage_names(stages):
    """The stages of every pipeline, each behind what reads it."""

    def nested(stage):
        return [stage.name, *map(nested, stage.inputs)]

    return [nested(stage) for stage in stages.pipelines]


# -- waiting -------------------------------------------------------------------------------


def test_an_iterator_counts_what_it_gives_and_how_long_that_took():
    statistics = consume(Dataset.range(10).map(slow(2e-3)).batch(5), 2e-2).statistics()
    assert statistics.elements == 2
    assert 0.02 <= statistics.waiting <= statistics.seconds - 0.02
    assert statistics.waiting_share == statistics.waiting / statistics.seconds
    assert str(statistics).startswith("2 elements in 0.")


def test_an_iterator_that_nobody_asked_has_not_waited():
    statistics = iter(Dataset.range(3)).statistics()
    assert (statistics.elements, statistics.waiting, statistics.waiting_share) == (0, 0, 0)


def test_a_slow_loop_waits_less_for_a_fast_pipeline_than_a_fast_loop_for_a_slow_one():
    patient = consume(Dataset.range(5), 1e-2).statistics()
    waiting = consume(Dataset.range(5).map(slow(1e-2))).statistics()
    assert patient.waiting_share < waiting.waiting_share


def test_the_optional_and_the_numpy_elements_count_too():
    iterator = iter(tf.data.Dataset.range(3))
    iterator.get_next(), iterator.get_next_as_optional()
    assert iterator.statistics().elements == 2
    numpy = tf.data.Dataset.range(3).as_numpy_iterator()
    list(numpy)
    assert numpy.statistics().elements == 3


def test_a_distributed_iterator_has_statistics():
    strategy = unison.MirroredStrategy(["cpu:0", "cpu:1"])
    iterator = iter(strategy.experimental_distribute_dataset(Dataset.range(8).batch(4)))
    assert len(list(iterator)) == 2
    assert iterator.statistics().elements == 2
    assert iterator.statistics().waiting > 0


def test_a_thread_knows_how_long_it_waited_and_counts_no_second_twice():
    inner = Dataset.range(5).map(slow(4e-3))
    outer = Dataset.from_generator(lambda: iter(inner))
    before = waited_seconds()
    begin = time.perf_counter()
    consume(outer)
    elapsed = time.perf_counter() - begin
    assert 0.02 <= waited_seconds() - before <= elapsed
    elsewhere = []
    thread = threading.Thread(target=lambda: elsewhere.append(waited_seconds()))
    thread.start()
    thread.join()
    assert elsewhere == [0]


# -- stages --------------------------------------------------------------------------------


def test_the_slow_stage_of_a_pipeline_is_named():
    pairs = Dataset.from_tensor_slices((np.arange(40.0), np.arange(40)))
    dataset = pairs.shuffle(40).map(slow(1e-2)).filter(lambda x, y: True).batch(8).prefetch(2)
    with timing() as stages:
        consume(dataset)
    assert stages.slowest.name == "Map"
    assert stages.slowest.elements == 40
    assert stages.slowest.seconds >= 0.4
    assert stages.share(stages.slowest) > 0.5
    assert stage_names(stages) == [
        ["Prefetch", ["Batch", ["Filter", ["Map", ["Shuffle", ["Slices"]]]]]]
    ]


@pytest.mark.parametrize("at", range(4))
def test_whichever_it_is(at):
    steps = [slow(2e-3) if place == at else slow(0) for place in range(4)]
    with timing() as stages:
        consume(
            Dataset.range(10)
            .map(steps[0])
            .filter(lambda x: steps[1](x) is x)
            .flat_map(lambda x: steps[2](Dataset.from_tensors(x)))
            .scan(0, lambda state, x: (state, steps[3](x)))
        )
    assert stages.slowest.name == ["Map", "Filter", "FlatMap", "Scan"][at]


def test_a_slow_source_is_named():
    def rows():
        for number in range(10):
            time.sleep(2e-3)
            yield number

    with timing() as stages:
        consume(Dataset.from_generator(rows).batch(2))
    assert stages.slowest.name == "Generator"


def test_a_stage_that_is_read_by_index_is_timed_for_itself():
    def heavy(x):
        return tf.linalg.matmul(tf.fill([300, 300], x), tf.fill([300, 300], x))[0, 0]

    dataset = tf.data.Dataset.from_tensor_slices(np.arange(64.0, dtype="float32"))
    dataset = dataset.map(heavy).shuffle(64, seed=1).batch(16)
    assert dataset.plan.inputs[0].inputs[0].rows() is not None
    with timing() as stages:
        consume(dataset)
    assert stages.slowest.name == "Map"
    assert stages.slowest.elements == 64


def test_the_datasets_that_a_function_makes_are_one_stage():
    with timing() as stages:
        consume(Dataset.range(50).flat_map(lambda n: Dataset.range(3).map(lambda x: x).batch(2)))
    assert stage_names(stages) == [["FlatMap", ["Range"], ["Batch", ["Map", ["Range"]]]]]
    assert stages.pipelines[0].inputs[1].elements == 100


def test_a_prefetch_waits_and_says_how_much_is_ready():
    def ready(seconds_to_make, seconds_to_use):
        made = Dataset.from_generator(lambda: map(slow(seconds_to_make), range(20)))
        with timing() as stages:
            consume(made.prefetch(4), seconds_to_use)
        (prefetch,) = stages.pipelines
        assert prefetch.only_waits
        return prefetch.ready

    assert 0 <= ready(2e-3, 0) < ready(0, 2e-3) <= 4


@pytest.mark.parametrize(
    "options",
    [{}, {"num_parallel_calls": 2}, {"num_parallel_calls": 2, "executor": "process"}],
)
def test_a_function_is_the_slow_stage_wherever_it_runs(options):
    with timing() as stages:
        consume(Dataset.range(20).map(slow(5e-3), **options).batch(4).prefetch(1))
    assert stages.slowest.name == "Map"


def test_the_table_shows_every_stage_and_marks_the_slowest():
    with timing() as stages:
        consume(Dataset.range(20).map(slow(1e-3)).batch(4).prefetch(1))
    title, prefetch, batch, mapped, source = str(stages).splitlines()
    assert title.split() == ["stage", "elements", "seconds", "share"]
    assert prefetch.split()[0:2] == ["Prefetch", "5"]
    assert prefetch.endswith(" ready")
    assert batch.split()[0:2] == ["Batch", "5"]
    assert mapped.split()[0:2] == ["Map", "20"]
    assert mapped.endswith("% <- the slowest".replace("% ", "%  "))
    assert source.startswith("      Range")


def test_passes_over_a_dataset_add_up():
    dataset = Dataset.range(6).map(lambda x: x)
    with timing() as stages:
        consume(dataset)
        consume(dataset)
    assert [stage.elements for stage in stages.pipelines] == [12]


def test_a_dataset_that_is_asked_for_its_spec_is_no_pipeline_of_its_own():
    mapped = Dataset.range(6).map(lambda x: x)
    with timing() as stages:
        _ = mapped.element_spec
        consume(mapped.batch(2))
    assert stage_names(stages) == [["Batch", ["Map", ["Range"]]]]


def test_what_is_opened_outside_is_not_timed():
    dataset = Dataset.range(3).map(lambda x: x)
    before = iter(dataset)
    with timing() as stages:
        list(before)
    consume(dataset)
    assert stages.pipelines == []
    assert stages.slowest is None
    assert str(stages).split() == ["stage", "elements", "seconds", "share"]


def test_timing_changes_neither_elements_nor_states():
    def pipeline():
        return Dataset.range(50).shuffle(7, seed=1).map(lambda x: x + 1).batch(4).prefetch(2)

    def state_and_rest(dataset):
        stream = dataset.plan.stream()
        first = [stream.next()[0].tolist() for _ in range(3)]
        state = position_of(dataset.plan, stream)
        return first, state, [batch[0].tolist() for batch in iter(stream.next, None)]

    plain = state_and_rest(pipeline())
    with timing():
        timed = state_and_rest(pipeline())
    assert timed[0] == plain[0]
    assert timed[2] == plain[2]
    np.testing.assert_equal(timed[1], plain[1])


def test_an_error_ends_the_timing():
    def fail(x):
        raise ValueError(x)

    with pytest.raises(ValueError, match="0"), timing() as stages:
        consume(Dataset.range(3).map(fail))
    consume(Dataset.range(3))
    assert [stage.name for stage in stages.pipelines] == ["Map"]


def test_one_timing_at_a_time():
    with timing(), pytest.raises(RuntimeError, match="already"), timing():
        pass
    with timing():
        pass


# -- Keras ---------------------------------------------------------------------------------


def fit(dataset, strategy=None, **arguments):
    with (strategy or unison.OneDeviceStrategy("cpu:0")).scope():
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(dataset, epochs=1, verbose=0)  # compiles
    return model.fit(dataset, verbose=0, callbacks=[InputStatistics()], **arguments).history


@pytest.fixture
def batches():
    images, labels = np.ones((64, 4), "float32"), np.ones((64, 1), "float32")
    return Dataset.from_tensor_slices((images, labels)).batch(16)


def test_keras_logs_the_share_of_an_epoch_that_is_waited_for_input(batches):
    history = fit(batches.map(slow(5e-2)), epochs=2)
    assert len(history["input_wait"]) == 2
    assert all(0.5 < share < 1 for share in history["input_wait"])
    assert fit(batches)["input_wait"][0] < history["input_wait"][0]


def test_keras_logs_it_of_distributed_datasets(batches):
    strategy = unison.MirroredStrategy(["cpu:0", "cpu:1"])
    distributed = strategy.experimental_distribute_dataset(batches.map(slow(5e-2)))
    assert fit(distributed, strategy)["input_wait"][0] > 0.5


def test_the_slow_stage_of_keras_input_is_named(batches):
    with timing() as stages:
        fit(batches.map(slow(2e-2)))
    assert stages.slowest.name == "Map"
