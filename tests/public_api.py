"""The public API: every public name, with its kind and its signature.

`public_api.txt` holds them, one a line, as they are meant to be. A change of it is a change for
users: it goes into `CHANGELOG.md`. To write the file anew, run `python tests/public_api.py`.

Of `unison.tf` it has the names only: the signatures of its functions are TensorFlow's
(`surface_signatures.txt`).
"""

from __future__ import annotations

import enum
import functools
import importlib
import inspect
import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unison.unsupported import UnsupportedMember

FILE = Path(__file__).with_suffix(".txt")
COMMAND = "python tests/public_api.py"

#: The packages whose `__all__` is public.
PACKAGES = (
    "unison",
    "unison.compression",
    "unison.data",
    "unison.data.service",
    "unison.elastic",
    "unison.keras",
    "unison.monitoring",
    "unison.parameter_server",
    "unison.planning",
    "unison.profiling",
    "unison.runtime",
    "unison.runtime.cluster_resolvers",
    "unison.saving",
    "unison.testing",
    "unison.train",
)
FACE = "unison.tf"

_REFERENCE = Path(__file__).parents[1] / "docs"
_ENTRY = re.compile(r"^::: (?P<name>[\w.]+)$", re.MULTILINE)


def public_names() -> list[str]:
    """The names of all packages, and the others that the API reference has an entry for."""
    pages = "\n".join(page.read_text() for page in _REFERENCE.glob("api*.md"))
    names = {f"{package}.{name}" for package in PACKAGES for name in _names_of(package)}
    referred = set(_ENTRY.findall(pages))
    modules = {name for name in referred if _is_module(name)}
    names |= {f"{module}.{name}" for module in modules for name in _names_of(module)}
    return sorted(names | referred | modules)


def description() -> str:
    """What the file holds, of the package as it is.

    What has several names is described under the shortest one, and a method under the class that
    defines it, if that is public.
    """
    values = {path: _found(path) for path in public_names()}
    described: dict[int, str] = {}
    for path in sorted(values, key=lambda path: (path.count("."), path)):
        if _kind_of(values[path]) != "value":
            described.setdefault(id(values[path]), path)
    lines = []
    for path, value in values.items():
        name = described.get(id(value), path)
        lines += [f"{path}: {name}"] if name != path else _lines_of(path, value, described)
    face = importlib.import_module(FACE)
    lines += [f"{FACE}.{name}: {_kind_of(getattr(face, name))}" for name in face.__all__]
    return "\n".join(sorted(lines)) + "\n"


def _names_of(module: str) -> list[str]:
    """The names in the `__all__` of a module; without one, its own classes and functions."""
    found = importlib.import_module(module)
    own = [name for name, value in vars(found).items() if _is_public_part(name, value, module)]
    return list(getattr(found, "__all__", own))


def _is_public_part(name: str, value: Any, module: str) -> bool:
    is_own = getattr(value, "__module__", None) == module
    return is_own and not name.startswith("_") and _kind_of(value) != "value"


def _is_module(name: str) -> bool:
    return isinstance(_found(name), types.ModuleType)


def _found(path: str) -> Any:
    package, _, name = path.rpartition(".")
    if not package:
        return importlib.import_module(path)
    try:
        return getattr(importlib.import_module(package), name)
    except AttributeError:
        return importlib.import_module(path)


def _kind_of(value: Any) -> str:
    if inspect.ismodule(value):
        return "module"
    if inspect.isclass(value):
        return "class"
    is_function = inspect.isroutine(value) or hasattr(value, "__wrapped__")
    return "function" if is_function else "value"


def _lines_of(path: str, value: Any, described: dict[int, str]) -> Iterator[str]:
    kind = _kind_of(value)
    if kind == "class":
        bases = [described[id(base)] for base in value.__mro__[1:] if id(base) in described]
        below = f", a {', '.join(bases)}" if bases else ""
        yield f"{path}: class{_constructor(value)}{below}"
        for name, owner, member in _members(value):
            if owner is value or id(owner) not in described:
                yield f"{path}.{name}: {member}"
    elif kind == "function":
        yield f"{path}: function{_signature(value)}"
    else:
        yield f"{path}: {kind}"


def _constructor(of: type) -> str:
    """The arguments of a class, where it, or a class of ours above it, says which."""
    if issubclass(of, enum.Enum) or getattr(of, "_is_protocol", False):
        return ""
    for owner in of.__mro__:
        for name in ("__init__", "__new__"):
            if name in vars(owner):
                if owner.__module__.split(".")[0] != "unison":
                    return ""
                return _signature(getattr(owner, name), bound=True).partition(" -> None")[0]
    return ""


def _members(of: type) -> Iterator[tuple[str, type, str]]:
    """The public members that a class, or a class of ours above it, defines: name, where, kind."""
    if issubclass(of, enum.Enum):
        yield from ((name, of, "member") for name in of.__members__)
    for name in dir(of):
        owner = next((each for each in of.__mro__ if name in vars(each)), object)
        member = vars(owner).get(name)
        is_ours = owner.__module__.split(".")[0] == "unison"
        if name.startswith("_") or not is_ours or isinstance(member, enum.Enum | UnsupportedMember):
            continue
        yield name, owner, _member_kind(member)


def _member_kind(member: Any) -> str:
    if isinstance(member, property | functools.cached_property):
        return "property"
    if isinstance(member, staticmethod):
        return f"static method{_signature(member.__func__)}"
    if isinstance(member, classmethod):
        return f"class method{_signature(member.__func__, bound=True)}"
    if inspect.isfunction(member):
        return f"method{_signature(member, bound=True)}"
    return "attribute"


def _signature(function: Any, bound: bool = False) -> str:
    """The arguments and what is returned, as text that is the same with every Python."""
    signature = inspect.signature(function)
    shown: list[str] = []
    kind = None
    for parameter in list(signature.parameters.values())[bound:]:
        if kind is parameter.POSITIONAL_ONLY and parameter.kind is not kind:
            shown.append("/")
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}
        after_star = (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        if parameter.kind is parameter.KEYWORD_ONLY and kind not in after_star:
            shown.append("*")
        kind = parameter.kind
        text = f"{stars.get(kind, '')}{parameter.name}"
        if parameter.annotation is not parameter.empty:
            text += f": {_annotation(parameter.annotation)}"
        if parameter.default is not parameter.empty:
            text += f" = {_default(parameter.default)}"
        shown.append(text)
    if kind is inspect.Parameter.POSITIONAL_ONLY:
        shown.append("/")
    returned = signature.return_annotation
    arrow = "" if returned is signature.empty else f" -> {_annotation(returned)}"
    return f"({', '.join(shown)}){arrow}"


def _annotation(annotation: Any) -> str:
    if isinstance(annotation, typing.ForwardRef):  # of a named tuple's field
        return annotation.__forward_arg__
    if isinstance(annotation, str):
        return annotation
    return getattr(annotation, "__qualname__", None) or str(annotation)


def _default(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if inspect.isclass(value) or inspect.isroutine(value):
        return value.__qualname__
    text = repr(value)
    return text if " at 0x" not in text else f"<{type(value).__name__}>"


if __name__ == "__main__":
    FILE.write_text(description(), "utf-8")
