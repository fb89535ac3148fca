"""The CTC loss is minus the logarithm of the probability of all paths that give the labels."""

import itertools

import numpy as np
import pytest

import unison.tf as tf

CLASSES = 3
LOGITS = np.random.default_rng(1).normal(size=(5, 1, CLASSES)).astype(np.float32)


def collapsed(path, blank):
    """A path with repetitions merged, without blanks."""
    return [label for label, _ in itertools.groupby(path) if label != blank]


def by_all_paths(labels, frames, blank):
    logits = LOGITS[:frames, 0].astype(np.float64)
    probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    paths = itertools.product(range(CLASSES), repeat=frames)
    giving = (path for path in paths if collapsed(path, blank) == labels)
    return -np.log(sum(probabilities[range(frames), path].prod() for path in giving))


def loss(labels, frames, blank=None, length=4):
    padded = tf.constant([labels + [0] * (length - len(labels))], tf.int32)
    return float(tf.nn.ctc_loss(padded, LOGITS, [len(labels)], [frames], blank_index=blank)[0])


@pytest.mark.parametrize("labels", [[1], [1, 2], [1, 1], [2, 1, 2], [1, 1, 2], []], ids=str)
@pytest.mark.parametrize("frames", [4, 5])
def test_of_some_labels(labels, frames):
    assert loss(labels, frames) == pytest.approx(by_all_paths(labels, frames, 0), rel=1e-5)


def test_the_last_class_may_be_the_blank():
    assert loss([0, 1], 5, blank=-1) == pytest.approx(by_all_paths([0, 1], 5, 2), rel=1e-5)


def test_labels_that_need_more_frames_are_impossible():
    assert loss([1, 1, 1], 4) == np.inf


def test_examples_may_come_first():
    turned = np.swapaxes(LOGITS, 0, 1)
    by_example = tf.nn.ctc_loss([[1, 2]], turned, [2], [5], logits_time_major=False)
    assert float(by_example[0]) == pytest.approx(loss([1, 2], 5))


def test_labels_may_be_sparse():
    sparse = tf.SparseTensor([[0, 0], [0, 1]], [1, 0], [1, 3])
    found = tf.nn.ctc_loss(sparse, LOGITS, None, [5], blank_index=-1)
    assert float(found[0]) == pytest.approx(loss([1, 0], 5, blank=-1))
    with pytest.raises(ValueError, match="blank_index"):
        tf.nn.ctc_loss(sparse, LOGITS, None, [5])


def test_its_gradient_is_that_of_finite_differences():
    logits = tf.constant(LOGITS)
    with tf.GradientTape() as tape:
        tape.watch(logits)
        value = tf.nn.ctc_loss([[1, 1]], logits, [2], [5])[0]
    step = np.zeros_like(LOGITS)
    step[1, 0, 2] = 1e-2
    up, down = (
        float(tf.nn.ctc_loss([[1, 1]], LOGITS + sign * step, [2], [5])[0]) for sign in (1, -1)
    )
    gradient = tape.gradient(value, logits)
    assert float(gradient[1, 0, 2]) == pytest.approx((up - down) / 2e-2, rel=1e-2)
