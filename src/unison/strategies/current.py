"""The thread's strategy and replica: outside any scope, those of the default strategy."""

from __future__ import annotations

from unison.strategies.base import Strategy
from unison.strategies.context import (
    ReplicaContext,
    replica_context_in_scope,
    strategy_in_scope,
)
from unison.strategies.default import DefaultStrategy, default_strategy


def get_strategy() -> Strategy:
    """Returns the strategy of the innermost scope, else the default one.

    The default strategy has one replica, on the default device.

    TF: `tf.distribute.get_strategy`.
    """
    strategy = strategy_in_scope()
    return default_strategy() if strategy is None else strategy


def has_strategy() -> bool:
    """Whether the thread is in a scope of a strategy other than the default one.

    TF: `tf.distribute.has_strategy`.
    """
    return not isinstance(get_strategy(), DefaultStrategy)


def get_replica_context() -> ReplicaContext | None:
    """Returns the context of the replica that is being traced.

    Outside any scope it is that of the default strategy's only replica; in cross-replica context
    it is None.

    TF: `tf.distribute.get_replica_context`.
    """
    if strategy_in_scope() is None:
        return ReplicaContext(default_strategy())
    return replica_context_in_scope()
