"""The errors for names that `unison.tf` does not have.

`names.txt` lists TensorFlow's public names, so that these can be distinguished from
typing errors; `advice.py` has replacements for some.
"""

from __future__ import annotations

import difflib
import functools
import importlib.abc
import importlib.machinery
import importlib.resources
import importlib.util
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

#: Modules that programs import although they are not public.
_NOT_PUBLIC = {"python": "it is TensorFlow's implementation: use the public names"}

_OTHERWISE = "tensors are jax.Arrays, so what jax.numpy, jax or keras offer for it works on them"


def names_missing_from(
    module: str, instead: Mapping[str, str] | None = None
) -> Callable[[str], Any]:
    """Returns the `__getattr__` of a module of the face.

    Args:
        module: The module's `__name__`.
        instead: Replacements for some of TensorFlow's names; they take precedence over `advice.py`.

    Examples:
        >>> lookup = names_missing_from("unison.tf.nn", {"dilation2d": "use max_pool2d"})
        >>> try:
        ...     lookup("dilation2d")
        ... except AttributeError as error:
        ...     print(error)
        tf.nn.dilation2d is not supported by Unison: use max_pool2d
    """
    path = module.removeprefix("unison.")

    def lookup(name: str) -> Any:
        raise AttributeError(
            _message(path, name, instead or {}), name=name, obj=sys.modules.get(module)
        )

    return lookup


class MissingModules(importlib.abc.MetaPathFinder):
    """Raises the error for a module that the face does not have, when it is imported.

    It stands last in `sys.meta_path`: imports ask it for what no other finder has found. Tools ask
    it for any module.
    """

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        package, _, name = fullname.rpartition(".")
        if package != "unison.tf" and not package.startswith("unison.tf."):
            return
        asks = sys._getframe(1).f_back  # behind importlib's own function
        if asks is not None and asks.f_code is importlib.util.find_spec.__code__:
            return  # it only asks whether there is such a module
        places = getattr(sys.modules.get(package), "__path__", path)
        if importlib.machinery.PathFinder.find_spec(fullname, places) is None:
            # Not under the module's own name: Python would drop an error that has it in
            # `from unison.tf import name`.
            message = _message(package.removeprefix("unison."), name, _NOT_PUBLIC)
            raise ModuleNotFoundError(message, name=fullname.removeprefix("unison."))


def namespace(module: str, **names: Any) -> types.ModuleType:
    """Returns a small module of the face that has no file of its own.

    Args:
        module: Its name, as in "unison.tf.config.threading".
        names: What it holds.
    """
    made = types.ModuleType(module)
    made.__dict__.update(names, __getattr__=names_missing_from(module))
    return made


def public_names(path: str) -> tuple[str, ...]:
    """Returns the public names of one of TensorFlow's modules; none of an unknown one.

    Examples:
        >>> public_names("tf.bitwise")[:2]
        ('bitwise_and', 'bitwise_or')
    """
    return _all_names().get(path, ())


@functools.cache
def _all_names() -> dict[str, tuple[str, ...]]:
    text = importlib.resources.files("unison.tf").joinpath("names.txt").read_text("utf-8")
    lines = (line.split(": ", 1) for line in text.splitlines())
    return {path: tuple(names.split()) for path, names in lines}


def _message(path: str, name: str, instead: Mapping[str, str]) -> str:
    full_name = f"{path}.{name}"
    if name in public_names(path) or name in instead:
        return f"{full_name} is not supported by Unison: {instead.get(name) or _advice(full_name)}"
    known = [*public_names(path), *dir(sys.modules.get(f"unison.{path}", types))]
    similar = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    hint = f"did you mean {similar[0]!r}?" if similar else _OTHERWISE
    return f"{path} has no {name!r}, neither in TensorFlow 2.21 nor in Unison: {hint}"


def _advice(full_name: str) -> str:
    """Returns the advice for a name, or for the innermost module that there is one for."""
    from unison.tf.advice import ADVICE

    while full_name:
        if full_name in ADVICE:
            return ADVICE[full_name]
        full_name = full_name.rpartition(".")[0]
    return _OTHERWISE
