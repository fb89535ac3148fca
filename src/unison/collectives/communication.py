"""Options for the communication of collective operations."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import json
import os
from collections.abc import Iterator, Sequence

import jax

from unison.collectives.method import AggregationMethod
from unison.storage.decoding import parsed_json
from unison.thread_local import ThreadLocal


class CommunicationImplementation(enum.Enum):
    """The implementation of the communication between workers.

    Attributes:
        AUTO: Shared memory between processes on CPU that run on one machine; between machines, and
            between accelerators, what XLA chooses.
        RING: The network only: on CPU, Gloo's rings.
        NCCL: What XLA chooses; for GPUs that is NCCL.

    TF: `tf.distribute.experimental.CommunicationImplementation`.
    """

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"


@dataclasses.dataclass(frozen=True)
class CommunicationOptions:
    """Options of collective operations.

    Args:
        bytes_per_pack: The approximate size of the buffers into which the arrays of a sum or mean
            are packed; arrays are never split, except by `ACCUMULATE_N`, whose chunks have this
            size. XLA may combine small ones (on CPU it combines all). On GPUs and TPUs, it is the
            number of bytes up to which XLA combines sums of gradients. 0: the method's choice, or
            XLA's.
        timeout_seconds: How long workers wait for each other; has no effect within one process.
        implementation: A `CommunicationImplementation` or its name.
        method: The `AggregationMethod`, or its name, for gradients for which none is given.
        compresses: Whether gradients are compressed as configured in their optimizer. If not, they
            are sent losslessly, and the first ones include the remainder that was still to be sent.
            It does not affect `local_sgd` and `diloco`, which do not send gradients.
        auto_tune: Whether a strategy measures in the first steps which of these options are
            fastest, and uses them from then on; see `unison.strategies.tuning`.

    Raises:
        ValueError: `bytes_per_pack` or `timeout_seconds` is negative, or there is no such
            implementation or method.

    Examples:
        >>> import tempfile
        >>> options = CommunicationOptions(method="TREE", implementation="ring")
        >>> with tempfile.NamedTemporaryFile() as file:
        ...     options.save(file.name)
        ...     CommunicationOptions.from_file(file.name) == options
        True

    TF: `tf.distribute.experimental.CommunicationOptions`.
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: CommunicationImplementation = CommunicationImplementation.AUTO
    method: AggregationMethod = AggregationMethod.DEFAULT
    compresses: bool = True
    auto_tune: bool = False

    def __post_init__(self) -> None:
        if self.bytes_per_pack < 0:
            raise ValueError(f"bytes_per_pack must be 0 or more. Received: {self.bytes_per_pack}")
        if self.timeout_seconds is not None and not self.timeout_seconds >= 0:  # nor is NaN
            raise ValueError(f"timeout_seconds must be 0 or more. Received: {self.timeout_seconds}")
        if isinstance(self.implementation, str):
            name = self.implementation.upper()
            object.__setattr__(self, "implementation", CommunicationImplementation(name))
        object.__setattr__(self, "method", AggregationMethod.parse(self.method))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the options into a JSON file, for `from_file`."""
        said = dataclasses.asdict(self)
        said |= {"implementation": self.implementation.name, "method": self.method.name}
        with open(path, "w", encoding="utf-8") as file:
            json.dump(said, file, indent=2)
            file.write("\n")

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> CommunicationOptions:
        """Returns the options that `save` wrote; options missing from the file have their defaults.

        Raises:
            OSError: The file cannot be read.
            ValueError: The file does not contain valid options.
        """
        with open(path, "rb") as file:
            try:
                said = parsed_json(file.read())
            except ValueError as error:
                raise ValueError(f"{os.fspath(path)} is not valid JSON: {error}") from None
        kinds: dict[str, tuple[type, ...]] = {
            "bytes_per_pack": (int,),
            "timeout_seconds": (int, float, type(None)),
            "implementation": (str,),
            "method": (str,),
            "compresses": (bool,),
            "auto_tune": (bool,),
        }
        if not isinstance(said, dict) or not all(
            type(value) in kinds.get(name, ()) for name, value in said.items()
        ):
            raise ValueError(
                f"Expected in {os.fspath(path)} an object with communication options, as "
                f"CommunicationOptions.save writes it: {', '.join(kinds)}. Received: "
                f"{str(said)[:200]}"
            )
        try:
            return cls(**said)
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)}: {str(error)[:200]}") from error

    def packs(self, arrays: Sequence[jax.Array]) -> list[list[jax.Array]]:
        """Returns `arrays`, in order, in packs of the set size; an empty list if none is set."""
        packs: list[list[jax.Array]] = []
        size = self.bytes_per_pack
        for array in arrays if self.bytes_per_pack else ():
            if size >= self.bytes_per_pack:
                packs.append([])
                size = 0
            packs[-1].append(array)
            size += array.nbytes
        return packs


class Communication:
    """The options with which a strategy's programs communicate, and how the programs use them.

    Args:
        options: The initial options.

    Attributes:
        options: The current options. Changes do not affect existing programs.
        was_asked: Whether a program that uses them has been traced since this was reset.
        warmup_steps: After how many steps gradients are compressed, if a program compresses any.
    """

    def __init__(self, options: CommunicationOptions):
        self.options = options
        self.was_asked = False
        self.warmup_steps: int | None = None


_current: ThreadLocal[Communication | None] = ThreadLocal(None)


@contextlib.contextmanager
def communicating(communication: Communication) -> Iterator[None]:
    """Context manager in which gradients are summed with the options of `communication`."""
    with _current.bound_to(communication):
        yield


def options_in_scope(warmup_steps: int | None = None) -> CommunicationOptions:
    """Returns the communication options of the program that is being traced.

    Args:
        warmup_steps: After how many steps it compresses gradients, if it requests the options for
            that.
    """
    communication = _current.value
    if communication is None:
        return CommunicationOptions()
    communication.was_asked = True
    if warmup_steps is not None:
        communication.warmup_steps = warmup_steps
    return communication.options
