"""`tf.cond`, `tf.case`, `tf.switch_case` and `tf.while_loop`.

Where the values that decide are known, Python decides. In compiled programs `unison.branches`
does, and variables can be read and assigned in the branches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from unison import branches
from unison.cells import has_cell
from unison.conversion import called
from unison.eager_fallback import needs_python
from unison.errors import InvalidArgumentError
from unison.program.control_flow import VALUE_WANTED, known_truth
from unison.tf.tensor_array import TensorArray
from unison.tf.tensors import convert_to_tensor, is_variable


def cond(
    pred: Any,
    true_fn: Callable[[], Any] | None = None,
    false_fn: Callable[[], Any] | None = None,
    name: str | None = None,
) -> Any:
    """Returns `true_fn()` if `pred` holds, else `false_fn()`.

    In a compiled program where `pred` is computed, both functions are traced and one runs. In a
    replica program the replicas may decide differently, as long as the branch taken does not
    communicate.

    Raises:
        TypeError: A function is missing, or no function.

    TF: `tf.cond`.
    """
    for argument, function in (("true_fn", true_fn), ("false_fn", false_fn)):
        if not callable(function):
            raise TypeError(f"'{argument}' must be callable. Received: {function!r}")
    assert true_fn is not None and false_fn is not None
    known = known_truth(pred)
    if known is not None:
        return called(true_fn if known else false_fn)
    return branches.switch(convert_to_tensor(pred), [_branch(false_fn), _branch(true_fn)])


def case(
    pred_fn_pairs: Any,
    default: Callable[[], Any] | None = None,
    exclusive: bool = False,
    strict: bool = False,
    name: str = "case",
) -> Any:
    """Returns the result of the function of the first true condition, otherwise of `default()`.

    Args:
        pred_fn_pairs: Pairs of a condition and a function.
        default: Of no arguments. Without it, the last function's condition must hold if no other
            does.
        exclusive: Without effect: of several conditions that hold the first decides.
        strict: Without effect.
        name: Without effect.

    Raises:
        InvalidArgumentError: No condition is true, and there is no default.

    TF: `tf.case`.
    """
    pairs = list(pred_fn_pairs.items() if isinstance(pred_fn_pairs, Mapping) else pred_fn_pairs)
    known = [known_truth(pred) for pred, _ in pairs]
    if default is None and all(holds is False for holds in known):
        raise InvalidArgumentError(message="tf.case: no condition holds, and there is no default.")
    *pairs, last = [*pairs, (None, default)] if default is not None else pairs
    choice = last[1]
    for pred, function in reversed(pairs):
        choice = functools.partial(cond, pred, function, choice)
    return choice()


def switch_case(
    branch_index: Any,
    branch_fns: Any,
    default: Callable[[], Any] | None = None,
    name: str = "switch_case",
) -> Any:
    """Returns the result of the function with that index; of `default` (or the last) for any other.

    Args:
        branch_index: An integer.
        branch_fns: Functions of no arguments; or pairs, or a dictionary, of index and function.
        default: Of no arguments.
        name: Without effect.

    TF: `tf.switch_case`.
    """
    functions = _by_index(branch_fns)
    other = functions[-1] if default is None else default
    try:
        index = int(branch_index)
    except VALUE_WANTED:
        index_tensor = convert_to_tensor(branch_index)
        every = [_branch(function) for function in (*functions, other)]
        is_known = (index_tensor >= 0) & (index_tensor < len(functions))
        return branches.switch(jax.numpy.where(is_known, index_tensor, len(functions)), every)
    chosen = functions[index] if 0 <= index < len(functions) else other
    return called(chosen)


def _by_index(branch_fns: Any) -> list[Callable[[], Any]]:
    given = list(branch_fns.items() if isinstance(branch_fns, Mapping) else branch_fns)
    if not given or callable(given[0]):
        pairs = list(enumerate(given))
    else:
        pairs = sorted(given, key=lambda pair: pair[0])
    if not pairs or [index for index, _ in pairs] != list(range(len(pairs))):
        raise ValueError(
            f"branch_fns must have the indices 0 to n - 1. Received: {[pair[0] for pair in pairs]}"
        )
    return [function for _, function in pairs]


def while_loop(
    cond: Callable[..., Any],
    body: Callable[..., Any],
    loop_vars: Any,
    shape_invariants: Any = None,
    parallel_iterations: int = 10,
    back_prop: bool = True,
    swap_memory: bool = False,
    maximum_iterations: Any = None,
    name: str | None = None,
) -> Any:
    """Repeats `body` for as long as `cond` holds, both called with the loop's variables.

    In a compiled program the variables keep their shapes and dtypes. Such a loop can be
    differentiated if `maximum_iterations` is stated.

    Args:
        cond: Maps the variables to a truth value.
        body: Maps them to their next values.
        loop_vars: A list, tuple or other nest of tensors.
        shape_invariants: Shapes may change outside compiled programs, whatever this says. A
            `tf.function` that has such a loop runs step by step if this is given.
        parallel_iterations: Without effect.
        back_prop: Without effect.
        swap_memory: Without effect.
        maximum_iterations: At most so many rounds.
        name: Without effect.

    Returns:
        The variables at the end, nested as `loop_vars`.

    Raises:
        TypeError: `cond` or `body` is not a function.
        ValueError: There are no variables; or `shape_invariants` allow other shapes where these
            cannot change.

    Examples:
        >>> while_loop(lambda i: i < 10, lambda i: i + 3, [0])
        [Array(12, dtype=int32)]

    TF: `tf.while_loop`.
    """
    if not callable(cond) or not callable(body):
        raise TypeError(f"'cond' and 'body' must be callable. Received: {cond!r} and {body!r}")
    if not isinstance(loop_vars, Sequence | Mapping):
        loop_vars = [loop_vars]
    if not loop_vars:
        raise ValueError("'loop_vars' must be provided.")
    limit = None if maximum_iterations is None else int(maximum_iterations)
    state = _tensors(loop_vars)
    holds = called(cond, *_arguments(state))
    if known_truth(holds) is None:
        state = _with_elements(state, body)
        try:
            return branches.while_loop(
                lambda state: convert_to_tensor(called(cond, *_arguments(state))),
                lambda state: _next(body, state),
                state,
                limit,
                convert_to_tensor(holds),
            )
        except TypeError as error:
            if shape_invariants is None:
                raise
            needs_python("A loop of which the tensors change their shapes")
            raise ValueError(
                "In a compiled program, the variables of tf.while_loop keep their shapes, whatever "
                "shape_invariants allow. Use a tf.TensorArray, or a tensor that is long enough."
            ) from error
    rounds = 0
    while (limit is None or rounds < limit) and holds:
        state = _next(body, state)
        holds = called(cond, *_arguments(state))
        rounds += 1
    return state


def _arguments(state: Any) -> Any:
    return state.values() if isinstance(state, Mapping) else state


def _next(body: Callable[..., Any], state: Any) -> Any:
    """Returns the next state, in the structure of the last: of one variable, a bare value."""
    result = called(body, *_arguments(state))
    if not isinstance(result, list | tuple | Mapping):
        result = [result]
    structure: Any = jax.tree.structure(state)
    leaves = jax.tree.leaves(_tensors(result))
    if len(leaves) != structure.num_leaves:
        raise ValueError(
            f"The body of tf.while_loop must return {structure.num_leaves} values, as loop_vars "
            f"has. Received: {len(leaves)}"
        )
    return jax.tree.unflatten(structure, leaves)


def _with_elements(state: Any, body: Callable[..., Any]) -> Any:
    """Returns the state with zeros in the `TensorArray`s that nothing was written to yet.

    A loop's state has the same arrays before and after a round.
    """
    leaves, structure = jax.tree.flatten(state, is_leaf=_is_array_of_tensors)
    if not any(_is_array_of_tensors(leaf) and not jax.tree.leaves(leaf) for leaf in leaves):
        return state
    after = branches.shapes_of(lambda: body(*_arguments(state)))
    later = jax.tree.leaves(after, is_leaf=_is_array_of_tensors)
    filled = [
        jax.tree.map(lambda shape: jax.numpy.zeros(shape.shape, shape.dtype), new)
        if _is_array_of_tensors(old) and not jax.tree.leaves(old)
        else old
        for old, new in zip(leaves, later, strict=True)
    ]
    return jax.tree.unflatten(structure, filled)


def _is_array_of_tensors(value: Any) -> bool:
    return isinstance(value, TensorArray)


def _branch(function: Callable[[], Any]) -> Callable[[], Any]:
    """Returns a branch whose results are tensors; variables stay, see `branches.switch`."""
    return lambda: jax.tree.map(
        lambda leaf: leaf if has_cell(leaf) else convert_to_tensor(leaf),
        called(function),
        is_leaf=is_variable,
    )


def _tensors(value: Any) -> Any:
    """Returns a nest with its leaves as tensors; None, and what is not a value, is unchanged."""
    return jax.tree.map(_tensor, value, is_leaf=is_variable)


def _tensor(leaf: Any) -> Any:
    try:
        return convert_to_tensor(leaf)
    except (TypeError, ValueError):
        return leaf
