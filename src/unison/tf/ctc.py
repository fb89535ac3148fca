"""`tf.nn.ctc_loss`: sequences without an alignment, by connectionist temporal classification."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from unison.tf.sparse import SparseTensor, to_dense
from unison.tf.tensors import convert_to_tensor, invalid_arguments

#: The logarithm of a probability that is as good as zero; infinities have no gradient.
_NEVER = -1e30


def ctc_loss(
    labels: Any,
    logits: Any,
    label_length: Any,
    logit_length: Any,
    logits_time_major: bool = True,
    unique: Any = None,
    blank_index: int | None = None,
    name: str | None = None,
) -> jax.Array:
    """Returns minus the logarithm of the probability of each example's labels.

    That is the sum over all paths through the frames that give the labels when repeated classes
    are merged and blanks are removed (Graves et al., *Connectionist Temporal Classification*,
    2006). It is infinite, with a gradient of zero, if there are too few frames for the labels;
    TensorFlow's is about 700 then.

    Args:
        labels: Class indices, of shape `[examples, labels]`, or a `tf.SparseTensor` of that shape
            whose rows are filled from the left.
        logits: Of shape `[frames, examples, classes]`.
        label_length: The number of labels of each example. Of a sparse tensor it may be None.
        logit_length: The number of frames of each example.
        logits_time_major: False: the logits have the shape `[examples, frames, classes]`.
        unique: Without effect: it is what TensorFlow computes from the labels in advance.
        blank_index: The class of blanks; negative ones are counted from the last. Default: 0.
        name: Without effect.

    Raises:
        ValueError: The labels are sparse, and no blank is given.

    TF: `tf.nn.ctc_loss`.
    """
    if isinstance(labels, SparseTensor):
        if blank_index is None:
            raise ValueError(
                "Argument `blank_index` must be provided when labels is a SparseTensor."
            )
        if label_length is None:
            rows = jnp.asarray(labels.indices)[:, 0]
            label_length = jnp.bincount(rows, length=int(labels.dense_shape[0]))
        labels = to_dense(labels)
    labels = convert_to_tensor(labels).astype(jnp.int32)
    logits = convert_to_tensor(logits)
    if not logits_time_major:
        logits = jnp.swapaxes(logits, 0, 1)
    blank = (blank_index or 0) % logits.shape[-1]
    with invalid_arguments("tf.nn.ctc_loss"):
        return _loss(
            labels,
            jax.nn.log_softmax(logits),
            convert_to_tensor(label_length),
            convert_to_tensor(logit_length),
            blank,
        )


def _loss(
    labels: jax.Array,
    log_probabilities: jax.Array,
    label_length: jax.Array,
    logit_length: jax.Array,
    blank: int,
) -> jax.Array:
    """The forward algorithm over states that alternate between blanks and labels."""
    examples, length = labels.shape
    states = jnp.full((examples, 2 * length + 1), blank).at[:, 1::2].set(labels)
    before = jnp.pad(states, [(0, 0), (2, 0)], constant_values=blank)[:, :-2]
    may_skip = (states != blank) & (states != before)

    def later(alpha: jax.Array, by: int) -> jax.Array:
        return jnp.pad(alpha, [(0, 0), (by, 0)], constant_values=_NEVER)[:, :-by]

    def step(alpha: jax.Array, frame: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        log_probability, time = frame
        reached = jnp.logaddexp(alpha, later(alpha, 1))
        reached = jnp.logaddexp(reached, jnp.where(may_skip, later(alpha, 2), _NEVER))
        reached += jnp.take_along_axis(log_probability, states, axis=1)
        return jnp.where((time < logit_length)[:, None], reached, alpha), None

    # Before the first frame, where the first blank and the first label are one step away.
    start = jnp.full((examples, 2 * length + 1), _NEVER, log_probabilities.dtype)
    first = jnp.take_along_axis(log_probabilities[0], states[:, :2], axis=1)
    start = start.at[:, :2].set(first)
    times = jnp.arange(1, len(log_probabilities))
    alpha, _ = lax.scan(step, start, (log_probabilities[1:], times))
    last = 2 * label_length.astype(jnp.int32)[:, None]
    ends = jnp.take_along_axis(alpha, jnp.concatenate([last, jnp.maximum(last - 1, 0)], 1), axis=1)
    with_label = jnp.where(label_length > 0, ends[:, 1], _NEVER)
    loss = -jnp.logaddexp(ends[:, 0], with_label)
    return jnp.where(loss > -_NEVER / 2, jnp.inf, loss)
