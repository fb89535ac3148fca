"""`Compression`: the common part of all methods: state, rules, warm-up, uncompressed tensors.

A method sums gradients over the replicas with fewer bytes on the wire. Users see a pair of pure
functions, `init` and `apply`, over trees of gradients, in Optax's style; a subclass implements
`_compressed`, and the initial values of its state. All replicas decode the same bytes, so their
results are equal, bit for bit.
"""

from __future__ import annotations

import abc
import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from unison.collectives import AggregationMethod, ReduceOp, aggregate, options_in_scope
from unison.collectives.aggregation import parse_linear
from unison.compression.rules import LARGE_MATRICES, Rule
from unison.profiling.regions import AGGREGATE
from unison.runtime.placement import REPLICA_AXIS
from unison.slices import IndexedSlices

#: Tensors of one kind of state, in the order of the compressed tensors, by the kind's name.
Kinds = dict[str, tuple[jax.Array, ...]]

#: Sums tensors over the replicas without loss.
Sum = Callable[[Sequence[jax.Array]], list[jax.Array]]


class CompressionState(NamedTuple):
    """The state of a compression between steps.

    Attributes:
        step: The number of steps so far.
        of_replica: The state of each replica. `"residual"` is what it has not sent yet.
            A checkpoint may store the sum over the replicas, and divide it between any
            number of replicas: the total of unsent gradients stays the same.
        of_all: State that is equal on all replicas.
    """

    step: jax.Array
    of_replica: Kinds
    of_all: Kinds


class Exchange(NamedTuple):
    """The arguments of a method in one step.

    Attributes:
        step: The number of steps before this one.
        sum: Sums over the replicas without loss.
        axis_name: The mesh axis of the replicas.
    """

    step: jax.Array
    sum: Sum
    axis_name: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compression(abc.ABC):
    """Sums gradients over the replicas with fewer bytes on the wire.

    Tensors that the rule leaves out, integers and complex numbers are summed without loss, by the
    aggregation method given to `apply`.

    Attributes:
        rule: Selects the tensors to compress, by name and tensor.
        warmup_steps: The number of first steps without compression.
        momentum: The factor of the momentum that replaces the gradients, 0 for none: v = m v +
            g, on each replica, before the compression.
        clipnorm: Each replica clips its contribution to the sum before that, so that the
            Euclidean norm of all of it is at most this divided by the root of the number of
            replicas: the norm of a sum of independent contributions is then at most `clipnorm` on
            average. None: no clipping. (Lin et al. 2018, "Deep Gradient Compression".)
    """

    rule: Rule = LARGE_MATRICES
    warmup_steps: int = 0
    momentum: float = 0.0
    clipnorm: float | None = None

    def __post_init__(self) -> None:
        if self.warmup_steps < 0:
            raise ValueError(
                f"warmup_steps must be 0 or more. Received: warmup_steps={self.warmup_steps}"
            )
        if not 0 <= self.momentum < 1:
            raise ValueError(
                f"momentum must be 0 or more, and below 1. Received: momentum={self.momentum}"
            )
        if self.clipnorm is not None and self.clipnorm <= 0:
            raise ValueError(
                f"clipnorm must be None or above 0. Received: clipnorm={self.clipnorm}"
            )

    def init(self, params: Any) -> CompressionState:
        """Returns the state before the first step: that of one replica.

        Args:
            params: A tree like the gradients.
        """
        divided, _ = self._divided(params)
        compressed = [wide(jnp.zeros_like(tensor)) for _, tensor in divided.compressed]
        own, common = self._own_state(compressed), self._common_state(compressed)
        if self.momentum:
            own["velocity"] = tuple(compressed)
            common["velocity"] = tuple(
                wide(jnp.zeros_like(tensor)) for _, tensor in divided.others if _is_float(tensor)
            )
        return CompressionState(jnp.zeros((), jnp.int32), own, common)

    def apply(
        self,
        gradients: Any,
        state: CompressionState,
        op: ReduceOp | str = ReduceOp.SUM,
        method: AggregationMethod | int | str | None = None,
        axis_name: str = REPLICA_AXIS,
    ) -> tuple[Any, CompressionState]:
        """Combines the replicas' gradients.

        Used inside a replica program, or where a `jax.shard_map` binds `axis_name`; elsewhere,
        and with one replica, nothing is sent and nothing lost or stored: previous residuals
        are added to the result. A step whose result is not finite does not change the state (a loss
        scale will skip such a step).

        Args:
            gradients: A tree of arrays, of equal shapes on all replicas.
            state: The result of `init`, or of the previous step.
            op: `ReduceOp.SUM` or `ReduceOp.MEAN`, or its name.
            method: The method by which uncompressed tensors are summed.
            axis_name: The mesh axis of the replicas.

        Returns:
            A tree like `gradients`, equal on all replicas, and the new state.

        Raises:
            ValueError: Unknown method or operation, or `state` belongs to other
                gradients.
        """
        op, method = parse_linear(op), AggregationMethod.parse(method)
        count = number_of_replicas(axis_name)
        divided, structure = self._divided(gradients)

        def sum_all(tensors: Sequence[jax.Array]) -> list[jax.Array]:
            tensors = list(tensors)
            return tensors if count == 1 else aggregate(tensors, method, axis_name=axis_name)

        others = [tensor for _, tensor in divided.others]
        tensors = [tensor for _, tensor in divided.compressed]
        self._check(state, tensors)
        if self.clipnorm is not None:
            # A mean contains an n-th of each replica's contribution.
            limit = self.clipnorm / math.sqrt(count) * (count if op is ReduceOp.MEAN else 1)
            tensors, others = _clipped(tensors, others, limit)
        if count > 1:
            others = aggregate(others, method, op, axis_name)
        others, common = self._with_momentum(others, state)
        exchange = Exchange(state.step, sum_all, axis_name)
        with jax.named_scope(AGGREGATE):
            sums, new = self._combined([wide(tensor) for tensor in tensors], state, exchange)
        new = new._replace(of_all=new.of_all | common)
        if op is ReduceOp.MEAN:
            sums = [total / count for total in sums]
        results: list[Any] = [None] * structure.num_leaves
        for (place, tensor), other in zip(divided.others, others, strict=True):
            results[place] = other.astype(tensor.dtype) if _is_float(tensor) else other
        for (place, tensor), total in zip(divided.compressed, sums, strict=True):
            results[place] = total.astype(tensor.dtype)
        return jax.tree.unflatten(structure, results), _unless_spoiled(
            [*sums, *filter(_is_float, others)], state, new
        )

    def names(self, gradients: Any) -> list[str]:
        """Returns the names of the tensors of `gradients` that are compressed."""
        divided, _ = self._divided(gradients)
        return [divided.names[place] for place, _ in divided.compressed]

    @property
    def steps_until_settled(self) -> int:
        """The number of steps after which all steps send the same."""
        return self.warmup_steps

    def settled(self) -> Compression:
        """Returns the compression after the first steps."""
        return dataclasses.replace(self, warmup_steps=0)

    def part_of_state(
        self, state: CompressionState, params: Any, names: Collection[str]
    ) -> tuple[CompressionState, Callable[[CompressionState], CompressionState]]:
        """Returns the state of some tensors, and a function that merges it into that of all.

        For a step with gradients of some tensors only: the state of the others is unchanged.

        Args:
            state: The state of all tensors.
            params: The argument of `init`.
            names: The names of those tensors.
        """
        divided, _ = self._divided(params)
        compressed = [divided.names[place] in names for place, _ in divided.compressed]
        others = [
            divided.names[place] in names for place, tensor in divided.others if _is_float(tensor)
        ]
        # In the replicas' common state, the momentum is that of the uncompressed tensors.
        own = dict.fromkeys(state.of_replica, compressed)
        common = {kind: others if kind == "velocity" else compressed for kind in state.of_all}

        def whole(part: CompressionState) -> CompressionState:
            return CompressionState(
                part.step,
                _put_back(part.of_replica, state.of_replica, own),
                _put_back(part.of_all, state.of_all, common),
            )

        part = CompressionState(
            state.step, _taken(state.of_replica, own), _taken(state.of_all, common)
        )
        return part, whole

    # -- implemented by a method ------------------------------------------------------------

    def _own_state(self, tensors: Sequence[jax.Array]) -> Kinds:
        """Returns the initial state of a replica for `tensors`, which are zeros."""
        return {}

    def _common_state(self, tensors: Sequence[jax.Array]) -> Kinds:
        """Returns the initial common state of all replicas."""
        return {}

    def _admits(self, tensor: Any) -> bool:
        """Whether compressing `tensor` saves anything."""
        return True

    @abc.abstractmethod
    def _compressed(
        self, tensors: list[jax.Array], state: CompressionState, exchange: Exchange
    ) -> tuple[list[jax.Array], Kinds, Kinds]:
        """Returns the sums over the replicas of `tensors`, and the changes of the state.

        The tensors are of float32 or float64, after their momentum. There are several replicas.
        """

    # -- common to all methods ----------------------------------------------------------------

    def _combined(
        self, tensors: list[jax.Array], state: CompressionState, exchange: Exchange
    ) -> tuple[list[jax.Array], CompressionState]:
        own: Kinds = {}
        if self.momentum:
            before = state.of_replica["velocity"]
            tensors = [self.momentum * v + g for v, g in zip(before, tensors, strict=True)]
            own["velocity"] = tuple(tensors)

        def everything() -> tuple[list[jax.Array], Kinds, Kinds]:
            """Sends without loss, including previous residuals."""
            kept, owed = state.of_replica | own, tensors
            if "residual" in kept:
                late = kept["residual"]
                owed = [held + tensor for held, tensor in zip(late, tensors, strict=True)]
                kept = {**kept, "residual": tuple(map(jnp.zeros_like, late))}
            return exchange.sum(owed), kept, state.of_all

        def lossy() -> tuple[list[jax.Array], Kinds, Kinds]:
            sums, kept, common = self._compressed(tensors, state, exchange)
            return sums, own | kept, state.of_all | common

        if (
            number_of_replicas(exchange.axis_name) == 1
            or not tensors
            or not options_in_scope(self.steps_until_settled).compresses
        ):
            sums, kept, common = everything()
        elif self.warmup_steps:
            sums, kept, common = lax.cond(state.step < self.warmup_steps, everything, lossy)
        else:
            sums, kept, common = lossy()
        return sums, CompressionState(state.step + 1, kept, common)

    def _with_momentum(
        self, others: Sequence[jax.Array], state: CompressionState
    ) -> tuple[list[jax.Array], Kinds]:
        """Returns the uncompressed tensors, already combined, with their momentum."""
        if not self.momentum:
            return list(others), {}
        before = iter(state.of_all["velocity"])
        moving = [
            self.momentum * next(before) + other if _is_float(other) else other for other in others
        ]
        return moving, {"velocity": tuple(filter(_is_float, moving))}

    def _divided(self, tree: Any) -> tuple[_Divided, Any]:
        leaves, structure = jax.tree.flatten_with_path(
            tree, is_leaf=lambda node: isinstance(node, IndexedSlices)
        )
        divided = _Divided([], [], [])
        for place, (path, leaf) in enumerate(leaves):
            tensor = leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jnp.asarray(leaf)
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            admitted = (
                _is_float(tensor)
                and tensor.size > 0
                and self.rule(name, tensor)
                and self._admits(tensor)
            )
            divided.names.append(name)
            (divided.compressed if admitted else divided.others).append((place, tensor))
        return divided, structure

    def _check(self, state: CompressionState, tensors: Sequence[jax.Array]) -> None:
        """Raises a ValueError if the residuals belong to other tensors."""
        for kind, kept in state.of_replica.items():
            expected = [tensor.shape for tensor in tensors]
            received = [tensor.shape for tensor in kept]
            if received != expected:
                raise ValueError(
                    f"The state of a compression must be that of init(params), with a {kind} of "
                    f"the shapes {expected} on each replica. Received: {received}"
                )


class _Divided(NamedTuple):
    """The tensors of a tree, each with its index.

    Attributes:
        names: The names of all tensors.
        compressed: The indices of those to compress.
        others: The indices of the others.
    """

    names: list[str]
    compressed: list[tuple[int, Any]]
    others: list[tuple[int, Any]]


def _taken(kinds: Kinds, chosen: dict[str, list[bool]]) -> Kinds:
    """Returns the state of the chosen tensors, for each kind."""
    return {kind: tuple(itertools.compress(kept, chosen[kind])) for kind, kept in kinds.items()}


def _put_back(part: Kinds, whole: Kinds, chosen: dict[str, list[bool]]) -> Kinds:
    """Returns `whole` with the part that `_taken` has selected replaced by `part`."""
    put = {}
    for kind, kept in whole.items():
        new = iter(part[kind])
        put[kind] = tuple(
            next(new) if is_chosen else old
            for old, is_chosen in zip(kept, chosen[kind], strict=True)
        )
    return put


def _clipped(
    tensors: Sequence[jax.Array], others: Sequence[jax.Array], limit: float
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Returns a replica's tensors, multiplied so that the norm of all floats is at most `limit`."""
    floats = [tensor for tensor in (*tensors, *others) if _is_float(tensor)]
    squares = [jnp.sum(jnp.square(wide(tensor))) for tensor in floats]
    factor = jnp.minimum(1, limit / jnp.sqrt(sum(squares, start=jnp.zeros(()))))

    def clipped(tensor: jax.Array) -> jax.Array:
        return tensor * factor.astype(tensor.dtype) if _is_float(tensor) else tensor

    return [clipped(tensor) for tensor in tensors], [clipped(other) for other in others]


def _unless_spoiled(
    results: Sequence[jax.Array], before: CompressionState, after: CompressionState
) -> CompressionState:
    """Returns the state `after` a step, or `before` it if its results are not finite."""
    if not results or not jax.tree.leaves((after.of_replica, after.of_all)):
        return after
    finite = jnp.stack([jnp.isfinite(result).all() for result in results]).all()
    own, common = jax.tree.map(
        lambda new, old: jnp.where(finite, new, old),
        (after.of_replica, after.of_all),
        (before.of_replica, before.of_all),
    )
    return CompressionState(after.step, own, common)


def _is_float(tensor: Any) -> bool:
    return bool(jnp.issubdtype(tensor.dtype, jnp.floating))


def number_of_replicas(axis_name: str) -> int:
    """Returns the size of the mesh axis; 1 if it is not bound."""
    try:
        return lax.axis_size(axis_name)
    except NameError:
        return 1


def wide(tensor: jax.Array) -> jax.Array:
    """Returns `tensor` in the dtype in which it is compressed: float32, or float64."""
    return tensor.astype(jnp.promote_types(tensor.dtype, jnp.float32))
