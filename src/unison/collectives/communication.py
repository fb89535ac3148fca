"""How a program asks collective operations to travel."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import json
import os
import threading
from collections.abc import Iterator, Sequence

import jax

from unison.collectives.method import AggregationMethod
from unison.storage.decoding import parsed_json

_thread = threading.local()


class CommunicationImplementation(enum.Enum):
    """Who moves the bytes between workers.

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
        bytes_per_pack: About how large the buffers are into which the arrays of a sum or mean are
            packed; an array is never divided, but by `ACCUMULATE_N`, whose pieces have this size.
            XLA may combine small ones (on CPU it combines all). 0: the method's choice.
        timeout_seconds: How long workers wait for each other; within one process nobody waits.
        implementation: A `CommunicationImplementation` or its name.
        method: The `AggregationMethod`, or its name, of gradients for which none is given.
        compresses: Whether gradients take the compression that is given to their optimizer. If
            not, they are sent without loss, and with the first what was still to be sent. No
            matter to `local_sgd` and `diloco`, which send no gradients.
        auto_tune: Whether a strategy measures in the first steps by which of these options they
            are fastest, and takes those; see `unison.strategies.tuning`.

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
        """Returns the options that `save` wrote; what the file does not name has its default.

        Raises:
            OSError: The file cannot be read.
            ValueError: It has something else in it.
        """
        with open(path, "rb") as file:
            try:
                said = parsed_json(file.read())
            except ValueError as error:
                raise ValueError(f"{os.fspath(path)} is no JSON file: {error}") from None
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
        """Returns `arrays`, in order, packed to the wanted size; nothing if there is none."""
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
    """The options by which the programs of a strategy communicate, and what they made of them.

    Args:
        options: The options at first.

    Attributes:
        options: The present ones. Programs that exist stay as they are.
        was_asked: Whether a program has been traced that goes by them since this was reset.
        warmup_steps: After how many steps gradients are compressed, if a program compresses any.
    """

    def __init__(self, options: CommunicationOptions):
        self.options = options
        self.was_asked = False
        self.warmup_steps: int | None = None


@contextlib.contextmanager
def communicating(communication: Communication) -> Iterator[None]:
    """Inside, gradients are summed by the options of `communication`."""
    outer = getattr(_thread, "communication", None)
    _thread.communication = communication
    try:
        yield
    finally:
        _thread.communication = outer


def options_in_scope(warmup_steps: int | None = None) -> CommunicationOptions:
    """Returns the options by which the program that is being traced communicates.

    Args:
        warmup_steps: After how many steps it compresses gradients, if that is what the options
            are asked for.
    """
    communication: Communication | None = getattr(_thread, "communication", None)
    if communication is None:
        return CommunicationOptions()
    communication.was_asked = True
    if warmup_steps is not None:
        communication.warmup_steps = warmup_steps
    return communication.options
