"""Name scopes: the prefixes that `Module`s give to what is made inside them."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

_thread = threading.local()


def current_name_scope() -> str:
    """Returns the prefix of the innermost open scope, which ends with a slash, or an empty text."""
    scopes = getattr(_thread, "scopes", None)
    return scopes[-1] if scopes else ""


class NameScope(contextlib.AbstractContextManager):
    """A prefix of names; entered, it gives the whole prefix, outer scopes included.

    Args:
        name: The prefix. One that ends with a slash is whole: outer scopes do not count.

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
        _thread.scopes = [*getattr(_thread, "scopes", []), prefix]
        return prefix

    def __exit__(self, *failure: Any) -> None:
        _thread.scopes = _thread.scopes[:-1]
