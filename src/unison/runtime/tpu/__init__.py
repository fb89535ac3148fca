"""TPUs: the known slices, their topology, and the placement of replicas on their cores."""

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
