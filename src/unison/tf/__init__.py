"""The drop-in face: `import unison.tf as tf` instead of `import tensorflow as tf`.

Only names, thin adapters and TensorFlow's conveniences; the work is done below, and nothing else
in the package imports this. Tensors are `jax.Array`s. Importing it starts no backend, brings in
Keras only when `tf.keras` is used, and changes what `patches` says.
"""

from __future__ import annotations

import importlib
from typing import Any

import jax

import unison
from unison.cells import VariableAggregation, VariableSynchronization
from unison.tf import config, distribute, dtypes, math, nn, random
from unison.tf.dtypes import (
    bfloat16,
    bool,
    complex64,
    complex128,
    double,
    float16,
    float32,
    float64,
    half,
    int8,
    int16,
    int32,
    int64,
    string,
    uint8,
    uint16,
    uint32,
    uint64,
)
from unison.tf.functions import function
from unison.tf.math import (
    abs,
    add,
    add_n,
    argmax,
    argmin,
    clip_by_value,
    cos,
    divide,
    equal,
    exp,
    floor,
    greater,
    greater_equal,
    less,
    less_equal,
    logical_and,
    logical_not,
    logical_or,
    matmul,
    maximum,
    minimum,
    multiply,
    negative,
    not_equal,
    pow,
    reduce_all,
    reduce_any,
    reduce_max,
    reduce_mean,
    reduce_min,
    reduce_prod,
    reduce_sum,
    round,
    sigmoid,
    sign,
    sin,
    sqrt,
    square,
    subtract,
    tanh,
)
from unison.tf.missing import names_missing_from
from unison.tf.patches import patch_arrays
from unison.tf.printing import print
from unison.tf.tensors import (
    cast,
    concat,
    constant,
    convert_to_tensor,
    expand_dims,
    eye,
    fill,
    gather,
    identity,
    is_tensor,
    one_hot,
    ones,
    ones_like,
    range,
    rank,
    reshape,
    shape,
    size,
    split,
    squeeze,
    stack,
    tile,
    transpose,
    unstack,
    where,
    zeros,
    zeros_like,
)
from unison.variables import Variable

__all__ = [
    "Tensor",
    "Variable",
    "VariableAggregation",
    "VariableSynchronization",
    "abs",
    "add",
    "add_n",
    "argmax",
    "argmin",
    "bfloat16",
    "bool",
    "cast",
    "clip_by_value",
    "complex64",
    "complex128",
    "concat",
    "config",
    "constant",
    "convert_to_tensor",
    "cos",
    "distribute",
    "divide",
    "double",
    "dtypes",
    "equal",
    "exp",
    "expand_dims",
    "eye",
    "fill",
    "float16",
    "float32",
    "float64",
    "floor",
    "function",
    "gather",
    "greater",
    "greater_equal",
    "half",
    "identity",
    "int8",
    "int16",
    "int32",
    "int64",
    "is_tensor",
    "less",
    "less_equal",
    "logical_and",
    "logical_not",
    "logical_or",
    "math",
    "matmul",
    "maximum",
    "minimum",
    "multiply",
    "negative",
    "nn",
    "not_equal",
    "one_hot",
    "ones",
    "ones_like",
    "pow",
    "print",
    "random",
    "range",
    "rank",
    "reduce_all",
    "reduce_any",
    "reduce_max",
    "reduce_mean",
    "reduce_min",
    "reduce_prod",
    "reduce_sum",
    "reshape",
    "round",
    "shape",
    "sigmoid",
    "sign",
    "sin",
    "size",
    "split",
    "sqrt",
    "square",
    "squeeze",
    "stack",
    "string",
    "subtract",
    "tanh",
    "tile",
    "transpose",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "unstack",
    "where",
    "zeros",
    "zeros_like",
]

#: The release of TensorFlow whose names and rules these are, and our own.
__version__ = f"2.21.0+unison.{unison.__version__}"

Tensor = jax.Array

patch_arrays()

_missing = names_missing_from(
    __name__,
    {
        "GradientTape": "use jax.value_and_grad",
        "data": "pass NumPy arrays to fit, or any iterable of batches to "
        "strategy.experimental_distribute_dataset",
        "device": "use jax.default_device, or tf.distribute.OneDeviceStrategy",
        "train": "use keras.optimizers and model.save_weights",
        "compat": "use keras.optimizers for optimizers, and the names of TensorFlow 2",
    },
)


def __getattr__(name: str) -> Any:
    if name == "keras":
        return importlib.import_module("unison.tf.keras")
    return _missing(name)
