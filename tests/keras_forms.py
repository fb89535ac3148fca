"""How Keras comes to a program: it is imported first, or it is TensorFlow's, met inside a scope."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any

#: "tf" is what TensorFlow's guide writes: `import unison.tf as tf`, and `tf.keras` in the scope.
FORMS = ("keras", "tf")

#: What is imported in the processes of a program of each form before it begins.
IMPORTED = {"keras": ("unison", "keras", "pytest"), "tf": ("unison", "pytest")}

#: Whether TensorFlow's Keras was met in a scope of this process: later scopes have it from there.
_is_met = False


def forms(*run: str, soaked: Iterable[str] = ()) -> Any:
    """Parametrizes a test by the form of its program.

    Args:
        run: The forms in which it is run.
        soaked: Those in which it is run by `make soak` only, where each takes long.
    """
    import pytest

    later = [pytest.param(form, marks=pytest.mark.soak) for form in soaked]
    return pytest.mark.parametrize("form", [*run, *later])


@contextlib.contextmanager
def scope_with_keras(strategy: Any, form: str = "keras") -> Iterator[Any]:
    """Enters a strategy's scope, and gives Keras as a program of that form has it there."""
    if form == "keras":
        import keras

        with strategy.scope():
            yield keras
        return
    global _is_met
    message = "Keras is imported: this would be a program of another form"
    assert _is_met or "keras" not in sys.modules, message
    import unison.tf as tf

    with strategy.scope():
        _is_met = True
        yield tf.keras
