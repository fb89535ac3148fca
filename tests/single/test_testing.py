"""`unison.testing`: the checker finds what must not happen, and faults happen where they should."""

import json
import signal

import pytest

from subprocess_program import run_program
from unison.errors import InvalidArgumentError
from unison.runtime.elastic import faults
from unison.testing import Fault, Outcome, check, read_history, run


def process(name, *views, examples=()):
    """What a process writes that goes through views.

    Each is (number, members, first step, last step), and more by name: `left` (default: it leaves
    the view where it is), `digest`, `has_taken_over`.
    """
    records = []
    for number, members, first, last, *more in views:
        given = more[0] if more else {}
        about = {"view": number, "worker": name}
        records.append(
            {"is": "view", "step": first, "members": [*members], "member": name, **about}
            | {"has_taken_over": given.get("has_taken_over", False)}
        )
        records += [{"is": "commit", "step": step, **about} for step in range(first + 1, last + 1)]
        if "digest" in given:
            records.append(
                {"is": "state", "step": last, "digest": given["digest"], "of": 3, **about}
            )
        if given.get("left", True):
            records.append({"is": "left", "step": last, **about})
    records += [{"is": "examples", "epoch": epoch, "seen": seen} for epoch, seen in examples]
    return records


def kinds(*processes):
    return {finding.kind for finding in check(processes)}


ALIVE = {"left": False}
TAKEN = {"has_taken_over": True}


def test_a_job_in_which_one_is_lost_another_joins_and_one_step_is_void_is_sound():
    # c is killed when step 6 is on its way, which a has got; b takes it over. d joins later.
    a = process("a", (1, "abc", 0, 6), (2, "ab", 6, 9), (3, "abd", 9, 12, {"digest": "x"}))
    b = process("b", (1, "abc", 0, 5), (2, "ab", 6, 9, TAKEN), (3, "abd", 9, 12, {"digest": "x"}))
    c = process("c", (1, "abc", 0, 5, ALIVE))
    d = process("d", (3, "abd", 9, 12, TAKEN | {"digest": "x"}), examples=[(1, [2, 2, 2])])
    assert check([a, b, c, d]) == []


def test_a_job_that_goes_on_from_what_it_has_saved_is_sound():
    view, *others = process("a", (1, "a", 5, 9))
    resumed = {"is": "resumed", "view": 1, "worker": "a", "step": 5}
    assert check([[view | {"step": 0}, resumed, *others]]) == []


def test_a_step_that_was_on_its_way_to_one_that_is_cut_off_is_void():
    a = process("a", (1, "abc", 0, 6, {"digest": "other"}))
    b = process("b", (1, "abc", 0, 5), (2, "bc", 5, 7))
    c = process("c", (1, "abc", 0, 5), (2, "bc", 5, 7))
    assert check([a, b, c]) == []


def test_a_step_that_two_groups_commit_is_found():
    a = process("a", (1, "ab", 0, 6), (2, "ab", 5, 6, TAKEN))
    b = process("b", (1, "ab", 0, 6), (2, "ab", 5, 6, TAKEN))
    assert kinds(a, b) >= {"a step committed twice", "a committed step lost"}


def test_a_step_that_half_a_group_commits_is_found():
    a = process("a", (1, "abc", 0, 5))
    b = process("b", (1, "abc", 0, 5))
    c = process("c", (1, "abc", 0, 2))
    assert kinds(a, b, c) == {"a step committed by half a group"}


def test_a_commit_without_a_program_may_follow_the_one_that_was_running():
    a = process("a", (1, "ab", 0, 6), (2, "a", 6, 7))
    b = process("b", (1, "ab", 0, 4), (3, "b", 7, 7, TAKEN))
    assert kinds(a, b) == {"a step committed by half a group"}
    epoch_end = next(record for record in a if record["is"] == "commit" and record["step"] == 6)
    epoch_end["programs"] = 0
    assert check([a, b]) == []


def test_that_the_last_step_lacks_in_one_worker_is_found():
    a = process("a", (1, "ab", 0, 5))
    b = process("b", (1, "ab", 0, 4))
    assert kinds(a, b) == {"a step committed by half a group"}


def test_two_views_that_are_active_at_once_are_found():
    halves = [
        process("a", (1, "abcd", 0, 5), (2, "ab", 5, 10)),
        process("b", (1, "abcd", 0, 5), (2, "ab", 5, 10)),
        process("c", (1, "abcd", 0, 5), (3, "cd", 5, 9)),
        process("d", (1, "abcd", 0, 5), (3, "cd", 5, 9)),
    ]
    assert "two groups at once" in kinds(*halves)
    same_number = [process("a", (2, "ab", 5, 6, ALIVE)), process("c", (2, "cd", 5, 6, ALIVE))]
    assert "two groups at once" in kinds(*same_number)


def test_a_member_that_goes_on_in_a_view_that_is_over_is_found():
    a = process("a", (1, "abc", 0, 9, ALIVE))
    b = process("b", (1, "abc", 0, 5), (2, "bc", 5, 7))
    c = process("c", (1, "abc", 0, 5), (2, "bc", 5, 7))
    assert "two groups at once" in kinds(a, b, c)


def test_a_complete_step_that_the_next_view_does_not_have_is_found():
    a = process("a", (1, "ab", 0, 6, ALIVE))
    b = process("b", (1, "ab", 0, 6), (2, "bc", 5, 5, TAKEN))
    c = process("c", (2, "bc", 5, 5, TAKEN))
    assert "a committed step lost" in kinds(a, b, c)


def test_a_step_that_one_member_leaves_out_is_found():
    a, b = process("a", (1, "ab", 0, 3)), process("b", (1, "ab", 0, 3))
    b = [record for record in b if record["step"] != 2]
    assert kinds(a, b) == {"a step committed by half a group"}


def test_a_program_of_several_steps_takes_effect_as_a_whole_or_is_void():
    def without(records, *steps):
        return [record for record in records if record["step"] not in steps]

    a = without(process("a", (1, "ab", 0, 9)), 7, 8)
    b = without(process("b", (1, "ab", 0, 6), (2, "b", 6, 9)), 7, 8)
    assert check([a, b]) == []


def test_a_member_that_begins_a_view_with_another_state_is_found():
    a = process("a", (1, "ab", 0, 6), (2, "ab", 6, 7))
    b = process("b", (1, "ab", 0, 5), (2, "ab", 6, 7))  # it has not taken over step 6
    assert kinds(a, b) == {"unequal states"}
    a, b = process("a", (1, "ab", 3, 4)), process("b", (1, "ab", 2, 4))
    assert "unequal states" in kinds(a, b)


def test_unequal_states_after_the_same_step_are_found():
    a = process("a", (1, "ab", 0, 5, {"digest": "x"}))
    b = process("b", (1, "ab", 0, 5, {"digest": "y"}))
    assert kinds(a, b) == {"unequal states"}


@pytest.mark.parametrize(
    ("seen", "words"), [([2, 1, 2, 2], "1 of 4 are lost: 1"), ([2, 2, 3, 3], "2 of 4 are repeated")]
)
def test_an_example_that_is_lost_or_repeated_is_named(seen, words):
    (finding,) = check([process("a", (1, "a", 0, 5), examples=[(1, seen)])])
    assert finding.kind == "examples lost or repeated"
    assert words in finding.what


def test_a_history_is_read_without_the_line_that_was_torn_when_its_process_was_killed(tmp_path):
    lines = [json.dumps(record) for record in process("a", (1, "a", 0, 2, ALIVE))]
    (tmp_path / "worker-0-17.jsonl").write_text("\n".join(lines) + '\n{"is": "comm')
    assert read_history(tmp_path) == [process("a", (1, "a", 0, 2, ALIVE))]
    assert check(tmp_path) == []


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"kind": "melt"}, "a kind of"),
        ({"phase": "lunch"}, "a phase of"),
        ({"worker": -1}, "a worker's number"),
        ({"occurrence": 0}, "an occurrence"),
        ({"kind": "slow"}, "seconds for the kind 'slow'"),
        ({"seconds": 1.0}, "no seconds for the kind 'kill'"),
    ],
)
def test_a_fault_that_there_is_not_is_refused(given, expected):
    with pytest.raises(InvalidArgumentError, match=f"Expected {expected}.*Received: "):
        Fault(**({"kind": "kill", "worker": 0} | given))


def test_faults_of_workers_that_are_not_started_are_refused():
    with pytest.raises(InvalidArgumentError, match="Expected faults of the workers 0 to 1"):
        run("train.py", workers=2, faults=[Fault("kill", worker=2)])


def test_a_network_is_not_cut_where_it_is_that_of_the_tester():
    with pytest.raises(InvalidArgumentError, match=r"Pass `hosts`.*Received: Fault\(kind='cut'"):
        run("train.py", workers=2, faults=[Fault("cut", worker=1)])


#: A worker that comes to 30 steps, without the rest of an elastic job.
WORKER = """
import json, os, sys
os.environ["UNISON_ELASTIC_TOKEN"] = "secret"
os.environ["UNISON_ELASTIC"] = json.dumps({"register": "127.0.0.1:1", "slot": int(sys.argv[1])})
from unison.runtime.elastic import faults
from unison.runtime.elastic.lifecycle import happened
faults.listen()
for step in range(30):
    happened("step", step)
    print(step, flush=True)
    happened("checkpoint")
"""


def steps_of_worker(number, told):
    done = run_program(WORKER, number, env=told, imported=("jax", "unison"))
    return [int(line) for line in done.stdout.split()], done.returncode, done.stderr


def test_a_fault_happens_once_at_its_point_and_is_written_down_before(tmp_path):
    planned = [
        Fault("kill", worker=1, step=5, occurrence=2),
        Fault("exception", worker=1, step=20, phase="checkpoint"),
        Fault("cut", worker=1, step=25, seconds=1.0),
        Fault("slow", worker=0, step=9, seconds=0.0),
    ]
    told = faults.told(planned, tmp_path)
    assert steps_of_worker(1, told)[:2] == ([0, 1, 2, 3, 4, 5], -signal.SIGKILL)
    assert faults.fired(tmp_path)[0]["at_step"] == 6
    # The process that takes its place has the next one, and not this one again.
    steps, code, errors = steps_of_worker(1, told)
    assert (steps[-1], code) == (20, 1)
    assert "InjectedError: Injected: Fault(kind='exception'" in errors
    # The network of the machine is not cut.
    steps, code, errors = steps_of_worker(1, told)
    assert (steps[-1], code) == (24, 1)
    assert 'Faults of the kind "cut" need a worker in a network namespace of its own' in errors
    assert sorted(faults.fired(tmp_path)) == [0, 1]
    assert steps_of_worker(0, told)[:2] == ([*range(30)], 0)
    assert sorted(faults.fired(tmp_path)) == [0, 1, 3]
    outcome = Outcome(0, [(0, "hello")], [], planned, faults.fired(tmp_path), [], 1.0)
    with pytest.raises(AssertionError, match=r"have not happened:\nFault\(kind='cut'"):
        outcome.assert_fired()


def test_a_stopped_worker_goes_on_after_its_time(tmp_path):
    told = faults.told([Fault("stop", worker=0, step=3, seconds=0.2)], tmp_path)
    assert steps_of_worker(0, told)[:2] == ([*range(30)], 0)
    assert sorted(faults.fired(tmp_path)) == [0]


def test_faults_that_cannot_be_understood_are_refused(tmp_path, monkeypatch):
    told = faults.told([Fault("kill", worker=0)], tmp_path)[faults.VARIABLE]
    broken = told.replace('"kill"', '"melt"')
    steps, code, errors = steps_of_worker(0, {faults.VARIABLE: broken})
    assert (steps, code) == ([], 1)
    assert f"Expected {faults.VARIABLE} as unison.testing sets it" in errors


def test_an_outcome_says_how_processes_ended_and_who_printed_what():
    events = [
        {"event": "process lost", "worker": 1, "why": "SIGKILL"},
        {"event": "process ended", "worker": 1, "code": 0},
        {"event": "process ended", "worker": 0, "code": 0},
    ]
    lines = [(None, "[unison] the job runs"), (0, "a"), (1, "b"), (0, "c")]
    outcome = Outcome(3, lines, events, [], {}, [], 1.0)
    assert outcome.exit_codes == {0: ["exit code 0"], 1: ["SIGKILL", "exit code 0"]}
    assert outcome.output(0) == ["a", "c"]
    assert outcome.output(None) == ["[unison] the job runs"]
    with pytest.raises(AssertionError, match=r"ends with 0. Received: 3\n.*the job runs"):
        outcome.assert_ended()
