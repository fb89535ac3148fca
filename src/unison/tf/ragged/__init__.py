"""`tf.ragged`: tensors whose rows have different lengths.

`tensor` has the class `RaggedTensor`; the other modules implement operations of `unison.tf` for
ragged arguments, which `unison.tf.dispatch` calls: `elementwise`, `reductions`, `assertions`,
`arrays`, `texts`, `conversions` and `indexing`, all of them by the row splits of `partitions`.
"""

from __future__ import annotations

from unison.tf.missing import names_missing_from
from unison.tf.ragged import (
    arrays,
    assertions,
    conversions,
    elementwise,
    indexing,
    reductions,
    texts,
)
from unison.tf.ragged.arrays import boolean_mask
from unison.tf.ragged.elementwise import map_flat_values
from unison.tf.ragged.factories import (
    constant,
    cross,
    row_splits_to_segment_ids,
    segment_ids_to_row_splits,
    stack,
    stack_dynamic_partitions,
)
from unison.tf.ragged.factories import range_ as range

__all__ = [
    "boolean_mask",
    "constant",
    "cross",
    "map_flat_values",
    "range",
    "row_splits_to_segment_ids",
    "segment_ids_to_row_splits",
    "stack",
    "stack_dynamic_partitions",
]

__getattr__ = names_missing_from(__name__)

#: The modules that register their operations, which are loaded with this package.
IMPLEMENTATIONS = (arrays, assertions, conversions, elementwise, indexing, reductions, texts)
