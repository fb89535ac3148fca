"""An input service: processes on any machine compute datasets for training programs.

A dispatcher (`dispatcher`) knows the datasets, the workers, and who reads what; its decisions are
in `registry`, without sockets and threads, and its `journal` survives a restart. Workers (`worker`)
compute datasets in `tasks`, each into a buffer (`buffers`), and programs read them (`reading`)
through `distribute` and `from_dataset_id` (`datasets`). Workers run in a process of this program
(`worker_process`), on the nodes of a Ray cluster (`ray_workers`), or by the command.
"""

from unison.lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
