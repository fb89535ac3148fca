"""`AggregationMethod`: the names of the methods that combine gradients of several replicas."""

from __future__ import annotations

import enum


class AggregationMethod(enum.IntEnum):
    """The combination of several replicas' gradients (`tf.AggregationMethod`).

    The results agree up to round-off, and exactly for integers: two methods differ in an element by
    at most 2 (n - 1) eps times the sum over the n replicas of the absolute values.

    Attributes:
        ADD_N: All at once: one buffer and one all-reduce for all tensors of a dtype.
        TREE: Pairs of replicas exchange and add, log2(n) times, first within hosts and then across
            them.
        ACCUMULATE_N: In chunks of at most 1 MiB, one after the other and in place, so that almost
            no memory is needed besides the gradients.
        DEFAULT: The method measured to be fastest for the sizes, devices and hosts at hand.
        EXPERIMENTAL_TREE: TensorFlow's name for `TREE`.
        EXPERIMENTAL_ACCUMULATE_N: TensorFlow's name for `ACCUMULATE_N`.
    """

    ADD_N = 0
    TREE = 1
    ACCUMULATE_N = 2
    # In TensorFlow `DEFAULT` is another name of `ADD_N`.
    DEFAULT = 3
    EXPERIMENTAL_TREE = TREE
    EXPERIMENTAL_ACCUMULATE_N = ACCUMULATE_N

    @classmethod
    def parse(cls, method: AggregationMethod | int | str | None) -> AggregationMethod:
        """Returns the member that `method` is or names, in any case; `DEFAULT` for None."""
        if method is None:
            return cls.DEFAULT
        if isinstance(method, str) and method.upper() in cls.__members__:
            return cls[method.upper()]
        if isinstance(method, int) and method in cls.__members__.values():
            return cls(method)
        raise ValueError(
            "Expected an AggregationMethod: ADD_N, TREE, ACCUMULATE_N or DEFAULT. "
            f"Received: {method!r}"
        )
