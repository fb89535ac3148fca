"""Additions to Keras by modules in layers above `unison.keras`.

`unison.keras` cannot import these modules, and may be imported at any time: before the first scope,
or by the first use of `tf.keras` inside one. So they register functions here, which are called when
it is imported.
"""

from __future__ import annotations

from collections.abc import Callable

_additions: list[Callable[[], object]] = []
_is_imported = False


def when_keras_is_imported(add: Callable[[], object]) -> None:
    """Registers `add` to be called once after `unison.keras` is imported; calls it now if it is."""
    if _is_imported:
        add()
    else:
        _additions.append(add)


def keras_is_imported() -> None:
    """Calls the registered functions; `unison.keras` calls this at the end of its import."""
    global _is_imported
    _is_imported = True
    while _additions:
        _additions.pop(0)()
