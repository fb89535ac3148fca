"""How TensorFlow lets a program choose its all-reduce.

XLA chooses the algorithm that fits the devices, so these are accepted by `MirroredStrategy` and
have no effect.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any


class CrossDeviceOps:
    """Base class of the choices. TF: `tf.distribute.CrossDeviceOps`."""


@dataclasses.dataclass(frozen=True)
class HierarchicalCopyAllReduce(CrossDeviceOps):
    """TF: `tf.distribute.HierarchicalCopyAllReduce`."""

    num_packs: int = 1


@dataclasses.dataclass(frozen=True)
class NcclAllReduce(CrossDeviceOps):
    """TF: `tf.distribute.NcclAllReduce`."""

    num_packs: int = 1


@dataclasses.dataclass(frozen=True)
class ReductionToOneDevice(CrossDeviceOps):
    """TF: `tf.distribute.ReductionToOneDevice`."""

    reduce_to_device: str | None = None
    accumulation_fn: Callable[..., Any] | None = None
