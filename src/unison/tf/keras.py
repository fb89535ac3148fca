"""`tf.keras`: Keras 3 on JAX, loaded when the name is first used.

Everything is Keras' own; importing this module brings `unison.keras`, by which models that are
built in a scope are distributed, also in a scope that is open already.
"""

from __future__ import annotations

import sys
from typing import Any

import unison.keras  # noqa: F401  (before Keras: it chooses the JAX backend)

import keras  # isort: skip


def __getattr__(name: str) -> Any:
    return getattr(keras, name)


def __dir__() -> list[str]:
    return dir(keras)


# `from unison.tf.keras.layers import Dense`: Keras' public modules under the face's name.
for _name, _module in list(sys.modules.items()):
    if _name.startswith("keras.") and not _name.startswith("keras.src"):
        sys.modules[f"unison.tf.{_name}"] = _module
