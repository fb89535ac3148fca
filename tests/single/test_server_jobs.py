"""The processes of a job with parameter servers: which are restarted, and how the job ends."""

import time

import pytest

from unison.runtime.launching import Restarts
from unison.runtime.launching.server_jobs import ParameterServerJob, Task
from unison.runtime.launching.workers import ProcessWorker, Program

#: Runs until the test, or the time, is over.
WAITS = "import time; time.sleep(60)"

#: Ends with an error as often as the test wants, counted in a file.
ENDS_AT_FIRST = """
import sys, time
with open(sys.argv[1], "a") as file:
    file.write("x")
    if file.tell() <= int(sys.argv[2]):
        sys.exit(3)
time.sleep(60)
"""


@pytest.fixture
def run(tmp_path):
    """Runs a job of a chief and one task that ends `times` times, and returns its events."""
    starts = tmp_path / "starts"
    events = []

    def run(task, times, until, exit_code=0, start=ProcessWorker, seconds=60, **more):
        chief = f"import os, sys, time\nwhile not ({until}): time.sleep(0.01)\n"
        chief += f"sys.exit({exit_code})"
        programs = [
            Program(["-S", "-E", "-c", chief, str(starts)], {}),
            Program(["-S", "-E", "-c", ENDS_AT_FIRST, str(starts), str(times)], {}),
        ]
        tasks = [Task("chief", 0), task]
        with ParameterServerJob(
            programs, tasks, lambda *line: None, start, on_event=events.append, **more
        ) as job:
            failure = job.wait(seconds)
        return failure, events

    return run


#: The chief ends when the task has been started so often.
STARTED = "os.path.exists(sys.argv[1]) and os.path.getsize(sys.argv[1]) >= {}".format


def test_a_lost_worker_is_restarted_after_a_pause(run):
    begin = time.monotonic()
    failure, events = run(Task("worker", 0), times=2, until=STARTED(3))
    assert failure is None
    assert [(event["why"], event["again_in"]) for event in events] == [
        ("exit code 3", 0.5),
        ("exit code 3", 1.0),
    ]
    assert time.monotonic() - begin > 1.5


def test_a_worker_that_always_ends_soon_is_given_up(run):
    _, events = run(Task("worker", 0), times=9, until=f"{STARTED(3)} and not time.sleep(1)")
    assert [event.get("given_up") for event in events] == [
        None,
        None,
        "it ended 3 times in a row within 10 s, before it had joined",
    ]


def test_no_more_than_the_restarts_of_the_job_are_used(run):
    until = f"{STARTED(2)} and not time.sleep(1)"
    _, events = run(Task("worker", 0), times=9, until=until, restarts=Restarts(at_most=1))
    assert events[-1]["given_up"] == "all 1 restarts are used (--restarts)"


@pytest.mark.parametrize(("restarts_servers", "losses"), [(False, 0), (True, 1)])
def test_servers_are_restarted_if_they_keep_their_variables(run, restarts_servers, losses):
    until = f"{STARTED(1 + losses)} and not time.sleep(0.5)"
    _, events = run(Task("ps", 0), times=1, until=until, restarts_servers=restarts_servers)
    assert len(events) == losses


def test_a_worker_of_a_lost_machine_is_given_up(run):
    class Cut(ProcessWorker):
        lost_with = property(lambda self: "its node 10.0.0.2", lambda self, given: None)

    until = f"{STARTED(1)} and not time.sleep(1)"
    _, (event,) = run(Task("worker", 0), times=1, until=until, start=Cut)
    assert event["why"] == "its node 10.0.0.2 is lost"
    assert event["given_up"] == "the program knows its address there only"


def test_a_start_that_fails_is_a_loss(run):
    starts = []

    def start(index, program, on_line):
        starts.append(index)
        if starts.count(1) == 2 and index == 1:
            raise OSError("out of processes")
        return ProcessWorker(index, program, on_line)

    _, events = run(Task("worker", 0), times=1, until=STARTED(2), start=start)
    assert [event["why"] for event in events] == ["exit code 3", "out of processes"]


def test_the_chiefs_failure_is_the_jobs(run):
    failure, events = run(Task("worker", 0), times=0, until=STARTED(1), exit_code=4)
    assert (failure.worker, failure.exit_code, events) == (0, 4, [])


def test_a_job_that_takes_too_long_is_ended(run):
    with pytest.raises(TimeoutError, match="Timed out: expected the job to end within"):
        run(Task("worker", 0), times=0, until="False", seconds=0.5)
