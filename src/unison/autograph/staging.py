"""Branches and loops of functions as branches and loops of the program that is being traced.

`malt` makes functions of the blocks of a statement, and a pair of functions, `get_state` and
`set_state`, that read and set the variables that the blocks change.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp

from unison import branches
from unison.autograph.containers import Watched, contents, name_of, put_back
from unison.autograph.symbols import (
    NUMBERS,
    Form,
    Symbol,
    form_of,
    joined,
    not_staged,
    symbols_of,
)
from unison.conversion import Refusal
from unison.thread_local import ThreadLocal

#: The number of times that the kinds of a loop's variables may be widened before they must hold.
_WIDENINGS = 4

_ADVICE_IN_LOOPS = (
    "In a loop of a program, variables keep their shapes and dtypes: begin with the dtype that it "
    "ends with, pad to a fixed size, or write to a tf.TensorArray."
)
_ADVICE_IN_BRANCHES = "Let both branches give it one structure, shape and dtype."


@dataclasses.dataclass
class Variables:
    """The variables of a function that a statement changes.

    Attributes:
        names: Their names.
        read: Returns their values.
        write: Sets them.
        blocks: The statement's blocks.
        lists: Lists and dictionaries whose contents are among them.
    """

    names: Sequence[str]
    read: Callable[[], tuple]
    write: Callable[[tuple], None]
    blocks: Sequence[Callable[..., Any] | None]
    lists: Sequence[Any] = ()

    def symbols(self) -> list[Symbol]:
        return symbols_of(self.names, self.read())

    def watched(self) -> Watched:
        """Returns what the blocks can reach beside the variables."""
        own = [
            cell
            for block in self.blocks
            if isinstance(block, types.FunctionType)
            for name, cell in zip(block.__code__.co_freevars, block.__closure__ or (), strict=True)
            if name in self.names
        ]
        return Watched(self.blocks, (*self.lists, *own))

    def and_contents_of(self, lists: Sequence[Any]) -> Variables:
        """Returns the variables with, before them, what is in lists and dictionaries."""

        def read() -> tuple:
            return (*map(contents, lists), *self.read())

        def write(values: tuple) -> None:
            for container, content in zip(lists, values, strict=False):
                put_back(container, content)
            self.write(values[len(lists) :])

        names = [name_of(container, self.blocks) for container in lists]
        return Variables((*names, *self.names), read, write, self.blocks, (*lists, *self.lists))


#: Whether the thread traces a branch or a loop.
_is_staging = ThreadLocal(False)


def is_staging() -> bool:
    """Whether this thread traces a branch or a loop, in which each block is traced."""
    return _is_staging.value


_Statement = TypeVar("_Statement", bound=Callable[..., None])


def _refusing(statement: _Statement) -> _Statement:
    """Returns a statement whose errors the user's function cannot take for its own."""

    @functools.wraps(statement)
    def staged(*args: Any, **kwargs: Any) -> None:
        try:
            with _is_staging.bound_to(True):
                statement(*args, **kwargs)
        except Exception as error:
            raise Refusal(error) from error

    return cast(_Statement, staged)


@_refusing
def choose(
    condition: Any,
    body: Callable[[], Any],
    orelse: Callable[[], Any],
    variables: Variables,
    num_outputs: int,
) -> None:
    """Runs `body` where the condition holds in the program, else `orelse`.

    Args:
        condition: A truth value of the program.
        body: A block.
        orelse: A block.
        variables: Those that the blocks change.
        num_outputs: The number of them, from the first one, that are used afterwards.

    Raises:
        StagingError: Afterwards a variable would be an array or something else.
    """
    before = variables.read()
    watched = variables.watched()
    changed: list[Any] = []
    ends: list[list[Symbol]] = [[], []]
    forms: list[Form] | None = None

    def branch(number: int) -> Callable[[], list[jax.Array]]:
        def run() -> list[jax.Array]:
            variables.write(before)
            try:
                (orelse, body)[number]()
            finally:
                changed.extend(watched.changed())
            ends[number] = symbols = variables.symbols()[:num_outputs]
            if forms is None:
                return [jnp.asarray(array) for symbol in symbols for array in symbol.arrays]
            return [a for form, s in zip(forms, symbols, strict=True) for a in form.arrays_of(s)]

        return run

    def agree() -> None:
        nonlocal forms
        if not all(len(end) == num_outputs for end in ends):
            return  # the error is one of a branch
        is_first = forms is None
        forms = [_either(*pair, watched) for pair in zip(ends[1], ends[0], strict=True)]
        if changed or (is_first and not all(map(_are_of, forms, *ends))):
            raise _DifferError

    def switched() -> Any:
        # With other functions in each call: JAX remembers the traces of those that it knows.
        return branches.switch(index, [branch(0), branch(1)], agree)

    index = truth(condition)
    try:
        try:
            arrays = switched()
        except _DifferError:
            if not changed:
                arrays = switched()
    except BaseException:
        variables.write(before)
        watched.changed()
        raise
    if changed:
        lists = list({id(each): each for each in changed}.values())
        variables.write(before)
        extended = variables.and_contents_of(lists)
        choose(condition, body, orelse, extended, num_outputs + len(lists))
        return
    assert forms is not None
    rest = iter(arrays)
    after = [
        _kept(one, other, form.value(rest))
        for one, other, form in zip(ends[0], ends[1], forms, strict=True)
    ]
    variables.write((*after, *before[num_outputs:]))


class _DifferError(Exception):
    """Both branches have been traced, and leave different things, or lists that they changed."""


def truth(condition: Any) -> jax.Array:
    """Returns a truth value as a Boolean scalar.

    Raises:
        ValueError: It has more than one element.
    """
    value = jnp.asarray(condition)
    if value.size != 1:
        raise ValueError(
            "The truth value of an array with more than one element is ambiguous. Received: an "
            f"array of shape {value.shape}. Use tf.reduce_any or tf.reduce_all."
        )
    return value.reshape(()).astype(bool)


def _either(one: Symbol, other: Symbol, watched: Watched) -> Form:
    """Returns the form of a variable that one of two branches has set."""
    if one.value is not other.value and (watched.has(one.value) or watched.has(other.value)):
        raise not_staged(
            f"`if` sets {one} to one list or dictionary or to another, which are known by other "
            "names, too. Copy it: list(...), dict(...)."
        )
    if one.is_undefined and other.is_undefined:
        return form_of(one)
    for undefined, defined, place in ((one, other, "if"), (other, one, "else")):
        if undefined.is_undefined:
            if defined.is_returned:
                return form_of(defined)
            raise not_staged(
                f"`if` leaves {defined} undefined in its `{place}` branch, and it is used "
                "afterwards. Set it before the `if`, or in both branches."
            )
    return joined(one, other, ("in the `if` branch", "in the `else` branch"), _ADVICE_IN_BRANCHES)


def _are_of(form: Form, *ends: Symbol) -> bool:
    return all(map(form.fits, ends))


def _kept(one: Symbol, other: Symbol, value: Any) -> Any:
    """Returns `value`, or what both branches have left as one and the same thing."""
    if one.value is other.value:
        return one.value
    if one.structure != other.structure:
        return value
    leaves = [
        a if a is b or (type(a) is type(b) and type(a) in NUMBERS and a == b) else leaf
        for a, b, leaf in zip(one.leaves, other.leaves, jax.tree.leaves(value), strict=True)
    ]
    return jax.tree.unflatten(one.structure, leaves)


@_refusing
def repeat_while(
    held: Any,
    test: Callable[[], Any],
    body: Callable[[], Any],
    variables: Variables,
    maximum_iterations: int | None = None,
) -> None:
    """Repeats `body` for as long as `test()` holds in the program.

    Args:
        held: What `test` has returned the first time.
        test: A truth value of the program. It is called after each round, as Python does.
        body: A block.
        variables: Those that they change.
        maximum_iterations: The maximum number of rounds.

    Raises:
        StagingError: A variable does not keep its form.
    """

    def round_() -> jax.Array:
        body()
        return truth(test())

    loop = _Loop(variables, round_)

    def once(state: tuple[jax.Array, list[jax.Array]]) -> tuple[jax.Array, list[jax.Array]]:
        loop.enter(state[1])
        holds = round_()
        return holds, loop.arrays()

    with loop.restoring():
        state = truth(held), loop.start()
        end = branches.while_loop(lambda state: state[0], once, state, maximum_iterations)
        loop.enter(end[1])


@_refusing
def repeat_over(
    rows: Any, body: Callable[[Any], Any], variables: Variables, *, length: int
) -> None:
    """Calls `body` with the slices of `rows` along the first axis, in the program.

    Args:
        rows: A tree of arrays.
        body: A block.
        variables: Those that it changes.
        length: The number of slices.

    Raises:
        StagingError: A variable does not keep its form.
    """
    if not length:
        return
    example = jax.tree.map(lambda array: array[0], rows)
    loop = _Loop(variables, lambda: body(example), runs=True)

    def once(arrays: list[jax.Array], row: Any) -> tuple[list[jax.Array], tuple]:
        loop.enter(arrays)
        body(row)
        return loop.arrays(), ()

    with loop.restoring():
        loop.enter(branches.scan(once, loop.start(), rows)[0])


class _Loop:
    """The variables of a loop as arrays that it carries from round to round.

    Args:
        variables: The variables.
        round_: Runs a round.
        runs: Whether it runs at least once, so that what it defines is defined after it.
    """

    def __init__(self, variables: Variables, round_: Callable[[], Any], runs: bool = False):
        self._variables = variables
        self._round = round_
        self._runs = runs
        self._before = variables.read()
        self._forms: list[Form] = []

    @contextlib.contextmanager
    def restoring(self) -> Iterator[None]:
        """Context manager that lets the variables be as before if there is an error in it."""
        watched = dataclasses.replace(self._variables, lists=()).watched()
        try:
            yield
        except BaseException:
            self._variables.write(self._before)
            watched.changed()
            raise

    def start(self) -> list[jax.Array]:
        """Finds the forms of the variables; returns the arrays of the first round."""
        before = symbols_of(self._variables.names, self._before)
        self._forms = [form_of(symbol) for symbol in before]
        for _ in range(_WIDENINGS):
            after, lists = self._after_a_round(self._arrays_of(before))
            if lists:
                self._variables.write(self._before)
                self._variables = self._variables.and_contents_of(lists)
                self._before = self._variables.read()
                return self.start()
            forms = [
                self._joined(form, symbol, end)
                for form, symbol, end in zip(self._forms, before, after, strict=True)
            ]
            if forms == self._forms:
                return self._arrays_of(before)
            self._forms = forms
        names = ", ".join(map(str, before))
        raise not_staged(f"loop changes the dtype of a variable in each round: {names}.")

    def _after_a_round(self, arrays: list[jax.Array]) -> tuple[list[Symbol], list[Any]]:
        """Returns the variables after a round, and the lists that it has changed."""
        ends: list[Symbol] = []
        watched = self._variables.watched()
        changed: list[Any] = []

        def once() -> list[Any]:
            self.enter(arrays)
            try:
                self._round()
            finally:
                changed.extend(watched.changed())
            ends[:] = self._variables.symbols()
            return [array for symbol in ends for array in symbol.arrays]

        branches.shapes_of(once)
        return ends, changed

    def _joined(self, form: Form, before: Symbol, end: Symbol) -> Form:
        """Returns the form of a variable that a round leaves as `end`."""
        if before.is_undefined:
            if not (end.is_undefined or end.is_returned or self._runs):
                raise not_staged(
                    f"loop may not run, and {end} is used afterwards. Set it before the loop."
                )
            return form_of(end)
        if _is_unwritten(before) and type(before.value) is type(end.value):
            return form_of(end)
        places = ("before the loop", "after a round of it")
        found = joined(before, end, places, _ADVICE_IN_LOOPS)
        return form if form.fits(end) and form.structure == found.structure else found

    def _arrays_of(self, symbols: Iterable[Symbol]) -> list[jax.Array]:
        pairs = zip(self._forms, symbols, strict=True)
        return [array for form, symbol in pairs for array in form.arrays_of(symbol)]

    def enter(self, arrays: list[jax.Array]) -> None:
        """Lets the variables have the values of `arrays`."""
        rest = iter(arrays)
        self._variables.write(tuple(form.value(rest) for form in self._forms))

    def arrays(self) -> list[jax.Array]:
        """Returns the values of the variables after a round."""
        return self._arrays_of(self._variables.symbols())


def _is_unwritten(symbol: Symbol) -> bool:
    """Whether it is a `TensorArray` (or a class like it) to which nothing has been written."""
    return not symbol.leaves and not isinstance(symbol.value, list | tuple | dict | None)
