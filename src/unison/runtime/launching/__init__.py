"""Starting the workers of a job: what `unison run` and `launch` are made of.

`environments` says what each worker finds in its environment, `workers` starts one on this machine
and `ray_nodes` on a Ray cluster, `jobs` ends all of them when one fails, and `functions` runs a
Python function instead of a program. `elastic` starts lost workers again, as far as `restarts`
says; `job_folder` is what remains of such a job, and `guards` end workers when nobody else does.
"""

from unison.runtime.launching.elastic import ElasticJob, ForeignGroup
from unison.runtime.launching.environments import (
    cluster_on_this_machine,
    elastic_environments,
    with_own_gpus,
    worker_environments,
)
from unison.runtime.launching.functions import WorkerError, launch
from unison.runtime.launching.guards import Guard
from unison.runtime.launching.job_folder import JobFolder
from unison.runtime.launching.jobs import Failure, Job
from unison.runtime.launching.ray_nodes import RayNodes, Room
from unison.runtime.launching.restarts import Restarts
from unison.runtime.launching.workers import ProcessWorker, Program, Start

__all__ = [
    "ElasticJob",
    "Failure",
    "ForeignGroup",
    "Guard",
    "Job",
    "JobFolder",
    "ProcessWorker",
    "Program",
    "RayNodes",
    "Restarts",
    "Room",
    "Start",
    "WorkerError",
    "cluster_on_this_machine",
    "elastic_environments",
    "launch",
    "with_own_gpus",
    "worker_environments",
]
