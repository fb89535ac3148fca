"""Partition rules: how a device mesh divides the axes of variables, by the variables' names.

They have the form of Keras' `LayoutMap` and of JAX programs such as T5X and EasyLM: name patterns,
each with the mesh axis that divides each axis of a variable.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec

logger = logging.getLogger("unison")

#: For each axis of a variable, the mesh axis or axes that divide it, or None.
Axes = tuple[str | tuple[str, ...] | None, ...]


class PartitionRules:
    """Finds the rule for a variable, and checks that it can be applied.

    Args:
        rules: The `Axes` (or `PartitionSpec`s) by name pattern: the first pattern that `re.search`
            finds in a variable's name applies. Or a `keras.distribution.LayoutMap`, where a pattern
            must match the whole path, and at most one pattern may.
        axes: The sizes of the mesh axes, by name.
        first: Rules that take precedence over those, and need not match any variable.

    Raises:
        ValueError: A rule names an axis that the mesh does not have, or is not a valid regular
            expression.

    Examples:
        >>> rules = PartitionRules({"kernel": (None, "model")}, {"model": 4})
        >>> rules.division_of("dense/kernel", (3, 8))
        P(None, 'model')
        >>> rules.division_of("dense/bias", (8,))
        P()
    """

    def __init__(
        self,
        rules: Mapping[str, Any],
        axes: Mapping[str, int],
        first: Mapping[str, Axes] | None = None,
    ):
        self._axes = dict(axes)
        self._given = rules
        self._is_layout_map = hasattr(rules, "device_mesh")
        self._first = {
            pattern: self._spec(pattern, entries) for pattern, entries in (first or {}).items()
        }
        self._specs = {
            pattern: self._spec(pattern, rule.axes if self._is_layout_map else rule)
            for pattern, rule in _items(rules)
        }
        #: The patterns that no variable has matched, and that were not warned about.
        self._unmatched = set(self._specs)
        self._patterns = {pattern: _compiled(pattern) for pattern in self._specs}
        self._specs = self._first | self._specs

    def division_of(self, name: str, shape: tuple[int, ...]) -> PartitionSpec:
        """Returns the mesh axes that divide the axes of the variable `name`.

        Raises:
            ValueError: Its shape is not divisible by them.
        """
        pattern = self._pattern_of(name)
        if pattern is None:
            return PartitionSpec()
        self._unmatched.discard(pattern)
        spec = self._specs[pattern]
        if len(spec) > len(shape):
            raise ValueError(
                f"Expected a rule with at most one entry for each axis of variable {name!r}, "
                f"which has the shape {shape}. Received: {pattern!r}: {tuple(spec)}."
            )
        for axis, entry in enumerate(spec):
            parts = math.prod(self._axes[one] for one in _names(entry))
            if shape[axis] % parts:
                raise ValueError(
                    f"Expected dimension {axis} of variable {name!r} to be divisible by {parts}, "
                    f"the size of mesh axis {entry!r}. Received: the shape {shape}, and the rule "
                    f"{pattern!r}: {tuple(spec)}. Change the layer's size, the mesh or the rule."
                )
        return spec

    def warn_of_unmatched(self) -> None:
        """Warns once about every rule that no variable has matched so far."""
        for pattern in sorted(self._unmatched):
            logger.warning(
                "The partition rule %r: %s has matched no variable so far, and divides nothing.",
                pattern,
                tuple(self._specs[pattern]),
            )
        self._unmatched.clear()

    def _pattern_of(self, name: str) -> str | None:
        for pattern in self._first:
            if re.search(pattern, name):
                return pattern
        if not self._is_layout_map:
            found = (key for key, pattern in self._patterns.items() if pattern.search(name))
            return next(found, None)
        if self._given[name] is None:  # raises where several match
            return None
        if name in self._specs:
            return name
        return next(key for key, pattern in self._patterns.items() if pattern.fullmatch(name))

    def _spec(self, pattern: str, entries: Any) -> PartitionSpec:
        if isinstance(entries, str) or not isinstance(entries, tuple | list | PartitionSpec):
            raise ValueError(
                "Expected for each rule a tuple with a mesh axis or None for each axis of a "
                f"variable, such as (None, 'model'). Received: {pattern!r}: {entries!r}"
            )
        used = [name for entry in entries for name in _names(entry)]
        unknown = [name for name in used if name not in self._axes]
        if unknown:
            raise ValueError(
                f"Expected the mesh axes that divide a replica, {sorted(self._axes)}. Received: "
                f"{pattern!r}: {tuple(entries)}. (Use zero= for what the replicas divide.)"
            )
        if len(set(used)) < len(used):
            raise ValueError(
                f"Expected each mesh axis once in a rule. Received: {pattern!r}: {tuple(entries)}"
            )
        return PartitionSpec(*entries)


def partition_specs(tree: Any, rules: Mapping[str, Any], axes: Mapping[str, int]) -> Any:
    """Returns, for each array of a pytree, its `PartitionSpec` under the rules.

    An array's name is its path, such as `"encoder/0/kernel"`.

    Args:
        tree: Arrays, or `jax.ShapeDtypeStruct`s.
        rules: As for `PartitionRules`.
        axes: The sizes of the mesh axes, by name.

    Raises:
        ValueError: A rule cannot be applied.

    Examples:
        >>> import numpy as np
        >>> weights = {"dense": {"kernel": np.ones((3, 8)), "bias": np.ones(8)}}
        >>> partition_specs(weights, {"kernel": (None, "model")}, {"model": 4})
        {'dense': {'bias': P(), 'kernel': P(None, 'model')}}
    """
    parsed = PartitionRules(rules, axes)
    return map_named(lambda name, leaf: parsed.division_of(name, tuple(leaf.shape)), tree)


def map_named(function: Callable[[str, Any], Any], tree: Any) -> Any:
    """Maps `function` over each leaf's path, such as `"encoder/0/kernel"`, and the leaf.

    Examples:
        >>> map_named(lambda name, leaf: (name, leaf), {"a": [1]})
        {'a': [('a/0', 1)]}
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: function(jax.tree_util.keystr(path, simple=True, separator="/"), leaf),
        tree,
    )


def _items(rules: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    # Iterating over a LayoutMap's items would look each pattern up as if it were a path.
    for pattern in rules:
        yield pattern, rules[pattern]


def _names(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(
            f"Expected a regular expression that variables' names match. Received: {pattern!r}: "
            f"{error}"
        ) from error
