"""Rules that select the tensors of a model to compress."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

#: Selects tensors by their name (the path in the tree, such as `dense/kernel`) and the tensor, or
#: an object with its shape and dtype.
Rule = Callable[[str, Any], bool]


@dataclasses.dataclass(frozen=True)
class LargeMatrices:
    """Selects tensors that are large and have several axes, unless their name is excluded.

    Biases and the scales of normalization layers have one axis: they are a thousandth of a
    model's bytes, and their errors cost more accuracy than those of kernels.

    Attributes:
        smallest_size: Tensors of fewer elements are left out.
        lowest_rank: Tensors of fewer axes are left out.
        left_out: Regular expressions; a tensor in whose name one is found is left out.

    Examples:
        >>> import numpy as np
        >>> from unison.compression import LargeMatrices
        >>> rule = LargeMatrices(left_out=("embedding",))
        >>> rule("dense/kernel", np.ones((64, 64)))
        True
        >>> rule("dense/bias", np.ones(4096)), rule("embedding/table", np.ones((64, 64)))
        (False, False)
    """

    smallest_size: int = 1024
    lowest_rank: int = 2
    left_out: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.left_out, str):
            raise TypeError(
                "left_out must be a tuple of regular expressions, such as ('norm',). Received: "
                f"left_out={self.left_out!r}"
            )

    def __call__(self, name: str, tensor: Any) -> bool:
        return (
            len(tensor.shape) >= self.lowest_rank
            and tensor.size >= self.smallest_size
            and not any(re.search(pattern, name) for pattern in self.left_out)
        )


#: The default rule.
LARGE_MATRICES = LargeMatrices()


def everything(name: str, tensor: Any) -> bool:
    """A rule that selects all tensors."""
    return True
