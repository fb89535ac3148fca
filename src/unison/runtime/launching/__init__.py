"""Starting the workers of a job: what `unison run` and `launch` are made of.

`environments` says what each worker finds in its environment, `workers` starts one on this machine
and `ray_nodes` on a Ray cluster, `jobs` ends all of them when one fails, and `functions` runs a
Python function instead of a program. `elastic` starts lost workers again, as far as `restarts`
says; `job_folder` is what remains of such a job, and `guards` end workers when nobody else does.
"""

from unison.lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
