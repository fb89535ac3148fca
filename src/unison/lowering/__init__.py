"""Faster XLA:CPU forms of operations that XLA itself lowers inefficiently on CPUs."""

from unison.lowering.rewrite import has_shard_map, lower_for_cpu, lowered_trace

__all__ = ["has_shard_map", "lower_for_cpu", "lowered_trace"]
