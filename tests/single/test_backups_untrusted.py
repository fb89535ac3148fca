"""Backups of `fit` that somebody else has made: right checksums, and anything behind them."""

import logging
import os
import time

import numpy as np
import pytest

import unison.tf as tf
from fuzzed.backups import (
    arrays,
    change_latest,
    model_and_values,
    position_in,
    train,
    within_a_pass,
    without_a_length,
    writes_backup,
)
from unison.data import Dataset
from unison.data.plan import memories_of, recall
from unison.errors import DataLossError
from unison.train.fit_position import FitPosition
from unison.train.fit_state import checked_sizes
from unison.train.keras_callbacks import give_states, states_of
from unison.train.random_state import numpy_and_python, set_numpy_and_python

IS_CORRUPT = r"^Checkpoint .*backup-\d+\b.* is corrupt: .*Remove it to go on from an earlier state"


def change(folder, to_position):
    """Changes the position in the latest backup; all checksums are right again."""
    change_latest(folder, lambda index, members: to_position(position_in(index)))


# -- callbacks -----------------------------------------------------------------------------------


def attributes_of(position, name):
    return position["callbacks"]["dict"][name]["dict"]


def test_a_backup_does_not_say_where_a_callback_writes(tmp_path):
    named, outside = tmp_path / "named", tmp_path / "outside"
    named.mkdir()
    outside.mkdir()
    writes_backup(arrays)(named)

    def name_another_file(position):
        of_checkpoint = attributes_of(position, "ModelCheckpoint")
        of_checkpoint |= {"filepath": str(outside / "x.weights.h5"), "best": None}

    change(named, name_another_file)
    with pytest.raises(DataLossError, match=IS_CORRUPT) as raised:
        train(named, arrays)
    assert "expected best, _batches_seen_since_last_saving, _last_batch_seen" in str(raised.value)
    assert "received 'filepath'" in str(raised.value)
    assert os.listdir(outside) == []


@pytest.mark.parametrize("name", ["filepath", "model", "monitor_op", "__class__", "on_epoch_end"])
def test_no_other_attribute_of_a_callback_is_set(name):
    callback = tf.keras.callbacks.ModelCheckpoint("a.weights.h5", save_weights_only=True)
    states = states_of([callback])
    states["ModelCheckpoint"] |= {"_last_batch_seen": 3, name: "b"}
    with pytest.raises(DataLossError, match=f"The backup is corrupt: .*received '{name}'"):
        give_states([callback], states, "The backup")
    assert callback._last_batch_seen is None  # nothing was changed


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("wait", -1),
        ("wait", "3"),
        ("wait", True),
        ("stopped_epoch", 1.5),
        ("best_epoch", None),
        ("best", "0.5"),
        ("best", 10**400),
        ("best", [0.5]),
        ("best_weights", 3),
        ("best_weights", [np.zeros((6, 2)), np.zeros(1)]),
        ("best_weights", [np.zeros((6, 1))]),
        ("best_weights", [np.full((6, 1), "a"), np.zeros(1)]),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_value_that_a_callback_does_not_save_is_corrupt(name, value):
    callback = tf.keras.callbacks.EarlyStopping()
    callback.set_model(tf.keras.Sequential([tf.keras.Input((6,)), tf.keras.layers.Dense(1)]))
    with pytest.raises(DataLossError, match=f"The backup is corrupt: {name} .*EarlyStopping"):
        give_states([callback], {"EarlyStopping": {name: value}}, "The backup")


@pytest.mark.parametrize("best", [None, 3, 0.5, float("nan"), float("inf")], ids=str)
def test_a_best_value_is_kept(best):
    callback, resumed = (tf.keras.callbacks.EarlyStopping() for _ in range(2))
    callback.best = best
    give_states([resumed], states_of([callback]), "The backup")
    np.testing.assert_equal(resumed.best, best)


# -- the position --------------------------------------------------------------------------------


def data_of(position):
    return position["data"]["dict"]


def begun_of(position):
    return data_of(position)["begun"]["dict"]


WRONG = {
    "epoch": lambda p: p.update(epoch="1"),
    "negative epoch": lambda p: p.update(epoch=-1),
    "no batch": lambda p: p.pop("batch"),
    "batch of true": lambda p: p.update(batch=True),
    "batch behind the last": lambda p: p.update(batch=99),
    "has_stopped": lambda p: p.update(has_stopped=0),
    "callbacks": lambda p: p.update(callbacks=None),
    "data": lambda p: p.update(data=3),
    "no taken": lambda p: data_of(p).pop("taken"),
    "negative taken": lambda p: data_of(p).update(taken=-1),
    "taken behind the last": lambda p: data_of(p).update(taken=99),
    "endless taken": lambda p: data_of(p).update(taken=2**62),
    "looks_ahead": lambda p: data_of(p).update(looks_ahead=None),
    "no begun": lambda p: data_of(p).pop("begun"),
    "begun": lambda p: data_of(p).update(begun=None),
    "now": lambda p: data_of(p).update(now=[]),
    "nothing taken, and no now": lambda p: data_of(p).update(taken=0, now=None),
    "num_parts": lambda p: begun_of(p).update(num_parts=0),
    "shares": lambda p: begun_of(p).update(shares={"list": ["x"]}),
    "no memories": lambda p: begun_of(p).pop("memories"),
    "memories": lambda p: begun_of(p).update(memories={"list": ["[]"]}),
    "memories of several": lambda p: begun_of(p).update(
        num_parts=2, memories={"list": [{"list": ["[]", "xx"]}]}
    ),
    "numpy": lambda p: begun_of(p).update(numpy={"list": []}),
    "python": lambda p: begun_of(p).update(python={"list": [3, 1, None]}),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("inputs", [arrays, within_a_pass, without_a_length])
def test_a_wrong_position_with_right_checksums_is_corrupt(tmp_path, inputs, wrong):
    writes_backup(inputs)(tmp_path)
    change(tmp_path, wrong)
    begin = time.process_time()
    with pytest.raises(DataLossError, match=IS_CORRUPT):
        train(tmp_path, inputs)
    assert time.process_time() - begin < 2.0


def test_fit_after_a_corrupt_backup_begins_with_the_first_epoch(tmp_path):
    writes_backup(arrays)(tmp_path / "backup")
    change(tmp_path / "backup", lambda p: attributes_of(p, "EarlyStopping").update(wait=-1))
    with pytest.raises(DataLossError):
        train(tmp_path / "backup", arrays)
    train(tmp_path / "none", arrays)
    model, _ = model_and_values()
    assert len(model.history.epoch) == 3


@pytest.mark.timeout(60)
def test_steps_that_the_data_does_not_have_are_not_counted(tmp_path):
    writes_backup(without_a_length)(tmp_path)
    change(tmp_path, lambda p: (p.update(batch=2**62), data_of(p).update(taken=2)))
    with pytest.raises(DataLossError, match=IS_CORRUPT):
        train(tmp_path, without_a_length)


def test_a_corrupt_position_changes_nothing():
    position = FitPosition(None)
    state = {
        "epoch": 3, "batch": 1, "data": {"taken": -1}, "callbacks": {}, "has_stopped": False
    }  # fmt: skip
    with pytest.raises(DataLossError, match="The position in fit is corrupt"):
        position.set_state(state)
    assert (position.epoch, position.data) == (0, None)


@pytest.mark.parametrize("sizes", [3, [3], [[0]], [[0, "1"]], [[-1, 1.0]], [[4, 1.0]], [[0, -1.0]]])
def test_sizes_of_batches_are_numbers_from_the_first_batch_on(sizes):
    with pytest.raises(ValueError, match="expected"):
        checked_sizes(sizes)


def test_a_backup_that_nobody_has_changed_is_resumed(tmp_path, caplog):
    with caplog.at_level(logging.INFO, "unison"):
        writes_backup(arrays)(tmp_path)
        train(tmp_path, arrays)
    assert "is restored" in caplog.text


# -- random numbers ------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [-1, 625, 10**6, 2**40, 1.0])
def test_random_numbers_are_not_drawn_from_memory_behind_the_state(place):
    state = numpy_and_python()
    state["numpy"][2] = place
    before = np.random.get_state()[1].tolist()
    with pytest.raises(DataLossError, match="expected a whole number from 0 to 624"):
        set_numpy_and_python(state)
    assert np.random.get_state()[1].tolist() == before


@pytest.mark.parametrize("name", ["numpy", "python"])
def test_a_generator_of_zeros_alone_is_corrupt(name):
    """NumPy would never find a normal number in it."""
    state = numpy_and_python()
    state[name][1] = np.zeros_like(state[name][1])
    with pytest.raises(DataLossError, match="words of a Mersenne Twister"):
        set_numpy_and_python(state)


# -- earlier passes ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        lambda memory: memory.pop("_seed"),
        lambda memory: memory.update(_seed="3"),
        lambda memory: memory.update(_passes=None),
        lambda memory: memory.update(more=1),
    ],
    ids=["no seed", "seed of text", "passes", "more"],
)
def test_what_earlier_passes_left_is_checked_before_it_is_restored(change):
    plan = Dataset.range(9).shuffle(9, seed=3).plan
    memories = memories_of(plan)
    changed = [dict(memory) for memory in memories]
    change(changed[0])
    with pytest.raises(ValueError, match="expected"):
        recall(plan, changed)
    assert memories_of(plan) == memories


def test_an_earlier_position_of_a_cache_is_checked():
    plan = Dataset.range(9).cache().plan
    recall(plan, [{"is_kept": True, "begin": {"memory": "x"}}])
    with pytest.raises(DataLossError, match="The position of an iterator is corrupt"):
        plan.stream().next()
