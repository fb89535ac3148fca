"""The parts of Keras' objects for a checkpoint, and the events that add parts.

Parts are named by attributes, as in TensorFlow: `kernel`, `dense`, `optimizer`. Layers and weights
that are not in an attribute (the layers of a `Sequential`, a weight that only `add_weight`
returns) are named by their index among the layers or weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import unison.keras  # noqa: F401  (before Keras: it chooses the JAX backend)
from unison.module import tell_waiting

import keras  # isort: skip
from keras.src.saving.keras_saveable import KerasSaveable  # isort: skip

_KERAS_OBJECTS = (KerasSaveable, keras.random.SeedGenerator)

#: Attributes that are not followed: Keras' own lists of the other parts, references to the parts of
#: other objects, and the metrics that `compile` creates (as in TensorFlow; `model.metrics` can be
#: given to a checkpoint by name).
_NOT_FOLLOWED = frozenset(
    "_trainable_variables _non_trainable_variables _variables _layers _metrics _seed_generators "
    "_functional _operations _operations_by_depth _nodes _nodes_by_depth _inbound_nodes "
    "_outbound_nodes _compile_metrics _compile_loss _loss_tracker".split()
)

#: The lists of an object's own variables. For an optimizer, `_variables` alone: its
#: `_trainable_variables` are the model's.
_WEIGHTS = ("_trainable_variables", "_non_trainable_variables")

#: The methods in which Keras' objects create variables, and other objects that do.
_MAKES_PARTS = ("build", "compile")


def is_keras_object(value: Any) -> bool:
    """Whether `value` is a layer, model, optimizer, metric, ... of Keras."""
    return isinstance(value, _KERAS_OBJECTS)


def parts_of_keras_object(owner: Any, is_tracked: Callable[[Any], bool]) -> dict[str, Any]:
    """Returns the parts of one of Keras' objects, by name."""
    parts = dict(_attributes(owner, is_tracked))
    held = set(_identities(parts.values()))
    return parts | {name: part for name, part in _unnamed(owner) if id(part) not in held}


def _attributes(owner: Any, is_tracked: Callable[[Any], bool]) -> Iterator[tuple[str, Any]]:
    for name, value in vars(owner).items():
        if name in _NOT_FOLLOWED or not is_tracked(value):
            continue
        public = name.lstrip("_")
        if public != name and isinstance(getattr(type(owner), public, None), property):
            yield public, value  # the `kernel` of a Dense layer is in `_kernel`
        yield name, value


def _identities(values: Any) -> Iterator[int]:
    for value in values:
        if isinstance(value, dict):
            yield from _identities(value.values())
        elif isinstance(value, list | tuple):
            yield from _identities(value)
        else:
            yield id(value)


def _unnamed(owner: Any) -> Iterator[tuple[str, Any]]:
    for account in _WEIGHTS if isinstance(owner, keras.Layer) else ("_variables",):
        for index, variable in enumerate(getattr(owner, account, ())):
            yield f"{account}[{index}]", variable
    # The layers of a model without its input layer, which a Sequential model gets when it is built.
    layers = owner.layers if isinstance(owner, keras.Model) else getattr(owner, "_layers", ())
    for index, layer in enumerate(layers):
        yield f"layers[{index}]", layer


def parts_known_to_tensorflow(owner: Any) -> dict[str, Any]:
    """Returns the parts that TensorFlow finds in Keras' lists, by their index in them.

    It finds the layers of a functional model or a `Sequential`, and the weights that an optimizer
    updates, only in this way.
    """
    if isinstance(owner, keras.optimizers.Optimizer):
        return {
            f"{name}[{place}]": weight
            for name in ("_variables", "_trainable_variables")
            for place, weight in enumerate(getattr(owner, name, ()))
        }
    functional = getattr(owner, "_functional", None)
    of_sequential = {} if functional is None else {"_functional": functional}
    operations = enumerate(getattr(owner, "_operations", ()))
    return of_sequential | {f"_operations[{place}]": layer for place, layer in operations}


def settle(owner: Any) -> None:
    """Stores the state that a running loop of a model holds in the model's variables."""
    if isinstance(owner, keras.Model):
        owner.jax_state_sync()


def announce_new_parts(owner: Any) -> None:
    """Makes `owner` notify pending restorations when it has been built or compiled."""
    for name in _MAKES_PARTS:
        method = getattr(owner, name, None)
        if callable(method) and not hasattr(method, "_announces_parts"):
            # Bypasses Keras' attribute tracking, for this object only.
            vars(owner)[name] = _announcing(owner, method)


def _announcing(owner: Any, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        tell_waiting(owner)
        return result

    wrapped._announces_parts = True  # type: ignore[attr-defined]
    return wrapped
