"""Keras' scopes that a signal handler has interrupted as they were about to end.

A handler can raise at the first instruction of a scope's `__exit__`. The thread would stay in that
scope: variables would have the values of a step that was being traced, and new ones would wait for
their first values.
"""

from __future__ import annotations

import os

import keras
from keras.src.backend.common import global_state
from keras.src.backend.common.variables import initialize_all_variables

from unison.interrupts import signals_held
from unison.tracebacks import is_running

_FOLDER = os.path.dirname(keras.__file__) + os.sep

#: The attributes of Keras' thread-local state that hold the innermost scope of a kind.
_SCOPES = ("stateless_scope", "symbolic_scope", "autocast_scope")

_UNINITIALIZED = "uninitialized_variables"


def leave_interrupted_scopes() -> None:
    """Leaves the scopes of functions that have ended, and gives variables their first values.

    It is called where a public function of Unison ends with an error (`tracebacks.more_ends`).
    Nothing is done while a function of Keras is running, whose scopes they may be.
    """
    is_outside = all(global_state.get_global_attribute(name) is None for name in _SCOPES)
    if is_outside and not global_state.get_global_attribute(_UNINITIALIZED):
        return
    if is_running(_FOLDER):
        return
    with signals_held:
        for name in _SCOPES:
            global_state.set_global_attribute(name, None)
        waiting = global_state.get_global_attribute(_UNINITIALIZED) or []
        # Keras has initialized some of them if a handler interrupted it there.
        left = [variable for variable in waiting if variable._value is None]
        global_state.set_global_attribute(_UNINITIALIZED, left)
        initialize_all_variables()
