"""`bucket_by_sequence_length`: batches of elements of similar lengths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from unison.data.plan import Plan
from unison.data.specs import Signature, as_shape
from unison.data.structure import Leaves, Structure
from unison.data.transformations.nesting import Function
from unison.data.transformations.windows import GroupByWindow
from unison.errors import InvalidArgumentError

#: Returns batches of a plan's elements, of a size and padded to shapes.
Batching = Callable[[Plan, int, Any], Plan]


def bucketed(
    source: Plan,
    length_of: Function,
    boundaries: Sequence[int],
    sizes: Sequence[int],
    batches_of: Batching,
    shapes: Any = None,
    pads_to_boundary: bool = False,
) -> Plan:
    """Returns the batches of a plan's elements, with each range of lengths in separate batches.

    Args:
        source: The elements.
        length_of: Returns the length of an element.
        boundaries: The lengths at which a new bucket begins.
        sizes: The size of the batches of each bucket.
        batches_of: Returns the batches.
        shapes: The shapes to pad to, as in `padded_batch`.
        pads_to_boundary: Whether unknown sizes are padded to one less than the
            bucket's upper boundary.

    Raises:
        ValueError: The number of sizes is not one more than that of the boundaries.
    """
    if len(sizes) != len(boundaries) + 1:
        raise ValueError(
            f"Expected one batch size more than boundaries. Received: {len(sizes)} "
            f"bucket_batch_sizes and {len(boundaries)} bucket_boundaries"
        )

    def bucket_of(element: Leaves, structure: Structure) -> Leaves:
        length = int(length_of(element, structure)[0])
        return (np.int64(np.searchsorted(boundaries, length, side="right")),)

    def reduce(arguments: Leaves, structure: Structure) -> Leaves:
        bucket, window = arguments
        padded = shapes
        if pads_to_boundary:
            if bucket == len(boundaries):
                raise InvalidArgumentError(
                    message="With pad_to_bucket_boundary=True, the last boundary must be above "
                    "the longest element."
                )
            padded = _filled(shapes, window.signature, boundaries[bucket] - 1)
        return (batches_of(window, sizes[bucket], padded),)

    stage = "bucket_by_sequence_length"
    return GroupByWindow(source, bucket_of, reduce, lambda key: sizes[key], stage)


def _filled(shapes: Any, signature: Signature, size: int) -> Any:
    """Returns the shapes to pad to, with `size` in place of unknown sizes."""
    given = [spec.shape for spec in signature.specs]
    if shapes is not None:
        given = [as_shape(shape) for shape in signature.structure.flatten(shapes)]
    filled = [
        None if shape is None else [size if known is None else known for known in shape]
        for shape in given
    ]
    return signature.structure.pack(filled)
