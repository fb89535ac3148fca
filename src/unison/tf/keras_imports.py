"""Brings `unison.tf.keras` to Keras also where a program imports Keras by its own name.

Programs for TensorFlow write `import keras` as well as `tf.keras`, before or after TensorFlow.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import os
import sys
import types
from collections.abc import Sequence
from typing import Any

from unison.strategies.keras_additions import when_keras_is_imported


def follow_keras() -> None:
    """Imports `unison.tf.keras` as soon as Keras has been imported, now if it has."""
    # Keras reads it once, when it is imported; TensorFlow's is this one.
    if os.environ.get("KERAS_BACKEND") in (None, "", "tensorflow"):
        os.environ["KERAS_BACKEND"] = "jax"
    when_keras_is_imported(lambda: importlib.import_module("unison.tf.keras"))
    keras = sys.modules.get("keras")
    if keras is None:
        sys.meta_path.insert(0, _KerasFinder())
    else:
        _keras_is_loaded(keras)


def _keras_is_loaded(keras: types.ModuleType) -> None:
    if keras.backend.backend() == "jax":  # another one has no use for ours
        importlib.import_module("unison.keras")


class _KerasFinder(importlib.abc.MetaPathFinder):
    """Finds Keras as the finders behind it do, with a loader that tells when it is loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "keras":
            return None
        finders = sys.meta_path[sys.meta_path.index(self) + 1 :]
        found = (finder.find_spec(fullname, path, target) for finder in finders)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self)
        return spec


class _Loader(importlib.abc.Loader):
    """Loads Keras as `loader` does."""

    def __init__(self, loader: importlib.abc.Loader, finder: _KerasFinder):
        self._loader = loader
        self._finder = finder

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        attributes: Any = module
        attributes.__spec__.loader = attributes.__loader__ = self._loader
        self._loader.exec_module(module)
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        _keras_is_loaded(module)
