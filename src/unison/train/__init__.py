"""Saving the state of a program and bringing it back, and optimizers."""

from unison.lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
