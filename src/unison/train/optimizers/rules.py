"""The update rules of TensorFlow 1's optimizers, as pure functions of one variable's arrays.

Each takes the gradient g, the value w, the slots by name and the hyperparameters by name, and
returns the new value and the new slots. All arrays have the variable's shape or none, and its
dtype. The formulas, and where their epsilons are, are those of TensorFlow's kernels
(`tensorflow/core/kernels/training_ops.cc`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax import lax

Arrays = Mapping[str, jax.Array]
Rule = Callable[[jax.Array, jax.Array, Arrays, Arrays], tuple[jax.Array, dict[str, jax.Array]]]


def gradient_descent(
    gradient: jax.Array, value: jax.Array, slots: Arrays, hyper: Arrays
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """`w - rate g`."""
    return value - hyper["learning_rate"] * gradient, {}


def momentum(
    gradient: jax.Array, value: jax.Array, slots: Arrays, hyper: Arrays
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """`a = momentum a + g; w - rate a`."""
    accumulated = hyper["momentum"] * slots["momentum"] + gradient
    return value - hyper["learning_rate"] * accumulated, {"momentum": accumulated}


def nesterov(
    gradient: jax.Array, value: jax.Array, slots: Arrays, hyper: Arrays
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """`a = momentum a + g; w - rate (g + momentum a)`. Source: Sutskever et al. 2013."""
    rate, decay = hyper["learning_rate"], hyper["momentum"]
    accumulated = decay * slots["momentum"] + gradient
    value = value - (rate * gradient + rate * decay * accumulated)
    return value, {"momentum": accumulated}


def adam(
    gradient: jax.Array, value: jax.Array, slots: Arrays, hyper: Arrays
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Adam, with epsilon as in the last lines of the paper's section 2 ("epsilon hat").

    `m = beta1 m + (1 - beta1) g; v = beta2 v + (1 - beta2) g^2;
    w - rate sqrt(1 - beta2^t) / (1 - beta1^t) m / (sqrt(v) + epsilon)`.
    Source: Kingma and Ba 2014.
    """
    rate = hyper["learning_rate"] * jnp.sqrt(1 - hyper["beta2_power"]) / (1 - hyper["beta1_power"])
    m = slots["m"] + (1 - hyper["beta1"]) * (gradient - slots["m"])
    v = slots["v"] + (1 - hyper["beta2"]) * (gradient**2 - slots["v"])
    return value - rate * m / (jnp.sqrt(v) + hyper["epsilon"]), {"m": m, "v": v}


def rms_prop(
    gradient: jax.Array, value: jax.Array, slots: Arrays, hyper: Arrays
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """`s = decay s + (1 - decay) g^2; a = momentum a + rate g / sqrt(s + epsilon); w - a`.

    Source: Hinton, "Neural Networks for Machine Learning", lecture 6e.
    """
    mean_square = slots["rms"] + (1 - hyper["decay"]) * (gradient**2 - slots["rms"])
    return _rms_step(gradient, value, slots, hyper, mean_square, {"rms": mean_square})


def centered_rms_prop(
    gradient: jax.Array, value: jax.Array, slots: Arrays, hyper: Arrays
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """`rms_prop` by the gradients' variance: `s - mg^2` with `mg = decay mg + (1 - decay) g`.

    Source: Graves 2013, "Generating Sequences With Recurrent Neural Networks".
    """
    mean_square = slots["rms"] + (1 - hyper["decay"]) * (gradient**2 - slots["rms"])
    mean = slots["mg"] + (1 - hyper["decay"]) * (gradient - slots["mg"])
    moments = {"rms": mean_square, "mg": mean}
    return _rms_step(gradient, value, slots, hyper, mean_square - mean**2, moments)


def _rms_step(
    gradient: jax.Array,
    value: jax.Array,
    slots: Arrays,
    hyper: Arrays,
    moment: jax.Array,
    moments: dict[str, jax.Array],
) -> tuple[jax.Array, dict[str, jax.Array]]:
    step = hyper["learning_rate"] * gradient / jnp.sqrt(moment + hyper["epsilon"])
    step = hyper["momentum"] * slots["momentum"] + step
    return value - step, moments | {"momentum": step}


def adagrad(
    gradient: jax.Array, value: jax.Array, slots: Arrays, hyper: Arrays
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """`s = s + g^2; w - rate g / sqrt(s)`, without epsilon. Source: Duchi et al. 2011."""
    accumulated = slots["accumulator"] + gradient**2
    step = hyper["learning_rate"] * gradient * lax.rsqrt(accumulated)
    return value - step, {"accumulator": accumulated}


def adadelta(
    gradient: jax.Array, value: jax.Array, slots: Arrays, hyper: Arrays
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """`s = rho s + (1 - rho) g^2; d = sqrt(u + epsilon) / sqrt(s + epsilon) g;
    u = rho u + (1 - rho) d^2; w - rate d`. Source: Zeiler 2012.
    """
    rho, epsilon = hyper["rho"], hyper["epsilon"]
    accumulated = rho * slots["accum"] + (1 - rho) * gradient**2
    updates = slots["accum_update"]
    step = jnp.sqrt(updates + epsilon) * lax.rsqrt(accumulated + epsilon) * gradient
    updates = rho * updates + (1 - rho) * step**2
    value = value - hyper["learning_rate"] * step
    return value, {"accum": accumulated, "accum_update": updates}


def ftrl(
    gradient: jax.Array, value: jax.Array, slots: Arrays, hyper: Arrays
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Follow the regularized leader, per coordinate, with shrinkage.

    `s' = s + g^2; p = -learning_rate_power; z = z + g + 2 shrinkage w - (s'^p - s^p) / rate w;
    w = (sign(z) l1 - z) / (s'^p / rate + 2 l2) if |z| > l1, else 0`.
    Source: McMahan et al. 2013, "Ad Click Prediction: a View from the Trenches".
    """
    rate, power, l1 = hyper["learning_rate"], -hyper["learning_rate_power"], hyper["l1"]
    accumulated = slots["accum"] + gradient**2
    scale = accumulated**power
    sigma = (scale - slots["accum"] ** power) / rate
    linear = slots["linear"] + gradient + 2 * hyper["shrinkage"] * value - sigma * value
    value = jnp.where(
        jnp.abs(linear) > l1,
        (l1 * jnp.sign(linear) - linear) / (scale / rate + 2 * hyper["l2"]),
        jnp.zeros_like(value),
    )
    return value, {"accum": accumulated, "linear": linear}
