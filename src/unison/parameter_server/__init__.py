"""Parameter servers: variables in separate processes, and workers that push gradients to them.

* `strategy` puts variables on servers (`cells`, `partitioners`), and `coordinator` schedules
  functions on workers; both are in the program's own process, the coordinator. There, `functions`
  numbers the scheduled functions, `calls` is the queue, and `dispatching` has a thread for each
  worker (`worker_threads`) that takes calls from it.
* `programs` turns a scheduled function into a program for workers and updates for servers;
  `splitting` decides where to divide it, by the cheapest `cut`.
* `workers` and `servers` are the other processes; `serving` starts them.
* `store` is the client of the servers in the coordinator and the workers, and `messages` the wire
  protocol.
* `shared` has the variables that several jobs share; `jobs` separates jobs on a server.

How a function is sent to a worker: as in TensorFlow, the coordinator traces it, and sends compiled
code (StableHLO, written by `jax.export`), with a description in numbers and text. So workers need
nothing of the user's program except the functions that create their datasets, user code fails where
the user sees it, and no part of a step is ever unpickled. A dataset's function is Python, and has
to run where the data is read; it is pickled, and signed with the job's key, which both ends of
every connection have proved to know; the signature is checked before it is unpickled. With Ray, the
processes receive that key through Ray's own channels. Ray starts and monitors processes; variables
and gradients use separate connections, because Ray's object store takes 5.6 ms for a round trip of
1.6 MB, ten times as long as a socket.
"""

from unison.parameter_server.calls import RemoteValue
from unison.parameter_server.coordinator import ClusterCoordinator
from unison.parameter_server.partitioners import (
    FixedShardsPartitioner,
    MaxSizePartitioner,
    MinSizePartitioner,
    Partitioner,
)
from unison.parameter_server.per_worker import PerWorkerDataset, PerWorkerIterator
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
