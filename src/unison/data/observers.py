"""Observers of datasets, registered by higher-level packages before a dataset is created."""

from __future__ import annotations

from collections.abc import Callable

#: Called whenever a dataset is created: from then on, arguments may be datasets.
when_made: list[Callable[[], None]] = []
