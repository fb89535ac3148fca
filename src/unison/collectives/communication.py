"""How a program asks collective operations to travel."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

import jax


class CommunicationImplementation(enum.Enum):
    """Who moves the bytes between workers.

    Attributes:
        AUTO: Shared memory between processes on CPU that run on one machine; between machines, and
            between accelerators, what XLA chooses.
        RING: The network only: on CPU, Gloo's rings.
        NCCL: What XLA chooses; for GPUs that is NCCL.

    TF: `tf.distribute.experimental.CommunicationImplementation`.
    """

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"


@dataclasses.dataclass(frozen=True)
class CommunicationOptions:
    """Options of collective operations.

    Args:
        bytes_per_pack: About how large the buffers are into which the arrays of a sum or mean are
            packed; an array is never divided. XLA may combine small ones (on CPU it combines
            all). 0: XLA's choice.
        timeout_seconds: How long workers wait for each other; within one process nobody waits.
        implementation: A `CommunicationImplementation` or its name.

    Raises:
        ValueError: `bytes_per_pack` is negative, or there is no such implementation.

    TF: `tf.distribute.experimental.CommunicationOptions`.
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: CommunicationImplementation = CommunicationImplementation.AUTO

    def __post_init__(self) -> None:
        if self.bytes_per_pack < 0:
            raise ValueError(f"bytes_per_pack must be 0 or more. Received: {self.bytes_per_pack}")
        if isinstance(self.implementation, str):
            name = self.implementation.upper()
            object.__setattr__(self, "implementation", CommunicationImplementation(name))

    def packs(self, arrays: Sequence[jax.Array]) -> list[list[jax.Array]]:
        """Returns `arrays`, in order, packed to the wanted size; nothing if there is none."""
        packs: list[list[jax.Array]] = []
        size = self.bytes_per_pack
        for array in arrays if self.bytes_per_pack else ():
            if size >= self.bytes_per_pack:
                packs.append([])
                size = 0
            packs[-1].append(array)
            size += array.nbytes
        return packs
