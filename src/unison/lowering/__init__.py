"""Faster XLA:CPU forms of operations that XLA itself lowers badly on CPUs."""

from unison.lowering.rewrite import lower_for_cpu

__all__ = ["lower_for_cpu"]
