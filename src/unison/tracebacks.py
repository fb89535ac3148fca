"""Tracebacks that show the user's frames, and not those of Unison, JAX and Keras.

An error that leaves the package passes through a public function decorated with `filter_traceback`,
which removes the frames of libraries from its traceback, as Keras and JAX do in theirs. What
remains is the path through the user's code to the line that failed, including functions that a
library called. An error that a library raised because of another one counts as one failure: it
keeps the other one as its `__context__`, and Python prints only the last one. Contexts that a
signal handler has left open are ended there, too, as their frames are found in the traceback.

`UNISON_LOG=debug` leaves tracebacks as they are, and so does JAX's `JAX_TRACEBACK_FILTERING=off`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import sysconfig
import traceback
import types
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any, TypeVar

import jax

_logger = logging.getLogger("unison")

_Function = TypeVar("_Function", bound=Callable[..., Any])

#: The packages whose frames are hidden. A package that has not been imported has no frames.
_LIBRARIES = ("unison", "jax", "jaxlib", "keras")

#: Frames of Python's own modules are hidden between those of the libraries (`contextlib`,
#: `functools`), and shown where the user's code calls them (`json`).
_STANDARD_LIBRARY = sysconfig.get_path("stdlib") + os.sep
_SITE_PACKAGES = tuple({sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib")})

#: The frames in which a generator may have stopped at its `yield` for good, or a stack at its end.
_ENDS = (
    contextlib._GeneratorContextManager.__enter__.__code__,
    contextlib._GeneratorContextManager.__exit__.__code__,
    contextlib.ExitStack.__exit__.__code__,
)

#: End what else a signal handler can leave open; called when an error leaves a public function.
more_ends: list[Callable[[], object]] = []

#: The beginning of the note that JAX adds to an error whose traceback it has filtered.
_NOTE_OF_JAX = "--------------------\nFor simplicity, JAX has removed its internal frames"

#: The note that replaces it.
NOTE = "(Frames of Unison, JAX and Keras are hidden. UNISON_LOG=debug shows them.)"


def is_filtering() -> bool:
    """Whether the frames of libraries are removed from tracebacks.

    They are unless the logger "unison" shows messages of the level DEBUG (`UNISON_LOG=debug`), or
    JAX's own filtering is off (`JAX_TRACEBACK_FILTERING=off`,
    `tf.debugging.disable_traceback_filtering()`).
    """
    is_off = jax.config.values["jax_traceback_filtering"] == "off"
    return not is_off and not _logger.isEnabledFor(logging.DEBUG)


def filter_traceback(function: _Function) -> _Function:
    """Returns `function`, wrapped to remove the frames of libraries from its errors' tracebacks.

    For public functions and methods that users call. If there is no error, its only cost is one
    call.

    Examples:
        >>> @filter_traceback
        ... def fails():
        ...     raise ValueError("no")
        >>> try:
        ...     fails()
        ... except ValueError as error:
        ...     print(error)
        no
    """

    @functools.wraps(function)
    def entered(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except StopIteration:  # which ends every iteration over a dataset
            raise
        except BaseException as error:
            end_contexts(error)
            shorten(error)
            # Not `raise error`, which would add this frame again.
            raise

    return entered  # type: ignore[return-value]


def end_contexts(error: BaseException) -> None:
    """Ends the context managers that a signal handler interrupted as they had begun or were to end.

    A handler can raise at the first instruction of the `__exit__` of a generator's context manager,
    and at the last but one of its `__enter__`. What follows the generator's `yield` would run when
    the error is deleted; a notebook keeps it.
    """
    for each in _chain(error):
        for trace in _walk(each.__traceback__):
            frame = trace.tb_frame
            if frame.f_code not in _ENDS or _is_running(frame):
                continue
            manager = frame.f_locals["self"]
            if isinstance(manager, contextlib.ExitStack):
                manager.close()
            else:
                manager.gen.close()  # does nothing if the generator has ended
    for end in more_ends:
        end()


def _is_running(frame: FrameType) -> bool:
    """Whether this thread is in a frame, whose error was caught there."""
    caller: FrameType | None = sys._getframe(1)
    while caller is not None and caller is not frame:
        caller = caller.f_back
    return caller is not None


def is_running(folder: str) -> bool:
    """Whether this thread runs a function whose file is in `folder`, a path with a separator."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith(folder):
        frame = frame.f_back
    return frame is not None


def shorten(error: BaseException) -> None:
    """Removes the frames of libraries from the tracebacks of `error` and of the errors behind it.

    Does nothing if `is_filtering()` is False.
    """
    if not is_filtering():
        return
    known: set[int] = set()
    remaining: BaseException | None = error
    while remaining is not None and id(remaining) not in known:
        known.add(id(remaining))
        _shorten(remaining)
        hidden = remaining.__suppress_context__
        remaining = remaining.__cause__ or (None if hidden else remaining.__context__)


def show_instead(cause: BaseException, error: BaseException) -> None:
    """Makes Python show `cause`, which was not raised, instead of the resulting `error`."""
    cause.__traceback__ = error.__traceback__
    cause.__context__ = error
    cause.__cause__ = None if is_filtering() else error


def user_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Returns the frames of the traceback of `error` outside the libraries, outermost first.

    Examples:
        >>> try:
        ...     jax.numpy.ones(2) @ jax.numpy.ones(3)
        ... except TypeError as error:
        ...     [frame.name for frame in user_frames(error)]
        ['<module>']
    """
    shown = _filtered(_Frames(error.__traceback__))
    return [] if shown is None else list(traceback.extract_tb(shown))


def users_line() -> str:
    """Returns the user's line that is calling a library: file, line and function; "" if none."""
    stack = list(traceback.walk_stack(None))
    for (frame, line), hidden in zip(stack, _are_hidden([f for f, _ in stack]), strict=True):
        if not hidden:
            return f"{frame.f_code.co_filename}, line {line}, in {frame.f_code.co_name}"
    return ""


def own_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Returns those of `user_frames` that do not belong to an installed package either."""
    return [
        frame
        for frame in user_frames(error)
        if not frame.filename.startswith(_SITE_PACKAGES)
        and not _is_standard_library(frame.filename)
    ]


def last_user_frame(trace: TracebackType | None) -> TracebackType | None:
    """Returns a traceback of the innermost frame of `trace` outside the libraries."""
    frames = _Frames(trace)
    for each, is_hidden in zip(reversed(frames.traces), reversed(frames.are_hidden), strict=True):
        if not is_hidden:
            return TracebackType(None, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return None


class _Frames:
    """The frames of a traceback, outermost first, and which of them belong to libraries."""

    def __init__(self, trace: TracebackType | None):
        self.traces = list(_walk(trace))
        self.are_hidden = _are_hidden([each.tb_frame for each in self.traces])

    @property
    def end_in_a_library(self) -> bool:
        """Whether a library raised the error."""
        return bool(self.are_hidden) and self.are_hidden[-1]


def _shorten(error: BaseException) -> None:
    frames = _Frames(error.__traceback__)
    trace = _filtered(frames)
    if frames.end_in_a_library and (error.__cause__ is not None or not error.__suppress_context__):
        # The library's error explains the other one: show it at the place where that one was
        # raised.
        led = error.__cause__ or error.__context__
        if led is not None:
            trace = _filtered(_continued(frames, led))
            error.__cause__ = None  # which also suppresses the context
            error.__context__ = led
    error.__traceback__ = trace
    notes: list[str] = getattr(error, "__notes__", [])
    notes[:] = [NOTE if note.startswith(_NOTE_OF_JAX) else note for note in notes]
    while notes.count(NOTE) > 1:
        notes.remove(NOTE)


def _continued(frames: _Frames, led: BaseException) -> _Frames:
    """Returns the frames down to where `led`, which was caught in one of them, was raised."""
    began = None if led.__traceback__ is None else led.__traceback__.tb_frame
    for index, trace in enumerate(frames.traces):
        if trace.tb_frame is began:
            whole = _Frames(None)
            whole.traces = [*frames.traces[:index], *_walk(led.__traceback__)]
            whole.are_hidden = _are_hidden([each.tb_frame for each in whole.traces])
            return whole
    return frames


def _filtered(frames: _Frames) -> TracebackType | None:
    shown: TracebackType | None = None
    for trace, is_hidden in zip(reversed(frames.traces), reversed(frames.are_hidden), strict=True):
        if not is_hidden:
            shown = TracebackType(shown, trace.tb_frame, trace.tb_lasti, trace.tb_lineno)
    return shown


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Returns an error, the one that led to it, and so on."""
    known: set[int] = set()
    remaining: BaseException | None = error
    while remaining is not None and id(remaining) not in known:
        known.add(id(remaining))
        yield remaining
        remaining = remaining.__cause__ or remaining.__context__


def _walk(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _are_hidden(frames: list[FrameType]) -> list[bool]:
    folders = _folders_of_libraries()
    names = [_file_of(frame) for frame in frames]
    hidden = [name.startswith(folders) for name in names]
    for order in (range(len(names)), reversed(range(len(names)))):
        beside = False
        for index in order:
            hidden[index] = hidden[index] or (beside and _is_standard_library(names[index]))
            beside = hidden[index]
    return hidden


def _file_of(frame: FrameType) -> str:
    """Returns the file of the code of a frame; for what `exec` made of a string without a name (as
    `dataclass` makes its methods), the file of its module.
    """
    name = frame.f_code.co_filename
    return (frame.f_globals.get("__file__") or name) if name == "<string>" else name


def _is_standard_library(name: str) -> bool:
    return name.startswith((_STANDARD_LIBRARY, "<frozen ")) and not name.startswith(_SITE_PACKAGES)


def _folders_of_libraries() -> tuple[str, ...]:
    files = [getattr(sys.modules.get(name), "__file__", None) for name in _LIBRARIES]
    return tuple(os.path.dirname(file) + os.sep for file in files if file)
