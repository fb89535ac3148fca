"""`tf.keras`: Keras 3 on JAX under TensorFlow's name, with the spellings of Keras 2.

Classes and functions are Keras' own. Importing this module brings `unison.keras`, by which models
that are built in a scope are distributed, also in a scope that is open already; gives Keras'
classes the old methods and arguments (`patches`); and makes a face of every module of Keras, with
the names that Keras 3 dropped or with what to use instead.
"""

from __future__ import annotations

import unison.keras  # noqa: F401  (before Keras: it chooses the JAX backend)

import keras  # isort: skip

from unison.keras.scope import keras_in_scopes
from unison.strategies.scope_observers import as_outside_scopes
from unison.tf.keras.names import make_module, stand_over, stand_over_modules_below
from unison.tf.keras.patches import patch_keras

__version__ = keras.__version__

# A scope may be open, which restores Keras' own functions when it is closed: not these over them.
with as_outside_scopes(keras_in_scopes):
    patch_keras()

__getattr__ = stand_over(__name__)

stand_over_modules_below(__name__)
make_module(
    f"{__name__}.experimental",
    {
        "CosineDecay": keras.optimizers.schedules.CosineDecay,
        "CosineDecayRestarts": keras.optimizers.schedules.CosineDecayRestarts,
    },
)
make_module(f"{__name__}.estimator", {})
make_module(f"{__name__}.dtensor", {})
