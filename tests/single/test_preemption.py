"""A process that is about to be stopped saves behind its step and exits, and goes on from there."""

import os
import signal
import threading
import time

import pytest

import unison
import unison.tf as tf
from subprocess_program import run_program
from unison.errors import InvalidArgumentError
from unison.runtime.cluster import ClusterSpec
from unison.runtime.cluster_resolvers import SimpleClusterResolver
from unison.train import (
    Checkpoint,
    CheckpointManager,
    PreemptionCheckpointHandler,
    TerminationConfig,
    latest_checkpoint,
    load_variable,
)

#: Takes ten steps, and gets SIGTERM in the fourth one, unless it has been restarted.
PROGRAM = """
import os, signal, sys
import unison.tf as tf
count = tf.Variable(0)
handler = tf.distribute.experimental.PreemptionCheckpointHandler(
    None, tf.train.Checkpoint(count=count), sys.argv[1]
)
first = handler.total_run_calls
def step():
    if first == 0 and handler.total_run_calls == 3:
        os.kill(os.getpid(), signal.SIGTERM)
    count.assign_add(1)
    return int(count)
steps = []
try:
    while handler.total_run_calls < 10:
        steps.append(handler.run(step))
finally:
    print(first, steps)
"""


@pytest.fixture
def made():
    """Makes handlers, which are stopped at the end of the test."""
    handlers = []

    def make(*args, **kwargs):
        handlers.append(PreemptionCheckpointHandler(None, *args, **kwargs))
        return handlers[-1]

    yield make
    for handler in handlers:
        handler.stop()


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.01)  # Python calls the handler between two operations


def saved(folder, name="count"):
    return int(load_variable(folder, f"{name}/.ATTRIBUTES/VARIABLE_VALUE"))


def test_program_that_gets_sigterm_saves_exits_with_42_and_goes_on_where_it_was(tmp_path):
    def run():
        return run_program(PROGRAM, tmp_path, timeout=100, imported=("jax", "unison"))

    stopped = run()
    assert (stopped.returncode, stopped.stdout) == (42, "0 [1, 2, 3, 4]\n"), stopped.stderr
    assert saved(tmp_path) == saved(tmp_path, "checkpointed_runs") == 4
    again = run()
    assert (again.returncode, again.stdout) == (0, "4 [5, 6, 7, 8, 9, 10]\n"), again.stderr


def test_step_in_which_the_signal_comes_is_saved_and_none_is_begun(tmp_path, made):
    count, calls = unison.Variable(0), []
    config = TerminationConfig(exit_fn=lambda: calls.append(handler.total_run_calls))
    handler = made(Checkpoint(count=count), tmp_path, config)

    def step():
        count.assign_add(1)
        if int(count) == 2:
            terminate()
        return "result"

    assert [handler.run(step) for _ in range(2)] == ["result"] * 2
    assert calls == []
    handler.run(count.assign_add, 1)  # which is taken after all, as exit_fn returns
    assert calls == [2]
    assert saved(tmp_path) == 2
    handler.run(count.assign_add, 1)
    assert calls == [2]


def test_function_is_asked_in_place_of_the_signal(tmp_path, made, monkeypatch):
    monkeypatch.setattr("unison.train.preemption._SECONDS_BETWEEN_QUESTIONS", 0.01)
    before = signal.getsignal(signal.SIGTERM)
    answers = iter([False, True])
    config = TerminationConfig(lambda: next(answers), exit_fn=lambda: exits.append(1))
    count, exits = unison.Variable(0), []
    handler = made(Checkpoint(count=count), tmp_path, config)
    assert signal.getsignal(signal.SIGTERM) == before
    deadline = time.monotonic() + 60
    while not exits and time.monotonic() < deadline:
        handler.run(time.sleep, 0.01)
    assert exits == [1]


def test_function_that_fails_is_asked_again(tmp_path, made, monkeypatch, caplog):
    monkeypatch.setattr("unison.train.preemption._SECONDS_BETWEEN_QUESTIONS", 0.01)
    asked = threading.Semaphore(0)

    def fail():
        asked.release()
        raise OSError("no metadata server")

    made(Checkpoint(count=unison.Variable(0)), tmp_path, TerminationConfig(fail))
    for _ in range(3):
        assert asked.acquire(timeout=60)
    assert caplog.text.count("It will be called again") == 1


def test_training_goes_on_in_the_grace_period_and_is_saved_again_before_its_end(tmp_path, made):
    count, saves, exits = unison.Variable(0), [], []
    config = TerminationConfig(
        grace_period=0.5,
        save_fn=lambda: saves.append((int(count), time.monotonic())),
        exit_fn=lambda: exits.append(time.monotonic()),
    )
    handler = made(Checkpoint(count=count), tmp_path, config)
    handler.run(terminate)
    told = time.monotonic()
    deadline = told + 60
    while not exits and time.monotonic() < deadline:
        handler.run(count.assign_add, 1)
    assert next(number for number, _ in saves) == 0
    assert len(saves) == 2
    assert saves[1][0] > 0
    assert saves[1][1] <= exits[0]


def test_loop_without_run_saves_behind_a_step(tmp_path, made):
    count, exits = unison.Variable(0), []
    config = TerminationConfig(exit_fn=lambda: exits.append(int(count)))
    manager = CheckpointManager(Checkpoint(count=count), tmp_path, None)
    handler = made(manager, termination_config=config)
    for number in range(4):
        count.assign_add(1)
        if number == 2:
            terminate()
        handler.save_checkpoint_if_preempted(checkpoint_number=7)
    assert exits == [3]
    assert latest_checkpoint(tmp_path) == str(tmp_path / "ckpt-7")


def test_end_of_the_scope_is_a_place_to_save(tmp_path, made):
    count, exits = unison.Variable(0), []
    handler = made(
        Checkpoint(count=count), tmp_path, TerminationConfig(exit_fn=lambda: exits.append(1))
    )
    with handler.watch_preemption_scope():
        handler.run(terminate)
        assert not exits
    assert exits == [1]


def test_step_that_raises_is_not_counted(tmp_path, made):
    handler = made(Checkpoint(count=unison.Variable(0)), tmp_path)

    def fail():
        raise ValueError("the step")

    handler.run(lambda: None)
    with pytest.raises(ValueError, match="the step"):
        handler.run(fail)
    assert handler.total_run_calls == 1


def test_signal_does_again_what_it_did_before(tmp_path, made):
    told = []
    before = signal.signal(signal.SIGTERM, lambda *args: told.append(1))
    try:
        handler = made(Checkpoint(count=unison.Variable(0)), tmp_path)
        terminate()
        assert told == []
        handler.stop()
        terminate()
        assert told == [1]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_handler_of_another_thread_says_that_it_gets_no_signals(tmp_path):
    errors = []

    def make():
        try:
            PreemptionCheckpointHandler(None, Checkpoint(count=unison.Variable(0)), tmp_path)
        except ValueError as error:
            errors.append(str(error))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join(60)
    assert "main thread" in errors[0]


def test_checkpoint_needs_a_folder():
    with pytest.raises(InvalidArgumentError, match="checkpoint_dir"):
        PreemptionCheckpointHandler(None, Checkpoint(count=unison.Variable(0)))


@pytest.mark.parametrize(
    ("jobs", "said"),
    [
        ({"worker": ["a:1"], "ps": ["b:1"]}, "parameter servers"),
        ({"worker": ["a:1", "b:1"]}, "joined the 2 workers"),
    ],
)
def test_cluster_that_cannot_agree_is_refused(tmp_path, jobs, said):
    resolver = SimpleClusterResolver(ClusterSpec(jobs), task_type="worker", task_id=0)
    with pytest.raises(ValueError, match=said):
        PreemptionCheckpointHandler(resolver, Checkpoint(count=unison.Variable(0)), tmp_path)


def test_face_has_the_names_of_tensorflow():
    assert tf.distribute.experimental.PreemptionCheckpointHandler is PreemptionCheckpointHandler
    assert tf.distribute.experimental.TerminationConfig is TerminationConfig
