"""Statements of a loop's body about the loop: `set_loop_options`."""

from __future__ import annotations

from typing import Any

#: The default of options, which means that they are not given.
_UNSPECIFIED = object()


def set_loop_options(
    parallel_iterations: Any = _UNSPECIFIED,
    swap_memory: Any = _UNSPECIFIED,
    maximum_iterations: Any = _UNSPECIFIED,
    shape_invariants: Any = _UNSPECIFIED,
) -> None:
    """Sets options of the loop around it, as the first statement of its body.

    Args:
        parallel_iterations: Without effect.
        swap_memory: Without effect.
        maximum_iterations: The maximum number of iterations. A `while` over arrays that has one can
            be differentiated.
        shape_invariants: Without effect: the shapes of compiled loops are constant.

    TF: `tf.autograph.experimental.set_loop_options`.
    """
