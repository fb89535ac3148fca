"""The values of the variables in what a user's metric or step returns."""

from __future__ import annotations

from typing import Any

import keras

from unison.cells import has_cell


def values_in(results: Any) -> Any:
    """Returns results with the values of variables in their place, as TensorFlow takes them.

    Args:
        results: Tensors and variables, in any nesting.
    """
    return keras.tree.map_structure(_value, results)


def _value(leaf: Any) -> Any:
    if isinstance(leaf, keras.Variable):
        return leaf.value
    return leaf.value() if has_cell(leaf) else leaf
