"""The computation of a replica in a program, and the program as it is launched."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec


class StepsInALoop:
    """Marks a program as a loop of steps, each of which either takes effect or does not."""


#: Computes the results of a program that has no effect; see `ReplicaFunction`.
Unchanged = Callable[[Sequence[Any], Any], Any] | StepsInALoop


@dataclasses.dataclass(frozen=True)
class ReplicaFunction:
    """A function that computes one replica's part of a program.

    Attributes:
        function: Maps this replica's values to this replica's results.
        in_specs: The arguments' partition specs, as for `jax.shard_map`.
        out_specs: The partition specs of the results.
        donate: The arguments whose buffers the program may reuse.
        name: The program's name in messages.
        unchanged: Maps a replica's arguments and results to the results of the program if it must
            have no effect; or a `StepsInALoop`, if the function is a loop of steps. A group of
            workers that may change needs it (see `unison.runtime.elastic`); elsewhere, a program
            takes effect or raises.
        compiler_options: Options of XLA, as for `jax.jit`.
        number: From `new_program`, if the program may fail on one replica while others wait for it.
    """

    function: Callable[..., Any]
    in_specs: Any
    out_specs: Any
    donate: Sequence[int] = ()
    name: str = "a program"
    unchanged: Unchanged | None = None
    compiler_options: Mapping[str, Any] | None = None
    number: int = 0


@dataclasses.dataclass(frozen=True)
class PlacedProgram:
    """A program of all replicas.

    Attributes:
        launch: Runs it.
        jitted: The underlying jitted function, if launching the program is only calling that
            function under the launch lock.
        lower: Traces and lowers it for arguments, which its first launch then does not do.
    """

    launch: Callable[..., Any]
    jitted: Callable[..., Any] | None = None
    lower: Callable[..., Any] | None = None

    def __call__(self, *args: Any) -> Any:
        return self.launch(*args)


def specs_of_each(in_specs: Any) -> tuple[Any, ...]:
    """Returns the specs of the arguments; a single spec stands for a single argument."""
    return (in_specs,) if isinstance(in_specs, PartitionSpec) else tuple(in_specs)


def with_ticket(
    part: ReplicaFunction, function: Callable[..., Any], spec: PartitionSpec, copies: int = 1
) -> ReplicaFunction:
    """Returns `function`, which takes a ticket before what `part` takes.

    It returns as many copies of a ticket before the results. `spec` is that of a ticket.
    """
    return dataclasses.replace(
        part,
        function=function,
        in_specs=(spec, *specs_of_each(part.in_specs)),
        out_specs=(*(spec for _ in range(copies)), part.out_specs),
        donate=(0, *(place + 1 for place in part.donate)),
    )
