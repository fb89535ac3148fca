"""`tf.compat`: what programs of TensorFlow 2 use of other versions, and text and bytes."""

import logging

import numpy as np
import pytest

import unison.tf as tf

v1 = tf.compat.v1


def test_the_global_step_is_one_for_a_strategy(two_replicas):
    step = v1.train.get_or_create_global_step()
    assert step is v1.train.get_or_create_global_step() is v1.train.get_global_step()
    assert (step.name, int(step), step.dtype) == ("global_step:0", 0, tf.int64)
    with pytest.raises(ValueError, match="exists already"):
        v1.train.create_global_step()
    with two_replicas.scope():
        assert v1.train.get_global_step() is None
        mirrored = v1.train.create_global_step()
        w = tf.Variable(1.0)
    two_replicas.run(
        lambda: v1.train.GradientDescentOptimizer(0.1).minimize(lambda: w * w, global_step=mirrored)
    )
    assert v1.train.global_step(None, mirrored) == 1


def test_initializers_have_nothing_to_do():
    assert v1.global_variables_initializer() is None
    assert v1.local_variables_initializer() is None
    assert v1.tables_initializer() is None
    assert v1.global_variables() == v1.trainable_variables() == []
    assert v1.enable_eager_execution() is v1.enable_v2_behavior() is None
    assert v1.executing_eagerly_outside_functions()


def test_assignments_return_the_variable():
    w = tf.Variable(1.0)
    assert float(v1.assign(w, 3.0)) == 3.0
    assert float(v1.assign_add(w, 2.0)) == 5.0
    assert float(v1.assign_sub(w, 1.0)) == float(w) == 4.0


def test_logging_sets_the_level_of_unisons_logger():
    logger = logging.getLogger("unison")
    before = logger.level
    try:
        v1.logging.set_verbosity(v1.logging.ERROR)
        assert v1.logging.get_verbosity() == logger.level == logging.ERROR
    finally:
        logger.setLevel(before)
    assert [v1.logging.DEBUG, v1.logging.INFO, v1.logging.WARN] == [10, 20, 30]


@pytest.mark.parametrize(
    "name", ["Session", "placeholder", "disable_eager_execution", "GPUOptions"]
)
def test_what_belongs_to_graphs_says_what_to_use_instead(name):
    with pytest.raises(AttributeError, match=f"tf.compat.v1.{name} is not supported by Unison: "):
        getattr(v1, name)


def test_schedules_and_savers_say_what_to_use_instead():
    with pytest.raises(AttributeError, match=r"tf.keras.optimizers.schedules"):
        _ = v1.train.exponential_decay
    with pytest.raises(AttributeError, match=r"tf.train.Checkpoint"):
        _ = v1.train.Saver


def test_names_that_both_versions_have_are_those_of_version_2():
    assert v1.Variable is tf.Variable
    assert v1.nn is tf.nn
    assert v1.train.Checkpoint is tf.train.Checkpoint
    assert tf.compat.v2 is tf


def test_version_2_can_be_imported_by_its_name():
    import unison.tf.compat.v2 as tf_v2
    from unison.tf.compat.v2 import constant

    assert tf_v2 is tf
    assert constant is tf.constant


@pytest.mark.parametrize("value", ["ä", b"\xc3\xa4"])
def test_text_and_bytes_become_each_other(value):
    assert tf.compat.as_bytes(value) == b"\xc3\xa4"
    assert tf.compat.as_text(value) == tf.compat.as_str(value) == tf.compat.as_str_any(value) == "ä"


@pytest.mark.parametrize("convert", [tf.compat.as_bytes, tf.compat.as_text, tf.compat.as_str])
def test_what_is_neither_text_nor_bytes_is_refused(convert):
    with pytest.raises(TypeError, match=r"Expected bytes or text\. Received: 3"):
        convert(3)


def test_other_conversions_are_those_of_tensorflow(tmp_path):
    assert tf.compat.as_str_any(3) == "3"
    assert tf.compat.as_bytes(bytearray(b"a")) == b"a"
    assert tf.compat.as_text(b"\xe4", "latin-1") == "ä"
    assert tf.compat.path_to_str(tmp_path) == str(tmp_path)
    assert isinstance(np.int32(3), tf.compat.integral_types)
    assert tf.compat.dimension_value(None) is None
    assert tf.compat.forward_compatible(2020, 1, 1)


def test_a_server_takes_the_configuration_of_the_tutorial():
    config = v1.ConfigProto()
    config.inter_op_parallelism_threads = 4
    assert config.inter_op_parallelism_threads == 4
    assert v1.ConfigProto(inter_op_parallelism_threads=2).inter_op_parallelism_threads == 2


def test_a_configuration_names_what_there_is_instead_of_a_field():
    with pytest.raises(AttributeError, match=r"set_memory_growth"):
        v1.ConfigProto().gpu_options.allow_growth = True
    with pytest.raises(AttributeError, match=r"tf\.config\.threading"):
        v1.ConfigProto().intra_op_parallelism_threads = 1
    with pytest.raises(AttributeError, match=r"set_soft_device_placement"):
        v1.ConfigProto(allow_soft_placement=True)
