"""Trainings whose workers are killed, stopped, cut off or told to go, and come back.

Whatever happens, the training ends with the weights of one to which nothing did, and each example
of each epoch is used once. The faults are public: `unison.testing`. Random ones are in tests/soak.
"""

import functools

import numpy as np
import pytest

import elastic_training
from elastic_training import reports, require_the_same_training, sizes, train, train_alone
from keras_forms import forms
from unison.testing import Fault, run

pytestmark = pytest.mark.timeout(elastic_training.SECONDS + 60)

#: 12 steps of training and 3 of validation in each epoch; without `slow`, those of one group are
#: one step where the shares of a batch are equal.
FIT = ("fit", "epochs=4")
STEPWISE = (*FIT, "slow=0.01")
TWICE = ("fit", "epochs=2", "loops=2")

#: Keeps a job going until those are back that were started again.
WAITING = "full=3"


@functools.cache
def alone(*given):
    return train_alone(*given)


def test_a_batch_more_or_less_would_show():
    weights = np.array(alone(*FIT)["weights"])
    other = train_alone(*FIT, "examples=130")["weights"]
    assert np.abs(weights - other).max() > 100 * elastic_training.ROUND_OFF


@forms("tf", soaked=["keras"])
def test_one_after_the_other_is_lost_until_one_is_left(form, tmp_path):
    faults = [
        Fault("kill", 0, 14, "exchange"),  # with a step on its way
        Fault("terminate", 3, 18, "evaluate", 2),
        Fault("kill", 1, 36, "checkpoint"),
    ]
    outcome = train(4, faults, *STEPWISE, f"form={form}", f"folder={tmp_path}", restarts=0)
    outcome.assert_fired()
    assert len(require_the_same_training(outcome, alone(*FIT))) == 1
    assert sizes(outcome) == [4, 3, 2, 1]
    ends = {0: ["SIGKILL"], 1: ["SIGKILL"], 2: ["exit code 0"], 3: ["SIGTERM"]}
    assert outcome.exit_codes == ends


@pytest.mark.soak
@forms("keras", soaked=["tf"])
def test_several_are_killed_at_once_with_many_steps_in_one(form):
    faults = [Fault("kill", 0, 30, "exchange"), Fault("kill", 1, 30, "exchange")]
    outcome = train(3, faults, *FIT, f"form={form}", restarts=0)
    outcome.assert_fired()
    assert len(require_the_same_training(outcome, alone(*FIT))) == 1


@pytest.mark.soak
@forms("tf", soaked=["keras"])
def test_workers_that_are_lost_come_back_and_take_part_in_a_later_fit(form):
    # One is lost while the first group forms; in the second `fit` again, and another one while the
    # next group forms. Who comes back leaves out the first `fit`, which is over for the others.
    faults = [
        Fault("kill", 1, 0, "recovery", 4),
        Fault("kill", 1, 40, "exchange"),
        Fault("kill", 2, 40, "recovery", 3),
    ]
    outcome = train(3, faults, *TWICE, f"form={form}", "slow=0.02", WAITING)
    outcome.assert_fired()
    assert len(require_the_same_training(outcome, alone(*TWICE))) == 3
    assert sizes(outcome)[-1] == 3
    assert outcome.exit_codes[1] == ["SIGKILL", "SIGKILL", "exit code 0"]


@pytest.mark.soak
def test_a_worker_that_joins_in_a_later_epoch_trains_all_epochs_of_the_next_fit():
    given = ("fit", "epochs=3", "loops=2")
    fault = Fault("kill", 1, 18)  # in the second epoch, of 12 steps
    outcome = train(2, [fault], *given, "slow=0.02", "full=2")
    outcome.assert_fired()
    assert len(require_the_same_training(outcome, alone(*given))) == 2


@pytest.mark.soak  # its restarts take minutes where cores are few
def test_workers_are_killed_when_they_start_and_when_they_compile():
    faults = [
        Fault("kill", 0, phase="start", occurrence=2),
        Fault("kill", 1, phase="compile"),
        Fault("kill", 2, phase="compile", occurrence=3),
    ]
    outcome = train(3, faults, *FIT, "slow=0.02", WAITING)
    outcome.assert_fired()
    require_the_same_training(outcome, alone(*FIT))


@forms("keras", soaked=["tf"])
def test_a_worker_that_hangs_is_left_out_and_one_that_comes_to_is_taken_in_again(form):
    faults = [Fault("stop", 1, 24), Fault("stop", 2, 30, "exchange", seconds=4.0)]
    outcome = train(3, faults, *FIT, f"form={form}", "slow=0.02", "full=2", heartbeat_timeout=2.0)
    outcome.assert_fired()
    assert len(require_the_same_training(outcome, alone(*FIT))) == 2
    assert sizes(outcome)[0] == 3


@pytest.mark.soak
def test_a_slow_worker_stays_and_an_error_of_the_program_ends_the_job():
    faults = [Fault("slow", 1, 20, seconds=1.0), Fault("exception", 0, 30)]
    outcome = train(2, faults, *STEPWISE, "full=2")
    outcome.assert_fired()
    outcome.assert_ended(1)
    outcome.assert_sound()
    assert sizes(outcome)[0] == 2
    assert any("InjectedError" in line for line in outcome.output(0))


@forms("tf", soaked=["keras"])
def test_with_too_few_workers_the_job_stops_and_goes_on_when_it_is_started_again(form, tmp_path):
    options = {"min_workers": 2, "restarts": 0, "wait": 1.0, "folder": tmp_path / "job"}
    first = train(2, [Fault("kill", 0, 30)], *STEPWISE, f"form={form}", **options)
    first.assert_fired()
    first.assert_ended(77)
    first.assert_sound()
    second = train(2, [], *FIT, f"form={form}", **options)
    assert len(require_the_same_training(second, alone(*FIT))) == 2


@pytest.mark.soak
@forms("keras", soaked=["tf"])
def test_whoever_joins_between_epochs_shuffles_a_dataset_as_the_others_do(form):
    given = ("fit", "epochs=3", "data=dataset")
    outcome = train(
        2, [Fault("kill", 1, 12, "commit")], *given, f"form={form}", "slow=0.02", "full=2"
    )
    outcome.assert_fired()
    assert len(require_the_same_training(outcome, alone(*given))) == 2


def test_workers_decode_their_own_examples_whatever_their_number():
    given = ("fit", "epochs=3", "data=decoded")
    faults = [Fault("kill", 0, 14, "exchange"), Fault("kill", 1, 26, "exchange")]
    outcome = train(3, faults, *given, "slow=0.01", restarts=0)
    outcome.assert_fired()
    (survivor,) = require_the_same_training(outcome, alone(*given))
    # Of 14 of 36 steps it had 2 or 4 rows, of 12 half, of 10 all. The steps around a loss are read
    # again, and the model is built from a batch.
    assert 14 * 2 + 12 * 5 + 10 * 10 <= survivor["decoded"] <= 14 * 4 + 12 * 5 + 10 * 10 + 40
    assert alone(*given)["decoded"] >= 360


@forms("tf", soaked=["keras"])
def test_loops_of_ones_own_go_on_from_the_last_commit(form):
    given = ("loop", "epochs=2", "loops=2", f"form={form}")
    faults = [
        Fault("kill", 1, 13, "commit"),  # between two passes
        Fault("kill", 0, 15, "exchange"),
        Fault("kill", 2, 34, "commit"),
    ]
    outcome = train(3, faults, *given, "slow=0.02", WAITING)
    outcome.assert_fired()
    assert len(require_the_same_training(outcome, alone(*given))) == 3


def test_whoever_joins_before_the_first_commit_takes_part_in_the_first_pass():
    given = ("loop", "epochs=2")
    fault = Fault("kill", 1, phase="start", occurrence=2)
    outcome = train(2, [fault], *given, "early=1", "slow=0.02", "full=2")
    outcome.assert_fired()
    assert sizes(outcome) == [1, 2]
    assert len(require_the_same_training(outcome, alone(*given))) == 2


#: Each replica counts its steps in a copy of its own.
COUNTING = """
import json, time
import numpy as np
import unison

strategy = unison.MultiWorkerMirroredStrategy()
resolver = strategy.cluster_resolver
before = resolver.task_id
patience = 40.0
with strategy.scope():
    count = unison.Variable(
        np.int32(0),
        synchronization=unison.VariableSynchronization.ON_READ,
        aggregation=unison.VariableAggregation.SUM,
    )
begun_at = []


@unison.elastic.run
def train(state):
    global patience
    begun_at.append(state.step)
    while state.step < 40:
        strategy.run(lambda: count.assign_add(1))
        state.step += 1
        state.commit()
        time.sleep(0.01)
        while strategy.num_replicas_in_sync < 2 and patience > 0 and not strategy.group.is_over:
            time.sleep(0.02)
            patience -= 0.02


train(unison.elastic.State(step=0, count=count))
told = {
    "steps": 40 - begun_at[0],
    "own": int(count.cell.copies()[0]),
    "sum": int(count),
    "tasks": [before, resolver.task_id, resolver.cluster_spec().num_tasks("worker")],
}
print("REPORT", json.dumps(told), flush=True)
"""


def test_what_is_summed_over_the_replicas_is_not_given_to_whoever_joins(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(COUNTING)
    outcome = run(
        program,
        workers=2,
        faults=[Fault("kill", 1, 12, "exchange")],
        environment=elastic_training.ENVIRONMENT,
        timeout=elastic_training.SECONDS,
    )
    outcome.assert_fired()
    outcome.assert_ended(0)
    old, new = sorted(reports(outcome), key=lambda told: -told["steps"])
    assert old["steps"] == 40 > new["steps"] > 0
    for told in (old, new):
        assert told["own"] == told["steps"]
        assert told["sum"] == old["steps"] + new["steps"]
    assert (old["tasks"], new["tasks"]) == ([0, 0, 2], [None, 1, 2])


@pytest.mark.soak
def test_what_is_summed_over_the_replicas_stays_what_it_is_when_a_job_is_started_again(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(COUNTING)
    options = {"environment": elastic_training.ENVIRONMENT, "timeout": elastic_training.SECONDS}
    options |= {"min_workers": 2, "restarts": 0, "wait": 1.0, "folder": tmp_path / "job"}
    first = run(program, workers=2, faults=[Fault("kill", 1, 12, "exchange")], **options)
    first.assert_ended(77)
    second = run(program, workers=2, faults=[], **options)
    second.assert_ended(0)
    for told in reports(second):
        # What the worker that is left had counted until then, and what both count since.
        assert told["sum"] == (40 - told["steps"]) + 2 * told["steps"]
        assert 0 < told["steps"] < 40


@pytest.mark.soak
@forms("keras", soaked=["tf"])
def test_the_batches_of_replicas_may_stay_and_the_learning_rate_follow(form):
    # Two replicas in each worker.
    devices = {"UNISON_CPU_DEVICES": "2"}
    faults = [Fault("kill", 1, 30, "exchange")]
    outcome = train(
        2, faults, *STEPWISE, f"form={form}", "keep=parts", restarts=0, environment=devices
    )
    outcome.assert_fired()
    outcome.assert_ended(0)
    outcome.assert_sound()
    (report,) = reports(outcome)
    assert set(report["seen"]) == {4}
    assert report["replicas"] == 2
    assert report["rate"] == pytest.approx(0.05 / 2)


@forms("keras", soaked=["tf"])
def test_a_worker_whose_program_ends_too_early_is_not_waited_for(form):
    given = ("fit", "epochs=2")
    outcome = train(3, [], *given, f"form={form}", "slow=0.01", "shorter=1", heartbeat_timeout=3.0)
    outcome.assert_ended(0)
    outcome.assert_sound()
    assert sizes(outcome) == [3, 2]
    assert {tuple(codes) for codes in outcome.exit_codes.values()} == {("exit code 0",)}
    early, *others = sorted(reports(outcome), key=lambda report: len(report["history"]["loss"]))
    assert len(early["history"]["loss"]) == 1
    # The others train the last epoch without it, on all of its examples.
    expected = alone(*given)
    for report in others:
        assert report["seen"] == expected["seen"]
        np.testing.assert_allclose(
            report["weights"], expected["weights"], rtol=0, atol=elastic_training.ROUND_OFF
        )
    assert others[0]["digest"] == others[1]["digest"]


@pytest.fixture
def hosts(monkeypatch):
    monkeypatch.syspath_prepend(str(elastic_training.ROOT))
    from benchmarks import namespaces

    if reason := namespaces.what_is_missing():
        pytest.skip(f"No hosts can be made here: {reason}.")
    with namespaces.hosts(4) as made:
        yield made


def cut_network(hosts, fault, *given, **options):
    return train(
        3,
        [fault],
        *FIT,
        "slow=0.02",
        "full=3",
        *given,
        min_workers=2,
        heartbeat_timeout=2.0,
        hosts=[host.command for host in hosts],
        listen=hosts[0].address,
        **options,
    )


@pytest.mark.soak
def test_whose_network_is_cut_for_a_time_comes_back(hosts):
    outcome = cut_network(hosts, Fault("cut", 1, 20, "exchange", seconds=4.0), wait=20.0)
    outcome.assert_fired()
    assert len(require_the_same_training(outcome, alone(*FIT))) == 3
    assert sizes(outcome)[-1] == 3
    assert 2 in sizes(outcome)[1:]


@pytest.mark.soak
def test_of_a_network_that_is_cut_only_one_side_goes_on(hosts):
    fault = Fault("cut", 1, 20, "exchange")
    outcome = cut_network(hosts, fault, "patience=8", restarts=0, wait=4.0)
    outcome.assert_fired()
    assert len(require_the_same_training(outcome, alone(*FIT))) == 2
    assert sizes(outcome)[-2:] == [3, 2]  # two may have begun before the third came
