"""`tf.errors`: the errors of `unison.errors`, and TensorFlow's codes."""

from __future__ import annotations

from unison.errors import (
    AbortedError,
    AlreadyExistsError,
    CancelledError,
    DataLossError,
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    OpError,
    OutOfRangeError,
    PermissionDeniedError,
    ResourceExhaustedError,
    UnauthenticatedError,
    UnavailableError,
    UnimplementedError,
    UnknownError,
)
from unison.program import ControlFlowError as OperatorNotAllowedInGraphError
from unison.tf.missing import names_missing_from

__all__ = [
    "ABORTED",
    "ALREADY_EXISTS",
    "CANCELLED",
    "DATA_LOSS",
    "DEADLINE_EXCEEDED",
    "FAILED_PRECONDITION",
    "INTERNAL",
    "INVALID_ARGUMENT",
    "NOT_FOUND",
    "OK",
    "OUT_OF_RANGE",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "UNAUTHENTICATED",
    "UNAVAILABLE",
    "UNIMPLEMENTED",
    "UNKNOWN",
    "AbortedError",
    "AlreadyExistsError",
    "CancelledError",
    "DataLossError",
    "DeadlineExceededError",
    "FailedPreconditionError",
    "InternalError",
    "InvalidArgumentError",
    "NotFoundError",
    "OpError",
    "OperatorNotAllowedInGraphError",
    "OutOfRangeError",
    "PermissionDeniedError",
    "ResourceExhaustedError",
    "UnauthenticatedError",
    "UnavailableError",
    "UnimplementedError",
    "UnknownError",
]

OK = 0
CANCELLED = CancelledError.CODE
UNKNOWN = UnknownError.CODE
INVALID_ARGUMENT = InvalidArgumentError.CODE
DEADLINE_EXCEEDED = DeadlineExceededError.CODE
NOT_FOUND = NotFoundError.CODE
ALREADY_EXISTS = AlreadyExistsError.CODE
PERMISSION_DENIED = PermissionDeniedError.CODE
RESOURCE_EXHAUSTED = ResourceExhaustedError.CODE
FAILED_PRECONDITION = FailedPreconditionError.CODE
ABORTED = AbortedError.CODE
OUT_OF_RANGE = OutOfRangeError.CODE
UNIMPLEMENTED = UnimplementedError.CODE
INTERNAL = InternalError.CODE
UNAVAILABLE = UnavailableError.CODE
DATA_LOSS = DataLossError.CODE
UNAUTHENTICATED = UnauthenticatedError.CODE

__getattr__ = names_missing_from(__name__)
