"""Parameter servers: variables in processes of their own, and workers that bring them gradients.

* `strategy` puts variables on servers (`cells`, `partitioners`), and `coordinator` schedules
  functions on workers; both are in the program's own process, the coordinator.
* `programs` makes a scheduled function into what a worker runs and what servers do; `division`
  decides where one ends and the other begins, by the cheapest `cut`.
* `workers` and `servers` are the other processes; `serving` starts them.
* `store` is what coordinator and workers see of the servers, and `messages` the wire.
* `shared` is what several jobs share; `jobs` keeps them apart on a server.

How a function gets to a worker: as in TensorFlow, the coordinator traces it, and compiled code
travels (StableHLO, written by `jax.export`), with a description in numbers and text. So workers
need nothing of the user's program but what makes their datasets, a crash in user code happens where
the user sees it, and nothing of a step is unpickled anywhere. A dataset's function is Python, and
has to run where the data is read; it is pickled, and signed with the job's key, which both ends of
every connection have proved to know; the signature is checked before it is unpickled. With Ray,
that key gets to the processes through Ray's own channels. Ray starts and watches processes; the
variables and gradients have a way of their own, because Ray's object store takes 5.6 ms for 1.6 MB
there and back, ten times as long as a socket.
"""

from unison.parameter_server.coordinator import (
    ClusterCoordinator,
    PerWorkerDataset,
    PerWorkerIterator,
    RemoteValue,
)
from unison.parameter_server.partitioners import (
    FixedShardsPartitioner,
    MaxSizePartitioner,
    MinSizePartitioner,
    Partitioner,
)
from unison.parameter_server.serving import Server, current_worker_index
from unison.parameter_server.sharded import VariableShard, read_rows, shards_of
from unison.parameter_server.shared import VariableStore
from unison.parameter_server.strategy import ParameterServerStrategy

__all__ = [
    "ClusterCoordinator",
    "FixedShardsPartitioner",
    "MaxSizePartitioner",
    "MinSizePartitioner",
    "ParameterServerStrategy",
    "Partitioner",
    "PerWorkerDataset",
    "PerWorkerIterator",
    "RemoteValue",
    "Server",
    "VariableShard",
    "VariableStore",
    "current_worker_index",
    "read_rows",
    "shards_of",
]
