"""What `unison run` says of an elastic job."""

import pytest

from unison.cli.elastic_story import Story


@pytest.mark.parametrize(
    ("event", "said"),
    [
        ({"event": "process started", "worker": 2}, "worker 2 is started"),
        (
            {"event": "process started", "worker": 2, "where": "10.0.0.2"},
            "worker 2 is started on node 10.0.0.2",
        ),
        (
            {"event": "process waits", "worker": 2, "why": "no node has room for it"},
            "worker 2 waits to be started: no node has room for it",
        ),
        (
            {
                "event": "process lost",
                "worker": 1,
                "why": "SIGKILL",
                "again_in": 0.5,
                "restart": 3,
            },
            "worker 1 was lost (SIGKILL); it is started again in 0.5 s (3 of 10)",
        ),
        (
            {"event": "process lost", "worker": 1, "why": "exit code 75", "given_up": "enough"},
            "worker 1 was lost (exit code 75); it is not started again: enough",
        ),
        ({"event": "process ended", "worker": 0, "code": 0}, "worker 0 has ended"),
        (
            {"event": "process ended", "worker": 0, "code": 77},
            "worker 0 has ended with exit code 77",
        ),
        (
            {"event": "timeout", "seconds": 60.0, "running": 2},
            "Timed out: expected the job to end within 60 s. 2 workers still run, and are ended. "
            "Give it more time (--timeout), or see in the output what they wait for.",
        ),
        ({"event": "leaving", "worker": "worker 1"}, "worker 1 leaves: it is to end soon"),
        (
            {"event": "late", "worker": "worker 1", "about": "worker 1 is late\nIts stack: ..."},
            "worker 1 is late\nIts stack: ...",
        ),
        (
            {"event": "goes on", "worker": "worker 1", "about": "worker 1 goes on"},
            "worker 1 goes on",
        ),
        (
            {"event": "refused", "worker": "worker 3", "why": "other software"},
            "worker 3 is refused: other software",
        ),
        (
            {"event": "benched", "worker": "worker 3", "seconds": 20.0},
            "worker 3 is left out for 20 s: groups with it failed",
        ),
        ({"event": "ended", "code": 0, "why": "all are done"}, "the job is done"),
        (
            {"event": "ended", "code": 77, "why": "2 workers are needed"},
            "the job ends: 2 workers are needed (exit code 77)",
        ),
        ({"event": "ended", "code": 78, "why": "the job is stopped"}, None),
        ({"event": "came", "worker": "worker 0"}, None),
        ({"event": "proposed", "view": 1, "workers": ["worker 0"]}, None),
    ],
)
def test_an_event_that_matters_is_said(event, said):
    assert Story(restarts=10).told(event) == said


def test_a_group_that_has_changed_says_since_when_and_who_is_new():
    now = [100.0]
    story = Story(restarts=10, now=lambda: now[0])
    assert story.told({"event": "interrupted", "why": "before the first"}) is None
    first = {"event": "started", "workers": ["worker 0", "worker 1"], "step": None}
    assert story.told(first) == "the job runs: 2 workers (worker 0, worker 1)"
    assert story.told({"event": "interrupted", "why": "worker 1 is lost"}) is None
    now[0] = 100.5
    assert story.told({"event": "interrupted", "why": "again"}) is None
    now[0] = 101.25
    second = {"event": "started", "workers": ["worker 0", "worker 2"], "step": 7}
    assert story.told(second) == (
        "regrouped: 2 workers (worker 0, worker 2), from step 7 after 1.25 s; worker 2 joined"
    )
    third = {"event": "started", "workers": ["worker 0"], "step": 9}
    assert story.told(third) == "regrouped: 1 worker (worker 0), from step 9"
