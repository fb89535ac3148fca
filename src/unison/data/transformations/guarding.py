"""Datasets with unexpected elements: `assert_cardinality`, `ignore_errors`."""

from __future__ import annotations

import logging

from unison.data.plan import UNKNOWN, Plan, SameElements, Stream
from unison.data.structure import Leaves
from unison.errors import FailedPreconditionError
from unison.interrupts import is_of_a_signal_handler

logger = logging.getLogger("unison")


class AssertCardinality(SameElements):
    """The elements, with an error at the end if their number is not the expected one."""

    identity = ("_expected",)

    def __init__(self, source: Plan, expected: int):
        super().__init__(source)
        self._expected = expected

    def cardinality(self) -> int:
        return self._expected

    def _stream(self) -> Stream:
        return _CountedStream(self._input.stream(), self._expected)


class _CountedStream(Stream):
    moving = ("_stream", "_count")

    def __init__(self, stream: Stream, expected: int):
        self._stream = stream
        self._expected = expected
        self._count = 0

    def next(self) -> Leaves | None:
        element = self._stream.next()
        self._count += element is not None
        is_short = element is None and self._count < self._expected
        if is_short or 0 <= self._expected < self._count:
            raise FailedPreconditionError(
                message=f"The dataset was expected to contain {self._expected} elements, and "
                f"contains {'at least ' if element is not None else ''}{self._count}."
            )
        return element


class IgnoreErrors(SameElements):
    """The elements, except those whose computation fails."""

    def __init__(self, source: Plan, logs: bool):
        super().__init__(source)
        self._logs = logs

    def cardinality(self) -> int:
        return 0 if self._input.cardinality() == 0 else UNKNOWN

    def _stream(self) -> Stream:
        return _TolerantStream(self._input.stream(), self._logs)


class _TolerantStream(Stream):
    moving = ("_stream",)

    def __init__(self, stream: Stream, logs: bool):
        self._stream = stream
        self._logs = logs

    def next(self) -> Leaves | None:
        while True:
            try:
                return self._stream.next()
            except Exception as error:
                if is_of_a_signal_handler(error):
                    raise
                if self._logs:
                    logger.warning("An element is left out: %s", error)
