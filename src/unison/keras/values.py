"""The values of the variables in what a user's metric or step returns."""

from __future__ import annotations

from typing import Any

import keras


def values_in(results: Any) -> Any:
    """Returns results with the values of variables in their place, as TensorFlow takes them.

    Args:
        results: Tensors and Keras' variables, in any nesting.
    """
    return keras.tree.map_structure(
        lambda leaf: leaf.value if isinstance(leaf, keras.Variable) else leaf, results
    )
