"""Gradients as products of two thin matrices: PowerSGD."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from unison.compression.base import Compression, CompressionState, Exchange, Kinds
from unison.compression.rules import LARGE_MATRICES, Rule


@dataclasses.dataclass(frozen=True, kw_only=True)
class PowerSGD(Compression):
    """Sends two factors of every matrix; see `powersgd`.

    Attributes:
        rank: The factors' number of columns.
    """

    rank: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank < 1:
            raise ValueError(f"rank must be 1 or more. Received: rank={self.rank}")

    def _admits(self, tensor: Any) -> bool:
        """Whether the factors are smaller than the matrix."""
        if len(tensor.shape) < 2:
            return False
        rows, columns = _matrix_shape(tensor)
        return self.rank * (rows + columns) < rows * columns

    def _own_state(self, tensors: Sequence[jax.Array]) -> Kinds:
        return {"residual": tuple(tensors)}

    def _common_state(self, tensors: Sequence[jax.Array]) -> Kinds:
        keys = jax.random.split(jax.random.key(0), max(1, len(tensors)))
        return {
            "basis": tuple(
                jax.random.normal(key, (_matrix_shape(tensor)[1], self.rank), tensor.dtype)
                for key, tensor in zip(keys, tensors, strict=False)
            )
        }

    def _compressed(
        self, tensors: list[jax.Array], state: CompressionState, exchange: Exchange
    ) -> tuple[list[jax.Array], Kinds, Kinds]:
        residuals, bases = state.of_replica["residual"], state.of_all["basis"]
        matrices = [
            (tensor + residual).reshape(_matrix_shape(tensor))
            for tensor, residual in zip(tensors, residuals, strict=True)
        ]
        # QR by reflections completes a basis if columns are linearly dependent, or zero.
        lefts = exchange.sum(
            [_product(m, _orthonormal(basis)) for m, basis in zip(matrices, bases, strict=True)]
        )
        lefts = [_orthonormal(left) for left in lefts]
        own_rights = [_product(m.T, left) for m, left in zip(matrices, lefts, strict=True)]
        rights = exchange.sum(own_rights)
        sums, kept = [], []
        for tensor, matrix, left, own_right, right in zip(
            tensors, matrices, lefts, own_rights, rights, strict=True
        ):
            sums.append(_product(left, right.T).reshape(tensor.shape))
            kept.append((matrix - _product(left, own_right.T)).reshape(tensor.shape))
        return sums, {"residual": tuple(kept)}, {"basis": tuple(rights)}


def powersgd(
    rank: int = 4,
    *,
    rule: Rule = LARGE_MATRICES,
    warmup_steps: int = 0,
) -> PowerSGD:
    """Sends a low-rank approximation of the replicas' sum.

    A gradient M is a matrix of all but the last axis by the last. With Q of the previous step,
    P = orthonormal(sum of M Q) and Q = sum of transpose(M) P, all replicas get P transpose(Q).
    Each keeps the error of the approximation of its own M, and adds it to the next gradient (error
    feedback). Tensors whose factors would not be smaller are sent uncompressed: the full rank
    has no loss. (Vogels et al. 2019, "PowerSGD".)

    Args:
        rank: The rank of the approximation.
        rule: Selects the tensors to compress.
        warmup_steps: The number of first steps without compression.

    Raises:
        ValueError: The rank is less than 1.

    Examples:
        >>> import numpy as np, unison
        >>> from unison import compression
        >>> strategy = unison.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> low_rank = compression.powersgd(1)
        >>> def step(gradient):
        ...     return low_rank.apply(gradient, low_rank.init(gradient))[0]
        >>> ones = np.ones((64, 32), "float32")
        >>> sums = strategy.run(step, (unison.PerReplica([ones, 2 * ones]),))
        >>> np.allclose(sums.values[0], 3)
        True
    """
    return PowerSGD(rank=rank, rule=rule, warmup_steps=warmup_steps)


def _matrix_shape(tensor: Any) -> tuple[int, int]:
    return math.prod(tensor.shape[:-1]), tensor.shape[-1]


def _orthonormal(matrix: jax.Array) -> jax.Array:
    """Returns a matrix with orthonormal columns that span those of `matrix`."""
    return jnp.linalg.qr(matrix)[0]


def _product(left: jax.Array, right: jax.Array) -> jax.Array:
    """Returns the product in full precision: a basis that is not orthonormal loses gradients."""
    return jnp.matmul(left, right, precision="highest")
