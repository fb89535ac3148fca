"""The line of `launch(progress=True)`, in terminals and notebooks."""

import io
import sys
import types

import pytest

from unison.monitoring import progress
from unison.monitoring.launcher import Monitored
from unison.monitoring.progress import ProgressLine
from unison.runtime import launch


class Tty(io.StringIO):
    def isatty(self):
        return True


def stderr_is(stream, monkeypatch):
    # pytest sets that of `sys` anew between the fixtures and the test.
    seen = types.SimpleNamespace(stderr=stream, modules=sys.modules)
    monkeypatch.setattr(progress, "sys", seen)


@pytest.fixture
def terminal(monkeypatch):
    stream = Tty()
    stderr_is(stream, monkeypatch)
    monkeypatch.setattr(progress, "_EVERY", 0.01)
    monkeypatch.setenv("COLUMNS", "20")
    return stream


def shown_on(stream):
    """The lines that are to be seen, one after the other."""
    return [line for line in stream.getvalue().split(progress._CLEAR) if line]


def test_the_line_is_kept_up_to_date_and_leaves_the_terminal_clean(terminal):
    steps = iter(range(1000))
    with ProgressLine(lambda: f"step {next(steps)}"):
        while len(shown_on(terminal)) < 4:
            pass
    assert shown_on(terminal)[:4] == ["step 0", "step 1", "step 2", "step 3"]
    assert terminal.getvalue().endswith(progress._CLEAR)


def test_a_line_is_as_wide_as_the_terminal(terminal):
    with ProgressLine(lambda: 30 * "x"):
        pass
    assert shown_on(terminal)[0] == 19 * "x"


def test_workers_print_above_the_line(terminal):
    with ProgressLine(lambda: "step 1") as line:
        line.above(lambda worker, text: terminal.write(f"[{worker}] {text}\n"))(0, "hello")
        while terminal.getvalue().count("step 1") < 3:
            pass
    shown = shown_on(terminal)
    assert shown[shown.index("[0] hello\n") + 1] == "step 1"


def test_nothing_is_shown_in_a_file(monkeypatch):
    stream = io.StringIO()
    stderr_is(stream, monkeypatch)
    printed = []
    with ProgressLine(lambda: "step 1") as line:
        line.above(lambda *given: printed.append(given))(0, "hello")
    assert (stream.getvalue(), printed) == ("", [(0, "hello")])


def test_a_notebook_has_an_output_of_its_cell(monkeypatch):
    shown = []

    class Handle:
        def update(self, bundle, raw):
            shown.append(("update", bundle, raw))

    def display(bundle, raw, display_id):
        shown.append(("display", bundle, raw))
        return Handle()

    ipython = types.ModuleType("IPython")
    ipython.get_ipython = lambda: types.SimpleNamespace(kernel=object())
    ipython.display = types.ModuleType("IPython.display")
    ipython.display.display = display
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", ipython.display)
    with ProgressLine(lambda: "step 1"):
        pass
    bundle = {"text/plain": "step 1"}
    assert shown == [("display", bundle, True), ("update", bundle, True)]


def test_a_job_says_how_far_it_is_and_is_not_published_for_that(terminal):
    with Monitored("train", "workers", ["worker 0"], False, has_progress=True) as monitored:
        assert monitored.is_watched
        assert monitored._collector is None
        with monitored.progress():
            pass
    assert shown_on(terminal)[0] == "0 of 1 workers run,"


def test_workers_of_a_function_report_their_steps(terminal, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")

    def train():
        import time

        import unison

        for step in range(30):
            unison.monitoring.report(loss=0.5, step=step + 1)
            time.sleep(0.05)
        print("done")

    printed = []
    launch(
        train, workers=1, timeout=60, on_line=lambda *given: printed.append(given), progress=True
    )
    assert printed == [(0, "done")]
    assert any("1 of 1 workers run" in line and "loss 0.5" in line for line in shown_on(terminal))
