"""Gradients with fewer bytes on the wire; see the documentation, "Compression"."""

from unison.compression.base import Compression, CompressionState
from unison.compression.local import LocalTraining, diloco, local_sgd
from unison.compression.low_rank import powersgd
from unison.compression.quantized import bfloat16, float16, int4, int8, sign
from unison.compression.reporting import Report, report, residual_norm
from unison.compression.rules import LargeMatrices, Rule, everything
from unison.compression.sparse import topk

__all__ = [
    "Compression",
    "CompressionState",
    "LargeMatrices",
    "LocalTraining",
    "Report",
    "Rule",
    "bfloat16",
    "diloco",
    "everything",
    "float16",
    "int4",
    "int8",
    "local_sgd",
    "powersgd",
    "report",
    "residual_norm",
    "sign",
    "topk",
]
