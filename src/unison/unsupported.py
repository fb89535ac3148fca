"""The members of TensorFlow's classes that Unison does not have: their use names the remedy."""

from __future__ import annotations

from typing import Any


class UnsupportedMember:
    """A member of a class that raises an error with the remedy when it is read.

    `hasattr` is False of it, for the class and for its instances, which may set the attribute.

    Args:
        instead: The remedy.

    Examples:
        >>> class Variable:
        ...     eval = UnsupportedMember("use variable.numpy()")
        >>> try:
        ...     Variable().eval
        ... except AttributeError as error:
        ...     print(error)
        Variable.eval is not supported by Unison: use variable.numpy()
    """

    __slots__ = ("_name", "instead")

    def __init__(self, instead: str):
        self.instead = instead
        self._name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type) -> Any:
        raise AttributeError(
            f"{owner.__name__}.{self._name} is not supported by Unison: {self.instead}",
            name=self._name,
            obj=owner if instance is None else instance,
        )


def refuse_option(option: str, value: Any, remedy: str) -> None:
    """Raises a ValueError if an option of TensorFlow is set that Unison does not have."""
    if value:
        raise ValueError(f"{option} is not supported by Unison: {remedy}. Received: {value!r}")
