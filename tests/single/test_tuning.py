"""`CommunicationOptions(auto_tune=True)` on the replicas of one process."""

import dataclasses
import json
import logging
import re

import jax
import keras
import numpy as np
import pytest

import unison
import unison.train
from unison import AggregationMethod, CommunicationOptions, compression
from unison.collectives import Communication, communicating, options_in_scope
from unison.runtime.placement import Placement
from unison.strategies import tuning

FASTER = [[1.0] * 8, [0.5] * 8]


def strategy_of(**options):
    return unison.MultiWorkerMirroredStrategy(communication_options=CommunicationOptions(**options))


def trained(strategy, steps, compressed_by=None):
    """The weights of a model after so many steps of `fit`, and the model."""
    keras.utils.set_random_seed(1)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(8 * steps, 32)).astype("float32")
    y = x[:, :1] * 2
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((32,)), keras.layers.Dense(40), keras.layers.Dense(1)]
        )
        optimizer = keras.optimizers.SGD(0.01)
        if compressed_by is not None:
            unison.train.with_compression(optimizer, compressed_by)
        model.compile(optimizer, "mse")
    model.fit(x, y, batch_size=8, verbose=0, shuffle=False)
    return [np.asarray(weight) for weight in model.get_weights()], model


class FakeClock:
    """Makes the steps of one way the fastest, whatever they take."""

    def __init__(self, communication, is_fast):
        self.now, self.seconds = 0.0, 0.0
        self.communication = communication
        self.is_fast = is_fast

    def perf_counter(self):
        # It is read before a step, by whose way it goes on, and after it.
        self.now += self.seconds
        self.seconds = 0.5 if self.is_fast(self.communication.options) else 1.0
        return self.now


@pytest.fixture
def fastest_is(monkeypatch):
    def choose(strategy, is_fast):
        monkeypatch.setattr(tuning, "time", FakeClock(strategy._communication, is_fast))
        monkeypatch.setattr(tuning, "_PACKS", (2**20,))
        monkeypatch.setattr(tuning, "_ROUNDS", 3)

    return choose


def test_fit_settles_for_the_fastest_way_and_trains_as_without(fastest_is, caplog):
    strategy = strategy_of(auto_tune=True)
    fastest_is(strategy, lambda way: way.method is AggregationMethod.TREE)
    with caplog.at_level(logging.INFO, "unison"):
        tuned, _ = trained(strategy, 24)
    plain, _ = trained(strategy_of(), 24)
    assert strategy.communication_options == CommunicationOptions(method="TREE")
    for one, other in zip(tuned, plain, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    (said,) = [line for line in caplog.messages if "Gradients are now" in line]
    assert said.startswith("Gradients are now communicated by TREE: measured fastest.")
    assert "by DEFAULT 1e+03 ms" in said
    assert "by DEFAULT in packs of 1 MiB" in said


def settled(seconds, caplog, monkeypatch, of_others=()):
    """The options on which a worker settles by its times and those of others."""
    monkeypatch.setattr(
        tuning.process_group, "all_gather_json", lambda value, what: [value, *of_others]
    )
    communication = Communication(CommunicationOptions(auto_tune=True))
    trial = tuning._Trial([CommunicationOptions(), CommunicationOptions(method="TREE")], 0)
    trial.seconds = seconds
    with caplog.at_level(logging.INFO, "unison"):
        tuning.Tuning(communication, lambda: None)._settle(trial)
    return communication.options


def test_what_is_not_clearly_faster_does_not_replace_the_default(caplog, monkeypatch):
    barely = [[1.0] * 8, [0.98] * 8]
    assert settled(barely, caplog, monkeypatch) == CommunicationOptions()
    assert any("no other options are 3% faster" in line for line in caplog.messages)


@pytest.mark.parametrize(("is_first", "level"), [(True, "WARNING"), (False, "INFO")])
def test_the_first_worker_says_what_was_chosen(is_first, level, caplog, monkeypatch):
    monkeypatch.setattr(tuning.process_group, "is_first", lambda: is_first)
    settled(FASTER, caplog, monkeypatch)
    (said,) = caplog.records
    assert said.levelname == level
    assert said.getMessage().startswith("Gradients are now communicated by TREE")


def test_workers_settle_by_the_times_of_the_last_to_come(caplog, monkeypatch):
    options = settled(FASTER, caplog, monkeypatch, of_others=[[[0.3] * 8, [0.4] * 8]])
    # By itself this worker would have taken the second; it had waited for the other.
    assert options.method is AggregationMethod.DEFAULT
    assert settled(FASTER, caplog, monkeypatch).method is AggregationMethod.TREE


def test_a_loop_of_runs_settles_and_trains_as_without(fastest_is, monkeypatch, caplog):
    # The ways are programs of one signature: none is traced as often.
    monkeypatch.setattr("unison.program.cache._RETRACES_TO_WARN", 3)

    def weights_after(strategy):
        with strategy.scope():
            weight = unison.Variable(np.ones(8, np.float32))

        def step(x):
            gradient = unison.aggregate(x * weight.read_value())
            weight.assign_sub(1e-3 * gradient)
            return gradient.sum()

        def look(x):
            return unison.get_replica_context().all_reduce("SUM", x)

        rng = np.random.default_rng(0)
        for batch in rng.normal(size=(24, 4)).astype("float32"):
            strategy.run(step, (unison.PerReplica(list(batch)),))
            strategy.run(look, (unison.PerReplica(list(batch)),))
        return np.asarray(weight)

    tuned = strategy_of(auto_tune=True)
    fastest_is(tuned, lambda way: way.bytes_per_pack == 2**20)
    np.testing.assert_allclose(weights_after(tuned), weights_after(strategy_of()), rtol=1e-5)
    assert tuned.communication_options == CommunicationOptions(bytes_per_pack=2**20)
    # Of `step` and `look`; those of other ways are dropped.
    assert len(tuned._programs) == 2
    assert not any("has been traced" in line for line in caplog.messages)


def test_a_compression_is_switched_off_where_it_costs_time(fastest_is, caplog):
    strategy = strategy_of(auto_tune=True)
    fastest_is(strategy, lambda way: not way.compresses)
    _, model = trained(strategy, 30, compression.sign(momentum=0))
    assert not strategy.communication_options.compresses
    # Both lines are seen without UNISON_LOG.
    first, second = [one.getMessage() for one in caplog.records if one.name == "unison"]
    assert first.startswith("Gradients are now communicated by DEFAULT, not compressed: measured")
    assert second.startswith("Compression is switched off")
    # What was still to be sent went with the first step without it.
    assert unison.train.compression_report(model.optimizer)[1] == 0


def test_a_compression_that_saves_time_stays(fastest_is):
    strategy = strategy_of(auto_tune=True)
    fastest_is(strategy, lambda way: way.compresses)
    _, model = trained(strategy, 30, compression.sign(momentum=0))
    assert strategy.communication_options.compresses
    assert unison.train.compression_report(model.optimizer)[1] > 0


def test_steps_of_the_warm_up_of_a_compression_are_not_measured():
    ways = tuning.ways_to_try(CommunicationOptions(), compresses=True)
    trial = tuning._Trial(ways, steps_to_skip=3)
    for _ in range(3 + len(ways)):
        trial.note(1.0)
    assert not any(trial.seconds)
    assert trial.way is ways[0]
    trial.note(2.0)
    assert trial.seconds[0] == [2.0]


def test_no_compression_is_tried_that_was_not_given():
    ways = tuning.ways_to_try(CommunicationOptions(), compresses=False)
    assert {way.compresses for way in ways} == {True}
    assert tuning.ways_to_try(CommunicationOptions(compresses=False), compresses=True)[0] == (
        CommunicationOptions(compresses=False)
    )


def test_a_group_that_may_change_is_not_tuned(monkeypatch):
    monkeypatch.setattr("unison.strategies.multi_worker.elastic_group", object)
    with pytest.raises(ValueError, match="auto_tune needs a fixed set of workers"):
        strategy_of(auto_tune=True)


def test_sums_without_a_strategy_go_by_the_defaults():
    assert options_in_scope() == CommunicationOptions()
    communication = Communication(CommunicationOptions(bytes_per_pack=8))
    with communicating(communication):
        assert options_in_scope().bytes_per_pack == 8
    assert communication.was_asked


def sums_by(**options):
    """The program that sums two tensors of 2048 bytes."""
    strategy = strategy_of(**options)
    tree = [np.ones(512, np.float32), np.ones(512, np.float32)]
    with strategy.replica_context():
        trace = jax.make_jaxpr(lambda t: unison.aggregate(t), axis_env=[("replica", 4)])(tree)
    return str(trace)


@pytest.mark.parametrize("method", ["DEFAULT", "ADD_N", "ACCUMULATE_N"])
def test_packs_of_a_strategy_divide_the_sums_of_its_gradients(method, monkeypatch):
    monkeypatch.setattr(Placement, "exchanges_buffers", False)  # as without the compiled part
    sums = [sums_by(method=method, bytes_per_pack=size).count("psum") for size in (0, 2048, 4096)]
    assert sums == [1, 2, 1]


def test_pieces_of_accumulate_n_have_the_size_of_packs():
    rounds = re.findall(r"length=(\d+)", sums_by(method="ACCUMULATE_N", bytes_per_pack=512))
    assert rounds == ["4", "4"]


# -- files ---------------------------------------------------------------------------------------


def test_a_saved_choice_is_given_again(tmp_path):
    options = CommunicationOptions(
        bytes_per_pack=2**20, timeout_seconds=3.5, method="tree", compresses=False
    )
    options.save(tmp_path / "options.json")
    assert CommunicationOptions.from_file(tmp_path / "options.json") == options
    assert json.loads((tmp_path / "options.json").read_text())["method"] == "TREE"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not valid JSON"),
        ("[]", "Expected in .* an object with communication options"),
        ('{"speed": 3}', "Received: {'speed': 3}"),
        ('{"bytes_per_pack": true}', "Received: {'bytes_per_pack': True}"),
        ('{"method": "BEST"}', "Expected an AggregationMethod"),
    ],
)
def test_a_file_with_something_else_is_refused(tmp_path, text, message):
    (tmp_path / "options.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        CommunicationOptions.from_file(tmp_path / "options.json")


def test_options_know_their_method_by_name():
    options = CommunicationOptions(method="add_n")
    assert options.method is AggregationMethod.ADD_N
    assert dataclasses.replace(options, auto_tune=True).method is AggregationMethod.ADD_N
