"""Starting the workers of a job on this machine: what `unison run` and `launch` are made of.

`environments` says what each worker finds in its environment, `jobs` starts the processes, passes
on what they print and ends all of them when one fails, and `functions` runs a Python function
instead of a program.
"""

from unison.runtime.launching.environments import cluster_on_this_machine, worker_environments
from unison.runtime.launching.functions import WorkerError, launch
from unison.runtime.launching.jobs import Failure, Job, Program

__all__ = [
    "Failure",
    "Job",
    "Program",
    "WorkerError",
    "cluster_on_this_machine",
    "launch",
    "worker_environments",
]
