"""Errors that any room may raise and that programs catch by TensorFlow's names.

Each is the Python exception that says the same, too: who knows nothing of TensorFlow catches
`ValueError`, `FileNotFoundError` or `TimeoutError`. `unison.tf.errors` lists them.
"""

from __future__ import annotations

from typing import Any, ClassVar


class OpError(Exception):
    """Base of the errors that an operation ends with.

    Args:
        node_def: Without meaning here; TensorFlow's place for the node of a graph.
        op: Without meaning here; TensorFlow's place for the operation.
        message: What was expected, what was received, and the mend.
        error_code: One of TensorFlow's codes (`tf.errors.NOT_FOUND`, ...). Default: the class'.

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
        super().__init__(message)
        self.node_def = node_def
        self.op = op
        self.message = message
        self.error_code = self.CODE if error_code is None else error_code

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> Any:
        return type(self), (self.node_def, self.op, self.message, self.error_code)


class CancelledError(OpError):
    """Somebody called the operation off."""

    CODE = 1


class UnknownError(OpError, RuntimeError):
    """A failure that nothing more is known of."""

    CODE = 2


class InvalidArgumentError(OpError, ValueError):
    """An argument that the operation cannot work with."""

    CODE = 3


class DeadlineExceededError(OpError, TimeoutError):
    """The time ran out."""

    CODE = 4


class NotFoundError(OpError, FileNotFoundError):
    """A file, or another thing asked for by name, is not there."""

    CODE = 5


class AlreadyExistsError(OpError, FileExistsError):
    """What was to be made is there already."""

    CODE = 6


class PermissionDeniedError(OpError, PermissionError):
    """The caller may not do this."""

    CODE = 7


class ResourceExhaustedError(OpError, MemoryError):
    """No memory, or none of another resource, is left."""

    CODE = 8


class FailedPreconditionError(OpError, RuntimeError):
    """Something must be done before: a variable initialized, a folder emptied."""

    CODE = 9


class AbortedError(OpError, RuntimeError):
    """The operation ended early; it may work when tried again."""

    CODE = 10


class OutOfRangeError(OpError, EOFError):
    """Nothing is left to read: the end of a file, or of a dataset."""

    CODE = 11


class UnimplementedError(OpError, NotImplementedError):
    """Nobody has made this."""

    CODE = 12


class InternalError(OpError, RuntimeError):
    """Something that must always hold does not."""

    CODE = 13


class UnavailableError(OpError, ConnectionError):
    """A machine, or a service, cannot be reached now."""

    CODE = 14


class DataLossError(OpError, OSError):
    """Data that was stored is damaged or gone."""

    CODE = 15


class UnauthenticatedError(OpError, PermissionError):
    """The caller did not say who it is."""

    CODE = 16
