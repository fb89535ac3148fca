"""`tf.distribute.cluster_resolver`."""

from unison.runtime.cluster_resolvers import (
    ClusterResolver,
    SimpleClusterResolver,
    TFConfigClusterResolver,
)
from unison.tf.missing import names_missing_from

__all__ = ["ClusterResolver", "SimpleClusterResolver", "TFConfigClusterResolver"]

_DESCRIBE = "describe the cluster in TF_CONFIG, or by a SimpleClusterResolver"

__getattr__ = names_missing_from(
    __name__,
    {
        "GCEClusterResolver": _DESCRIBE,
        "KubernetesClusterResolver": _DESCRIBE,
        "KubernetesExecutableLocation": _DESCRIBE,
        "SlurmClusterResolver": _DESCRIBE,
        "TPUClusterResolver": "MirroredStrategy() trains on all TPU cores of this machine",
        "UnionResolver": _DESCRIBE,
    },
)
