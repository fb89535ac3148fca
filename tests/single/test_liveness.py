"""What a worker concludes from what others say and do not say; and how it is said."""

import contextlib
import gc
import os
import signal
import socket
import sys
import threading
import time
import warnings
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from unison.errors import DeadlineExceededError, InvalidArgumentError, UnavailableError
from unison.net.lines import Line
from unison.runtime import liveness, process_group
from unison.runtime.exit_codes import LOST_ANOTHER
from unison.runtime.liveness.failure_detector import Finding, Late, Operation, Watch
from unison.runtime.liveness.sockets import listening, shut_down
from unison.runtime.liveness.star import Star
from unison.runtime.liveness.stragglers import Stragglers, where_the_program_is

NAMES = ["worker 0 (a:1)", "worker 1 (b:1)", "worker 2 (c:1)"]
STEP = Operation("run of step", "inputs float32[2]")
GATHER = Operation("gather")


def watch(own=0, limit=10.0):
    return Watch(NAMES, own, limit, now=0.0)


def beat(count, seconds=0.0, operation=STEP):
    doing = f"operation {count} ({operation.name})"
    return {
        "is": "beat",
        "count": count,
        "mark": operation.mark,
        "doing": doing,
        "seconds": seconds,
    }


def left(count, operation=STEP):
    return {"is": "left", "count": count, "mark": operation.mark}


def every_second(watched, until, count, beats):
    """What `watched` finds in the end: workers say what they do every second, by their index."""
    finding = None
    for second in range(1, until + 1):
        for worker, said in beats.items():
            watched.hear(worker, beat(said, seconds=float(second)), float(second))
        finding = finding or watched.look(count, "operation 5 (run of step)", float(second))
    return finding


def test_a_connection_that_closes_without_a_word_is_a_death():
    watched = watch()
    watched.hear(1, beat(3), 1.0)
    error = watched.hear(1, None, 2.0).error(NAMES, 0, "operation 4 (run of step)")
    assert isinstance(error, UnavailableError)
    assert error.message.startswith("worker 1 (b:1) has died")
    assert "Last reported: operation 3 (run of step), for 1.0 s." in error.message
    assert error.message.endswith("worker 0 (a:1), is in operation 4 (run of step).")


def test_a_connection_that_closes_after_a_goodbye_is_none():
    watched = watch()
    assert watched.hear(1, left(4), 1.0) is None
    assert watched.hear(1, None, 2.0) is None
    assert watched.look(4, "", 3.0) is None


def test_one_that_left_is_to_blame_once_this_worker_is_further():
    watched = watch()
    watched.hear(1, left(4), 1.0)
    finding = watched.look(5, "operation 5 (run of step)", 2.0)
    assert (finding.kind, finding.worker) == ("left", 1)
    assert "has left after 4 operations" in finding.about


def test_the_one_furthest_behind_is_stuck_after_the_limit():
    finding = every_second(watch(), 20, count=5, beats={1: 4, 2: 3})
    assert (finding.kind, finding.worker) == ("stuck", 2)
    assert isinstance(finding.error(NAMES, 0, ""), DeadlineExceededError)


def test_nobody_is_stuck_while_all_are_at_the_same_operation():
    assert every_second(watch(), 100, count=5, beats={1: 5, 2: 5}) is None


def test_one_that_comes_on_slowly_is_not_stuck():
    watched = watch()
    for second in range(1, 60):
        for worker in (1, 2):
            watched.hear(worker, beat(second // 8), float(second))
        assert watched.look(50, "", float(second)) is None


def looked(stragglers, until, late, is_first=True, pace=1.0):
    """Looks once a second, at workers that are late since second 10."""
    for second in range(until + 1):
        each = late if second > 10 else []
        stragglers.look(int(min(second, 10) / pace), each, is_first, float(second))


def test_one_that_is_late_is_asked_where_it_is_after_some_times_the_usual():
    said = []
    late = [Late(2, 9, 10.0, "operation 9 (run of step)")]
    looked(Stragglers(NAMES, said.append), 20, late)
    assert said == []  # an operation takes a second here
    looked(Stragglers(NAMES, said.append), 16, late, pace=0.1)
    assert said == [{"is": "where", "worker": 2}]
    looked(Stragglers(NAMES, said.append), 30, late, is_first=False)
    assert len(said) == 1  # another one asks


def test_one_that_is_late_is_reported_once_with_its_stack(caplog):
    caplog.set_level("INFO", "unison")
    stragglers = Stragglers(NAMES, lambda message: None)
    late = [Late(2, 9, 10.0, "operation 9 (run of step)")]
    looked(stragglers, 16, late, pace=0.1)
    stragglers.hear(2, where_the_program_is(), 17.0)
    stragglers.hear(2, where_the_program_is(), 18.0)
    stragglers.look(100, late, True, 18.0)
    (report,) = caplog.messages
    assert report.startswith(
        "worker 2 (c:1) has kept the others waiting for 7.0 s (an operation usually takes: 0.1 s). "
        "Last reported: operation 9 (run of step)."
    )
    assert "in test_one_that_is_late_is_reported_once_with_its_stack" in report
    stragglers.look(101, [], True, 20.0)
    assert caplog.messages[1:] == ["worker 2 (c:1) has resumed after 10.0 s"]


def test_one_that_is_late_and_does_not_answer_is_reported_as_stopped(caplog):
    looked(Stragglers(NAMES, lambda message: None), 20, [Late(1, 9, 10.0, "sleep")], pace=0.1)
    (report,) = caplog.messages
    assert report.endswith("Last reported: sleep.\nIt has not sent its stack: it is stopped.")


def test_one_that_says_nothing_is_silent_after_the_limit():
    finding = every_second(watch(), 20, count=5, beats={1: 5})
    assert (finding.kind, finding.worker) == ("silent", 2)


def test_where_the_first_is_silent_it_is_to_blame_for_the_silence_of_all():
    finding = every_second(watch(own=1), 20, count=5, beats={})
    assert (finding.kind, finding.worker) == ("silent", 0)


def test_a_worker_that_was_behind_is_not_blamed_once_the_first_relays_nothing():
    watched = watch(own=1)
    for second in range(1, 7):
        watched.hear(0, beat(5), float(second))
        watched.hear(2, beat(4), float(second))
        assert watched.look(5, "", float(second)) is None
    found = [(second, watched.look(5, "", float(second))) for second in range(7, 20)]
    second, finding = next(each for each in found if each[1] is not None)
    assert (second, finding.kind, finding.worker) == (17, "silent", 0)


def test_a_worker_that_was_stopped_itself_does_not_blame_others():
    watched = watch()
    every_second(watched, 5, count=5, beats={1: 5, 2: 5})
    assert watched.look(5, "", 100.0) is None
    assert watched.look(5, "", 101.0) is None


def test_a_worker_that_was_stopped_itself_finds_who_is_silent_from_then_on():
    watched = watch()
    every_second(watched, 5, count=5, beats={1: 5, 2: 5})
    watched.hear(2, beat(5), 100.0)  # it had been sent before
    for second in range(100, 111):
        watched.hear(1, beat(5), float(second))
        assert watched.look(5, "", float(second)) is None
    finding = watched.look(5, "", 111.0)
    assert (finding.kind, finding.worker) == ("silent", 2)


@pytest.mark.parametrize("said_in", ["a question", "a beat"])
def test_another_operation_under_the_same_number_is_another_program(said_in):
    watched = watch()
    other = Operation("run of step", "inputs float32[3]")
    if said_in == "a question":
        watched.hear(2, {"is": "operation", "number": 5, "text": str(other)}, 1.0)
        finding = watched.compare(5, STEP)
    else:
        watched.hear(2, beat(5, operation=other), 1.0)
        finding = watched.compare_latest({5: STEP}.get)
    error = finding.error(NAMES, 1, "operation 5")
    assert isinstance(error, InvalidArgumentError)
    assert "worker 2 (c:1) runs a different program than worker 0 (a:1)" in error.message


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"is": 7},
        {"is": "nothing"},
        {"is": "beat"},
        {"is": "beat", "count": "3", "mark": "", "doing": "", "seconds": 0.0},
        {"is": "left", "count": 3},
        {"is": "failed", "error": None},
        {"is": "operation", "number": 1.5, "text": ""},
        {"is": "finding", "kind": "died", "worker": 99, "by": 0, "about": ""},
        {"is": "where", "worker": -1},
        {"is": "stack"},
    ],
    ids=str,
)
def test_a_worker_that_sends_what_is_no_message_has_failed(message):
    finding = watch().hear(1, message, 1.0)
    assert (finding.kind, finding.worker) == ("failed", 1)
    assert "has sent an invalid message" in finding.about


def test_the_same_operation_is_no_other_program():
    watched = watch()
    watched.hear(1, beat(5), 1.0)
    watched.hear(2, {"is": "operation", "number": 5, "text": str(STEP)}, 1.0)
    assert watched.compare_latest({5: STEP}.get) is None
    assert watched.compare(5, STEP) is None
    assert watched.unheard_of(5) == [1]


def test_the_last_operation_of_one_that_left_is_compared_and_not_the_one_of_its_last_beat():
    watched = watch()
    watched.hear(1, beat(1), 1.0)
    watched.hear(1, left(2, GATHER), 1.1)
    assert watched.compare_latest({1: STEP, 2: GATHER}.get) is None
    watched.hear(2, left(2, STEP), 1.2)
    finding = watched.compare_latest({1: STEP, 2: GATHER}.get)
    assert (finding.kind, finding.worker) == ("differs", 2)


def test_what_a_worker_said_is_compared_once_when_this_one_has_come_so_far():
    watched = watch()
    own = {1: STEP}
    asked = []

    def operation_of(number):
        asked.append(number)
        return own.get(number)

    watched.hear(1, beat(1), 1.0)
    watched.hear(2, beat(2), 1.0)
    assert watched.compare_latest(operation_of) is None
    assert sorted(asked) == [1, 2]
    own[2] = GATHER
    asked.clear()
    assert watched.compare_latest(operation_of).worker == 2
    assert watched.compare_latest(operation_of) is None
    assert asked == [2]


@pytest.mark.parametrize("has_gone", [False, True])
def test_others_are_not_to_blame_for_silence_once_the_first_has_left(has_gone):
    watched = watch(own=1)
    watched.hear(2, beat(4), 1.0)
    watched.hear(0, left(5), 1.0)
    if has_gone:
        assert watched.hear(0, None, 1.5) is None
    for second in range(2, 60):
        assert watched.look(5, "the end", float(second)) is None
    assert watched.look(6, "operation 6", 60.0).kind == "left"


def star_of_three():
    (one, other), (third, fourth) = lines(), lines()
    first = Star(0, {1: one, 2: third})
    return [first, Star(1, {0: other}), Star(2, {0: fourth})]


def lines():
    """The two ends of a connection."""
    return [Line(end, most_waiting=None) for end in socket.socketpair()]


def hear(listener, others=(), count=1):
    """What one hears, while the others pass on what is said."""
    heard = []
    for _ in range(100):
        for other in others:
            other.hear(0.01)
        heard += listener.hear(0.01)
        if len(heard) >= count:
            break
    return heard


def test_what_one_says_reaches_all_through_the_first():
    first, second, third = star_of_three()
    second.say({"is": "beat"})
    second.hear(0.01)
    assert hear(first) == [(1, {"is": "beat", "from": 1})]
    assert hear(third, [first]) == [(1, {"is": "beat", "from": 1})]
    for star in (first, second, third):
        star.close()


def test_a_report_is_for_the_first_only():
    first, second, third = star_of_three()
    second.say({"is": "report"})
    second.say({"is": "beat"})
    second.hear(0.01)
    assert [message["is"] for _, message in hear(first, count=2)] == ["report", "beat"]
    assert [message["is"] for _, message in hear(third, [first])] == ["beat"]
    for star in (first, second, third):
        star.close()


def test_the_end_of_one_is_heard_by_all_after_its_last_word():
    first, second, third = star_of_three()
    second.say({"is": "left"})
    second.close()
    assert hear(first, count=2) == [(1, {"is": "left", "from": 1}), (1, None)]
    said = [message["is"] for _, message in hear(third, [first], count=2)]
    assert said == ["left", "gone"]
    first.close()
    assert hear(third) == [(0, None)]
    third.close()


def test_nobody_speaks_for_another_one():
    first, second, third = star_of_three()
    second._lines[0].stream.send(b'{"is": "left", "from": 2}\n')
    assert hear(first) == [(1, {"is": "left", "from": 1})]
    for star in (first, second, third):
        star.close()


def test_a_line_that_is_no_message_ends_the_connection():
    first, second, third = star_of_three()
    second._lines[0].stream.send(b"GET / HTTP/1.1\n\n")
    assert hear(first) == [(1, None)]
    assert first.connected == [2]
    for star in (first, second, third):
        star.close()


def test_connections_of_a_listener_are_shut_down_and_no_others():
    before = listening()
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_server(("127.0.0.1", 0)) as other,
        socket.create_connection(server.getsockname()) as client,
        socket.create_connection(other.getsockname()) as unrelated,
    ):
        assert listening() - before == {server.getsockname(), other.getsockname()}
        accepted, _ = server.accept()
        received = []
        waiting = threading.Thread(target=lambda: received.append(accepted.recv(1)), daemon=True)
        waiting.start()
        assert shut_down([server.getsockname()]) == 2
        waiting.join(10)
        assert received == [b""]
        assert client.recv(1) == b""
        unrelated.send(b"!")
        accepted.close()


def test_sockets_of_the_machine_alone_are_neither_found_nor_shut_down(tmp_path):
    before = listening()
    with socket.socket(socket.AF_UNIX) as local, socket.socket(socket.AF_UNIX) as client:
        local.bind(str(tmp_path / "socket"))
        local.listen()
        assert listening() == before
        client.connect(str(tmp_path / "socket"))
        accepted, _ = local.accept()
        with accepted:
            assert shut_down([("", 0)]) == 0
            client.sendall(b"!")
            assert accepted.recv(1) == b"!"


def test_a_star_that_is_closed_keeps_nothing_open_and_is_forgotten():
    stars = star_of_three()
    own = [(star._selector, star._waker) for star in stars]
    forgotten = [weakref.ref(star) for star in stars]
    for star in stars:
        star.close()
        star.say({"is": "beat"})
        assert star.hear(1.0) == []
    for selector, waker in own:
        assert waker.fileno() == -1
        assert selector.get_map() is None
    del star, stars
    gc.collect()
    assert [reference() for reference in forgotten] == [None] * 3


@contextlib.contextmanager
def job(own=0, others=None):
    """Inside, this process watches a job: alone, or with `others`."""
    count = 1 + len(others or {})
    try:
        yield liveness.start(NAMES[:count], own, others or {}, 10.0)
    finally:
        liveness.stop()


class Output:
    """Stands for an array that is still being computed."""

    def __init__(self):
        self.has_been_waited_for = False

    def is_deleted(self):
        return False

    def is_ready(self):
        return False

    def block_until_ready(self):
        self.has_been_waited_for = True


class Program:
    """Stands for a program whose outputs, a large and a small one, are still being computed."""

    def __init__(self):
        mesh = Mesh(np.array(jax.devices()[:2]), ("replica",))
        spec = PartitionSpec("replica")
        function = jax.shard_map(self.function, mesh=mesh, in_specs=spec, out_specs=spec)
        self.trace = jax.jit(function).trace
        self.outputs = [Output(), Output()]

    @staticmethod
    def function(x):
        return [jnp.tile(x, 3), x + jax.lax.psum(x, "replica")]

    def __call__(self, x):
        return self.outputs


def test_a_program_that_ran_once_is_waited_for_by_its_smallest_output():
    program = Program()
    with job() as watching:
        liveness.watched(program, "the last program")(jnp.ones(4))
        assert watching._is_stuck()
    assert [output.has_been_waited_for for output in program.outputs] == [False, True]


def test_a_handler_that_raises_ends_the_comparison_of_an_operation(monkeypatch):
    looks = []

    def look(number):
        signal.raise_signal(signal.SIGUSR1)
        looks.append(number)
        return [1]

    def stop(number, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, stop)
    one, other = lines()
    try:
        with job(others={1: one}) as watching:
            monkeypatch.setattr(watching._watch, "unheard_of", look)
            with pytest.raises(KeyboardInterrupt):
                watching.begin(STEP, is_new=True)
            assert looks  # it was not interrupted where the lock of the monitor is acquired
            other.close()
    finally:
        signal.signal(signal.SIGUSR1, before)


class Closed:
    """A stream that takes nothing, as a pipe that nobody reads."""

    def write(self, text):
        raise BrokenPipeError

    flush = write


@pytest.fixture
def exits(monkeypatch):
    """Where the codes are noted by which the process would have ended."""
    codes = []
    monkeypatch.setattr(os, "_exit", codes.append)
    return codes


def lose(watching):
    watching._declare(Finding("died", 0, 0, "has died"))


@pytest.mark.parametrize("closed", [(), ("stdout",), ("stdout", "stderr")])
def test_the_process_ends_by_a_failure_wherever_its_output_goes(exits, closed, monkeypatch, capsys):
    with job() as watching:
        lose(watching)
        for stream in closed:
            monkeypatch.setattr(sys, stream, Closed())
        watching._die()
        monkeypatch.undo()
        assert exits == [LOST_ANOTHER]
        assert ("has died" in capsys.readouterr().err) == ("stderr" not in closed)


def test_a_callback_that_raises_keeps_nothing_from_being_released(caplog):
    told = []

    def raising(error):
        raise ValueError("a callback is unwell")

    with (
        job() as watching,
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
    ):
        watching.release_at([server.getsockname()])
        for callback in (raising, told.append):
            liveness.on_failure(callback)
        lose(watching)
        assert client.recv(1) == b""
        assert told == [liveness.failure()]
        assert "a callback is unwell" in caplog.text


def uncaught(error, monkeypatch, fails=False):
    """What an error that nobody catches shows: the errors that the hook before ours has seen."""
    shown = []

    def show(kind, error, traceback):
        shown.append(error)
        if fails:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "excepthook", show)
    before = sys.excepthook
    process_group._tell_of_errors()
    process_group._tell_of_errors()  # as when another job is joined
    try:
        sys.excepthook(type(error), error, None)
    finally:
        process_group._stop_telling_of_errors()
    assert sys.excepthook is before
    return shown


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(("error", "code"), [(ValueError("unwell"), 1), (KeyboardInterrupt(), 130)])
def test_an_error_that_nobody_catches_is_shown_once_and_ends_the_process(
    error, code, fails, exits, monkeypatch
):
    here, there = socket.socketpair()
    with there, job(others={1: Line(here)}):
        assert uncaught(error, monkeypatch, fails) == [error]
        assert exits == [code]
        there.settimeout(30)
        said = b""
        while received := there.recv(1 << 16):
            said += received
        assert f'"failed", "error": "{type(error).__name__}'.encode() in said


def test_the_failure_of_another_that_nobody_catches_has_its_own_exit_code(exits, monkeypatch):
    with job() as watching:
        lose(watching)
        cause = watching.noticed()
        monkeypatch.setattr(sys, "stderr", Closed())
        monkeypatch.setattr(sys, "stdout", Closed())
        assert uncaught(cause, monkeypatch) == [cause]
        assert exits == [LOST_ANOTHER]


def test_an_error_of_xla_that_quotes_the_failure_is_that_of_another(exits, monkeypatch):
    with job() as watching:
        lose(watching)
        told = watching.noticed().message
        error = RuntimeError(f"INTERNAL: Error dispatching computation: {told}")
        (shown,) = uncaught(error, monkeypatch)
        assert str(shown) == told
        assert exits == [LOST_ANOTHER]


def test_an_error_ends_no_interpreter_in_which_somebody_types(exits, monkeypatch):
    error = ValueError("mistyped")
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    with job():
        assert uncaught(error, monkeypatch) == [error]
        assert liveness.is_watching()
    assert exits == []


def test_an_error_after_the_job_is_only_shown(exits, monkeypatch):
    error = ValueError("later")
    assert uncaught(error, monkeypatch) == [error]
    assert exits == []


def test_a_child_neither_hides_the_end_of_its_worker_nor_is_one():
    here, there = socket.socketpair()
    with there, job(own=1, others={0: Line(here)}):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # JAX warns of threads; this child computes nothing
            child = os.fork()
        if child == 0:
            is_none = not liveness.is_watching()
            liveness.stop()
            time.sleep(60 if is_none else 0)
            os._exit(1)
        try:
            liveness.stop()
            there.settimeout(30)
            while there.recv(1 << 16):
                pass
            assert os.waitpid(child, os.WNOHANG) == (0, 0)
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
