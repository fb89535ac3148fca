"""The output of `unison run --env`: how to start a program's workers elsewhere."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Callable, Mapping, Sequence

from unison.cli import manifests
from unison.cli.asked import Asked
from unison.cli.errors import CommandError
from unison.net.secret import KEY_VARIABLE
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


def local_environments(asked: Asked, places: Sequence[int] | None = None) -> list[dict[str, str]]:
    """Returns the additional environment variables of each worker on this machine.

    Args:
        asked: The input.
        places: Those of the workers that are started, each of which has GPUs of its own. Default:
            all.

    Raises:
        CommandError: The workers cannot listen at the address.
    """
    count = asked.workers or default_workers()
    places = range(count) if places is None else places
    try:
        cluster = cluster_on_this_machine(len(places), asked.host)
    except OSError as error:
        raise CommandError(
            f"Cannot listen on {asked.host}: {error}. Give an address of this machine as --host."
        ) from error
    of_places = with_own_gpus([{}] * count)
    workers = worker_environments(cluster, asked.devices_per_worker)
    return [worker | of_places[place] for worker, place in zip(workers, places, strict=True)]


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
    if asked.gpus is not None:
        raise CommandError("--gpus is for other machines. Those of this one are found.")
    return "".join(
        f"# worker {index}\n{_exported({**asked.environment, **environment})}"
        for index, environment in enumerate(local_environments(asked))
    )


def _slurm(asked: Asked) -> str:
    """Returns a batch script for `sbatch`, with one worker per node, or per GPU of a node."""
    gpus = f"#SBATCH --gpus-per-node={asked.gpus}\n" if asked.gpus else ""
    return (
        "#!/bin/bash\n"
        f"#SBATCH --nodes={asked.workers or 2}\n"
        f"#SBATCH --ntasks-per-node={asked.gpus or 1}\n"
        f"{gpus}"
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
    count, of_nodes = asked.workers or 2, ""
    if asked.gpus:
        count, of_nodes = count * asked.gpus, f"--map-by ppr:{asked.gpus}:node "
    return f"{_NEW_KEY}" + _again(
        asked,
        f"mpirun -n {count} {of_nodes}-x {KEY_VARIABLE} -x NPROC=1 -x OMP_NUM_THREADS=1 "
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
        "(\n"
        f"restarts={asked.restarts}\n"
        f"until {command}\n"
        "do\n"
        "    code=$?\n"
        f"    [ $code -ne {128 + signal.SIGINT} ] && [ $restarts -gt 0 ] || exit $code\n"
        "    restarts=$((restarts - 1))\n"
        "done\n"
        ")\n"
    )


def _ray(asked: Asked) -> str:
    """Returns the commands that create a Ray cluster and start the workers on it."""
    count = f"-n {asked.workers} " if asked.workers else ""
    options = "".join(f"{option} " for option in asked.options_on_ray)
    return (
        "# on the first machine; --node-ip-address 127.0.0.2 where it is the only one\n"
        "ray start --head --port 6379\n"
        "# on the others\n"
        "ray start --address FIRST_MACHINE:6379\n"
        "# on one of them\n"
        f"unison run {count}{options}--address auto "
        f"{shlex.join(asked.program)}\n"
    )


def _exported(environment: Mapping[str, str]) -> str:
    """Returns the shell commands that set variables."""
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in environment.items())


#: The recipes, by environment name.
RECIPES: dict[str, Callable[[Asked], str]] = {
    "jobset": manifests.jobset,
    "kubeflow": manifests.kubeflow,
    "kuberay": manifests.kuberay,
    "kubernetes": manifests.kubernetes,
    "openmpi": _open_mpi,
    "ray": _ray,
    "slurm": _slurm,
    "tf-config": _tf_config,
}
