"""Unison in a job whose workers may change, of which none is lost: what the protection costs."""

from __future__ import annotations

import os
import subprocess
import sys

import unison
from benchmarks import cluster
from benchmarks.contestants import training_unison
from benchmarks.contestants.elastic_register import TOKEN
from benchmarks.contestants.training import Training
from benchmarks.contestants.training_keras import Loop
from benchmarks.protocol import Contestant
from benchmarks.workloads import TrainingWork
from unison import tf
from unison.runtime.elastic.environment import ElasticEnvironment
from unison.runtime.launching import elastic_environments


def custom_loop(work: TrainingWork) -> Contestant:
    _come_to_job()
    strategy = unison.MultiWorkerMirroredStrategy()
    loop = Loop(tf, strategy, work)
    batches = training_unison.batches_on_device(strategy, work)

    @unison.elastic.run
    def train(state: unison.elastic.State) -> None:
        for images, labels in batches:
            loop.step(images, labels)
            state.commit()

    state = unison.elastic.State(
        steps_are_one_program=True, model=loop.model, optimizer=loop.optimizer
    )
    return Training(work, lambda: train(state), loop.parameters, training_unison.VERSIONS)


def fit(work: TrainingWork) -> Contestant:
    _come_to_job()
    return training_unison.fit(work)


def _come_to_job() -> None:
    """Makes this process a worker of an elastic job; the first one starts the job's register."""
    own = cluster.from_environment()
    register = own.addresses[0]
    if own.rank == 0:
        port = register.rpartition(":")[2]
        module = "benchmarks.contestants.elastic_register"
        subprocess.Popen([sys.executable, "-m", module, port, str(own.size)])
    told = ElasticEnvironment(register, TOKEN, "", None, "", 10.0, 60.0, None)
    os.environ |= elastic_environments(told, ["127.0.0.1"] * own.size)[own.rank]
