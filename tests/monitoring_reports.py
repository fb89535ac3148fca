"""Reports of workers, and jobs that have heard them, for the tests of `unison.monitoring`."""

from unison.monitoring.job import WatchedJob


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
        "sent": 0,
    } | about


def watched(*reports, kind="workers", workers=("worker 0", "worker 1")):
    job = WatchedJob("train.py", kind, workers)
    for report in reports:
        job.hear(report)
    return job
