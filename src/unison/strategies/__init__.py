"""Strategies, and the contexts that record which strategy and replica a thread is in."""

from unison.lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
