"""`tf.data`: input pipelines."""

from unison.data import AUTOTUNE
from unison.data import INFINITE as INFINITE_CARDINALITY
from unison.data import UNKNOWN as UNKNOWN_CARDINALITY
from unison.tf.data import experimental
from unison.tf.data.dataset import (
    Dataset,
    DatasetSpec,
    FixedLengthRecordDataset,
    Iterator,
    NumpyIterator,
    TextLineDataset,
    TFRecordDataset,
)
from unison.tf.data.options import Options, ThreadingOptions
from unison.tf.missing import names_missing_from

__all__ = [
    "AUTOTUNE",
    "INFINITE_CARDINALITY",
    "UNKNOWN_CARDINALITY",
    "Dataset",
    "DatasetSpec",
    "FixedLengthRecordDataset",
    "Iterator",
    "NumpyIterator",
    "Options",
    "TFRecordDataset",
    "TextLineDataset",
    "ThreadingOptions",
    "experimental",
]

__getattr__ = names_missing_from(__name__)
