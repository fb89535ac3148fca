from unison.strategies.base import Strategy as Strategy
from unison.strategies.base import ValueContext as ValueContext
from unison.strategies.central_storage import CentralStorageStrategy as CentralStorageStrategy
from unison.strategies.context import ReplicaContext as ReplicaContext
from unison.strategies.context import in_cross_replica_context as in_cross_replica_context
from unison.strategies.current import get_replica_context as get_replica_context
from unison.strategies.current import get_strategy as get_strategy
from unison.strategies.current import has_strategy as has_strategy
from unison.strategies.mirrored import MirroredStrategy as MirroredStrategy
from unison.strategies.model_parallel import ModelParallelStrategy as ModelParallelStrategy
from unison.strategies.multi_worker import (
    MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
)
from unison.strategies.one_device import OneDeviceStrategy as OneDeviceStrategy
from unison.strategies.tpu import TPUStrategy as TPUStrategy
