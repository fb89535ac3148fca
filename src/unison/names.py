"""Name scopes: the prefixes that `Module`s add to names created inside them."""

from __future__ import annotations

import contextlib
from typing import Any

from unison.thread_local import ThreadLocal

_scopes: ThreadLocal[tuple[str, ...]] = ThreadLocal(())


def current_name_scope() -> str:
    """Returns the prefix of the innermost open scope, ending with a slash, or an empty string."""
    return _scopes.value[-1] if _scopes.value else ""


class NameScope(contextlib.AbstractContextManager):
    """A prefix of names; entering it returns the full prefix, including outer scopes.

    Args:
        name: The prefix. One that ends with a slash is absolute: outer scopes are ignored.

    Examples:
        >>> with NameScope("encoder"), NameScope("attention") as prefix:
        ...     prefix
        'encoder/attention/'

    TF: `tf.name_scope`.
    """

    def __init__(self, name: str):
        if not isinstance(name, str):
            raise TypeError(f"A name scope's name must be text. Received: {name!r}")
        self._name = name

    @property
    def name(self) -> str:
        """The prefix as it was given."""
        return self._name

    def __enter__(self) -> str:
        is_whole = not self._name or self._name.endswith("/")
        prefix = self._name if is_whole else f"{current_name_scope()}{self._name}/"
        _scopes.value = (*_scopes.value, prefix)
        return prefix

    def __exit__(self, *failure: Any) -> None:
        _scopes.value = _scopes.value[:-1]
