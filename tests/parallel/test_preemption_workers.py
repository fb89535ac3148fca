"""Workers of which one is about to be stopped: all save behind one step, exit, and go on there."""

import pytest

from unison.runtime import WorkerError
from unison.train import load_variable
from warm_workers import launch

SECONDS = 150
STEPS = 60


def train(folder, signalled=(), grace_period=None):
    """Counts the steps; returns where it began, and what it counted.

    The second worker is slow, so that the first one is some steps ahead.
    """
    import os
    import signal
    import time

    import jax
    import numpy as np

    import unison
    from unison.train import Checkpoint, PreemptionCheckpointHandler, TerminationConfig

    strategy = unison.MultiWorkerMirroredStrategy()
    with strategy.scope():
        count = unison.Variable(np.float32(0.0), aggregation=unison.VariableAggregation.SUM)
        seen = unison.Variable(
            np.float32(0.0),
            synchronization=unison.VariableSynchronization.ON_READ,
            aggregation=unison.VariableAggregation.SUM,
        )
    index = jax.process_index()
    handler = PreemptionCheckpointHandler(
        strategy.cluster_resolver,
        Checkpoint(count=count, seen=seen),
        folder,
        TerminationConfig(grace_period=grace_period),
    )
    first = handler.total_run_calls

    def add():
        count.assign_add(1.0)
        seen.assign_add(1.0)

    def step():
        strategy.run(add)
        time.sleep(0.02 * index)
        if first == 0 and handler.total_run_calls == 10 and index in signalled:
            os.kill(os.getpid(), signal.SIGTERM)

    while handler.total_run_calls < STEPS:
        handler.run(step)
    return first, float(count), float(seen)


def on_workers(*args):
    return launch(train, 2, args, 1, timeout=SECONDS, on_line=lambda *line: None)


def saved(folder, name):
    return float(load_variable(folder, f"{name}/.ATTRIBUTES/VARIABLE_VALUE"))


@pytest.mark.parametrize("signalled", [(1,), (0, 1)], ids=["one", "both"])
def test_all_workers_save_behind_one_step_exit_and_go_on_there(tmp_path, signalled):
    with pytest.raises(WorkerError, match="42"):
        on_workers(tmp_path, signalled)
    steps = saved(tmp_path, "checkpointed_runs")
    assert 10 < steps < STEPS
    # What all hold together, and what each has a part of, are those of one step.
    assert saved(tmp_path, "count") == saved(tmp_path, "seen") == 2 * steps
    first, second = on_workers(tmp_path)
    assert first == second == (steps, 2.0 * STEPS, 2.0 * STEPS)


def test_workers_go_on_for_most_of_the_grace_period_and_save_again(tmp_path):
    with pytest.raises(WorkerError, match="42"):
        on_workers(tmp_path, (1,), 0.6)
    steps = saved(tmp_path, "checkpointed_runs")
    assert saved(tmp_path, "save_counter") == 2
    assert saved(tmp_path, "count") == saved(tmp_path, "seen") == 2 * steps
