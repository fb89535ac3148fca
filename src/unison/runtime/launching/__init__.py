"""Starting the workers of a job: what `unison run` and `launch` are made of.

`environments` says what each worker finds in its environment, `workers` starts one on this machine
and `ray_nodes` on a Ray cluster, `jobs` ends all of them when one fails, and `functions` runs a
Python function instead of a program.
"""

from unison.runtime.launching.environments import cluster_on_this_machine, worker_environments
from unison.runtime.launching.functions import WorkerError, launch
from unison.runtime.launching.jobs import Failure, Job
from unison.runtime.launching.ray_nodes import RayNodes, Room
from unison.runtime.launching.workers import ProcessWorker, Program, Start

__all__ = [
    "Failure",
    "Job",
    "ProcessWorker",
    "Program",
    "RayNodes",
    "Room",
    "Start",
    "WorkerError",
    "cluster_on_this_machine",
    "launch",
    "worker_environments",
]
