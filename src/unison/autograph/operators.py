"""The statements and operators of Python, where a value may be known only when the program runs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from malt.operators.variables import Undefined, UndefinedReturnValue, ld, ldu

from unison.autograph.rows import Counted, counted_range, rows_of
from unison.autograph.staging import Variables, choose, repeat_over, repeat_while, truth
from unison.autograph.symbols import is_array, not_staged
from unison.cells import has_cell
from unison.conversion import Refusal
from unison.program.assertions import require
from unison.program.control_flow import known_truth

_Block = Callable[[], Any]

#: The most rounds of a loop in Python that a `break` leaves on a condition of the program.
_MOST_ROUNDS = 64


def if_stmt(
    cond: Any,
    body: _Block,
    orelse: _Block,
    get_state: Callable[[], tuple],
    set_state: Callable[[tuple], None],
    symbol_names: tuple[str, ...],
    nouts: int,
) -> None:
    """`if cond: body() else: orelse()`."""
    known = known_truth(cond)
    if known is None:
        variables = Variables(symbol_names, get_state, set_state, (body, orelse))
        choose(cond, body, orelse, variables, nouts)
    else:
        (body if known else orelse)()


def if_exp(cond: Any, if_true: _Block, if_false: _Block, expr_repr: str) -> Any:
    """`if_true() if cond else if_false()`."""
    known = known_truth(cond)
    if known is not None:
        return (if_true if known else if_false)()
    return _chosen(expr_repr, cond, if_true, if_false)


def _chosen(
    name: str,
    condition: Any,
    if_true: _Block,
    if_false: _Block,
    checked: Callable[[Any], Any] = lambda value: value,
) -> Any:
    """Returns the value of one of two expressions, as the condition holds in the program."""
    value: Any = None

    def set_to(result: Any) -> None:
        nonlocal value
        value = result

    variables = Variables(
        (name,), lambda: (value,), lambda values: set_to(*values), (if_true, if_false)
    )
    choose(
        condition,
        lambda: set_to(checked(if_true())),
        lambda: set_to(checked(if_false())),
        variables,
        1,
    )
    return value


def while_stmt(
    test: _Block,
    body: _Block,
    get_state: Callable[[], tuple],
    set_state: Callable[[tuple], None],
    symbol_names: tuple[str, ...],
    opts: dict[str, Any],
) -> None:
    """`while test(): body()`."""
    while True:
        held = test()
        known = known_truth(held)
        if known is None:
            variables = Variables(symbol_names, get_state, set_state, (test, body))
            repeat_while(held, test, body, variables, opts.get("maximum_iterations"))
            return
        if not known:
            return
        body()


def for_stmt(
    iter_: Any,
    extra_test: _Block | None,
    body: Callable[[Any], Any],
    get_state: Callable[[], tuple],
    set_state: Callable[[tuple], None],
    symbol_names: tuple[str, ...],
    opts: dict[str, Any],
) -> None:
    """`for target in iter_: body(target)`, for as long as `extra_test()` holds."""
    variables = Variables(symbol_names, get_state, set_state, (extra_test, body))
    rows = rows_of(iter_)

    def guarded(target: Any) -> None:
        if extra_test is None:
            body(target)
        else:
            choose_or_run(extra_test(), lambda: body(target), variables)

    if isinstance(rows, Counted):
        _count(rows, extra_test, body, variables, opts)
    elif rows is None:
        _in_python(iter_, extra_test, body, variables)
    else:
        before = get_state()
        try:
            repeat_over(rows.arrays, guarded, variables, length=rows.length)
        except Refusal:
            # A round does what only Python does: it appends to a list, or indexes one.
            set_state(before)
            _in_python(rows, extra_test, body, variables)


def choose_or_run(condition: Any, body: _Block, variables: Variables) -> None:
    """Runs `body` if the condition holds; all that it changes may be used afterwards."""
    known = known_truth(condition)
    if known is None:
        choose(condition, body, lambda: None, variables, len(variables.names))
    elif known:
        body()


def _in_python(
    values: Any, extra_test: _Block | None, body: Callable[[Any], Any], variables: Variables
) -> None:
    for rounds, value in enumerate(values):
        if rounds == _MOST_ROUNDS and extra_test is not None:
            if isinstance(values, range):
                rest = values[rounds:]
                counted = counted_range(rest.start, rest.stop, rest.step)
                _count(counted, extra_test, body, variables, {})
                return
            raise Refusal(
                not_staged(
                    f"loop has more than {_MOST_ROUNDS} rounds, which only the program can leave: "
                    "go through a tf.range."
                )
            )
        holds = None if extra_test is None else extra_test()
        if holds is not None and known_truth(holds) is False:
            break
        once = functools.partial(body, value)
        choose_or_run(True if holds is None else holds, once, variables)


def _count(
    rows: Counted,
    extra_test: _Block | None,
    body: Callable[[Any], Any],
    variables: Variables,
    opts: dict[str, Any],
) -> None:
    """Calls `body` with values whose number the program computes."""
    index: Any = jnp.zeros((), rows.length.dtype)

    def write(values: tuple) -> None:
        nonlocal index
        index = values[0]
        variables.write(values[1:])

    def test() -> Any:
        is_left = index < rows.length
        return is_left if extra_test is None else and_(lambda: is_left, extra_test)

    def once() -> None:
        nonlocal index
        body(rows.at(index))
        index = index + 1

    counted = Variables(
        ("the index", *variables.names),
        lambda: (index, *variables.read()),
        write,
        variables.blocks,
    )
    repeat_while(test(), test, once, counted, opts.get("maximum_iterations"))


def and_(a: _Block, b: _Block) -> Any:
    """`a() and b()`; `b` is only evaluated if `a()` holds."""
    first = a()
    known = known_truth(first)
    if known is not None:
        return first and b()
    return _lazily(first, b, lambda: False)


def or_(a: _Block, b: _Block) -> Any:
    """`a() or b()`; `b` is only evaluated if `a()` does not hold."""
    first = a()
    known = known_truth(first)
    if known is not None:
        return first or b()
    return _lazily(first, lambda: True, b)


def _lazily(condition: Any, if_true: _Block, if_false: _Block) -> Any:
    return _chosen("the value", _truth_value(condition), if_true, if_false, _truth_value)


def _truth_value(operand: Any) -> Any:
    """Returns an operand of `and` or `or`, which must be a truth value.

    Raises:
        StagingError: It is none.
    """
    if not _is_boolean(operand):
        raise not_staged(
            "`and` or `or` gives, in Python, one of its operands, and not whether they hold. "
            f"Received: {operand!r}. Write a comparison, or a conditional expression."
        )
    return operand


def _is_boolean(value: Any) -> bool:
    if has_cell(value):
        value = value.value()
    return isinstance(value, bool) or (
        is_array(value) and jnp.asarray(value).dtype == jnp.bool_ and jnp.size(value) == 1
    )


def not_(a: Any) -> Any:
    """`not a`."""
    return jnp.logical_not(truth(a)) if known_truth(a) is None else not a


def assert_stmt(expression1: Any, expression2: _Block) -> None:
    """`assert expression1, expression2()`."""
    known = known_truth(expression1)
    if known is None:
        message = expression2()
        require(expression1, lambda: str(message))
    elif not known:
        raise AssertionError(expression2())


class FunctionScope:
    """The context around the body of a converted function.

    Attributes:
        name: The name under which the function knows it.
    """

    def __init__(self, function_name: str, name: str, options: Any):
        del function_name, options
        self.name = name

    def __enter__(self) -> FunctionScope:
        return self

    def __exit__(self, *error: Any) -> None: ...

    def ret(self, value: Any, did_return: Any) -> Any:
        """Returns what the function returns."""
        return None if isinstance(value, UndefinedReturnValue) else value


def with_function_scope(thunk: Callable[[FunctionScope], Any], name: str, options: Any) -> Any:
    """Returns the value of a converted lambda function."""
    return thunk(FunctionScope("lambda", name, options))


#: The names that converted code uses.
OPERATORS: dict[str, Any] = {
    function.__name__: function
    for function in (
        if_stmt,
        if_exp,
        while_stmt,
        for_stmt,
        and_,
        or_,
        not_,
        assert_stmt,
        FunctionScope,
        with_function_scope,
        Undefined,
        UndefinedReturnValue,
        ld,
        ldu,
    )
}
