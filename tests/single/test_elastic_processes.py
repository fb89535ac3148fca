"""The processes of an elastic job: who is started again, and how the job ends."""

import os
import signal
import threading
import time
from collections.abc import Callable

import pytest

from unison.errors import UnavailableError
from unison.runtime.launching import ElasticJob, Guard, ProcessWorker, Program, Restarts, elastic
from unison.runtime.launching.workers import NoRoomError


class Group:
    """A group that is told what the test wants to be so."""

    final_codes = frozenset({0, 77})

    def __init__(self):
        self.outcome = None
        self.others = False
        self.lost_ones: list[int] = []
        self.ends: list[str] = []

    def lost(self, worker):
        self.lost_ones.append(worker)

    def wait(self, seconds):
        time.sleep(seconds)
        return self.outcome

    def has_others(self):
        return self.others

    def end(self, why):
        self.ends.append(why)


#: Counts, in the file that its first argument names, how often it was started, as `nth`.
COUNTING = """
import os, signal, sys, time
with open(sys.argv[1], "a") as file:
    file.write("x")
nth = os.path.getsize(sys.argv[1])
"""


class Run:
    """A job of `python -c` programs, and what has happened to it."""

    def __init__(
        self,
        folder,
        *programs: str,
        at_most=10,
        grace=5.0,
        patience=60.0,
        start=ProcessWorker,
        **more,
    ):
        self.group = Group()
        self.events: list[dict] = []
        self.lines: list[str] = []
        self._times = [folder / f"started-{index}" for index in range(len(programs))]
        self.job = ElasticJob(
            [
                Program(["-S", "-E", "-c", COUNTING + source, str(path)], {})
                for source, path in zip(programs, self._times, strict=True)
            ],
            self.group,
            lambda worker, line: self.lines.append(line),
            self.events.append,
            start,
            Restarts(at_most),
            grace,
            patience,
            **more,
        )

    def __call__(self, timeout: float | None = 60) -> int:
        with self.job:
            return self.job.run(timeout)

    def in_thread(self, wait_for: Callable[[], bool], then: Callable[[], None]) -> None:
        """Does something when something is so."""

        def work():
            last = time.monotonic() + 30
            while not wait_for() and time.monotonic() < last:
                time.sleep(0.01)
            then()

        threading.Thread(target=work, daemon=True).start()

    def starts(self, worker: int = 0) -> int:
        path = self._times[worker]
        return path.stat().st_size if path.exists() else 0

    def happened(self, what: str) -> list[dict]:
        return [event for event in self.events if event["event"] == what]


KILLED_AT_FIRST = "if nth == 1: os.kill(os.getpid(), signal.SIGKILL)"


def test_a_worker_that_is_killed_is_started_again(tmp_path):
    run = Run(tmp_path, KILLED_AT_FIRST, "time.sleep(0.5)")
    assert run() == 0
    assert (run.starts(0), run.starts(1)) == (2, 1)
    (lost,) = run.happened("process lost")
    assert (lost["worker"], lost["why"], lost["restart"]) == (0, "SIGKILL", 1)
    assert run.group.lost_ones.count(0) == 2
    assert [event["worker"] for event in run.happened("process started")] == [0, 1, 0]


@pytest.mark.parametrize(
    "lost",
    [
        "sys.exit(143)",  # told to end soon
        "sys.exit(75)",  # by a lost peer
        "print('unison.errors.UnavailableError: worker 1 has died'); sys.exit(1)",
        "print('unison.runtime.elastic.group.GroupChanged: it is over'); sys.exit(1)",
        "os.abort()",
    ],
)
def test_these_ends_are_losses_too(tmp_path, lost):
    run = Run(tmp_path, f"if nth == 1: {lost}" if ";" not in lost else f"if nth == 1:\n {lost}")
    assert run() == 0
    assert run.starts() == 2


def test_a_program_that_raises_ends_the_job(tmp_path):
    run = Run(tmp_path, "raise ValueError('unwell')", "time.sleep(600)")
    assert run() == 1
    assert run.starts(0) == 1
    assert str(run.job.failure) == "worker 0 failed with exit code 1"
    assert run.job.failure.last_lines[-1] == "ValueError: unwell"
    assert run.group.ends == ["worker 0 failed with exit code 1"]


def test_a_program_that_exits_with_a_code_of_its_own_ends_the_job_with_it(tmp_path):
    assert Run(tmp_path, "sys.exit(9)")() == 9


def test_an_error_can_count_as_a_loss(tmp_path):
    run = Run(tmp_path, "if nth < 3: raise ValueError('unwell')", is_error_a_loss=True)
    assert run() == 0
    assert run.starts() == 3


def test_one_that_never_joins_is_given_up(tmp_path):
    run = Run(tmp_path, "os.kill(os.getpid(), signal.SIGSEGV)")
    assert run() == 128 + signal.SIGSEGV
    assert run.starts() == 3
    assert "3 times in a row" in run.happened("process lost")[-1]["given_up"]
    assert str(run.job.failure) == "worker 0 was ended by SIGSEGV"


def test_one_that_had_joined_is_started_again_until_all_restarts_are_used(tmp_path):
    run = Run(tmp_path, "time.sleep(0.2)\nos.kill(os.getpid(), signal.SIGKILL)", at_most=4)

    def join():
        while True:
            run.job.joined(0)
            time.sleep(0.02)

    threading.Thread(target=join, daemon=True).start()
    assert run() == 77
    assert run.starts() == 5
    assert run.happened("process lost")[-1]["given_up"] == "all 4 restarts are used (--restarts)"


def test_a_job_goes_on_with_the_workers_of_others(tmp_path):
    run = Run(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)", at_most=0)
    run.group.others = True
    run.in_thread(lambda: run.happened("process lost"), lambda: setattr(run.group, "outcome", 0))
    assert run() == 0


def test_the_groups_end_is_the_jobs(tmp_path):
    run = Run(tmp_path, "time.sleep(0.5)\nsys.exit(77)", "time.sleep(600)", grace=1.0)
    run.in_thread(lambda: run.starts(1), lambda: setattr(run.group, "outcome", 77))
    assert run() == 77
    assert run.group.ends == []
    assert run.happened("process lost") == []


def test_when_the_job_is_done_nobody_is_started_again_and_newcomers_end(tmp_path):
    run = Run(tmp_path, "time.sleep(2)", "time.sleep(600)")
    run.in_thread(
        lambda: run.starts(0) and run.starts(1),
        lambda: (run.job.joined(0), setattr(run.group, "outcome", 0)),
    )
    assert run() == 0
    assert (run.starts(0), run.starts(1)) == (1, 1)


@pytest.mark.parametrize("code", [1, 78, 79])
def test_how_one_ends_that_was_not_in_the_group_at_its_end_is_not_the_jobs(tmp_path, code):
    late = f"signal.signal(signal.SIGTERM, lambda *_: sys.exit({code}))\n"
    late += "print('here', flush=True)\ntime.sleep(600)"
    run = Run(tmp_path, "time.sleep(0.5)", late)

    def be_done():
        for worker in (0, 1):
            run.job.joined(worker)
        run.job.missed(1)  # it is stopped, say, and wakes after the end
        run.group.outcome = 0

    run.in_thread(lambda: run.lines, be_done)
    assert run() == 0
    assert run.job.failure is None
    codes = {event["worker"]: event["code"] for event in run.happened("process ended")}
    assert codes == {0: 0, 1: code}


@pytest.mark.parametrize(("stop", "timeout"), [("stopping", 60.0), ("timeout", 5.0)])
def test_a_stop_that_comes_when_the_job_is_done_changes_nothing(tmp_path, stop, timeout):
    saving = "print('here', flush=True)\nwhile not os.path.exists(sys.argv[1] + '.end'):"
    run = Run(tmp_path, saving + " time.sleep(0.01)", grace=30.0)

    def be_done():
        run.job.joined(0)
        run.group.outcome = 0
        if stop == "stopping":
            run.job.stop()

    run.in_thread(lambda: run.lines, be_done)
    run.in_thread(lambda: run.happened(stop), (tmp_path / "started-0.end").touch)
    assert run(timeout) == 0
    assert run.job.is_done


def test_a_job_that_is_done_and_whose_worker_is_killed_has_not_ended_well(tmp_path):
    stubborn = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('here', flush=True)\n"
    run = Run(tmp_path, stubborn + "time.sleep(600)", grace=0.2)

    def be_done():
        run.job.joined(0)
        run.group.outcome = 0
        time.sleep(0.2)
        run.job.stop()

    run.in_thread(lambda: run.lines, be_done)
    run()
    assert not run.job.is_done


def test_a_member_that_has_lost_the_register_is_started_again(tmp_path):
    run = Run(tmp_path, "print('here', flush=True)\ntime.sleep(0.5)\nif nth == 1: sys.exit(78)")
    run.in_thread(lambda: run.lines, lambda: run.job.joined(0))
    assert run() == 0
    assert run.starts() == 2


def test_a_worker_that_never_finds_the_register_ends_the_job(tmp_path):
    run = Run(tmp_path, "sys.exit(78)")
    assert run() == 78
    assert run.starts() == 1


HANGING_AT_FIRST = "print('here', flush=True)\nif nth == 1: os.kill(os.getpid(), signal.SIGSTOP)"


def test_a_member_that_hangs_and_does_not_come_back_is_killed_and_started_again(tmp_path):
    run = Run(tmp_path, HANGING_AT_FIRST, patience=0.2)
    run.in_thread(lambda: run.lines, lambda: (run.job.joined(0), run.job.missed(0)))
    assert run() == 0
    assert run.starts() == 2


def test_a_member_that_comes_back_in_time_goes_on(tmp_path):
    run = Run(tmp_path, "print('here', flush=True)\ntime.sleep(1.5)", patience=0.5)
    run.in_thread(
        lambda: run.lines, lambda: (run.job.joined(0), run.job.missed(0), run.job.back(0))
    )
    assert run() == 0
    assert run.starts() == 1


def test_one_that_hangs_does_not_keep_a_job_that_is_done(tmp_path):
    run = Run(tmp_path, HANGING_AT_FIRST, grace=0.2)
    run.in_thread(
        lambda: run.lines,
        lambda: (run.job.joined(0), run.job.missed(0), setattr(run.group, "outcome", 0)),
    )
    assert run() == 0
    assert run.starts() == 1


def test_an_error_after_the_jobs_end_is_not_hidden(tmp_path):
    run = Run(tmp_path, "time.sleep(1)\nraise ValueError('cannot save')")
    run.in_thread(run.starts, lambda: (run.job.joined(0), setattr(run.group, "outcome", 0)))
    assert run() == 1
    assert run.job.failure.last_lines[-1] == "ValueError: cannot save"


def test_a_job_that_is_stopped_lets_its_members_save_and_ends_the_others(tmp_path):
    saves = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('here', flush=True)\n"
    saves += "while not os.path.exists(sys.argv[1] + '.end'): time.sleep(0.01)\nprint('saved')"
    run = Run(tmp_path, saves, "print('here', flush=True)\ntime.sleep(600)")

    def stop():
        run.job.joined(0)
        run.job.stop()

    def end(why):
        run.group.ends.append(why)
        (tmp_path / "started-0.end").touch()

    run.group.end = end
    run.in_thread(lambda: run.lines.count("here") == 2, stop)
    run()
    assert run.group.ends == ["the job is stopped"]
    assert "saved" in run.lines
    codes = {event["worker"]: event["code"] for event in run.happened("process ended")}
    assert codes == {0: 0, 1: 128 + signal.SIGTERM}


def test_the_second_stop_kills(tmp_path):
    stubborn = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('here', flush=True)\n"
    run = Run(tmp_path, stubborn + "time.sleep(600)", grace=600.0)
    run.in_thread(lambda: run.lines, run.job.stop)
    run.in_thread(lambda: run.group.ends, run.job.stop)
    run()
    assert run.job.running == 0


def test_one_that_ignores_the_end_is_killed_after_the_grace(tmp_path):
    stubborn = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('here', flush=True)\n"
    run = Run(tmp_path, stubborn + "time.sleep(600)", grace=0.2)
    run.in_thread(lambda: run.lines, run.job.stop)
    run()
    assert run.job.running == 0


def test_a_job_has_a_bound(tmp_path):
    run = Run(tmp_path, "time.sleep(600)")
    assert run(timeout=0.5) == 124
    assert run.happened("timeout") == [{"event": "timeout", "seconds": 0.5, "running": 1}]


def test_a_place_where_no_process_can_be_started_is_a_loss(tmp_path):
    tries = []

    def start(index, program, on_line):
        tries.append(index)
        if len(tries) == 1:
            raise UnavailableError(message="no room")
        return ProcessWorker(index, program, on_line)

    run = Run(tmp_path, "pass", start=start)
    assert run() == 0
    assert tries == [0, 0]
    assert [event["why"] for event in run.happened("process lost")] == ["no room"]


def test_a_worker_whose_machine_is_lost_is_started_again(tmp_path):
    class Cut(ProcessWorker):
        lost_with = property(lambda self: "its node 10.0.0.2", lambda self, given: None)

    run = Run(tmp_path, "sys.exit(nth == 1)", start=Cut)
    assert run() == 0
    assert run.starts() == 2
    assert [event["why"] for event in run.happened("process lost")] == ["its node 10.0.0.2 is lost"]


def without_room(tries, but_for):
    """Returns what starts workers when they have been tried often enough."""

    def start(index, program, on_line):
        tries.append(index)
        if tries.count(index) <= but_for[index]:
            raise NoRoomError(message="no room")
        return ProcessWorker(index, program, on_line)

    return start


def test_a_worker_for_which_there_is_no_room_waits_and_loses_no_restart(tmp_path, monkeypatch):
    monkeypatch.setattr(elastic, "_SECONDS_BETWEEN_TRIES", 0.01)
    run = Run(tmp_path, "pass", "pass", at_most=0, start=without_room([], [0, 5]))
    assert run() == 0
    assert (run.starts(0), run.starts(1)) == (1, 1)
    assert run.happened("process waits") == [
        {"event": "process waits", "worker": 1, "why": "no room"}
    ]
    assert run.happened("process lost") == []


def test_the_group_does_not_wait_for_a_worker_for_which_there_is_no_room(tmp_path, monkeypatch):
    monkeypatch.setattr(elastic, "_SECONDS_BETWEEN_TRIES", 0.01)
    run = Run(tmp_path, "time.sleep(600)", start=without_room([], [1]))
    lost_before = []
    run.in_thread(lambda: run.starts() == 1, lambda: lost_before.extend(run.group.lost_ones))
    run.in_thread(lambda: lost_before, run.job.stop)
    run()
    assert lost_before == [0]


def test_a_job_ends_while_a_worker_waits_for_room(tmp_path):
    tries = []
    run = Run(tmp_path, "pass", start=without_room(tries, [1000]))

    def end():
        run.group.outcome = 0

    run.in_thread(lambda: tries, end)
    assert run() == 0
    assert run.starts() == 0


def test_children_of_a_lost_worker_end_before_it_is_started_again(tmp_path):
    run = Run(
        tmp_path,
        "if nth == 1:\n if os.fork() == 0: print(os.getpid(), flush=True); time.sleep(600)\n"
        " time.sleep(0.3); os.kill(os.getpid(), signal.SIGKILL)\n"
        "else: print('second')",
    )
    assert run() == 0
    child, second = run.lines
    assert second == "second"
    assert not is_alive(int(child))


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False


def test_a_guard_is_no_child_that_a_program_would_wait_for(tmp_path):
    tried = "try: os.wait()\nexcept ChildProcessError: print('none')"
    with Guard(60.0) as guard:

        def start(index, program, on_line):
            return ProcessWorker(index, program, on_line, guard)

        run = Run(tmp_path, tried, start=start)
        assert run() == 0
    assert run.lines == ["none"]


def test_a_worker_without_its_starter_is_told_first_and_killed_later(tmp_path):
    source = f"""
import os, sys, time
sys.path[:] = {os.sys.path!r}
from unison.runtime.launching import Guard, ProcessWorker, Program
stubborn = '''
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, lambda *_: open(sys.argv[1], "a").write("told"))
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
print(os.getpid(), child.pid, flush=True)
while True:
    time.sleep(0.1)
'''
guard = Guard(1.0)
ProcessWorker(0, Program(["-c", stubborn, {str(tmp_path / "told")!r}], {{}}),
              lambda _, line: print(line, flush=True), guard)
time.sleep(600)
"""
    starter = ProcessWorker(0, Program(["-c", source], {}), lambda _, line: said.append(line))
    said: list[str] = []
    last = time.monotonic() + 60
    while not said and time.monotonic() < last:
        time.sleep(0.05)
    pids = [int(pid) for pid in said[0].split()]
    starter.signal(signal.SIGKILL)
    starter.close()
    while any(map(is_alive, pids)) and time.monotonic() < last:
        time.sleep(0.05)
    assert not any(map(is_alive, pids))
    assert (tmp_path / "told").read_text() == "told"


def test_pauses_double_and_have_a_bound():
    restarts = Restarts(100)

    def pause(lived, has_joined):
        return restarts.lost(0, "SIGKILL", lived, has_joined)["again_in"]

    pauses = [pause(20.0, False) for _ in range(8)]
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert pause(1.0, True) == 0.0
    assert pause(20.0, False) == 0.5


def test_workers_are_given_up_one_by_one():
    restarts = Restarts(100)
    ends = [(0, False), (1, False), (0, False), (1, False), (1, True), (1, False), (0, False)]
    *others, last = [restarts.lost(worker, "", 1.0, has_joined) for worker, has_joined in ends]
    assert not any("given_up" in event for event in others)
    assert "before it had joined" in last["given_up"]
