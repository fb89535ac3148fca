"""The drop-in face: `import unison.tf as tf` instead of `import tensorflow as tf`.

Only names, thin adapters and TensorFlow's conveniences; the work is done below, and nothing else
in the package imports this. Tensors are `jax.Array`s. Importing it starts no backend, brings in
Keras only when `tf.keras` is used, and makes the changes that `patches` lists; those of
`keras.patches` where the program uses Keras, by whichever name.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import unison
from unison.lazy_loader import attach_stub
from unison.runtime import uncaught
from unison.tf.keras_imports import follow_keras
from unison.tf.missing import MissingModules, names_missing_from
from unison.tf.patches import patch_jax
from unison.tf.random_stream import register_random_stream

_load, __dir__, __all__ = attach_stub(__name__, __file__)
__all__.append("newaxis")

#: The release of TensorFlow whose names and rules these are, and our own.
__version__ = f"2.21.0+unison.{unison.__version__}"

newaxis = None

#: Modules that are loaded when they are first used, and not by `from unison.tf import *`.
_SUBMODULES = frozenset(
    "autograph bitwise compat data experimental debugging image io keras linalg lookup nest "
    "profiler ragged saved_model signal sparse strings summary test tpu train version".split()
)

#: Keras' modules that have a second name here.
_OF_KERAS = frozenset("initializers losses metrics optimizers".split())

patch_jax()
uncaught.install()
sys.meta_path.append(MissingModules())
register_random_stream()

_missing = names_missing_from(__name__)


def __getattr__(name: str) -> Any:
    if name in __all__:
        return _load(name)
    if name in _SUBMODULES:
        return importlib.import_module(f"unison.tf.{name}")
    if name in _OF_KERAS:
        return getattr(importlib.import_module("unison.tf.keras"), name)
    return _missing(name)


follow_keras()
