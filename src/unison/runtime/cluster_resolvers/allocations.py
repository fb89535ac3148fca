"""The first host of the allocation of a batch system, in which a launcher starts processes."""

from __future__ import annotations

import os
import pathlib

from unison.runtime.cluster_resolvers.hostlists import expand_hostlist

#: The variables of Slurm with the nodes of a job: of its `sbatch` script, and the older name.
_SLURM = ("SLURM_JOB_NODELIST", "SLURM_NODELIST")

#: LSF's hosts with their slots, as "host 4 host 4", and the file with one line a slot.
_LSF_HOSTS = "LSB_MCPU_HOSTS"
_LSF_FILE = "LSB_DJOB_RANKFILE"

#: The file of PBS and Torque with one line a slot.
_PBS_FILE = "PBS_NODEFILE"


def first_host() -> str | None:
    """Returns the first host of the allocation of Slurm, LSF or PBS; None without one.

    Raises:
        ValueError: A variable is malformed.
        OSError: A file that a variable names cannot be read.
    """
    for variable in _SLURM:
        if nodes := expand_hostlist(os.environ.get(variable, "")):
            return nodes[0]
    for hosts in (lsf_hosts(), _lines(_PBS_FILE)):
        if hosts:
            return hosts[0]
    return None


def lsf_hosts() -> list[str]:
    """Returns the hosts of an LSF job, each once, in order; none without a job.

    `LSB_DJOB_RANKFILE` and `LSB_MCPU_HOSTS` list them (IBM Spectrum LSF 10.1, "Environment
    variables set for job execution").

    Raises:
        ValueError: `LSB_MCPU_HOSTS` is malformed.
        OSError: The file cannot be read.
    """
    if hosts := _lines(_LSF_FILE):
        return hosts
    words = os.environ.get(_LSF_HOSTS, "").split()
    if len(words) % 2 or not all(slots.isdecimal() for slots in words[1::2]):
        raise ValueError(
            f"Expected hosts and numbers of slots in {_LSF_HOSTS}, such as 'a 4 b 4'. Received: "
            f"{os.environ[_LSF_HOSTS]!r}"
        )
    return list(dict.fromkeys(words[::2]))


def _lines(variable: str) -> list[str]:
    """Returns the different lines of the file that a variable names, in order."""
    path = os.environ.get(variable)
    if not path:
        return []
    return list(dict.fromkeys(pathlib.Path(path).read_text().split()))
