"""Starting weights that are the same under every library: NumPy draws them, from a seed."""

from __future__ import annotations

from typing import Any

import numpy as np


def start(model: Any, seed: int = 0) -> Any:
    """Draws the trainable weights of a built model, or of several; returns it.

    Vectors (biases, scales) keep what their initializers give, which is not drawn.
    """
    generator = np.random.default_rng(seed)
    for each in model if isinstance(model, list | tuple) else [model]:
        for variable in each.trainable_variables:
            shape = tuple(variable.shape)
            if len(shape) > 1:
                drawn = generator.normal(size=shape) / np.sqrt(np.prod(shape[:-1]))
                variable.assign(drawn.astype(np.float32))
    return model
