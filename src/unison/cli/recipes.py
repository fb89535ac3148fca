"""The output of `unison run --env`: how to start a program's workers elsewhere."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
import shlex
from collections.abc import Callable, Mapping, Sequence

from unison.cli.errors import CommandError
from unison.cli.programs import KERAS_BACKEND
from unison.monitoring.first_worker import VARIABLE as MONITOR
from unison.net.secret import KEY_VARIABLE
from unison.runtime.devices import CPU_DEVICES_VARIABLE
from unison.runtime.exit_codes import LOST_ANOTHER, PREEMPTED
from unison.runtime.launching import (
    cluster_on_this_machine,
    default_workers,
    with_own_gpus,
    worker_environments,
)

#: The line that creates a key for one job, which does not appear on a command line.
_NEW_KEY = (
    f"export {KEY_VARIABLE}=${{{KEY_VARIABLE}:-"
    "$(python -c 'import secrets; print(secrets.token_hex(32))')}\n"
)

#: The port of Kubernetes pods, each of which has its own address.
_PORT = 8470


@dataclasses.dataclass(frozen=True)
class Asked:
    """The program and workers to start.

    Attributes:
        program: The arguments of Python.
        workers: The number of workers. None: the recipe's default.
        devices_per_worker: The number of logical devices into which each worker splits its CPU;
            None: as configured.
        host: The address at which workers on this machine listen.
        is_monitored: Whether `unison top` may monitor them.
        restarts: How often all workers start again when one is lost.
    """

    program: Sequence[str]
    workers: int | None = None
    devices_per_worker: int | None = None
    host: str = "127.0.0.1"
    is_monitored: bool = True
    restarts: int = 0

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables of every worker, wherever it is started."""
        found = {}
        if backend := os.environ.get(KERAS_BACKEND):
            found[KERAS_BACKEND] = backend
        if self.is_monitored:
            found[MONITOR] = "1"
        if self.devices_per_worker is not None:
            found[CPU_DEVICES_VARIABLE] = str(self.devices_per_worker)
        return found


def local_environments(asked: Asked) -> list[dict[str, str]]:
    """Returns the additional environment variables of each worker on this machine.

    Raises:
        CommandError: The workers cannot listen at the address.
    """
    try:
        cluster = cluster_on_this_machine(asked.workers or default_workers(), asked.host)
    except OSError as error:
        raise CommandError(
            f"Cannot listen on {asked.host}: {error}. Give an address of this machine as --host."
        ) from error
    return with_own_gpus(worker_environments(cluster, asked.devices_per_worker))


def _tf_config(asked: Asked) -> str:
    """Returns the environment variables of each worker on this machine, as shell commands.

    Raises:
        CommandError: The workers should start again.
    """
    if asked.restarts:
        raise CommandError(
            "--restarts is for --env that starts the workers. What starts those of tf-config has "
            "to start them again."
        )
    return "".join(
        f"# worker {index}\n{_exported({**asked.environment, **environment})}"
        for index, environment in enumerate(local_environments(asked))
    )


def _slurm(asked: Asked) -> str:
    """Returns a batch script for `sbatch`, with one worker per node."""
    return (
        "#!/bin/bash\n"
        f"#SBATCH --nodes={asked.workers or 2}\n"
        "#SBATCH --ntasks-per-node=1\n"
        "#SBATCH --cpus-per-task=8\n"
        f"{'#SBATCH --requeue  # if a node fails' + chr(10) if asked.restarts else ''}"
        "export NPROC=$SLURM_CPUS_PER_TASK OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK"
        " OPENBLAS_NUM_THREADS=$SLURM_CPUS_PER_TASK\n"
        f"{_exported(asked.environment)}"
        f"{_NEW_KEY}"
        + _again(
            asked,
            'srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 \\\n'
            f"    python -u {shlex.join(asked.program)}",
        )
    )


def _open_mpi(asked: Asked) -> str:
    """Returns a command line with `mpirun`."""
    given = "".join(f"-x {name}={value} " for name, value in asked.environment.items())
    return f"{_NEW_KEY}" + _again(
        asked,
        f"mpirun -n {asked.workers or 2} -x {KEY_VARIABLE} -x NPROC=1 -x OMP_NUM_THREADS=1 "
        f"-x OPENBLAS_NUM_THREADS=1 {given}\\\n"
        f"    python -u {shlex.join(asked.program)}",
    )


def _again(asked: Asked, command: str) -> str:
    """Returns a command, which is repeated until it succeeds if its workers should start again.

    `srun` and `mpirun` end the other workers, too. Their exit status does not tell a program that
    has failed from a worker that was lost.
    """
    if not asked.restarts:
        return f"{command}\n"
    return (
        f"restarts={asked.restarts}\n"
        f"until {command}\n"
        "do\n"
        "    code=$?\n"
        "    [ $((restarts--)) -gt 0 ] || exit $code\n"
        "done\n"
    )


def _ray(asked: Asked) -> str:
    """Returns the commands that create a Ray cluster and start the workers on it."""
    count = f"-n {asked.workers} " if asked.workers else ""
    devices = (
        f"--devices-per-worker {asked.devices_per_worker} " if asked.devices_per_worker else ""
    )
    unwatched = "" if asked.is_monitored else "--no-monitor "
    restarts = f"--restarts {asked.restarts} " if asked.restarts else ""
    return (
        "# on the first machine; --node-ip-address 127.0.0.2 where it is the only one\n"
        "ray start --head --port 6379\n"
        "# on the others\n"
        "ray start --address FIRST_MACHINE:6379\n"
        "# on one of them\n"
        f"unison run {count}{devices}{restarts}{unwatched}--address auto "
        f"{shlex.join(asked.program)}\n"
    )


#: A worker that is lost ends the others, with exit code 75: all of their pods are replaced. A
#: program that fails would fail again. Of what Kubernetes does by itself (it drains a node, a pod
#: with priority needs its place), nothing counts.
_FAILURE_POLICY = f"""
  podFailurePolicy:
    rules:
      - action: Ignore
        onPodConditions:
          - type: DisruptionTarget
      - action: FailJob
        onExitCodes:
          containerName: worker
          operator: NotIn
          values: {[PREEMPTED, LOST_ANOTHER, *(128 + number for number in range(1, 32))]}"""


def _kubernetes(asked: Asked) -> str:
    """Returns an indexed job and its headless service, for `kubectl apply`."""
    workers = asked.workers or 2
    name = _kubernetes_name(asked.program)
    addresses = [f"{name}-{index}.{name}:{_PORT}" for index in range(workers)]
    config = json.dumps(
        {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": "$(INDEX)"}}
    )
    given = "".join(
        f"""
            - name: {variable}
              value: {json.dumps(value)}"""
        for variable, value in asked.environment.items()
    )
    return f"""\
# Set image and resources. The pods find each other by the names that the service gives them. What
# they prove to each other is a secret, made once:
#   kubectl create secret generic {name}-key --from-literal=key=$(openssl rand -hex 32)
apiVersion: v1
kind: Service
metadata:
  name: {name}
spec:
  clusterIP: None
  publishNotReadyAddresses: true
  selector:
    job-name: {name}
---
apiVersion: batch/v1
kind: Job
metadata:
  name: {name}
spec:
  completionMode: Indexed
  completions: {workers}
  parallelism: {workers}
  backoffLimit: {workers * asked.restarts}{_FAILURE_POLICY if asked.restarts else ""}
  template:
    spec:
      subdomain: {name}
      restartPolicy: Never
      containers:
        - name: worker
          image: IMAGE
          command: {json.dumps(["python", "-u", *asked.program])}
          ports:
            - containerPort: {_PORT}
          env:
            - name: INDEX
              valueFrom:
                fieldRef:
                  fieldPath: metadata.annotations['batch.kubernetes.io/job-completion-index']
            - name: {KEY_VARIABLE}
              valueFrom:
                secretKeyRef:
                  name: {name}-key
                  key: key
            - name: TF_CONFIG
              value: '{config}'{given}
"""


def _kubernetes_name(program: Sequence[str]) -> str:
    """Returns a name that is valid in Kubernetes, derived from the program's."""
    script = program[1] if program[0] == "-m" else pathlib.Path(program[0]).stem
    return re.sub(r"[^a-z0-9]+", "-", script.lower())[:40].strip("-") or "train"


def _exported(environment: Mapping[str, str]) -> str:
    """Returns the shell commands that set variables."""
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in environment.items())


#: The recipes, by environment name.
RECIPES: dict[str, Callable[[Asked], str]] = {
    "kubernetes": _kubernetes,
    "openmpi": _open_mpi,
    "ray": _ray,
    "slurm": _slurm,
    "tf-config": _tf_config,
}
