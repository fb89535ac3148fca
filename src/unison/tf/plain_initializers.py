"""Initializers of TensorFlow that Keras does not have: objects to be called with a shape."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from unison.tf import dtypes, random
from unison.tf.tensors import constant, ones, zeros


class _Initializer:
    """The common part: the configuration."""

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that make an equal one."""
        return dataclasses.asdict(self)  # type: ignore[call-overload]

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        return cls(**config)


@dataclasses.dataclass
class ZerosInitializer(_Initializer):
    """TF: `tf.zeros_initializer`.

    Examples:
        >>> ZerosInitializer()((2,))
        Array([0., 0.], dtype=float32)
    """

    def __call__(self, shape: Any, dtype: Any = dtypes.float32, **kwargs: Any) -> jax.Array:
        return zeros(shape, dtype)


@dataclasses.dataclass
class OnesInitializer(_Initializer):
    """TF: `tf.ones_initializer`."""

    def __call__(self, shape: Any, dtype: Any = dtypes.float32, **kwargs: Any) -> jax.Array:
        return ones(shape, dtype)


@dataclasses.dataclass
class ConstantInitializer(_Initializer):
    """TF: `tf.constant_initializer`."""

    value: Any = 0
    support_partition: bool = False

    def __call__(self, shape: Any, dtype: Any = None, **kwargs: Any) -> jax.Array:
        return constant(self.value, dtype, shape)


@dataclasses.dataclass
class RandomNormalInitializer(_Initializer):
    """TF: `tf.random_normal_initializer`."""

    mean: Any = 0.0
    stddev: Any = 0.05
    seed: int | None = None

    def __call__(self, shape: Any, dtype: Any = dtypes.float32, **kwargs: Any) -> jax.Array:
        return random.normal(shape, self.mean, self.stddev, dtype, self.seed)


@dataclasses.dataclass
class RandomUniformInitializer(_Initializer):
    """TF: `tf.random_uniform_initializer`."""

    minval: Any = -0.05
    maxval: Any = 0.05
    seed: int | None = None

    def __call__(self, shape: Any, dtype: Any = dtypes.float32, **kwargs: Any) -> jax.Array:
        return random.uniform(shape, self.minval, self.maxval, dtype, self.seed)
