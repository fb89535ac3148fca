"""`tf.distribute.cluster_resolver`."""

from unison.runtime.cluster_resolvers import (
    ClusterResolver,
    GCEClusterResolver,
    KubernetesClusterResolver,
    SimpleClusterResolver,
    SlurmClusterResolver,
    TFConfigClusterResolver,
    TPUClusterResolver,
)
from unison.runtime.cluster_resolvers import ExecutableLocation as KubernetesExecutableLocation
from unison.runtime.cluster_resolvers import UnionClusterResolver as UnionResolver
from unison.tf.missing import names_missing_from

__all__ = [
    "ClusterResolver",
    "GCEClusterResolver",
    "KubernetesClusterResolver",
    "KubernetesExecutableLocation",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
    "TPUClusterResolver",
    "UnionResolver",
]

__getattr__ = names_missing_from(__name__)
