"""Saved models: objects with variables and functions, used without their original code."""

from unison.saving.load import LoadedObject, contains_saved_model, load
from unison.saving.save import save

__all__ = ["LoadedObject", "contains_saved_model", "load", "save"]
