"""A line about how far a job is, below the output of its workers: in a terminal or a notebook."""

from __future__ import annotations

import importlib
import shutil
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol, Self

#: Seconds between two updates.
_EVERY = 0.5

#: ANSI's sequence that deletes the line of the cursor.
_CLEAR = "\r\x1b[2K"


def workers_running(state: Mapping[str, Any]) -> str:
    """Returns how many of a job's workers run, from its state, that of `WatchedJob.as_dict`.

    Examples:
        >>> workers_running({"workers": [{"state": "running"}, {"state": "lost"}]})
        '1 of 2 workers run'
    """
    running = sum(worker["state"] == "running" for worker in state["workers"])
    return f"{running} of {len(state['workers'])} workers run"


def facts_of(state: Mapping[str, Any]) -> list[str]:
    """Returns descriptions of a job's overall state, that of `WatchedJob.as_dict`.

    Examples:
        >>> known = {"steps_per_second": 21.04, "examples_per_second": 5390, "loss": 0.0612}
        >>> facts_of({"step": 640, "recoveries": 0, **known})
        ['step 640', '21 steps/s', '5,390 examples/s', 'loss 0.0612']
    """
    facts = [f"step {state['step']}"]
    if state["steps_per_second"] is not None:
        facts.append(f"{state['steps_per_second']:.3g} steps/s")
    if state["examples_per_second"] is not None:
        facts.append(f"{state['examples_per_second']:,.0f} examples/s")
    if state["loss"] is not None:
        facts.append(f"loss {state['loss']:.4g}")
    if state["recoveries"]:
        facts.append(
            f"recovered {state['recoveries']} times, last in {state['last_recovery_seconds']:.2f} s"
        )
    return facts


class _Place(Protocol):
    """The place where the line is shown."""

    def show(self, line: str) -> None:
        """Replaces the line."""

    def clear(self) -> None:
        """Makes room for other output."""


class ProgressLine:
    """A line that is kept up to date while it is entered, as a context manager.

    In a notebook, it is an output of the cell; in a terminal, the last line. Elsewhere, nothing is
    shown.

    Args:
        describe: Returns the line; called in any thread.
    """

    def __init__(self, describe: Callable[[], str]):
        self._describe = describe
        self._place: _Place | None = None
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._update, name="unison progress", daemon=True)

    def __enter__(self) -> Self:
        self._place = _place()
        if self._place is not None:
            self._show()
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._place is not None:
            self._is_over.set()
            self._thread.join()
            self._show()
            self._place.clear()

    def above(self, on_line: Callable[[int, str], None]) -> Callable[[int, str], None]:
        """Returns a function of a worker and a line, whose output is above this one."""

        def show(worker: int, line: str) -> None:
            with self._lock:
                if self._place is not None:
                    self._place.clear()
                on_line(worker, line)

        return show

    def _update(self) -> None:
        while not self._is_over.wait(_EVERY):
            self._show()

    def _show(self) -> None:
        with self._lock:
            assert self._place is not None
            self._place.show(self._describe())


class _Terminal:
    """The last line of a terminal."""

    def show(self, line: str) -> None:
        width = shutil.get_terminal_size().columns
        print(f"{_CLEAR}{line[: width - 1]}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        print(_CLEAR, end="", file=sys.stderr, flush=True)


class _Cell:
    """An output of a notebook's cell."""

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, line: str) -> None:
        bundle = {"text/plain": line}
        if self._handle is None:
            display: Any = importlib.import_module("IPython.display")
            self._handle = display.display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)

    def clear(self) -> None:
        """Does nothing: other output has a place of its own."""


def _place() -> _Place | None:
    ipython = sys.modules.get("IPython")
    if ipython is not None and hasattr(ipython.get_ipython(), "kernel"):
        return _Cell()
    return _Terminal() if sys.stderr.isatty() else None
