"""Checkpoints of the state of a program, and optimizers."""

from unison.lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
