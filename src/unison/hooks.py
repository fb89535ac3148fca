"""Hooks of lower layers that higher layers implement; those are imported when a hook is called."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from unison.conversion import convert_by
from unison.data.observers import when_made
from unison.runtime.launching.watching import Watched, watch_by
from unison.strategies.keras_additions import when_keras_is_imported
from unison.strategies.observing import strategy_observers
from unison.strategies.scope_observers import before_scopes, observe_scopes


def register() -> None:
    """Registers all hooks; called by `unison/__init__.py`."""
    watch_by(_watched)
    before_scopes(_import_for_keras)
    observe_scopes(_KerasCameTooLate())
    when_keras_is_imported(_add_to_keras)
    when_made.append(_let_keras_take_datasets)
    strategy_observers.append(_start_monitoring)
    convert_by(_call_converted)


def _import_for_keras() -> None:
    """Imports `unison.keras` when a program that uses Keras opens its first scope."""
    if "keras" in sys.modules:
        importlib.import_module("unison.keras")


class _KerasCameTooLate:
    """Raises an error for a scope in which the program first met Keras, unnoticed."""

    def opened(self) -> None:
        pass

    def closed(self) -> None:
        fails_anyway = sys.exc_info()[0] is not None
        if "keras" in sys.modules and "unison.keras" not in sys.modules and not fails_anyway:
            raise RuntimeError(
                "Keras was imported for the first time inside strategy.scope(), too late for the "
                "strategy to see what was built there. Import keras before the scope is entered."
            )


def _add_to_keras() -> None:
    """Adds backups, atomic saves and elastic loops to Keras once `unison.keras` is imported."""
    from unison.runtime.elastic import is_elastic_worker
    from unison.runtime.host_memory import has_worker_memory

    importlib.import_module("unison.train.keras_backup")
    importlib.import_module("unison.saving.keras_files")
    importlib.import_module("unison.saving.keras_orbax")
    if is_elastic_worker():
        importlib.import_module("unison.train.keras_elastic")
    if has_worker_memory():
        importlib.import_module("unison.train.keras_in_memory")


def _let_keras_take_datasets() -> None:
    """Makes Keras accept datasets when a program that uses Keras creates its first dataset."""
    backend = getattr(sys.modules.get("keras"), "backend", None)
    if backend is not None and backend.backend() == "jax":
        with contextlib.suppress(ValueError):  # another thread was first
            when_made.remove(_let_keras_take_datasets)
        from unison.keras.datasets import teach_keras

        teach_keras()


def _watched(
    program: str, kind: str, workers: Sequence[str], is_wanted: bool, has_progress: bool
) -> Watched:
    from unison.monitoring.launcher import Monitored

    return Monitored(program, kind, workers, is_wanted, has_progress=has_progress)


def _start_monitoring(strategy: Any) -> None:
    from unison.monitoring import start_if_asked

    start_if_asked(strategy)


def _call_converted(function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    from unison.autograph.calls import converted_call

    return converted_call(function, args, kwargs)
