"""What rooms above `unison.keras` add to Keras.

`unison.keras` cannot import them, and may be imported at any time: ahead of the first scope, or by
the first mention of `tf.keras` inside one. So they are registered here, and called when it is.
"""

from __future__ import annotations

from collections.abc import Callable

_additions: list[Callable[[], object]] = []
_is_imported = False


def when_keras_is_imported(add: Callable[[], object]) -> None:
    """Has `add` called once, when `unison.keras` has been imported; now, if it has."""
    if _is_imported:
        add()
    else:
        _additions.append(add)


def keras_is_imported() -> None:
    """Calls what was registered; for `unison.keras`, as the last thing that its import does."""
    global _is_imported
    _is_imported = True
    while _additions:
        _additions.pop(0)()
