"""`prefetch_to_device`: elements are copied to devices before they are requested."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from unison.data.chunks import Chunk, ChunkReader
from unison.data.leaves import is_text
from unison.data.plan import AUTOTUNE, Plan, SameElements, Stream
from unison.data.ragged import RaggedArray
from unison.data.specs import ArraySpec, Signature
from unison.data.state import State
from unison.data.structure import Leaves
from unison.data.transformations.prefetching import AUTOTUNE_SIZE, ReadAhead
from unison.errors import InvalidArgumentError
from unison.runtime.devices import prepare_backend
from unison.runtime.precision import device_array, device_dtype

#: The destination of elements: a device, a sharding, or None for the default device.
Target: TypeAlias = "jax.Device | Sharding | None"


class PrefetchToDevice(SameElements):
    """The elements as `jax.Array`s that a thread copies to a device, or divides between devices.

    Args:
        source: The input.
        size: The number of elements that may be ready on the devices; `AUTOTUNE` for a few.
        target: Called when elements are first requested; returns their destination.

    Raises:
        InvalidArgumentError: `size` is not a positive number.
    """

    def __init__(self, source: Plan, size: int, target: Callable[[], Target]):
        super().__init__(source)
        if size != AUTOTUNE and size < 1:
            raise InvalidArgumentError(
                message=f"Expected a size of at least 1, or tf.data.AUTOTUNE. Received: {size}"
            )
        self._size = AUTOTUNE_SIZE if size == AUTOTUNE else size
        self._target = target

    def signature_from(self, inputs: Sequence[Signature]) -> Signature | None:
        return inputs[0].map(_on_device)

    def _stream(self) -> Stream:
        return _PlacedStream(self._input, self._size, self._target)


def _on_device(spec: Any) -> Any:
    """Returns the spec of a leaf on a device, where some dtypes are converted to narrower ones."""
    if not isinstance(spec, ArraySpec) or spec.dtype.kind == "O":
        return spec
    return ArraySpec(spec.shape, np.dtype(device_dtype(spec.dtype)), spec.name)


class _PlacedStream(Stream):
    #: Its time is that of the stages that the thread runs.
    only_waits = True

    def __init__(self, source: Plan, size: int, target: Callable[[], Target]):
        prepare_backend()
        self._source = _Placed(source, target)
        self._size = size
        self._ahead = ReadAhead(self._source.next, size)

    def next(self) -> Leaves | None:
        item = self._ahead.get()
        return None if item is None else item[1]

    @property
    def num_ready(self) -> int:
        """The number of elements that are ready."""
        return self._ahead.num_ready

    def state(self) -> State:
        with self._ahead.paused() as waiting:
            before = [item[0] for item in waiting if item is not None]
            return self._source.reader.state_with(before)

    def restore(self, state: State) -> None:
        with self._ahead.paused():
            self._ahead.close()
            self._source.reader.restore(state)
        self._ahead = ReadAhead(self._source.next, self._size)


class _Placed:
    """The thread's work. The element itself is kept with its copy, for the state."""

    def __init__(self, source: Plan, target: Callable[[], Target]):
        self.reader = ChunkReader(source)
        self._target = target

    def next(self) -> tuple[Chunk, Leaves] | None:
        chunk = self.reader.read(1)
        return None if chunk is None else (chunk, placed(chunk[0], self._target()))


def placed(leaves: Leaves, target: Target) -> Leaves:
    """Returns the leaves of an element as arrays on a device, or divided between devices.

    Text and ragged arrays stay on the host. With several processes, each provides its part of a
    sharded array.

    Args:
        leaves: The leaves.
        target: Their destination. With a sharding over a mesh, scalars are on all its devices.

    Raises:
        InvalidArgumentError: A leaf cannot be divided between the devices.
    """
    return tuple(
        leaf if is_text(leaf) or isinstance(leaf, RaggedArray) else _put(leaf, target)
        for leaf in leaves
    )


def _put(leaf: Any, target: Target) -> Any:
    if not leaf.ndim and isinstance(target, NamedSharding):
        target = NamedSharding(target.mesh, PartitionSpec())
    if isinstance(target, Sharding) and not target.is_fully_addressable:
        return jax.make_array_from_process_local_data(target, np.asarray(leaf))
    # JAX would convert 64-bit dtypes to narrower ones in the copy.
    keeps_all_bits = leaf.dtype.itemsize == 8 and device_dtype(leaf.dtype) == leaf.dtype
    try:
        return jax.device_put(device_array(leaf) if keeps_all_bits else leaf, target)
    except ValueError as error:
        raise InvalidArgumentError(
            message=f"An array of shape {list(leaf.shape)} cannot be put where {target} says. "
            "Every batch must be divisible between the devices: use batch(drop_remainder=True), "
            f"or let a strategy distribute the dataset. {error}"
        ) from error
