"""`tf.DeviceSpec`; the expected values are TensorFlow 2.21's."""

import pytest

import unison.tf as tf


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("", ""),
        ("/job:ps/replica:0/task:1/device:CPU:0", "/job:ps/replica:0/task:1/device:CPU:0"),
        ("/GPU:0", "/device:GPU:0"),
        ("/gpu", "/device:GPU:*"),
        ("/device:gpu:1", "/device:GPU:1"),
        ("/cpu:*", "/device:CPU:*"),
        ("GPU:1", "/device:GPU:1"),
        ("/job:w", "/job:w"),
    ],
)
def test_parts_are_read_from_a_name(text, name):
    assert tf.DeviceSpec.from_string(text).to_string() == name


@pytest.mark.parametrize("text", ["/x:1", "/CPU:0/GPU:1"])
def test_what_is_no_name_of_a_device_is_refused(text):
    with pytest.raises(ValueError, match="Received"):
        tf.DeviceSpec.from_string(text)


def test_merged_spec_has_the_parts_of_the_other_one_first():
    spec = tf.DeviceSpec(job="w", device_type="CPU")
    merged = spec.make_merged_spec(tf.DeviceSpec(device_type="GPU", device_index=1))
    assert merged.to_string() == "/job:w/device:GPU:1"
    assert spec.replace(task="3").to_string() == "/job:w/task:3/device:CPU:*"
    assert hash(merged) == hash(tf.DeviceSpec.from_string("/job:w/device:GPU:1"))


def test_spec_names_the_device_of_a_block():
    with tf.device(tf.DeviceSpec(device_type="CPU", device_index=1)):
        assert tf.constant(1.0).device.id == 1
    with tf.device(tf.DeviceSpec(job="worker")):  # any device
        assert tf.constant(1.0).device.id == 0
