"""The bytes that a compression saves, and its residuals."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex

from unison.collectives import all_reduce_packed
from unison.compression.base import Compression, CompressionState
from unison.compression.local import LocalTraining
from unison.jaxprs import is_collective
from unison.runtime.placement import REPLICA_AXIS


@dataclasses.dataclass(frozen=True)
class Report:
    """The communication of one step.

    Attributes:
        bytes_sent: The bytes that a replica sends in a step after the warm-up:
            the mean over the steps, if they differ. For all-reduces, those of a ring.
        bytes_uncompressed: The bytes that it would send without compression.
        compressed: The names of the tensors that are compressed.
    """

    bytes_sent: float
    bytes_uncompressed: float
    compressed: tuple[str, ...]

    @property
    def bytes_saved(self) -> float:
        """The number of bytes that a replica saves in a step."""
        return self.bytes_uncompressed - self.bytes_sent

    @property
    def ratio(self) -> float:
        """The compression ratio; 1 if nothing would be sent anyway."""
        return self.bytes_uncompressed / self.bytes_sent if self.bytes_sent else 1.0


def report(compression: Compression | LocalTraining, gradients: Any, num_replicas: int) -> Report:
    """Returns the bytes that a step with `compression` sends, from the step's own collectives.

    It ignores the warm-up, and the strategy, whose options may switch the compression off.

    Args:
        compression: A compression.
        gradients: A tree of arrays, or of anything with shape and dtype.
        num_replicas: The number of replicas.

    Examples:
        >>> import jax.numpy as jnp
        >>> from unison import compression
        >>> gradients = {"kernel": jnp.ones((256, 256)), "bias": jnp.ones(256)}
        >>> compression.report(compression.int8(), gradients, 4)
        Report(bytes_sent=101376.0, bytes_uncompressed=394752.0, compressed=('kernel',))
    """
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), gradients)
    plain = bytes_sent(lambda tree: all_reduce_packed(jax.tree.leaves(tree)), like, num_replicas)
    if isinstance(compression, LocalTraining):
        return Report(plain / compression.every, plain, ())
    settled = compression.settled()
    sent = bytes_sent(lambda tree: settled.apply(tree, settled.init(tree)), like, num_replicas)
    return Report(sent, plain, tuple(compression.names(like)))


def residual_norm(state: CompressionState) -> jax.Array:
    """Returns the Euclidean norm of a replica's residuals, given its state."""
    squares = [
        jnp.sum(jnp.square(residual), dtype=residual.dtype)
        for residual in state.of_replica.get("residual", ())
    ]
    return jnp.sqrt(sum(squares, start=jnp.zeros(())))


def bytes_sent(
    function: Callable[..., Any],
    argument: Any,
    num_replicas: int,
    axis_name: str = REPLICA_AXIS,
) -> float:
    """Returns the bytes that a replica sends in `function`, by its collective operations.

    Args:
        function: A replica program of one argument, without loops.
        argument: A tree of `jax.ShapeDtypeStruct`s.
        num_replicas: The number of replicas.
        axis_name: The mesh axis of the replicas.
    """
    trace = jax.make_jaxpr(function, axis_env=[(axis_name, num_replicas)])(argument)
    return bytes_in(trace.jaxpr, num_replicas)


def _all_reduce(n: int) -> float:
    """The bytes of an all-reduce; other collectives that are not listed are counted as one."""
    return 2 * (n - 1) / n


#: The bytes that a replica sends, relative to its operand, with n replicas.
_SENT = {
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "all_gather": lambda n: n - 1,
    "all_gather_invariant": lambda n: n - 1,
    "ppermute": lambda n: 1,
}


def bytes_in(jaxpr: jex.Jaxpr, num_replicas: int) -> float:
    """Returns the bytes that a replica sends in a program.

    For a conditional, the branch that sends most is counted; the body of a loop whose trip count
    is unknown is counted once.

    Args:
        jaxpr: The program of a replica.
        num_replicas: The number of replicas.
    """
    total = 0.0
    for equation in jaxpr.eqns:
        if is_collective(equation):
            times = _SENT.get(equation.primitive.name, _all_reduce)
            avals: list[Any] = [atom.aval for atom in equation.invars]
            operands = sum(math.prod(aval.shape) * aval.dtype.itemsize for aval in avals)
            total += times(num_replicas) * operands
        inner = [bytes_in(body, num_replicas) for body in jex.jaxprs_in_params(equation.params)]
        if equation.primitive.name == "cond":
            total += max(inner)
        else:
            total += sum(inner) * equation.params.get("length", 1)
    return total
