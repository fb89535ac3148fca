"""`unison run --restarts R --in-memory-checkpoints`: workers that are lost resume from memory.

Whatever is lost, the training ends with the weights and metrics of one to which nothing happened,
bit by bit.
"""

import contextlib
import re
import signal
import subprocess

import numpy as np
import pytest

from in_memory_training import (
    LIMIT,
    PROGRAM,
    Machine,
    end_well,
    environment,
    keeping,
    report,
    resumed_steps,
    run,
    train_until,
    undisturbed,
)
from parameter_server_threads import free_addresses
from subprocess_program import kill_group, unison_run

pytestmark = pytest.mark.timeout(2 * LIMIT)

KEEPING = keeping()

TWO_WORKERS = ("-n", "2")


def soaked(*parameters):
    """Parameters of a case that only `make soak` runs."""
    return pytest.param(*parameters, marks=pytest.mark.soak)


@pytest.mark.parametrize(
    ("options", "given", "kills"),
    [
        pytest.param(TWO_WORKERS, ("loop",), "30:1", marks=pytest.mark.smoke),
        soaked(TWO_WORKERS, ("loop",), "25:0,40:1,50:0"),
        soaked(TWO_WORKERS, ("fit",), "30:1"),
        (TWO_WORKERS, ("fit", "form=tf"), "3:1,30:1,45:0"),
        soaked(TWO_WORKERS, ("loop", "form=tf"), "30:1"),
        soaked(TWO_WORKERS, ("fit", "loops=3", "epochs=2"), "30:1,60:0,100:1"),
        (("-n", "1", "--devices-per-worker", "2"), ("fit", "zero=3"), "30:0"),
        soaked(TWO_WORKERS, ("fit", "model=2"), "30:1"),
    ],
    ids=[
        "loop",
        "loop thrice",
        "fit",
        "fit thrice of tf.keras",
        "loop of tf",
        "several fits",
        "ZeRO 3",
        "one replica",
    ],
)
def test_a_training_goes_on_as_if_nothing_had_happened(tmp_path, options, given, kills):
    output = run(*options, *KEEPING, PROGRAM, tmp_path, *given, f"kills={kills}")
    assert report(output) == undisturbed(options, given)
    at = [int(kill.split(":")[0]) for kill in kills.split(",")]
    assert output.count("all workers are started again") == len(at)
    # It may be killed before the first checkpoint; later it has lost a few steps at most: they are
    # counted before those which are being kept, on a machine that may be busy.
    resumed = resumed_steps(output)
    assert len(resumed) == sum(step > 20 for step in at)
    later = [step for step in at if step > 20]
    assert all(-2 <= step - again <= 25 for step, again in zip(later, resumed, strict=True))


def test_a_first_step_that_is_traced_again_counts_once(tmp_path):
    options, given = ("-n", "1", "--devices-per-worker", "2"), ("fit", "zero=3", "form=tf")
    output = run(*options, *KEEPING, PROGRAM, tmp_path, *given, "kills=17:0")
    assert len(resumed_steps(output)) == 1  # in the first epoch, which has 19 steps
    assert report(output) == undisturbed(options, given)


def test_a_process_stands_by_and_has_imported_what_the_program_imports(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\n"
        "known = {'keras', 'unison.train.in_memory'} <= set(sys.modules)\n"
        f"sys.argv[:] = sys.argv; print('KNOWN', known, flush=True)\n"
        f"exec(compile(open({str(PROGRAM)!r}).read(), {str(PROGRAM)!r}, 'exec'))\n"
    )
    given = ("loop", "slow=0.2", "epochs=4", "kills=70:0")
    output = run("-n", 1, *KEEPING, program, tmp_path, *given)
    assert re.findall(r"KNOWN (\w+)", output) == ["False", "True"]
    assert len(resumed_steps(output)) == 1


# -- another number of workers ------------------------------------------------------------------

#: The options of a job that goes on without a worker that cannot be started again, and what it
#: does to its program.
REGROUPING = ("-n", 3, "--min-workers", 2, *KEEPING[2:])
LOSING = ("kills=30:2", "broken=2:3")


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(("loop",), marks=pytest.mark.smoke),
        ("fit", "plain=1", "form=tf"),
        soaked(("fit", "plain=1", "zero=3")),
    ],
    ids=["loop", "fit of tf.keras", "ZeRO 3"],
)
def test_a_training_goes_on_with_fewer_workers(tmp_path, given):
    output = run(*REGROUPING, PROGRAM, tmp_path, *given, *LOSING)
    found, expected = report(output), undisturbed(("-n", "3"), given)
    assert len(resumed_steps(output)) == 1
    assert "the job goes on with 2 workers" in output
    assert (found.pop("replicas"), expected["replicas"]) == ([3, 2], [3, 3])
    # Two replicas sum the same examples in another order than three.
    np.testing.assert_allclose(found["norms"], expected["norms"], rtol=1e-5)
    for name in ("seen", "steps"):
        assert found.get(name) == expected.get(name)
    for name, values in found.get("history", {}).items():
        np.testing.assert_allclose(values, expected["history"][name], rtol=1e-5)


def test_the_batch_of_each_replica_stays_if_that_is_wanted(tmp_path):
    given = ("fit", "plain=1", "keep=per_replica_batch")
    output = run(*REGROUPING, PROGRAM, tmp_path, *given, *LOSING)
    found = report(output)
    (resumed,) = resumed_steps(output)
    # 150 examples in an epoch: 8 in a batch of three workers, 5 in one of two.
    epoch, done = divmod(resumed, 19)
    rest = -(-(150 - 8 * done) // 5)
    assert found["steps"] == resumed + rest + (2 - epoch) * 150 // 5
    assert found["rate"] == pytest.approx(0.01 * 2 / 3)
    # Each epoch has counted each example once.
    counted = np.array(found["history"]["accuracy"]) * 150
    np.testing.assert_allclose(counted, np.round(counted), atol=1e-4)


def test_with_too_few_workers_the_job_ends(tmp_path):
    job = subprocess.run(
        unison_run(*REGROUPING, "--min-workers", 3, PROGRAM, tmp_path, "loop", *LOSING),
        capture_output=True,
        text=True,
        env=environment(),
        timeout=LIMIT,
        check=False,
    )
    assert job.returncode == 77
    assert "3 workers are needed to continue, and there would be 2" in job.stderr


# -- several machines ---------------------------------------------------------------------------


@pytest.mark.parametrize("lost", [1, soaked(2)], ids=["that of the rendezvous", "another"])
def test_a_whole_machine_is_lost_and_its_state_comes_from_another(tmp_path, lost):
    given = ("loop", "slow=0.05", "epochs=6")
    rendezvous = free_addresses(1)[0]
    with contextlib.ExitStack() as ending:

        def start(place):
            machine = Machine(f"127.0.0.{place}", 2, rendezvous, tmp_path, given)
            ending.callback(machine.lose)
            return machine

        machines = {place: start(place) for place in (1, 2)}
        train_until(50, tmp_path, [*machines.values()])
        machines[lost].lose()
        machines[lost] = start(lost)
        output = end_well([*machines.values()])
    # Between machines gloo sums, and on one machine shared memory: they round differently.
    expected = undisturbed(TWO_WORKERS, given)
    assert report(output)["seen"] == expected["seen"]
    (resumed,) = resumed_steps(output)
    assert resumed >= 20
    assert "fetched the state at step" in machines[lost].text(), output


@pytest.mark.parametrize("worker", [0, soaked(1)])
def test_a_lost_worker_of_fit_lets_all_machines_start_again(tmp_path, worker):
    given = ("fit", "plain=1", "slow=0.02", f"kills=30:{worker}")
    rendezvous = free_addresses(1)[0]
    with contextlib.ExitStack() as ending:
        machines = []
        for place in (1, 2):
            machine = Machine(f"127.0.0.{place}", "1:2", rendezvous, tmp_path, given)
            ending.callback(machine.lose)
            machines.append(machine)
        output = end_well(machines)
    found, expected = report(output), undisturbed(TWO_WORKERS, given[:2])
    np.testing.assert_allclose(found["norms"], expected["norms"], rtol=1e-5)
    assert found["steps"] == expected["steps"]
    assert output.count("all workers are started again") == 2
    assert len(resumed_steps(output)) == 1


@pytest.mark.parametrize("kind", ["loop", soaked("fit")])
@pytest.mark.parametrize("lost", [soaked(1), 3], ids=["that of the rendezvous", "another"])
def test_a_job_goes_on_without_a_lost_machine_and_with_another_one(tmp_path, kind, lost):
    given = (kind, "plain=1", "slow=0.05", "epochs=12")
    rendezvous = free_addresses(1)[0]
    with contextlib.ExitStack() as ending:

        def start(place):
            machine = Machine(f"127.0.0.{place}", "2:3", rendezvous, tmp_path, given)
            ending.callback(machine.lose)
            return machine

        machines = {place: start(place) for place in (1, 2, 3)}
        train_until(50, tmp_path, [*machines.values()])
        machines.pop(lost).lose()
        train_until(90, tmp_path, [*machines.values()])
        machines[4] = start(4)
        output = end_well([*machines.values()])
    found, expected = report(output), undisturbed(("-n", "3"), given)
    np.testing.assert_allclose(found["norms"], expected["norms"], rtol=1e-4)
    for name in ("seen", "steps"):
        assert found.get(name) == expected.get(name)
    numbers = re.findall(r"It goes on with (\d) workers; at that step there were (\d)", output)
    assert numbers == [("2", "3"), ("3", "2")]


# -- options ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--in-memory-checkpoints"], "Give --restarts"),
        (["--checkpoint-overhead", "1"], "is for --in-memory-checkpoints"),
        ([*KEEPING, "--min-workers", "1", "--wait", "3"], "--wait is for elastic jobs whose"),
        ([*KEEPING, "--min-workers", "1", "--address", "auto"], "--address is for elastic jobs"),
        ([*KEEPING, "--min-workers", "1", "--max-workers", "3", "-n", "2"], "no others can join"),
        (
            [*KEEPING, "--min-workers", "1", "--nnodes", "2", "--rendezvous", "a:1"],
            "different jobs",
        ),
        ([*KEEPING, "--hosts", "a,b"], "are for different jobs"),
        ([*KEEPING, "--address", "auto"], "are for different jobs"),
        ([*KEEPING[:-1], "0"], "expected a percentage"),
    ],
)
def test_wrong_options_are_refused(arguments, complaint, capsys):
    from unison.cli import main

    try:
        code = main(["run", *arguments, str(PROGRAM), "folder", "fit"])
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    assert complaint in capsys.readouterr().err


def test_ctrl_c_leaves_no_process(tmp_path):
    job = subprocess.Popen(
        unison_run("-n", 2, *KEEPING, PROGRAM, tmp_path, "loop", "slow=0.1", "epochs=50"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment(),
        start_new_session=True,
    )
    with contextlib.ExitStack() as ending:
        ending.callback(job.wait)
        ending.callback(kill_group, job.pid)
        train_until(60, tmp_path, [])
        job.send_signal(signal.SIGINT)
        assert job.wait(60) == 128 + signal.SIGINT
    left = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, check=False).stdout
    assert not left, left
