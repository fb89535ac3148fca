"""Checkpoints behave as TensorFlow's, whose answers are the literals, and lose nothing."""

import os
import random
import subprocess
import sys
import threading
import time
import zipfile

import fsspec
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import unison
import unison.data
from unison import train
from unison.cells import VariableAggregation as Aggregation
from unison.cells import VariableSynchronization as Synchronization
from unison.errors import DataLossError, InvalidArgumentError, NotFoundError, PermissionDeniedError
from unison.runtime.devices import prepare_backend
from unison.runtime.launches import LAUNCH_LOCK
from unison.train import (
    Checkpoint,
    CheckpointManager,
    get_checkpoint_state,
    latest_checkpoint,
    list_variables,
    load_checkpoint,
)

VALUE = ".ATTRIBUTES/VARIABLE_VALUE"


def variable(value=0.0, **kwargs):
    return unison.Variable(value, **kwargs)


def keys(**objects):
    """The names under which a checkpoint holds the variables of `objects`."""
    return sorted(path_and_shape[0] for path_and_shape in saved(**objects))


def saved(**objects):
    path = "memory://keys/checkpoint"
    return list_variables(Checkpoint(**objects).write(path))


@pytest.fixture(autouse=True, scope="module")
def _devices():
    prepare_backend()  # before Keras starts one with a single device


@pytest.fixture
def prefix(tmp_path):
    return os.path.join(tmp_path, "ckpt")


# -- paths and files ---------------------------------------------------------------------------


def test_save_adds_the_number_of_the_checkpoint(prefix):
    checkpoint = Checkpoint(v=variable())
    assert checkpoint.save(prefix) == f"{prefix}-1"
    assert checkpoint.save(prefix) == f"{prefix}-2"
    assert int(checkpoint.save_counter) == 2


def test_files_of_a_checkpoint_are_the_index_and_the_list_of_checkpoints(prefix, tmp_path):
    Checkpoint(v=variable()).save(prefix)
    assert sorted(os.listdir(tmp_path)) == ["checkpoint", "ckpt-1.index"]


def test_latest_checkpoint_is_the_last_one_saved(prefix, tmp_path):
    checkpoint = Checkpoint(v=variable())
    checkpoint.save(prefix)
    checkpoint.save(prefix)
    assert latest_checkpoint(tmp_path) == f"{prefix}-2"


def test_list_of_checkpoints_is_in_the_words_of_tensorflow(prefix, tmp_path):
    checkpoint = Checkpoint(v=variable())
    checkpoint.save(prefix)
    checkpoint.save(prefix)
    assert (tmp_path / "checkpoint").read_text() == (
        'model_checkpoint_path: "ckpt-2"\nall_model_checkpoint_paths: "ckpt-2"\n'
    )


def test_folder_without_a_checkpoint_has_no_latest_one(tmp_path):
    assert latest_checkpoint(tmp_path) is None
    assert latest_checkpoint(tmp_path / "nothing") is None
    assert get_checkpoint_state(tmp_path / "nothing") is None


def test_written_checkpoint_has_no_number_and_is_not_the_latest(prefix, tmp_path):
    checkpoint = Checkpoint(v=variable())
    checkpoint.save(prefix)
    assert checkpoint.write(tmp_path / "w") == str(tmp_path / "w")
    assert latest_checkpoint(tmp_path) == f"{prefix}-1"
    assert list_variables(tmp_path / "w") == [(f"save_counter/{VALUE}", []), (f"v/{VALUE}", [])]


def test_written_checkpoint_can_be_overwritten(prefix):
    v = variable(1.0)
    checkpoint = Checkpoint(v=v)
    checkpoint.write(prefix)
    v.assign(2.0)
    checkpoint.write(prefix)
    v.assign(0.0)
    checkpoint.read(prefix)
    assert float(v) == 2.0


def test_folders_on_the_way_are_made(tmp_path):
    path = tmp_path / "a" / "b" / "ckpt"
    assert Checkpoint(v=variable()).save(path) == f"{path}-1"


def test_prefix_may_be_a_folder(tmp_path):
    assert Checkpoint(v=variable()).save(f"{tmp_path}/") == f"{tmp_path}/-1"
    assert latest_checkpoint(tmp_path) == f"{tmp_path}/-1"


def test_prefix_may_be_relative(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert Checkpoint(v=variable()).save("ckpt") == "ckpt-1"
    assert latest_checkpoint(".") == "./ckpt-1"
    assert latest_checkpoint("") == "ckpt-1"


def test_moved_folder_is_found_where_it_is_now(tmp_path):
    Checkpoint(v=variable()).save(tmp_path / "before" / "ckpt")
    os.rename(tmp_path / "before", tmp_path / "after")
    assert latest_checkpoint(tmp_path / "after") == str(tmp_path / "after" / "ckpt-1")


@pytest.mark.parametrize("method", ["restore", "read"])
def test_missing_checkpoint_is_not_found(prefix, method):
    with pytest.raises(NotFoundError, match="There is no checkpoint"):
        getattr(Checkpoint(v=variable()), method)(prefix)


def test_empty_path_is_not_found():
    with pytest.raises(NotFoundError):
        Checkpoint(v=variable()).restore("")


def test_forgotten_number_is_named(prefix):
    Checkpoint(v=variable()).save(prefix)
    with pytest.raises(NotFoundError, match=r"Did you mean .*ckpt-1\?"):
        Checkpoint(v=variable()).restore(prefix)


def test_folder_in_place_of_a_checkpoint_is_named(prefix, tmp_path):
    Checkpoint(v=variable()).save(prefix)
    with pytest.raises(NotFoundError, match="is a folder: pass latest_checkpoint"):
        Checkpoint(v=variable()).restore(tmp_path)


def test_name_of_the_file_in_place_of_a_checkpoint_is_named(prefix):
    path = Checkpoint(v=variable()).save(prefix)
    with pytest.raises(NotFoundError, match=r"Name it without \.index"):
        Checkpoint(v=variable()).restore(f"{path}.index")


def test_checkpoint_behind_fsspec_is_saved_rotated_and_restored():
    folder = "memory://run"
    v = variable(1.0)
    manager = CheckpointManager(Checkpoint(v=v), folder, max_to_keep=1)
    manager.save()
    v.assign(2.0)
    manager.save()
    v.assign(0.0)
    assert latest_checkpoint(folder) == manager.latest_checkpoint == "memory://run/ckpt-2"
    Checkpoint(v=v).restore(latest_checkpoint(folder)).expect_partial()
    assert float(v) == 2.0
    names = [each["name"] for each in fsspec.filesystem("memory").ls("/run")]
    assert names == ["/run/checkpoint", "/run/ckpt-2.index"]


# -- what is followed ----------------------------------------------------------------------------


@pytest.mark.parametrize("value", [1, "a", None, np.ones(2), object(), len, unison.Module])
def test_what_has_no_state_is_refused(value):
    with pytest.raises(ValueError, match="A Checkpoint follows"):
        Checkpoint(x=value)


def test_root_without_a_state_is_refused():
    with pytest.raises(ValueError, match="root=3"):
        Checkpoint(3)


@pytest.mark.parametrize("value", [[1, 2], (), {}])
def test_lists_tuples_and_dictionaries_are_taken_whatever_they_hold(value):
    Checkpoint(x=value, y=[variable(), *value])


def test_save_counter_cannot_be_given():
    with pytest.raises(AttributeError, match="save_counter"):
        Checkpoint(save_counter=variable())


def test_values_in_lists_and_tuples_are_named_by_their_places():
    assert keys(x=[variable(), variable()]) == [f"x/0/{VALUE}", f"x/1/{VALUE}"]
    assert keys(x=(variable(), (variable(),))) == [f"x/0/{VALUE}", f"x/1/0/{VALUE}"]


def test_values_in_dictionaries_are_named_by_their_keys():
    x = {"a/b": variable(), "b": [variable()], "c.d": variable(), "..": variable()}
    assert keys(x=x) == [f"x/{key}/{VALUE}" for key in ("....", "a.Sb", "b/0", "c..d")]


def test_dictionary_with_a_variable_under_a_number_is_refused():
    with pytest.raises(ValueError, match="must have text as keys"):
        keys(x={1: variable()})


def test_variable_with_two_names_is_saved_once():
    v = variable()
    assert keys(a=v, b=v) == [f"a/{VALUE}"]


def test_nested_checkpoints_are_followed():
    inner = Checkpoint(v=variable())
    assert keys(a=inner) == [f"a/v/{VALUE}"]


def test_nested_checkpoint_that_was_saved_itself_has_its_counter(prefix):
    inner = Checkpoint(v=variable())
    inner.save(prefix)
    assert keys(a=inner) == [f"a/save_counter/{VALUE}", f"a/v/{VALUE}"]


def test_attribute_that_is_set_later_is_followed_and_a_deleted_one_is_not(prefix):
    checkpoint = Checkpoint(v=variable())
    checkpoint.w = variable()
    checkpoint.n = 5
    del checkpoint.v
    assert list_variables(checkpoint.write(prefix)) == [(f"w/{VALUE}", [])]


def test_root_is_saved_as_what_has_its_attributes(prefix):
    module = unison.Module()
    module.v = variable(3.0)
    path = Checkpoint(module, w=variable(4.0)).write(prefix)
    assert list_variables(path) == [(f"v/{VALUE}", []), (f"w/{VALUE}", [])]
    restored = Checkpoint(v=variable(), w=variable())
    restored.read(path).assert_consumed()
    assert (float(restored.v), float(restored.w)) == (3.0, 4.0)


def test_root_may_be_a_variable(prefix):
    path = Checkpoint(variable(3.0)).write(prefix)
    v = variable()
    Checkpoint(v).read(path).assert_consumed()
    assert float(v) == 3.0


def test_modules_that_refer_to_each_other_are_followed_once():
    one, other = unison.Module(), unison.Module()
    one.other, other.one, other.v = other, one, variable()
    assert keys(one=one) == [f"one/other/v/{VALUE}"]


class Position:
    """Stands for a data iterator: gives and takes its state."""

    def __init__(self):
        self.state = None

    def get_state(self):
        return self.state

    def set_state(self, state):
        self.state = state


STATE = {
    "index": 12345678901234567890,
    "rate": 0.5,
    "done": False,
    "name": "train",
    "raw": b"\x00\xff",
    "nothing": None,
    "order": (2, [1, {"a": 0}]),
}


def test_state_of_an_object_is_saved_and_given_back(prefix):
    position = Position()
    position.state = STATE
    path = Checkpoint(position=position).write(prefix)
    restored = Position()
    Checkpoint(position=restored).read(path).assert_consumed()
    assert restored.state == STATE


def test_arrays_in_the_state_of_an_object_are_saved(prefix):
    position = Position()
    position.state = {"keys": np.arange(4, dtype=np.uint32), "key": jnp.ones(2)}
    path = Checkpoint(position=position).write(prefix)
    position.state = None
    Checkpoint(position=position).read(path)
    np.testing.assert_equal(position.state["keys"], np.arange(4, dtype=np.uint32))
    np.testing.assert_equal(position.state["key"], [1.0, 1.0])


def test_state_that_would_need_pickling_is_refused_by_name(prefix):
    position = Position()
    position.state = {"set": {1, 2}}
    with pytest.raises(TypeError, match=r"Received: \{1, 2\} of type set"):
        Checkpoint(position=position).write(prefix)
    assert not os.path.exists(f"{prefix}.index")


def test_state_of_a_random_generator_of_numpy_goes_on_where_it_was(prefix):
    generator = np.random.RandomState(3)
    generator.normal()
    path = Checkpoint(generator=generator).write(prefix)
    expected = generator.normal()
    other = np.random.RandomState(0)
    Checkpoint(generator=other).read(path)
    assert other.normal() == expected


def test_object_that_is_set_after_restoring_gets_its_state(prefix):
    position = Position()
    position.state = 7
    path = Checkpoint(position=position).write(prefix)
    restored = Checkpoint()
    restored.read(path)
    restored.position = Position()
    assert restored.position.state == 7


class Stubborn(Position):
    """Refuses every state."""

    def set_state(self, state):
        raise ValueError(f"not mine: {state}")


@pytest.mark.parametrize("refusing", ["a", "z"])
def test_nothing_is_changed_where_one_object_refuses_its_state(prefix, refusing):
    saved_objects = {"a": Position(), "m": Position(), "z": Position()}
    for state, position in enumerate(saved_objects.values()):
        position.state = state
    path = Checkpoint(v=variable(1.0), **saved_objects).write(prefix)
    objects = {**{name: Position() for name in "amz"}, refusing: Stubborn()}
    v = variable(5.0)
    with pytest.raises(ValueError, match="not mine"):
        Checkpoint(v=v, **objects).read(path)
    assert [position.state for position in objects.values()] == [None, None, None]
    assert float(v) == 5.0


def test_object_that_waits_for_a_thread_that_launches_programs_is_saved(prefix):
    class Waiting(Position):
        def get_state(self):
            launched = threading.Event()

            def launch():
                with LAUNCH_LOCK:
                    launched.set()

            threading.Thread(target=launch, daemon=True).start()
            return launched.wait(20)

    path = Checkpoint(waiting=Waiting()).write(prefix)
    restored = Position()
    Checkpoint(waiting=restored).read(path)
    assert restored.state is True


# -- iterators over datasets ---------------------------------------------------------------------


def batches(count=12):
    words = np.array([b"w%d" % n for n in range(count)], object)
    halves = (np.arange(count) / 2).astype(jnp.bfloat16)
    dataset = unison.data.Dataset.from_tensor_slices({"word": words, "half": halves})
    # Behind a filter there is no access by index: elements wait in the buffer.
    return dataset.filter(lambda x: np.True_).shuffle(4, seed=1).repeat(2).batch(3)


def words(iterator):
    return [batch["word"].tolist() for batch in iterator]


def test_iterator_goes_on_together_with_the_variables(prefix):
    iterator, step = iter(batches()), variable(0)
    for _ in range(3):
        step.assign_add(1)
        next(iterator)
    path = Checkpoint(iterator=iterator, step=step).save(prefix)
    restored, restored_step = iter(batches()), variable(0)
    Checkpoint(iterator=restored, step=restored_step).restore(path).assert_consumed()
    assert int(restored_step) == 3
    batch, expected = next(restored), next(iterator)
    assert batch["half"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(batch["half"], expected["half"])
    assert words(restored) == words(iterator)


def test_iterator_that_is_set_after_restoring_goes_on(prefix):
    iterator = iter(batches())
    next(iterator)
    path = Checkpoint(iterator=iterator).write(prefix)
    checkpoint = Checkpoint()
    status = checkpoint.read(path)
    checkpoint.iterator = iter(batches())
    status.assert_consumed()
    assert words(checkpoint.iterator) == words(iterator)


def test_manager_brings_the_iterator_back(tmp_path):
    iterator = iter(batches())
    manager = CheckpointManager(Checkpoint(iterator=iterator), tmp_path, max_to_keep=2)
    for _ in range(3):
        next(iterator)
        manager.save()
    restored = iter(batches())
    CheckpointManager(Checkpoint(iterator=restored), tmp_path, 2).restore_or_initialize()
    assert words(restored) == words(iterator)


def test_iterator_of_another_pipeline_changes_nothing(prefix):
    iterator, v = iter(batches()), variable(1.0)
    path = Checkpoint(iterator=iterator, v=v).write(prefix)
    other, v = iter(batches().prefetch(1)), variable(5.0)
    with pytest.raises(ValueError, match=r"another pipeline.*\.Prefetch.*Make the dataset as it"):
        Checkpoint(iterator=other, v=v).read(path)
    assert float(v) == 5.0
    assert len(words(other)) == 8


def test_iterator_of_tf_data_goes_on(prefix):
    import unison.tf as tf

    def make():
        return tf.data.Dataset.range(10).shuffle(10, seed=1).map(lambda x: x + 1).batch(2)

    for made in (iter, lambda dataset: dataset.as_numpy_iterator()):
        iterator = made(make())
        next(iterator)
        path = tf.train.Checkpoint(iterator=iterator).save(prefix)
        restored = made(make())
        tf.train.Checkpoint(iterator=restored).restore(path).assert_consumed()
        rest = [np.asarray(batch).tolist() for batch in restored]
        assert rest == [np.asarray(batch).tolist() for batch in iterator]
        assert len(rest) == 4


def test_iterator_of_grain_goes_on(prefix):
    import grain

    def make():
        return iter(grain.MapDataset.range(10).shuffle(seed=1).to_iter_dataset())

    iterator = make()
    for _ in range(4):
        next(iterator)
    path = Checkpoint(iterator=iterator).write(prefix)
    restored = make()
    Checkpoint(iterator=restored).read(path).assert_consumed()
    assert list(restored) == list(iterator)


@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "uint32", "float16", "bfloat16", "float32", "complex64"]
)
def test_dtype_is_kept(prefix, dtype):
    v = variable(jnp.asarray([0, 1, 3]).astype(dtype))
    path = Checkpoint(v=v).write(prefix)
    expected = np.asarray(v)
    v.assign(jnp.zeros(3, dtype))
    Checkpoint(v=v).read(path).assert_consumed()
    np.testing.assert_equal(np.asarray(v), expected)
    assert load_checkpoint(path).get_tensor(f"v/{VALUE}").dtype == jnp.dtype(dtype)


# -- restoring: what TensorFlow answers ----------------------------------------------------------


@pytest.fixture
def path(prefix):
    """A saved checkpoint with one variable, `v`, of value 1."""
    return Checkpoint(v=variable(1.0)).save(prefix)


@pytest.mark.parametrize(
    "check",
    ["assert_consumed", "assert_existing_objects_matched", "assert_nontrivial_match"],
)
def test_everything_matches_the_program_that_saved(path, check):
    status = Checkpoint(v=variable()).restore(path)
    assert getattr(status, check)() is status


def test_variable_that_the_checkpoint_lacks_fails_two_assertions(path):
    v, w = variable(5.0), variable(6.0)
    status = Checkpoint(v=v, w=w).restore(path)
    with pytest.raises(AssertionError, match=r"no value for 1 objects .*\(root\)\.w"):
        status.assert_consumed()
    with pytest.raises(AssertionError, match=r"no value for 1 objects"):
        status.assert_existing_objects_matched()
    status.assert_nontrivial_match()
    assert (float(v), float(w)) == (1.0, 6.0)


def test_value_that_the_program_lacks_fails_one_assertion(path):
    status = Checkpoint().restore(path).expect_partial()
    with pytest.raises(AssertionError, match=r"were not restored.*\(root\)\.v"):
        status.assert_consumed()
    status.assert_existing_objects_matched()
    status.assert_nontrivial_match()


def test_nothing_in_common_is_trivial(prefix):
    path = Checkpoint(v=variable()).write(prefix)
    status = Checkpoint(z=variable()).read(path).expect_partial()
    with pytest.raises(AssertionError, match=r"It has no value for: \(root\)\.z"):
        status.assert_nontrivial_match()


def test_restoring_none_restores_nothing_and_fails_every_assertion():
    v = variable(2.0)
    status = Checkpoint(v=v).restore(None)
    for check in ("consumed", "existing_objects_matched", "nontrivial_match"):
        with pytest.raises(AssertionError, match="no checkpoint to restore"):
            getattr(status, f"assert_{check}")()
    assert status.expect_partial() is status
    assert status.initialize_or_restore() is None
    assert float(v) == 2.0


def test_attribute_that_is_set_after_restoring_gets_its_value(path):
    checkpoint = Checkpoint()
    status = checkpoint.restore(path)
    checkpoint.v = variable(9.0)
    assert float(checkpoint.v) == 1.0
    status.assert_consumed()


def test_name_gets_its_value_once(path):
    checkpoint = Checkpoint(v=variable())
    checkpoint.restore(path)
    checkpoint.v = variable(0.0)
    assert float(checkpoint.v) == 0.0


def test_of_two_restorations_that_wait_the_later_one_wins(tmp_path):
    one = Checkpoint(x=variable(1.0), y=variable(1.0)).write(tmp_path / "one")
    two = Checkpoint(x=variable(2.0)).write(tmp_path / "two")
    checkpoint = Checkpoint()
    checkpoint.read(one)
    checkpoint.read(two)
    checkpoint.x, checkpoint.y = variable(), variable()
    assert (float(checkpoint.x), float(checkpoint.y)) == (2.0, 1.0)


def test_attribute_of_a_module_inside_gets_its_value_later(prefix):
    module = unison.Module()
    module.inner = unison.Module()
    module.inner.v = variable(4.0)
    path = Checkpoint(m=module).write(prefix)
    other = unison.Module()
    status = Checkpoint(m=other).read(path)
    other.inner = unison.Module()
    other.inner.v = variable()
    assert float(other.inner.v) == 4.0
    status.assert_consumed()


def test_attribute_of_the_root_gets_its_value_later(prefix):
    module = unison.Module()
    module.v = variable(4.0)
    path = Checkpoint(module).write(prefix)
    other = unison.Module()
    Checkpoint(other).read(path)
    other.v = variable()
    assert float(other.v) == 4.0


def test_item_of_a_list_gets_its_value_by_the_time_the_status_is_asked(prefix):
    path = Checkpoint(x=[variable(1.0), variable(2.0)]).write(prefix)
    checkpoint = Checkpoint(x=[variable()])
    status = checkpoint.read(path)
    checkpoint.x.append(variable())
    status.assert_consumed()
    assert [float(v) for v in checkpoint.x] == [1.0, 2.0]


def test_one_variable_for_two_values_gets_the_first(prefix):
    path = Checkpoint(a=variable(1.0), b=variable(2.0)).write(prefix)
    x = variable()
    Checkpoint(a=x, b=x).read(path).assert_consumed()
    assert float(x) == 1.0


def test_two_variables_for_one_value_are_told(prefix, caplog):
    x = variable(5.0)
    path = Checkpoint(a=x, b=x).write(prefix)
    checkpoint = Checkpoint(a=variable(), b=variable())
    status = checkpoint.read(path)
    assert (float(checkpoint.a), float(checkpoint.b)) == (5.0, 0.0)
    assert "for which the program has two" in caplog.text
    with pytest.raises(AssertionError, match=r"\(root\)\.b"):
        status.assert_consumed()


def test_part_of_a_checkpoint_is_restored_by_its_names(prefix):
    inner = unison.Module()
    inner.layer = unison.Module()
    inner.layer.bias, inner.layer.kernel = variable([1.0, 2.0]), variable([3.0])
    path = Checkpoint(net=inner, step=variable()).write(prefix)
    bias = variable([0.0, 0.0])
    fake = Checkpoint(net=Checkpoint(layer=Checkpoint(bias=bias)))
    fake.read(path).expect_partial()
    np.testing.assert_equal(np.asarray(bias), [1.0, 2.0])


def test_counter_is_restored(prefix):
    checkpoint = Checkpoint(v=variable())
    checkpoint.save_counter.assign_add(4)
    assert checkpoint.save(prefix) == f"{prefix}-5"
    other = Checkpoint(v=variable())
    other.restore(f"{prefix}-5")
    assert int(other.save_counter) == 5
    assert other.save(prefix) == f"{prefix}-6"


def test_counter_is_there_after_reading_too(path):
    checkpoint = Checkpoint(v=variable())
    checkpoint.read(path)
    assert int(checkpoint.save_counter) == 1


def test_values_restored_nowhere_are_told_when_nobody_can_get_them_any_more(path, caplog):
    Checkpoint().restore(path)
    import gc

    gc.collect()
    assert "1 values of checkpoint" in caplog.text
    assert "(root).v" in caplog.text


def test_partial_restoration_that_is_expected_is_not_told(path, caplog):
    Checkpoint().restore(path).expect_partial()
    import gc

    gc.collect()
    assert caplog.text == ""


def test_values_come_when_the_file_is_gone_by_then(prefix):
    path = Checkpoint(v=variable(1.0)).write(prefix)
    checkpoint = Checkpoint()
    checkpoint.read(path)
    os.remove(f"{path}.index")
    checkpoint.v = variable()
    assert float(checkpoint.v) == 1.0


def test_copied_module_that_waits_is_a_module_of_its_own(path):
    import copy

    module = unison.Module()
    Checkpoint(module).read(path).expect_partial()
    copied = copy.deepcopy(module)
    module.v = variable()
    assert float(module.v) == 1.0
    assert not hasattr(copied, "v")


# -- what cannot be restored ---------------------------------------------------------------------


def test_another_shape_is_a_value_error_and_nothing_is_changed(tmp_path):
    path = Checkpoint(a=variable(1.0), v=variable(1.0)).write(tmp_path / "ckpt")
    a, v = variable(5.0), variable([1.0, 2.0], name="mine")
    with pytest.raises(ValueError, match=r"'mine' has shape \(2,\).*has shape \(\)"):
        Checkpoint(a=a, v=v).read(path)
    assert float(a) == 5.0
    np.testing.assert_equal(np.asarray(v), [1.0, 2.0])


@pytest.mark.parametrize("dtype", ["int32", "float16"])
def test_another_dtype_is_an_invalid_argument_and_nothing_is_changed(path, dtype):
    v = variable(jnp.asarray(5, dtype))
    with pytest.raises(InvalidArgumentError, match=f"has dtype {dtype}.*dtype float32"):
        Checkpoint(v=v).restore(path)
    assert float(v) == 5.0


def test_wide_value_fits_a_program_that_keeps_32_bits_only(prefix):
    path = Checkpoint(v=variable()).save(prefix)
    assert load_checkpoint(path).get_variable_to_dtype_map()[f"save_counter/{VALUE}"] == np.int64


def test_shape_that_does_not_fit_later_fails_where_the_attribute_is_set(path):
    checkpoint = Checkpoint()
    checkpoint.restore(path).expect_partial()
    with pytest.raises(ValueError, match="has shape"):
        checkpoint.v = variable([1.0, 2.0])


def test_module_in_the_place_of_a_variable_is_not_restored(path):
    status = Checkpoint(v=unison.Module()).restore(path).expect_partial()
    with pytest.raises(AssertionError, match=r"\(root\)\.v"):
        status.assert_consumed()


def test_file_in_the_place_of_a_folder_fails(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        Checkpoint(v=variable()).save(tmp_path / "file" / "ckpt")


def test_folder_that_cannot_be_written_is_no_permission_and_counts_no_save(monkeypatch, prefix):
    checkpoint = Checkpoint(v=variable())

    def refuse(*_):
        raise PermissionError("read-only file system")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(PermissionDeniedError, match="ckpt-1"):
        checkpoint.save(prefix)
    assert int(checkpoint.save_counter) == 0
    assert os.listdir(os.path.dirname(prefix)) == []


def test_full_disk_leaves_the_checkpoint_that_was_there(monkeypatch, prefix):
    v = variable(1.0)
    checkpoint = Checkpoint(v=v)
    checkpoint.write(prefix)
    v.assign(2.0)
    with monkeypatch.context() as patched:

        def is_full(*_):
            raise OSError(28, "No space left on device")

        patched.setattr(os, "fsync", is_full)
        with pytest.raises(MemoryError, match="No space is left"):
            checkpoint.write(prefix)
    assert os.listdir(os.path.dirname(prefix)) == ["ckpt.index"]
    checkpoint.read(prefix)
    assert float(v) == 1.0


# -- damaged files -------------------------------------------------------------------------------


def test_any_damage_is_noticed_and_changes_nothing(tmp_path):
    values = {"a": np.arange(60.0, dtype=np.float32), "b": np.float32(3.0)}
    path = Checkpoint(**{name: variable(value) for name, value in values.items()}).save(
        tmp_path / "ckpt"
    )
    with open(f"{path}.index", "rb") as file:
        whole = file.read()
    for seed in range(150):
        with open(f"{path}.index", "wb") as file:
            file.write(damaged(whole, random.Random(seed)))
        restored = {name: variable(np.zeros_like(value)) for name, value in values.items()}
        try:
            Checkpoint(**restored).restore(path)
        except DataLossError:
            expected = {name: np.zeros_like(value) for name, value in values.items()}
        else:
            expected = values  # a byte that means nothing
        for name, v in restored.items():
            np.testing.assert_equal(np.asarray(v), expected[name])


def damaged(whole, chance):
    damage = bytearray(whole)
    if chance.random() < 0.3:
        return damage[: chance.randrange(len(damage))]
    damage[chance.randrange(len(damage))] ^= 1 << chance.randrange(8)
    return damage


def test_damaged_value_is_noticed_before_anybody_asks_for_it(path):
    flip(path, b"v/.ATTRIBUTES")
    with pytest.raises(DataLossError, match="is corrupt"):
        Checkpoint().restore(path)


def flip(path, what):
    """Flips a bit in a value of the checkpoint at `path`."""
    with zipfile.ZipFile(f"{path}.index") as archive:
        member = next(m for m in archive.infolist() if m.filename.startswith(what.decode()))
    with open(f"{path}.index", "r+b") as file:
        file.seek(member.header_offset + 30 + len(member.filename) + 20 + member.file_size - 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))


def test_damaged_checkpoint_is_skipped_with_a_warning_for_the_one_before(prefix, tmp_path, caplog):
    checkpoint = Checkpoint(v=variable())
    paths = [checkpoint.save(prefix) for _ in range(3)]
    flip(paths[2], b"v/")
    with open(f"{paths[1]}.index", "r+b") as file:
        file.truncate(50)
    assert latest_checkpoint(tmp_path) == paths[0]
    assert [paths[2] in caplog.text, paths[1] in caplog.text] == [True, True]


def test_deleted_checkpoint_is_skipped(prefix, tmp_path):
    checkpoint = Checkpoint(v=variable())
    paths = [checkpoint.save(prefix) for _ in range(2)]
    os.remove(f"{paths[1]}.index")
    assert latest_checkpoint(tmp_path) == paths[0]


def test_list_of_checkpoints_that_cannot_be_read_is_ignored_with_a_warning(tmp_path, caplog):
    (tmp_path / "checkpoint").write_text("garbage")
    assert latest_checkpoint(tmp_path) is None
    assert "cannot be read" in caplog.text


def test_empty_list_of_checkpoints_is_a_value_error(tmp_path):
    (tmp_path / "checkpoint").write_text("")
    with pytest.raises(ValueError, match="does not name the latest checkpoint"):
        latest_checkpoint(tmp_path)


def test_checkpoint_of_tensorflow_is_told_from_ours(prefix):
    with open(f"{prefix}.index", "wb") as file:
        file.write(b"\x00\x00\x02\x08\x01")
    with pytest.raises(DataLossError, match="is corrupt"):
        Checkpoint(v=variable()).read(prefix)


def test_nothing_is_unpickled(prefix):
    class Bomb:
        def __reduce__(self):
            return os.mkdir, (f"{prefix}-exploded",)

    path = Checkpoint(v=variable(1.0)).write(prefix)
    with zipfile.ZipFile(f"{path}.index") as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(f"{path}.index", "w") as archive:
        for name, content in members.items():
            if name == f"v/{VALUE}.npy":
                with archive.open(name, "w") as stream:
                    np.save(stream, np.array(Bomb(), dtype=object), allow_pickle=True)
            else:
                archive.writestr(name, content)
    with pytest.raises(DataLossError):
        Checkpoint(v=variable()).read(path)
    assert not os.path.exists(f"{prefix}-exploded")


def test_saves_at_the_same_time_leave_one_whole_checkpoint_each(prefix, tmp_path):
    checkpoint = Checkpoint(v=variable(np.arange(1000.0, dtype=np.float32)))
    threads = [threading.Thread(target=checkpoint.save, args=(prefix,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    expected = ["checkpoint", *(f"ckpt-{number}.index" for number in range(1, 9))]
    assert sorted(os.listdir(tmp_path)) == expected
    assert latest_checkpoint(tmp_path) == f"{prefix}-8"


def test_writers_of_one_path_replace_each_other_and_readers_see_a_whole_one(prefix):
    stop = threading.Event()
    failures = []

    def write(value):
        checkpoint = Checkpoint(v=variable(np.full(2000, value, np.float32)))
        while not stop.is_set():
            checkpoint.write(prefix)

    write_once = Checkpoint(v=variable(np.zeros(2000, np.float32)))
    write_once.write(prefix)
    threads = [threading.Thread(target=write, args=(float(value),)) for value in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(40):
        value = load_checkpoint(prefix).get_tensor(f"v/{VALUE}")
        if len(np.unique(value)) != 1:
            failures.append(value)
    stop.set()
    for thread in threads:
        thread.join(30)
    assert failures == []


# -- strategies ----------------------------------------------------------------------------------

SYNCHRONIZATIONS = [Synchronization.ON_WRITE, Synchronization.ON_READ]


def diverged(strategy, synchronization, aggregation):
    """A variable whose copies are 2 and 12 on 2 replicas, if copies may differ; 1.0 if not."""
    with strategy.scope():
        v = variable(1.0, synchronization=synchronization, aggregation=aggregation)

    def write():
        index = unison.get_replica_context().replica_id_in_sync_group
        v.assign(jnp.asarray(index * 10.0 + 2.0))

    if synchronization is Synchronization.ON_READ or aggregation is Aggregation.NONE:
        strategy.run(write)
    return v


@pytest.mark.parametrize(
    ("synchronization", "aggregation", "value"),
    [
        (Synchronization.ON_WRITE, Aggregation.NONE, 2.0),
        (Synchronization.ON_WRITE, Aggregation.SUM, 1.0),
        (Synchronization.ON_WRITE, Aggregation.MEAN, 1.0),
        (Synchronization.ON_WRITE, Aggregation.ONLY_FIRST_REPLICA, 1.0),
        (Synchronization.ON_READ, Aggregation.SUM, 14.0),
        (Synchronization.ON_READ, Aggregation.MEAN, 7.0),
        (Synchronization.ON_READ, Aggregation.ONLY_FIRST_REPLICA, 2.0),
    ],
)
def test_checkpoint_holds_the_combined_value(
    two_replicas, prefix, synchronization, aggregation, value
):
    v = diverged(two_replicas, synchronization, aggregation)
    path = Checkpoint(v=v).write(prefix)
    assert load_checkpoint(path).get_tensor(f"v/{VALUE}") == value


def test_copies_without_a_common_value_cannot_be_saved(two_replicas, prefix):
    v = diverged(two_replicas, Synchronization.ON_READ, Aggregation.NONE)
    with pytest.raises(ValueError, match="ON_READ without an aggregation"):
        Checkpoint(v=v).write(prefix)


@pytest.mark.parametrize("synchronization", SYNCHRONIZATIONS)
@pytest.mark.parametrize("aggregation", ["NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA"])
def test_restored_value_is_on_every_replica(two_replicas, prefix, synchronization, aggregation):
    path = Checkpoint(v=variable(14.0)).write(prefix)
    with two_replicas.scope():
        v = variable(0.0, synchronization=synchronization, aggregation=Aggregation[aggregation])
    Checkpoint(v=v).read(path)
    is_shared = synchronization is Synchronization.ON_READ and aggregation == "SUM"
    copies = two_replicas.experimental_local_results(v)
    assert [float(copy) for copy in copies] == ([7.0, 7.0] if is_shared else [14.0, 14.0])


def test_a_sum_of_integers_is_restored_with_its_remainder(four_replicas, prefix):
    path = Checkpoint(v=variable(7)).write(prefix)
    with four_replicas.scope():
        v = variable(0, synchronization=Synchronization.ON_READ, aggregation=Aggregation.SUM)
    Checkpoint(v=v).read(path)
    assert [int(copy) for copy in four_replicas.experimental_local_results(v)] == [4, 1, 1, 1]
    assert int(v) == 7


@pytest.mark.parametrize(("replicas", "copies"), [(1, [14.0]), (2, [7.0] * 2), (4, [3.5] * 4)])
def test_sum_is_restored_on_another_number_of_replicas(prefix, two_replicas, replicas, copies):
    v = diverged(two_replicas, Synchronization.ON_READ, Aggregation.SUM)
    path = Checkpoint(v=v).write(prefix)
    strategy = unison.MirroredStrategy([f"CPU:{index}" for index in range(replicas)])
    with strategy.scope():
        w = variable(0.0, synchronization=Synchronization.ON_READ, aggregation=Aggregation.SUM)
    Checkpoint(v=w).read(path)
    assert [float(copy) for copy in strategy.experimental_local_results(w)] == copies
    assert float(w) == 14.0


def test_checkpoint_is_not_saved_inside_a_replica_program(two_replicas, prefix):
    with two_replicas.scope():
        checkpoint = Checkpoint(v=variable())
    with pytest.raises(RuntimeError, match="cannot be saved inside a function"):
        two_replicas.run(lambda: checkpoint.save(prefix))


def test_checkpoint_made_in_a_scope_counts_there_too(two_replicas, prefix):
    with two_replicas.scope():
        checkpoint = Checkpoint(v=variable())
        checkpoint.save(prefix)
        checkpoint.save(prefix)
    assert int(checkpoint.save_counter) == 2


# -- readers -------------------------------------------------------------------------------------


def test_reader_knows_shapes_dtypes_and_values(prefix, tmp_path):
    Checkpoint(v=variable([1.0, 2.0])).save(prefix)
    reader = load_checkpoint(tmp_path)
    shapes = {f"save_counter/{VALUE}": [], f"v/{VALUE}": [2]}
    assert reader.get_variable_to_shape_map() == shapes
    assert reader.get_variable_to_dtype_map()[f"v/{VALUE}"] == np.float32
    assert reader.has_tensor(f"v/{VALUE}")
    assert not reader.has_tensor("v")
    np.testing.assert_equal(reader.get_tensor(f"v/{VALUE}"), [1.0, 2.0])
    np.testing.assert_equal(train.load_variable(tmp_path, f"v/{VALUE}"), [1.0, 2.0])


def test_unknown_array_is_not_found(path):
    with pytest.raises(NotFoundError, match=r"has no array 'nope'\. It has: save_counter/"):
        load_checkpoint(path).get_tensor("nope")


def test_the_error_of_an_unknown_array_is_short(tmp_path):
    variables = {f"v{number}": unison.Variable(0.0) for number in range(100)}
    reader = load_checkpoint(Checkpoint(**variables).write(tmp_path / "ckpt"))
    with pytest.raises(NotFoundError, match=r"7\.\.\.'.* and 50 others") as raised:
        reader.get_tensor("7" * 5000)
    assert len(str(raised.value)) < 5000


@pytest.mark.parametrize("look", [list_variables, load_checkpoint])
def test_missing_checkpoint_cannot_be_looked_into(prefix, look):
    with pytest.raises(NotFoundError):
        look(prefix)


def test_numpy_reads_the_arrays_of_a_checkpoint(path):
    with np.load(f"{path}.index") as arrays:
        assert arrays[f"v/{VALUE}"] == 1.0


# -- the manager ---------------------------------------------------------------------------------


def names(paths):
    return [os.path.basename(path) for path in paths]


@pytest.fixture
def checkpoint():
    return Checkpoint(v=variable())


def test_manager_of_an_empty_folder_has_nothing(checkpoint, tmp_path):
    manager = CheckpointManager(checkpoint, tmp_path, max_to_keep=2)
    assert (manager.latest_checkpoint, manager.checkpoints) == (None, [])
    assert manager.directory == str(tmp_path)
    assert manager.checkpoint is checkpoint
    assert manager.restore_or_initialize() is None


def test_manager_keeps_the_last_checkpoints(checkpoint, tmp_path):
    manager = CheckpointManager(checkpoint, tmp_path, max_to_keep=2)
    paths = [manager.save() for _ in range(4)]
    assert names(manager.checkpoints) == ["ckpt-3", "ckpt-4"]
    assert manager.latest_checkpoint == paths[-1] == latest_checkpoint(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["checkpoint", "ckpt-3.index", "ckpt-4.index"]


def test_manager_keeps_all_if_told_so(checkpoint, tmp_path):
    manager = CheckpointManager(checkpoint, tmp_path, max_to_keep=None)
    for _ in range(4):
        manager.save()
    assert names(manager.checkpoints) == ["ckpt-1", "ckpt-2", "ckpt-3", "ckpt-4"]


def test_number_can_be_given_and_the_counter_counts_on(checkpoint, tmp_path):
    manager = CheckpointManager(checkpoint, tmp_path, max_to_keep=2)
    for _ in range(4):
        manager.save()
    assert names([manager.save(checkpoint_number=100)]) == ["ckpt-100"]
    assert int(checkpoint.save_counter) == 5
    assert names([manager.save(checkpoint_number=variable(7))]) == ["ckpt-7"]
    assert names([manager.save()]) == ["ckpt-7"]
    assert names(manager.checkpoints) == ["ckpt-100", "ckpt-7"]


def test_next_manager_of_a_folder_goes_on(checkpoint, tmp_path):
    manager = CheckpointManager(checkpoint, tmp_path, max_to_keep=3)
    for _ in range(3):
        manager.save()
    other = Checkpoint(v=variable())
    following = CheckpointManager(other, tmp_path, max_to_keep=1)
    assert names(following.checkpoints) == ["ckpt-1", "ckpt-2", "ckpt-3"]
    assert following.latest_checkpoint == manager.latest_checkpoint
    following.restore_or_initialize()
    assert names([following.save()]) == ["ckpt-4"]
    assert sorted(os.listdir(tmp_path)) == ["checkpoint", "ckpt-4.index"]


def test_manager_restores_the_latest_or_calls_its_function(checkpoint, tmp_path):
    called = []
    v = checkpoint.v
    manager = CheckpointManager(checkpoint, tmp_path, 1, init_fn=lambda: called.append(True))
    assert manager.restore_or_initialize() is None
    v.assign(3.0)
    manager.save()
    v.assign(0.0)
    assert names([manager.restore_or_initialize()]) == ["ckpt-1"]
    assert float(v) == 3.0
    assert called == [True]


def test_manager_passes_over_a_damaged_latest_checkpoint(checkpoint, tmp_path):
    paths = [CheckpointManager(checkpoint, tmp_path, 3).save() for _ in range(2)]
    flip(paths[1], b"v/")
    assert CheckpointManager(checkpoint, tmp_path, 3).latest_checkpoint == paths[0]


def test_checkpoints_have_the_name_that_was_asked_for(checkpoint, tmp_path):
    manager = CheckpointManager(checkpoint, tmp_path, 2, checkpoint_name="model.ckpt")
    assert names([manager.save()]) == ["model.ckpt-1"]


def test_manager_saves_once_an_interval(tmp_path):
    step = variable(0)
    manager = CheckpointManager(
        Checkpoint(step=step), tmp_path, None, step_counter=step, checkpoint_interval=3
    )
    saved_at = []
    for _ in range(8):
        if manager.save() is not None:
            saved_at.append(int(step))
        step.assign_add(1)
    assert saved_at == [0, 3, 6]
    assert manager.save(check_interval=False) is not None
    assert manager.save(check_interval=False) is None
    assert manager.checkpoint_interval == 3


def test_manager_keeps_one_checkpoint_every_few_hours_for_good(tmp_path, monkeypatch):
    now = [1_000_000.0]
    monkeypatch.setattr("time.time", lambda: now[0])
    checkpoint = Checkpoint(v=variable())
    manager = CheckpointManager(checkpoint, tmp_path, 2, keep_checkpoint_every_n_hours=1)
    for _ in range(8):
        now[0] += 1500.0
        manager.save()
    there = [name for name in sorted(os.listdir(tmp_path)) if name.endswith("index")]
    assert there == ["ckpt-3.index", "ckpt-6.index", "ckpt-7.index", "ckpt-8.index"]
    assert names(manager.checkpoints) == ["ckpt-7", "ckpt-8"]
    state = get_checkpoint_state(tmp_path)
    assert state.all_model_checkpoint_timestamps == [1010500.0, 1012000.0]
    assert state.last_preserved_timestamp == 1009000.0
    following = CheckpointManager(checkpoint, tmp_path, 2)
    assert names(following.checkpoints) == ["ckpt-7", "ckpt-8"]


KILLED_WHILE_SAVING = """
import sys
import numpy as np
import unison
from unison.train import Checkpoint, CheckpointManager

values = unison.Variable(np.zeros(1_000_000, np.float32))
manager = CheckpointManager(Checkpoint(values=values), sys.argv[1], max_to_keep=2)
manager.restore_or_initialize()
while True:
    values.assign_add(np.ones(1_000_000, np.float32))
    manager.save()
    print(int(values.numpy()[0]), flush=True)
"""


def test_killed_writer_leaves_the_last_whole_checkpoint(tmp_path):
    saved = 0
    for kill in range(3):
        writer = subprocess.Popen(
            [sys.executable, "-c", KILLED_WHILE_SAVING, str(tmp_path)], stdout=subprocess.PIPE
        )
        for _ in range(2 + kill):
            saved = int(writer.stdout.readline())
        time.sleep(0.003 * kill)
        writer.kill()
        saved = max(saved, *map(int, writer.stdout.read().split() or [0]))
        writer.wait(30)
        values = load_checkpoint(tmp_path).get_tensor(f"values/{VALUE}")
        assert values[0] in (saved, saved + 1)
        assert len(np.unique(values)) == 1
        saved = int(values[0])
    CheckpointManager(Checkpoint(), tmp_path, 2)
    assert len(os.listdir(tmp_path)) <= 1 + 3


@pytest.mark.parametrize("max_to_keep", [0, -1])
def test_keeping_no_checkpoint_is_a_value_error(checkpoint, tmp_path, max_to_keep):
    with pytest.raises(ValueError, match=f"max_to_keep .* Received: {max_to_keep}"):
        CheckpointManager(checkpoint, tmp_path, max_to_keep)


def test_interval_without_a_counter_of_steps_is_a_value_error(checkpoint, tmp_path):
    with pytest.raises(ValueError, match="step_counter"):
        CheckpointManager(checkpoint, tmp_path, 1, checkpoint_interval=2)


def test_how_many_to_keep_must_be_said(checkpoint, tmp_path):
    with pytest.raises(TypeError, match="max_to_keep"):
        CheckpointManager(checkpoint, tmp_path)


def test_watcher_sees_the_latest_checkpoints_and_ends_after_its_timeout(checkpoint, tmp_path):
    manager = CheckpointManager(checkpoint, tmp_path, 2)
    manager.save()
    watcher = train.checkpoints_iterator(tmp_path, timeout=0.05)
    seen = [next(watcher)]
    manager.save()
    manager.save()
    seen += list(watcher)
    assert names(seen) == ["ckpt-1", "ckpt-3"]


# -- Keras ---------------------------------------------------------------------------------------

X, Y = np.ones((4, 3), np.float32), np.ones((4, 1), np.float32)


class Net(keras.Model):
    """Keeps its layers in an attribute, a list and a dictionary."""

    def __init__(self):
        super().__init__()
        self.first = keras.layers.Dense(2)
        self.rest = [keras.layers.Dense(2)]
        self.by_name = {"last": keras.layers.Dense(1)}

    def call(self, x):
        return self.by_name["last"](self.rest[0](self.first(x)))


def trained_net():
    net = Net()
    net.compile(keras.optimizers.Adam(0.1), "mse")
    net.fit(X, Y, verbose=0)
    return net


@pytest.fixture(scope="module")
def net():
    return trained_net()


@pytest.fixture(scope="module")
def net_path(net, tmp_path_factory):
    return Checkpoint(net=net).write(tmp_path_factory.mktemp("net") / "ckpt")


def test_layers_in_attributes_lists_and_dictionaries_are_saved_by_name(net):
    weights = [key for key in keys(net=net) if "optimizer" not in key]
    layers = ("by_name/last", "first", "rest/0")
    expected = [
        f"net/{layer}/{weight}/{VALUE}" for layer in layers for weight in ("bias", "kernel")
    ]
    assert weights == expected


def test_state_of_an_optimizer_is_saved_without_the_weights(net):
    own = [key.removeprefix("net/optimizer/") for key in keys(net=net) if "optimizer" in key]
    slots = [f"{slot}/{i}/{VALUE}" for slot in ("_momentums", "_velocities") for i in range(6)]
    assert own == sorted([*slots, f"iterations/{VALUE}", f"learning_rate/{VALUE}"])


def test_model_that_is_not_built_gets_its_weights_when_it_is(net, net_path):
    other = Net()
    status = Checkpoint(net=other).read(net_path).expect_partial()
    status.assert_existing_objects_matched()
    with pytest.raises(AssertionError, match="were not restored"):
        status.assert_consumed()
    other(X)
    np.testing.assert_equal(other.get_weights(), net.get_weights())


def test_model_that_is_compiled_after_restoring_trains_on(net_path):
    one, other = trained_net(), Net()
    path = Checkpoint(net=one).write("memory://compiled/ckpt")
    status = Checkpoint(net=other).read(path)
    other.compile(keras.optimizers.Adam(0.1), "mse")
    history = [model.fit(X, Y, epochs=2, verbose=0).history["loss"] for model in (one, other)]
    assert history[0] == history[1]
    status.assert_consumed()


def test_optimizer_gets_its_slots_when_it_is_built(net, net_path):
    optimizer = keras.optimizers.Adam(0.5)
    Checkpoint(net=Checkpoint(optimizer=optimizer)).read(net_path).expect_partial()
    assert int(optimizer.iterations.numpy()) == 1
    optimizer.build(net.trainable_variables)
    for restored, original in zip(optimizer.variables, net.optimizer.variables, strict=True):
        np.testing.assert_equal(restored.numpy(), original.numpy())


def test_weight_of_a_layer_is_restored_into_a_variable(net, net_path):
    bias = variable(jnp.zeros(2))
    fake = Checkpoint(net=Checkpoint(first=Checkpoint(bias=bias)))
    fake.read(net_path).expect_partial()
    np.testing.assert_equal(np.asarray(bias), net.first.bias.numpy())
    fake.net.first.kernel = variable(jnp.zeros((3, 2)))
    np.testing.assert_equal(np.asarray(fake.net.first.kernel), net.first.kernel.numpy())


def sequential(built):
    inputs = [keras.Input((3,))] if built else []
    layers = [keras.layers.Dense(2), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    return keras.Sequential([*inputs, *layers])


@pytest.mark.parametrize("built", [False, True])
def test_sequential_model_is_restored_built_or_not(prefix, built):
    model = sequential(True)
    path = Checkpoint(model).write(prefix)
    other = sequential(built)
    status = Checkpoint(other).read(path)
    other(X)
    np.testing.assert_equal(other.get_weights(), model.get_weights())
    status.assert_consumed()


def test_weight_that_only_its_layer_knows_is_saved(prefix):
    class Layer(keras.layers.Layer):
        def build(self, _):
            self.add_weight(shape=(2,), initializer="ones", name="hidden")

    layer = Layer()
    layer.build(None)
    assert saved(layer=layer) == [(f"layer/_trainable_variables[0]/{VALUE}", [2])]


def test_seed_generators_and_metrics_are_saved():
    mean = keras.metrics.Mean()
    assert keys(seed=keras.random.SeedGenerator(1)) == [f"seed/state/{VALUE}"]
    assert keys(mean=mean) == [f"mean/count/{VALUE}", f"mean/total/{VALUE}"]


def test_unison_variable_in_a_keras_model_is_saved():
    model = sequential(False)
    model.steps = variable(3)
    assert keys(model=model) == [f"model/steps/{VALUE}"]


def test_a_layer_may_have_members_that_are_named_as_lists_of_keras():
    class Own(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.add_weight(shape=(2,), name="scale")

        def _variables(self):
            raise AssertionError("This is the program's own method.")

    assert saved(layer=Own()) == [(f"layer/_trainable_variables[0]/{VALUE}", [2])]


def test_checkpoint_saved_in_a_callback_has_the_values_of_that_moment(two_replicas, tmp_path):
    with two_replicas.scope():
        model = sequential(True)
        model.compile("sgd", "mse")
    checkpoint = Checkpoint(model=model)
    weights = []

    class Save(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            checkpoint.save(tmp_path / "ckpt")
            weights.append(model.get_weights())

    model.fit(X, Y, batch_size=2, epochs=1, verbose=0, callbacks=[Save()])
    other = sequential(True)
    Checkpoint(model=other).restore(tmp_path / "ckpt-1").expect_partial()
    np.testing.assert_equal(other.get_weights(), weights[0])
    assert not all(map(np.array_equal, weights[0], weights[1]))


def test_model_of_a_strategy_goes_on_under_another_one(tmp_path, two_replicas, four_replicas):
    def build(strategy):
        with strategy.scope():
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
            model.compile(keras.optimizers.Adam(0.1), "mse")
        return model

    model = build(two_replicas)
    model.fit(X, Y, verbose=0)
    path = Checkpoint(model=model).save(tmp_path / "ckpt")
    other = build(four_replicas)
    status = Checkpoint(model=other).restore(path)
    histories = [each.fit(X, Y, epochs=2, verbose=0).history["loss"] for each in (model, other)]
    np.testing.assert_allclose(histories[0], histories[1], rtol=1e-5)
    status.assert_consumed()


def test_variables_first_created_inside_a_replica_program_get_their_values(tmp_path, two_replicas):
    def program(restored):
        with two_replicas.scope():
            model = keras.Sequential([keras.layers.Dense(1)])
            optimizer = keras.optimizers.Adam(0.1)
            checkpoint = Checkpoint(model=model, optimizer=optimizer)
            if restored is not None:
                status = checkpoint.restore(restored)

        def step(x):
            prediction = model(x)
            optimizer.apply([jnp.ones_like(w.value) for w in model.weights], model.weights)
            return prediction

        result = two_replicas.run(step, args=(jnp.asarray(X),))
        if restored is not None:
            status.assert_consumed()
        return result.values[0], checkpoint

    _, checkpoint = program(None)
    path = checkpoint.save(tmp_path / "ckpt")
    expected = checkpoint.model(X)
    predicted, resumed = program(path)
    np.testing.assert_allclose(predicted, expected, rtol=1e-6)
    assert int(resumed.optimizer.iterations.numpy()) == 2


@pytest.mark.parametrize("built", [False, True])
def test_weights_are_saved_to_and_loaded_from_a_path_without_an_extension(tmp_path, built):
    model = sequential(True)
    train.save_weights(model, tmp_path / "epoch_1")
    other = sequential(built)
    train.load_weights(other, latest_checkpoint(tmp_path))
    other(X)
    np.testing.assert_equal(other.get_weights(), model.get_weights())


def test_weights_of_something_else_are_not_loaded_silently(tmp_path):
    path = Checkpoint(model=sequential(True), step=variable()).write(tmp_path / "ckpt")
    with pytest.raises(ValueError, match="its parts are model, step"):
        train.load_weights(sequential(True), path)


# -- a program of the multi-worker tutorial ------------------------------------------------------


def test_workers_save_into_folders_of_their_own_and_the_chief_s_is_kept(tmp_path):
    def write_folder(is_chief):
        return str(tmp_path / "ckpt") if is_chief else str(tmp_path / "ckpt" / "workertemp_1")

    step = variable(0)
    checkpoint = Checkpoint(step=step)
    managers = [
        CheckpointManager(checkpoint, directory=write_folder(chief), max_to_keep=1)
        for chief in (True, False)
    ]
    for epoch in range(2):
        step.assign(epoch + 1)
        for manager in managers:
            manager.save()
    latest = latest_checkpoint(tmp_path / "ckpt")
    assert latest == str(tmp_path / "ckpt" / "ckpt-3")
    other = variable(0)
    Checkpoint(step=other).restore(latest)
    assert int(other) == 2
