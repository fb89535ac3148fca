"""`tf.tpu`: TPUs need no setting up here; JAX finds those of the machine when it starts."""

from __future__ import annotations

from typing import Any

from unison.runtime.devices import prepare_backend
from unison.tf.missing import names_missing_from, namespace

__getattr__ = names_missing_from(__name__)


def _initialize_tpu_system(cluster_resolver: Any = None) -> None:
    """Starts the devices. TF: `tf.tpu.experimental.initialize_tpu_system`."""
    prepare_backend()


def _shutdown_tpu_system(cluster_resolver: Any = None) -> None:
    """Has no effect: the devices are given back when the process ends.

    TF: `tf.tpu.experimental.shutdown_tpu_system`.
    """


experimental = namespace(
    "unison.tf.tpu.experimental",
    initialize_tpu_system=_initialize_tpu_system,
    shutdown_tpu_system=_shutdown_tpu_system,
)
