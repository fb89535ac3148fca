"""Keras 3 under a strategy.

Importing this package imports Keras; `strategy.scope()` does so when the program has imported
Keras itself.
"""

import os
import sys

if "keras" not in sys.modules:
    # Keras reads its backend once, when it is imported; a backend that the user has set is kept.
    os.environ.setdefault("KERAS_BACKEND", "jax")

import keras

if keras.backend.backend() != "jax":
    raise ImportError(
        "Unison runs Keras on JAX. Expected: keras.backend.backend() == 'jax'. Received: "
        f"{keras.backend.backend()!r}. Set the environment variable KERAS_BACKEND=jax before "
        "Keras is imported."
    )

from unison.keras.control_flow import teach_control_flow
from unison.keras.datasets import teach_keras
from unison.keras.feeding import teach_feeding
from unison.keras.gathers import teach_gathers
from unison.keras.hashing import HashedCrossing, Hashing
from unison.keras.input_statistics import InputStatistics
from unison.keras.interrupted_scopes import leave_interrupted_scopes
from unison.keras.lookup import IntegerLookup, StringLookup
from unison.keras.losses import teach_losses
from unison.keras.normalization import BatchNormalization
from unison.keras.pipeline import Pipeline
from unison.keras.scope import keras_in_scopes
from unison.keras.tensorboard import TensorBoard
from unison.keras.text_vectorization import TextVectorization
from unison.strategies.keras_additions import keras_is_imported
from unison.strategies.scope_observers import observe_scopes
from unison.tracebacks import more_ends

observe_scopes(keras_in_scopes)
teach_keras()
teach_feeding()
teach_losses()
teach_gathers()
teach_control_flow()
more_ends.append(leave_interrupted_scopes)

__all__ = [
    "BatchNormalization",
    "HashedCrossing",
    "Hashing",
    "InputStatistics",
    "IntegerLookup",
    "Pipeline",
    "StringLookup",
    "TensorBoard",
    "TextVectorization",
]

keras_is_imported()
