"""A strategy's scope for Keras: it adopts the models, optimizers and variables created inside.

While at least one scope is open, a few constructors of Keras are wrapped, so that their objects
can be adopted; when the last scope closes, they are restored. Only the objects created
inside a scope are changed permanently.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import keras

from unison.keras.body_scopes import HeldByScope
from unison.keras.metrics import adopt_metric
from unison.keras.normalization import init_taking_synchronized
from unison.keras.optimizers import adopt_optimizer
from unison.keras.trainer import ReplicaTrainer, trainer_of
from unison.keras.variables import LiftingScope, adopt, outside_the_traced_program
from unison.program.tracing import holders, tracing_contexts
from unison.strategies import Strategy
from unison.strategies.current import get_strategy, has_strategy
from unison.tracebacks import filter_traceback

#: The attribute of a variable that holds a weak reference to the strategy that it was created in.
_STRATEGY = "_unison_strategy"

#: The methods of a model that run its steps.
ENTRY_POINTS = (
    "fit",
    "evaluate",
    "predict",
    "train_on_batch",
    "test_on_batch",
    "predict_on_batch",
)


def _creating_model(original: Callable[..., Any]) -> Any:
    @functools.wraps(original)
    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        model = original(cls, *args, **kwargs)
        _give_trainer(model)
        return model

    return staticmethod(new)


def _give_trainer(model: Any) -> None:
    if has_strategy() and trainer_of(model) is None:
        strategy = get_strategy()
        (strategy.keras_trainer() or ReplicaTrainer)(model, strategy)


def _followed_by(adopt: Callable[[Any], None]) -> Callable[[Callable[..., Any]], Any]:
    """Returns a wrapper of constructors, after which `adopt` is called with the new object."""

    def wrap(original: Callable[..., Any]) -> Any:
        @functools.wraps(original)
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            if has_strategy():
                adopt(self)

        return init

    return wrap


def _creating_normalization(original: Callable[..., Any]) -> Any:
    taking_synchronized = init_taking_synchronized(original)

    @functools.wraps(taking_synchronized)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        (taking_synchronized if has_strategy() else original)(self, *args, **kwargs)

    return init


def _creating_variable(original: Callable[..., Any]) -> Any:
    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        with outside_the_traced_program():
            original(self, *args, **kwargs)
            if has_strategy():
                adopt(self, get_strategy().placement)
                vars(self)[_STRATEGY] = weakref.ref(get_strategy())

    return init


def computes_by_its_variables(model: keras.Model) -> bool:
    """Gives a model that was created outside all scopes the trainer of its variables' strategy.

    Such models are made of a trained model's layers, to see what an inner layer gives, or to use
    its encoder and decoder alone. Keras' own loops would compute them on one device.

    Returns:
        Whether the model got the trainer now, which has replaced its methods.
    """
    if has_strategy() or trainer_of(model) is not None:
        return False
    references = (vars(variable).get(_STRATEGY) for variable in model.variables)
    strategies = {reference() for reference in references if reference is not None} - {None}
    if len(strategies) != 1:
        return False
    strategy = strategies.pop()
    (strategy.keras_trainer() or ReplicaTrainer)(model, strategy)
    return True


def _using_model(original: Callable[..., Any]) -> Any:
    @filter_traceback
    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if has_strategy():
            _check_owner(self, get_strategy(), original.__name__)
        return original(self, *args, **kwargs)

    return method


def _check_owner(model: keras.Model, strategy: Strategy, method: str) -> None:
    trainer = trainer_of(model)
    if trainer is None:
        raise ValueError(
            f"model.{method}() is called in the scope of {strategy!r}, but model {model.name!r} "
            "was built outside it, so that its variables are on one device. Build the model "
            "inside `with strategy.scope():`."
        )
    if trainer.strategy is not strategy:
        raise ValueError(
            f"model.{method}() is called in the scope of {strategy!r}, but model {model.name!r} "
            f"was built in the scope of another strategy, {trainer.strategy!r}. Use that one."
        )


def _owner_of(method: str) -> type:
    """Returns the class from which `keras.Model` has a method.

    It is wrapped there: Keras tells a user's `compile` from its own by comparing `Model`'s.
    """
    return next(owner for owner in keras.Model.__mro__ if method in vars(owner))


_WRAPPERS: list[tuple[type, str, Callable[..., Any]]] = [
    (keras.Model, "__new__", _creating_model),
    # What models call, too, for layers that have Keras' trainer as a base.
    (_owner_of("fit"), "__init__", _followed_by(_give_trainer)),
    (keras.Variable, "__init__", _creating_variable),
    (keras.optimizers.Optimizer, "__init__", _followed_by(adopt_optimizer)),
    (keras.metrics.Metric, "__init__", _followed_by(adopt_metric)),
    (keras.layers.BatchNormalization, "__init__", _creating_normalization),
    *((_owner_of(name), name, _using_model) for name in ("compile", *ENTRY_POINTS)),
]


class KerasInScopes:
    """Wraps Keras' constructors while scopes are open; see `strategies.scope_observers`."""

    def __init__(self) -> None:
        self._restore: list[Callable[[], None]] = []

    def opened(self) -> None:
        """The first scope has been opened."""
        for owner, name, wrap in _WRAPPERS:
            inherited = name not in vars(owner)
            original = vars(owner).get(name)
            function = getattr(owner, name)
            setattr(owner, name, wrap(function))
            if inherited:
                self._restore.append(functools.partial(delattr, owner, name))
            else:
                self._restore.append(functools.partial(setattr, owner, name, original))

    def closed(self) -> None:
        """The last scope has been closed."""
        while self._restore:
            self._restore.pop()()


keras_in_scopes = KerasInScopes()

tracing_contexts.append(LiftingScope)
holders.append(HeldByScope.now)
