"""TPUs: the slices that there are, their topology, and how replicas lie on their cores."""

from unison.runtime.tpu.slices import (
    MissingTPULibraryError,
    TPUSlice,
    UnknownSliceError,
    describe_slice,
)
from unison.runtime.tpu.topology import DeviceAssignment, Topology, topology_of

__all__ = [
    "DeviceAssignment",
    "MissingTPULibraryError",
    "TPUSlice",
    "Topology",
    "UnknownSliceError",
    "describe_slice",
    "topology_of",
]
