"""Starting the workers of a job: the implementation of `unison run` and `launch`.

`environments` sets the workers' environment variables, `workers` starts a worker on this machine
and `ray_nodes` on the nodes of a `ray_cluster`, `jobs` terminates all of them when one fails, and
`functions` runs a Python function instead of a program. `elastic` restarts lost workers, as
`restarts` allows, and `standby` has processes ready that continue sooner; `job_folder` holds the
files of such a job, and `guards` terminate workers whose parent process has died. `nodes` is the
meeting of several machines, and `partners` keeps copies of their workers' state in each other's
memory.
"""

from unison.lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
