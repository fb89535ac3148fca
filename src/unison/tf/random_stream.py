"""The stream of `tf.random` among the generators of the process, before it is used.

The state of a program is restored by name, and this may happen before the first draw.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from unison.train.random_state import GlobalGenerator, global_generators

if TYPE_CHECKING:
    from unison.runtime.placement import Placement


def register_random_stream() -> None:
    """Makes the stream part of the state that checkpoints save, and joining workers receive."""
    global_generators["tf.random"] = _StreamOnDemand()


class _StreamOnDemand:
    """The stream in `unison.tf.random_keys`, which is imported when it is used."""

    def get_state(self, placement: Placement | None) -> Any:
        return self._stream().get_state(placement)

    def set_state(self, state: Any, placement: Placement | None) -> None:
        self._stream().set_state(state, placement)

    @staticmethod
    def _stream() -> GlobalGenerator:
        return importlib.import_module("unison.tf.random_keys").process_stream
