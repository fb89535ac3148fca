"""How Keras comes to a program: it is imported first, or it is TensorFlow's, met inside a scope."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

#: "tf" is what TensorFlow's guide writes: `import unison.tf as tf`, and `tf.keras` in the scope.
FORMS = ("keras", "tf")

#: What is imported in the processes of a program of each form before it begins.
IMPORTED = {"keras": ("unison", "keras", "pytest"), "tf": ("unison", "pytest")}


@contextlib.contextmanager
def scope_with_keras(strategy: Any, form: str = "keras") -> Iterator[Any]:
    """Enters a strategy's scope, and gives Keras as a program of that form has it there."""
    if form == "keras":
        import keras

        with strategy.scope():
            yield keras
        return
    assert "keras" not in sys.modules, "Keras is imported: this would be a program of another form"
    import unison.tf as tf

    with strategy.scope():
        yield tf.keras
