"""`tf.compat.v1`: the parts of TensorFlow 1 that programs of TensorFlow 2 use.

The optimizers and the global step are in `train`. What TensorFlow 2 has under the same name is
that; it takes the arguments of TensorFlow 2. Graphs, sessions and placeholders do not exist.
"""

from __future__ import annotations

import sys
from typing import Any

from unison.tf.compat.v1 import logging, train
from unison.tf.compat.v1.config_proto import ConfigProto
from unison.tf.missing import names_missing_from, public_names

__all__ = [
    "ConfigProto",
    "assign",
    "assign_add",
    "assign_sub",
    "enable_control_flow_v2",
    "enable_eager_execution",
    "enable_resource_variables",
    "enable_tensor_equality",
    "enable_v2_behavior",
    "enable_v2_tensorshape",
    "executing_eagerly_outside_functions",
    "global_variables",
    "global_variables_initializer",
    "initialize_all_variables",
    "local_variables",
    "local_variables_initializer",
    "logging",
    "reset_default_graph",
    "set_random_seed",
    "tables_initializer",
    "train",
    "trainable_variables",
]

_NO_GRAPHS = (
    "there are no graphs and sessions. Operations run at once; decorate a function with "
    "tf.function to compile it"
)
_NO_SCOPES = "keep variables in a tf.Module or a Keras layer, which name them"

_missing = names_missing_from(
    __name__,
    {
        "GPUOptions": "use tf.config, such as tf.config.experimental.set_memory_growth",
        "Graph": _NO_GRAPHS,
        "InteractiveSession": _NO_GRAPHS,
        "Session": _NO_GRAPHS,
        "disable_eager_execution": _NO_GRAPHS,
        "disable_v2_behavior": _NO_GRAPHS,
        "get_default_graph": _NO_GRAPHS,
        "get_default_session": _NO_GRAPHS,
        "get_variable": _NO_SCOPES,
        "gfile": "use tf.io.gfile",
        "layers": "use tf.keras.layers",
        "losses": "use tf.keras.losses",
        "metrics": "use tf.keras.metrics",
        "placeholder": "pass values as arguments of a function",
        "placeholder_with_default": "pass values as arguments of a function",
        "variable_scope": _NO_SCOPES,
    },
)


def __getattr__(name: str) -> Any:
    face = sys.modules["unison.tf"]
    if name in public_names("tf.compat.v1") and name in public_names("tf"):
        return getattr(face, name)
    return _missing(name)


def enable_eager_execution(
    config: Any = None, device_policy: Any = None, execution_mode: Any = None
) -> None:
    """Does nothing: operations run at once. TF: `tf.compat.v1.enable_eager_execution`."""
    del config, device_policy, execution_mode


def enable_v2_behavior() -> None:
    """Does nothing: this is TensorFlow 2's behavior. TF: `tf.compat.v1.enable_v2_behavior`."""


enable_control_flow_v2 = enable_v2_behavior
enable_resource_variables = enable_v2_behavior
enable_tensor_equality = enable_v2_behavior
enable_v2_tensorshape = enable_v2_behavior


def executing_eagerly_outside_functions() -> bool:
    """Returns True. TF: `tf.compat.v1.executing_eagerly_outside_functions`."""
    return True


def global_variables_initializer() -> None:
    """Does nothing: a variable has its value when it is created.

    TF: `tf.compat.v1.global_variables_initializer`, and others that initialize.
    """


initialize_all_variables = global_variables_initializer
local_variables_initializer = global_variables_initializer


def tables_initializer(name: str = "init_all_tables") -> None:
    """Does nothing: a table has its contents when it is created.

    TF: `tf.compat.v1.tables_initializer`.
    """
    del name


def global_variables(scope: str | None = None) -> list[Any]:
    """Returns an empty list, as TensorFlow does where operations run at once.

    TF: `tf.compat.v1.global_variables`, `local_variables` and `trainable_variables`.
    """
    del scope
    return []


local_variables = global_variables
trainable_variables = global_variables


def reset_default_graph() -> None:
    """Does nothing: there are no graphs. TF: `tf.compat.v1.reset_default_graph`."""


def set_random_seed(seed: int) -> None:
    """Sets the global seed. TF: `tf.compat.v1.set_random_seed`, `tf.random.set_seed`."""
    sys.modules["unison.tf"].random.set_seed(seed)


def assign(ref: Any, value: Any) -> Any:
    """Assigns `value` to the variable `ref`, and returns it. TF: `tf.compat.v1.assign`."""
    return ref.assign(value)


def assign_add(ref: Any, value: Any) -> Any:
    """Adds `value` to the variable `ref`, and returns it. TF: `tf.compat.v1.assign_add`."""
    return ref.assign_add(value)


def assign_sub(ref: Any, value: Any) -> Any:
    """Subtracts `value` from the variable `ref`, and returns it. TF: `tf.compat.v1.assign_sub`."""
    return ref.assign_sub(value)
