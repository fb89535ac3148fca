"""Reports of workers, and jobs that have heard them, for the tests of `unison.monitoring`."""

import contextlib
import http.client
import json
import time

from unison.monitoring.job import WatchedJob
from unison.monitoring.running_jobs import running_jobs


def told(worker="worker 0", **about):
    """A report; `steps` of them have begun, ten a second, until `now`."""
    now, steps = about.get("now", 1000.0), about.get("steps", 10)
    begins = [
        [step, now - (steps - step) / 10, False] for step in range(max(0, steps - 100), steps)
    ]
    return {
        "worker": worker,
        "process": 1,
        "now": now,
        "has_ended": False,
        "steps": steps,
        "position": None,
        "examples": None,
        "waited": 0.0,
        "marks": begins,
        "loss": None,
        "memory": 2**20,
        "device_memory": None,
        "utilization": None,
        "checkpoint": None,
        "sent": 0,
        "operations": 0,
        "peak_operations": None,
    } | about


def watched(*reports, kind="workers", workers=("worker 0", "worker 1")):
    job = WatchedJob("train.py", kind, workers)
    for report in reports:
        job.hear(report)
    return job


def state_of_the_job():
    """What is known of the only job of this user that runs; None while there is none."""
    jobs = running_jobs()
    if not jobs:
        return None
    connection = http.client.HTTPConnection(jobs[0].address, timeout=10)
    with contextlib.closing(connection):
        bearer = {"Authorization": f"Bearer {jobs[0].token}"}
        connection.request("GET", "/state.json", headers=bearer)
        return json.loads(connection.getresponse().read())


def state_when(is_so, process, seconds=120):
    """The same as soon as `is_so` of it; `process` runs the job."""
    last = time.monotonic() + seconds
    state = None
    while time.monotonic() < last:
        state = state_of_the_job()
        if state is not None and is_so(state):
            return state
        assert process.poll() is None, "The job has ended."
        time.sleep(0.2)
    raise TimeoutError(f"It did not come to this: {state}")


def all_run(count, state):
    """Whether so many workers have begun to train, and all is known of them."""
    return (
        [worker["state"] for worker in state["workers"]] == ["running"] * count
        and state["loss"] is not None
        and state["examples_per_second"] is not None
    )
