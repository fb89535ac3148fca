"""Errors that any module may raise and that programs catch by TensorFlow's names.

Each also inherits from the Python exception with the same meaning, if there is one: code that knows
nothing of TensorFlow catches `ValueError`, `FileNotFoundError` or `TimeoutError`.
`unison.tf.errors` lists them.
"""

from __future__ import annotations

from typing import Any, ClassVar


class OpError(Exception):
    """Base class of the errors of operations.

    Args:
        node_def: Unused; in TensorFlow, the node of a graph.
        op: Unused; in TensorFlow, the operation.
        message: What was expected, what was received, and how to fix it.
        error_code: One of TensorFlow's codes (`tf.errors.NOT_FOUND`, ...). Default: that of the
            class.

    Examples:
        >>> error = NotFoundError(message="no such file: data.txt")
        >>> error.message, error.error_code, isinstance(error, FileNotFoundError)
        ('no such file: data.txt', 5, True)

    TF: `tf.errors.OpError`.
    """

    #: The code of the errors of this class.
    CODE: ClassVar[int] = 2

    def __init__(
        self,
        node_def: Any = None,
        op: Any = None,
        message: str = "",
        error_code: int | None = None,
    ):
        if isinstance(node_def, str) and not message:
            # Keras, where it adds to an error, makes a new one of a message alone.
            node_def, message = None, node_def
        super().__init__(message)
        self.node_def = node_def
        self.op = op
        self.message = message
        self.error_code = self.CODE if error_code is None else error_code

    @property
    def experimental_payloads(self) -> dict[bytes, bytes]:
        """The data that TensorFlow's runtime attaches to errors: none here."""
        return {}

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> Any:
        return type(self), (self.node_def, self.op, self.message, self.error_code)


class CancelledError(OpError):
    """The operation was cancelled."""

    CODE = 1


class UnknownError(OpError, RuntimeError):
    """A failure about which nothing more is known."""

    CODE = 2


class InvalidArgumentError(OpError, ValueError):
    """An argument is invalid for the operation."""

    CODE = 3


class DeadlineExceededError(OpError, TimeoutError):
    """The deadline has passed."""

    CODE = 4


class NotFoundError(OpError, FileNotFoundError):
    """A file, or something else requested by name, does not exist."""

    CODE = 5


class AlreadyExistsError(OpError, FileExistsError):
    """The object to be created already exists."""

    CODE = 6


class PermissionDeniedError(OpError, PermissionError):
    """The caller may not do this."""

    CODE = 7


class ResourceExhaustedError(OpError, MemoryError):
    """Memory or another resource is exhausted."""

    CODE = 8


class FailedPreconditionError(OpError, RuntimeError):
    """A precondition is not met: a variable must be initialized first, or a directory emptied."""

    CODE = 9


class AbortedError(OpError, RuntimeError):
    """The operation was aborted; it may succeed if retried."""

    CODE = 10


class OutOfRangeError(OpError, EOFError):
    """Nothing is left to read: the end of a file, or of a dataset."""

    CODE = 11


class UnimplementedError(OpError, NotImplementedError):
    """The operation is not implemented."""

    CODE = 12


class InternalError(OpError, RuntimeError):
    """An invariant is violated."""

    CODE = 13


class UnavailableError(OpError, ConnectionError):
    """A machine or service is currently unreachable."""

    CODE = 14


class DataLossError(OpError, OSError):
    """Stored data is damaged or lost."""

    CODE = 15


class UnauthenticatedError(OpError, PermissionError):
    """The caller did not authenticate itself."""

    CODE = 16
