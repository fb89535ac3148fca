"""Deferral of signal handlers while state is inconsistent.

A program takes the arrays of variables, XLA overwrites their buffers, and the new arrays are
stored. A signal handler that raises in between (Ctrl-C, an alarm that ends a notebook cell) would
lose the variables' values. Python runs handlers in the main thread, between any two instructions;
inside `signals_held`, they run at the end.

Where the main thread waits for another thread, neither is acceptable: Ctrl-C must end the wait, but
a handler that raises inside `threading.Condition` can leave its lock acquired, and every other
thread then waits forever. `wait_until` and `wait_for_event` deliver signals between two waits.
"""

from __future__ import annotations

import functools
import math
import os
import signal
import threading
import time

# The functions behind `signal.signal` and `signal.getsignal`. Those convert numbers to enumerations
# and take a hundred times as long, and these are called in every step.
from _signal import getsignal as _handler_of  # type: ignore[import-not-found]
from _signal import signal as _set_handler
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

#: Seconds after which a waiting main thread delivers pending signals.
_SECONDS_OF_A_WAIT = 0.05

#: The signals that may have a handler. Real-time signals have none in practice; querying them as
#: well would take twice as long.
_SIGNALS = tuple(
    sorted(
        number
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
        if number < getattr(signal, "SIGRTMIN", signal.NSIG)
    )
)


class SignalsHeld:
    """A context in which no Python signal handler runs.

    Signals that arrive are delivered at the end, to the handlers that were installed before. The
    context is reentrant. In threads other than the main thread, where handlers never run, it does
    nothing. Handlers installed in C and the default actions of signals are not affected.
    """

    def __init__(self) -> None:
        self._depth = 0
        #: The replaced handlers, with their signals.
        self._replaced: list[tuple[int, Any]] = []
        #: The pending signals.
        self._arrived: list[int] = []
        self._known: tuple[Any, ...] = ()
        self._with_handler: list[tuple[int, Any]] = []
        self._note = self._arrived_at  # one object, so that it can be recognized
        self._note_main_thread()
        os.register_at_fork(after_in_child=self._note_main_thread)

    def _note_main_thread(self) -> None:
        self._main_thread = threading.main_thread().ident

    def __enter__(self) -> None:
        if threading.get_ident() != self._main_thread:
            return
        if self._depth:
            self._depth += 1
            return
        try:
            handlers = tuple(map(_handler_of, _SIGNALS))
            if handlers != self._known:
                pairs = zip(_SIGNALS, handlers, strict=True)
                self._with_handler = [
                    (number, handler)
                    for number, handler in pairs
                    if callable(handler) and handler is not self._note
                ]
                self._known = handlers
            for pair in self._with_handler:
                self._replaced.append(pair)
                _set_handler(pair[0], self._note)
        except BaseException:  # raised by a handler that is not replaced yet
            self._release()
            raise
        self._depth = 1

    def __exit__(self, *failure: Any) -> None:
        if threading.get_ident() != self._main_thread:
            return
        self._depth -= 1
        if not self._depth:
            self._release()

    def handlers(self) -> list[Callable[..., Any]]:
        """Returns the handlers of all signals, including those that are held."""
        known = [_handler_of(number) for number in _SIGNALS]
        known += [handler for _, handler in self._replaced]
        return [each for each in known if callable(each) and each is not self._note]

    def _arrived_at(self, number: int, frame: Any) -> None:
        self._arrived.append(number)

    def _release(self) -> None:
        """Restores the handlers, and delivers the pending signals; each handler may raise.

        The loops have no condition at their head: Python 3.13 does not catch what a handler raises
        when such a loop jumps back to it (https://github.com/python/cpython/issues/130279).
        """
        try:
            while True:
                if not self._replaced:
                    break
                _set_handler(*self._replaced[-1])
                self._replaced.pop()
            while True:
                if not self._arrived:
                    break
                signal.raise_signal(self._arrived.pop(0))
        except BaseException:
            self._release()
            raise


#: The context, for whatever a signal handler must not interrupt.
signals_held = SignalsHeld()


def begin_block(begin: Callable[[], None], end: Callable[[], None]) -> None:
    """Calls `begin`, for a `with` statement that is entered only if no signal handler raises.

    Args:
        begin: Is called with signal handlers held.
        end: Undoes it, if it fails or one then raises.
    """
    has_begun = False
    try:
        with signals_held:
            has_begun = True
            begin()
    except BaseException:
        if has_begun:
            end()
        raise


def end_block(end: Callable[[], None]) -> None:
    """Calls `end` with signal handlers held, also where one raises before it is held.

    Args:
        end: Ends a block.
    """
    has_begun = False
    try:
        with signals_held:
            has_begun = True
            end()
    except BaseException:
        if not has_begun:
            end()
        raise


class HeldCall:
    """Holds signal handlers from inside a call until its results have been stored.

    JAX's compiled code calls Python where it does not know its arguments, and a handler could then
    end the call after XLA has overwritten them.
    """

    def __init__(self) -> None:
        self._is_holding = False

    def around(self, function: Callable[..., T]) -> Callable[..., T]:
        """Returns `function`, wrapped so that handlers are held from its first call on."""

        def held(*args: Any, **kwargs: Any) -> T:
            signals_held.__enter__()
            self._is_holding = True
            return function(*args, **kwargs)

        return held

    def release(self) -> None:
        """Delivers the signals that have arrived, if handlers are held."""
        if self._is_holding:
            self._is_holding = False
            signals_held.__exit__()


def without_signals(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `function`, wrapped so that signal handlers are held while it runs."""

    @functools.wraps(function)
    def held(*args: Any, **kwargs: Any) -> Any:
        with signals_held:
            return function(*args, **kwargs)

    return held


def wait_until(
    condition: threading.Condition,
    predicate: Callable[[], Any],
    then: Callable[[], T],
    timeout: float = math.inf,
) -> T:
    """Waits for a predicate, and returns the result of `then`; both run with the lock acquired.

    A signal handler that raises ends the wait. It runs without the lock, before or after `then`.

    Args:
        condition: The condition whose lock guards the predicate. Threads notify it of changes.
        predicate: The condition to wait for.
        then: The function to call once the predicate holds, or the timeout is over.
        timeout: The timeout in seconds.
    """
    last = time.monotonic() + timeout
    while True:
        with signals_held, condition:
            left = max(last - time.monotonic(), 0.0)
            if condition.wait_for(predicate, min(_SECONDS_OF_A_WAIT, left)) or not left:
                return then()


def wait_for_event(event: threading.Event) -> None:
    """Waits for an event. A signal handler that raises ends the wait."""
    is_set = False
    while not is_set:
        with signals_held:
            is_set = event.wait(_SECONDS_OF_A_WAIT)


def is_of_a_signal_handler(error: BaseException) -> bool:
    """Returns whether an error was raised by a Python signal handler, at an arbitrary place.

    Examples:
        >>> is_of_a_signal_handler(KeyboardInterrupt()), is_of_a_signal_handler(ValueError())
        (True, False)
    """
    if isinstance(error, KeyboardInterrupt):
        return True
    codes = [_code_of(handler) for handler in signals_held.handlers()]
    traceback = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code in codes:
            return True
        traceback = traceback.tb_next
    return False


def _code_of(handler: Any) -> Any:
    """Returns the code of a handler: a function, a method, or a callable object."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    return getattr(handler, "__code__", None) or getattr(handler.__call__, "__code__", None)
