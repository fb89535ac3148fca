"""`Module`: an object that finds the variables in its attributes."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from unison.cells import has_cell
from unison.names import NameScope

#: The attribute with the callbacks that wait for an object's next attribute; see `Tracked`.
WAITING = "_unison_waiting"

_WORD_BEGINS = re.compile(r"((?<=[a-z0-9])[A-Z]|(?!^)[A-Z](?=[a-z]))")
_IDENTIFIER = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*", re.ASCII)


class Tracked:
    """An object whose attributes a checkpoint restores, including those set after the restoration.

    While a restoration waits for attributes of the object, its callbacks are stored in the
    attribute `WAITING`; see `unison.train`.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        tell_waiting(self)


def tell_waiting(owner: Any) -> None:
    """Notifies the callbacks that wait for parts of `owner` that there may be new ones."""
    for attribute_was_set in tuple(vars(owner).get(WAITING, ())):
        attribute_was_set()


class Module(Tracked):
    """A container of variables, of other modules, and of functions that use them.

    Variables are found in the module's attributes, including lists, tuples and dictionaries, and in
    its submodules, which include Keras layers and metrics.

    Args:
        name: A Python identifier. Default: the class name in snake case.

    Raises:
        ValueError: `name` is not an identifier.

    Examples:
        >>> import unison, jax.numpy as jnp
        >>> class Dense(unison.Module):
        ...     def __init__(self, inputs, outputs):
        ...         super().__init__()
        ...         self.w = unison.Variable(jnp.ones([inputs, outputs]), name="w")
        ...         self.b = unison.Variable(jnp.zeros([outputs]), name="b")
        ...
        ...     def __call__(self, x):
        ...         return x @ self.w + self.b
        >>> layer = Dense(2, 3)
        >>> layer.name, [variable.shape for variable in layer.trainable_variables]
        ('dense', [(3,), (2, 3)])

    TF: `tf.Module`.
    """

    def __init__(self, name: str | None = None):
        if name is None:
            name = _WORD_BEGINS.sub(r"_\1", type(self).__name__).lower()
        elif not _IDENTIFIER.fullmatch(name):
            raise ValueError(
                f"A module's name must be a Python identifier of ASCII letters. Received: {name!r}"
            )
        self._name = name
        with NameScope(name) as prefix:
            self._name_scope = NameScope(prefix)

    @property
    def name(self) -> str:
        """The name given to the constructor, or the class name in snake case."""
        return self._name

    @property
    def name_scope(self) -> NameScope:
        """The scope whose prefix is the scopes that the module was created in and its name."""
        return self._name_scope

    @property
    def variables(self) -> tuple[Any, ...]:
        """The module's variables, ordered by attribute name, then those of its submodules."""
        return tuple(self._flatten(predicate=_is_variable))

    @property
    def trainable_variables(self) -> tuple[Any, ...]:
        """Those of `variables` that are trainable."""
        return tuple(self._flatten(predicate=lambda leaf: _is_variable(leaf) and leaf.trainable))

    @property
    def non_trainable_variables(self) -> tuple[Any, ...]:
        """Those of `variables` that are not trainable."""
        return tuple(
            self._flatten(predicate=lambda leaf: _is_variable(leaf) and not leaf.trainable)
        )

    @property
    def submodules(self) -> tuple[Any, ...]:
        """The modules, Keras layers and metrics in the attributes, then those inside them."""
        return tuple(self._flatten(predicate=_is_submodule))

    def _flatten(
        self,
        recursive: bool = True,
        predicate: Callable[[Any], Any] | None = None,
        attribute_traversal_key: Callable[[str], Any] | None = None,
        with_path: bool = False,
    ) -> Iterator[Any]:
        """Yields the leaves of the attributes, of the module first and then of its submodules.

        Args:
            recursive: Whether to go into submodules.
            predicate: Selects the leaves. Default: all.
            attribute_traversal_key: A key function for `sorted` that orders the attributes.
            with_path: Whether to yield `(path, leaf)` for every path that leads to a leaf.
                Otherwise every leaf is yielded once, without its path.
        """
        seen = None if with_path else {id(self)}
        for path, leaf in _walk(self, (), recursive, attribute_traversal_key, seen, ()):
            if predicate is None or predicate(leaf):
                yield (path, leaf) if with_path else leaf

    @classmethod
    def with_name_scope(cls, method: Callable[..., Any]) -> Callable[..., Any]:
        """Decorates a method so that it runs in the module's name scope.

        Examples:
            >>> class Layer(Module):
            ...     @Module.with_name_scope
            ...     def __call__(self):
            ...         return current_name_scope()
            >>> from unison.names import current_name_scope
            >>> Layer()()
            'layer/'
        """

        @functools.wraps(method)
        def in_name_scope(self: Module, *args: Any, **kwargs: Any) -> Any:
            with self.name_scope:
                return method(self, *args, **kwargs)

        return in_name_scope


def _is_variable(leaf: Any) -> bool:
    return has_cell(leaf) or isinstance(leaf, _keras_types("Variable"))


def _is_submodule(leaf: Any) -> bool:
    return isinstance(leaf, (Module, *_keras_types("Layer", "Metric")))


def _keras_types(*names: str) -> tuple[type, ...]:
    """Returns Keras classes by name; none if the program has not imported Keras."""
    found = (getattr(sys.modules.get("keras"), name, None) for name in names)
    return tuple(cls for cls in found if cls is not None)


def _walk(
    owner: Any,
    path: tuple[Any, ...],
    recursive: bool,
    order: Callable[[str], Any] | None,
    seen: set[int] | None,
    outer: tuple[int, ...],
) -> Iterator[tuple[tuple[Any, ...], Any]]:
    recursive = recursive and id(owner) not in outer  # modules may refer to each other
    submodules = []
    for leaf_path, leaf in _leaves_of_attributes(owner, order):
        if seen is not None:
            if id(leaf) in seen:
                continue
            seen.add(id(leaf))
        yield path + leaf_path, leaf
        if recursive and _is_submodule(leaf):
            submodules.append((path + leaf_path, leaf))
    for submodule_path, submodule in submodules:
        yield from _walk(submodule, submodule_path, recursive, order, seen, (*outer, id(owner)))


def _leaves_of_attributes(
    owner: Any, order: Callable[[str], Any] | None
) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if not isinstance(owner, Module):  # Keras tracks its own variables and layers
        yield from _leaves({"variables": owner.variables, "layers": _inner_layers(owner)})
        return
    for name in sorted(vars(owner).keys() - {WAITING}, key=order):
        try:
            yield from _leaves(vars(owner)[name], (name,))
        except TypeError as error:
            raise ValueError(
                f"The keys of the dictionaries in a module's attributes must be sortable. "
                f"Received: {type(owner).__name__}.{name} = {vars(owner)[name]!r}"
            ) from error


def _inner_layers(owner: Any) -> list[Any]:
    flatten = getattr(owner, "_flatten_layers", None)
    return list(flatten(include_self=False)) if flatten else []


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(value, Mapping):
        for key in sorted(value):
            yield from _leaves(value[key], (*path, key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _leaves(item, (*path, index))
    else:
        yield path, value
