import unison.collectives
import unison.data
import unison.errors
import unison.functions
import unison.module
import unison.partitioning
import unison.pipelining
import unison.planning
import unison.runtime
import unison.strategies
import unison.values
import unison.variables
from unison import compression as compression
from unison import elastic as elastic
from unison import monitoring as monitoring
from unison import parameter_server as parameter_server
from unison import profiling as profiling
from unison import saving as saving
from unison import testing as testing
from unison import train as train
from unison.cells import VariableAggregation as VariableAggregation
from unison.cells import VariableSynchronization as VariableSynchronization
from unison.collectives import AggregationMethod as AggregationMethod
from unison.collectives import CommunicationOptions as CommunicationOptions
from unison.collectives import ReduceOp as ReduceOp
from unison.collectives import aggregate as aggregate
from unison.collectives import all_gather as all_gather
from unison.collectives import all_reduce as all_reduce
from unison.collectives import broadcast as broadcast
from unison.collectives import reduce as reduce
from unison.functions import Function as Function
from unison.module import Module as Module
from unison.parameter_server import ParameterServerStrategy as ParameterServerStrategy
from unison.runtime.devices import enable_op_determinism as enable_op_determinism
from unison.runtime.devices import set_logical_cpu_devices as set_logical_cpu_devices
from unison.slices import IndexedSlices as IndexedSlices
from unison.strategies import CentralStorageStrategy as CentralStorageStrategy
from unison.strategies import MirroredStrategy as MirroredStrategy
from unison.strategies import ModelParallelStrategy as ModelParallelStrategy
from unison.strategies import MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy
from unison.strategies import OneDeviceStrategy as OneDeviceStrategy
from unison.strategies import ReplicaContext as ReplicaContext
from unison.strategies import Strategy as Strategy
from unison.strategies import TPUStrategy as TPUStrategy
from unison.strategies import ValueContext as ValueContext
from unison.strategies import get_replica_context as get_replica_context
from unison.strategies import get_strategy as get_strategy
from unison.strategies import has_strategy as has_strategy
from unison.strategies import in_cross_replica_context as in_cross_replica_context
from unison.values import Mirrored as Mirrored
from unison.values import PerReplica as PerReplica
from unison.variables import Variable as Variable

__version__: str
