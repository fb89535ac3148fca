import unison.runtime.cluster
import unison.runtime.cluster_resolvers
import unison.runtime.devices
import unison.runtime.elastic
import unison.runtime.launching
import unison.runtime.liveness
import unison.runtime.tpu
from unison.runtime.launching import WorkerError as WorkerError
from unison.runtime.launching import launch as launch
