"""Observers of datasets, which rooms above register before a dataset is made."""

from __future__ import annotations

from collections.abc import Callable

#: Called whenever a dataset is created: from then on, arguments may be datasets.
when_made: list[Callable[[], None]] = []
