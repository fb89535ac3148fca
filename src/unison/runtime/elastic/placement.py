"""The replicas of a group of workers that may change.

JAX on each worker knows only that worker's devices. The replicas of all workers become one group
through their programs: each is a transaction whose collective operations are exchanges (see
`unison.runtime.shared_memory.rewriting`), compiled once for each number of replicas.
"""

from __future__ import annotations

import contextlib
import functools
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from unison.runtime.placement import REPLICA_AXIS, Placement
from unison.runtime.replica_function import (
    PlacedProgram,
    ReplicaFunction,
    StepsInALoop,
    with_ticket,
)
from unison.runtime.shared_memory.library import Ticket
from unison.runtime.shared_memory.rewriting import Transaction
from unison.runtime.transfers import placed
from unison.thread_local import ThreadLocal

if TYPE_CHECKING:
    from unison.runtime.elastic.group import ElasticGroup

_OWN = PartitionSpec(REPLICA_AXIS)


class ElasticPlacement(Placement):
    """The devices of this worker, which hold some of the replicas of a group.

    Arrays are placed on this worker's devices: a mirrored array is whole on each, and a per-replica
    array has the slices of this worker's replicas. Initially, and between two groups, the worker is
    alone.

    Args:
        replica_devices: This worker's devices.
        group: The group in which its programs are launched.
    """

    def __init__(self, replica_devices: Sequence[jax.Device], group: ElasticGroup):
        #: The number of replicas that a thread pretends to have; None: the actual number.
        self._seeming_replicas: ThreadLocal[int | None] = ThreadLocal(None)
        super().__init__(replica_devices)
        self.shards_update = False  # it depends on the number of replicas, which changes
        #: The group in which the programs are launched.
        self.group = group

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        first = self.local_replicas[0]
        last = self.local_replicas[-1]
        return f"{super().__repr__()}, replicas {first} to {last} of {self.num_replicas}"

    @property
    def is_elastic(self) -> bool:
        return True

    @property
    def num_replicas(self) -> int:
        """The number of replicas of the group."""
        seeming = self._seeming_replicas.value
        return self._num_replicas if seeming is None else seeming

    @num_replicas.setter
    def num_replicas(self, number: int) -> None:
        self._num_replicas = number

    @property
    def local_replicas(self) -> tuple[int, ...]:
        """The indices of this worker's replicas."""
        is_real = self._seeming_replicas.value is None
        return self._local_replicas if is_real else tuple(range(len(self._local_replicas)))

    @local_replicas.setter
    def local_replicas(self, replicas: tuple[int, ...]) -> None:
        self._local_replicas = replicas

    @property
    def spans_processes(self) -> bool:
        """Whether other workers have replicas as well."""
        return len(self._local_replicas) < self.num_replicas

    @spans_processes.setter
    def spans_processes(self, spans: bool) -> None:
        """Ignored: this follows from the numbers of replicas."""

    def number(self, first: int, num_replicas: int) -> None:
        """Numbers this worker's replicas from `first` on, of `num_replicas` in total."""
        self.num_replicas = num_replicas
        self.local_replicas = tuple(range(first, first + len(self.local_devices)))

    @property
    def num_without_a_worker(self) -> int:
        """The number of replicas after the loss of a worker like this one; 0 if it is alone."""
        return self.num_replicas - len(self.local_replicas)

    @contextlib.contextmanager
    def as_if_of(self, num_replicas: int) -> Iterator[None]:
        """Makes these the first of `num_replicas` replicas inside the context, for this thread."""
        with self._seeming_replicas.bound_to(num_replicas):
            yield

    def bring(self, value: Any) -> jax.Array:
        return placed(value, self.mirrored)

    def spread(self, stacked: Any) -> Any:
        return placed(stacked, self.per_replica)

    def assemble(self, slices: Sequence[jax.Array]) -> jax.Array:
        shape = (len(self.local_devices), *slices[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, self.per_replica, slices)

    def divide(self, whole: Any) -> Any:
        def own_rows(rows: Any) -> Any:
            size = rows.shape[0] // self.num_replicas
            first = self.local_replicas[0] * size
            return rows[first : first + len(self.local_replicas) * size]

        return placed(jax.tree.map(own_rows, whole), self.per_replica)

    def join_rows(self, parts: Sequence[Any]) -> jax.Array:
        rows: jax.Array = placed(
            np.concatenate(parts) if len(parts) > 1 else parts[0], self.per_replica
        )
        return rows

    def whole_of(self, divided: Callable[[], jax.Array]) -> np.ndarray:
        """See `Placement.whole_of`. Does not compile a program."""
        own = np.asarray(divided())
        if not self.spans_processes:
            return own
        parts = self.group.ask_all(lambda: np.asarray(divided()).tobytes())
        rows = [np.frombuffer(part, own.dtype).reshape(-1, *own.shape[1:]) for part in parts]
        return np.concatenate(rows)

    def program(self, part: ReplicaFunction) -> PlacedProgram:
        """See `Placement.program`.

        A program with `unchanged` may still be running when the call returns: the caller gets its
        outcome from the group. A program without it is waited for, and run again if it had no
        effect; its result is a single array, the same on all replicas.
        """
        function, unchanged = part.function, part.unchanged

        def transaction(num_replicas: int) -> Transaction:
            if isinstance(unchanged, StepsInALoop):
                return Transaction(function, REPLICA_AXIS, num_replicas, is_a_loop=True)
            return Transaction(function, REPLICA_AXIS, num_replicas, unchanged)

        def compile_for(num_replicas: int) -> jax.stages.Wrapped:
            if num_replicas == len(self.local_devices):
                return self.jitted(part)
            return self.jitted(with_ticket(part, transaction(num_replicas), _OWN, copies=2))

        is_waited_for = unchanged is None
        return PlacedProgram(ElasticProgram(compile_for, self.group, part.name, is_waited_for))


class ElasticProgram:
    """A program of the replicas of a group, compiled for each number of replicas.

    Args:
        compile_for: Returns the program for a number of replicas. If there are replicas of other
            workers, the program takes a ticket, and also returns two copies of the next one.
        group: The group in which it is launched.
        name: The program's name in messages.
        is_waited_for: Whether a call returns only once the program is known to have taken effect.
    """

    def __init__(
        self,
        compile_for: Callable[[int], jax.stages.Wrapped],
        group: ElasticGroup,
        name: str,
        is_waited_for: bool,
    ):
        self._compile_for = functools.cache(compile_for)
        self._group = group
        self._name = name
        self._is_waited_for = is_waited_for
        #: By the number of replicas: the functions to call, and those compiled ahead of time.
        self._called: dict[int, Callable[..., Any]] = {}
        self._prepared: dict[int, Callable[..., Any]] = {}
        self._preparing = threading.Lock()
        self._foreseen: set[int] = set()

    def __call__(self, *args: Any) -> Any:
        if not self._is_waited_for:
            return self._launch(args)
        result = self._group.answer(lambda: self._launch(args), _packed, self._unpacked)
        fewer = self._group.placement.num_without_a_worker
        if fewer and fewer not in self._foreseen:
            self._foreseen.add(fewer)
            shapes = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in args]
            self._group.compile_ahead(functools.partial(self.prepare, fewer, *shapes))
        return result

    def _launch(self, args: Sequence[Any]) -> Any:
        placement = self._group.placement
        with placement.launch_lock:
            count = placement.num_replicas
            program = self._called.get(count)
            if program is None:
                self._group.tell("compile")
                with self._preparing:
                    program = self._prepared.get(count) or self._compile_for(count)
                self._called[count] = program
            launch = self._group.launch if placement.spans_processes else self._group.launch_alone
            self._group.tell("read" if self._is_waited_for else "step")
            results = launch(program, args, self._name)
            placement.launched(results)
            self._group.runs += not self._is_waited_for
            self._group.tell("exchange")
            return results

    def _unpacked(self, packed: bytes) -> jax.Array:
        header, _, data = packed.partition(b"\n")
        dtype, shape = json.loads(header)
        return self._group.placement.bring(np.frombuffer(data, jnp.dtype(dtype)).reshape(shape))

    def prepare(self, num_replicas: int, *args: Any) -> None:
        """Compiles the program for a number of replicas, in any thread, unless it has been called.

        Args:
            num_replicas: The future number of replicas.
            args: The shapes and dtypes of the arguments.
        """
        if num_replicas in self._called:
            return
        placement = self._group.placement
        local = len(placement.local_devices)
        if num_replicas > local:
            ticket = jax.ShapeDtypeStruct((local, len(Ticket)), np.uint32)
            args = (ticket, *args)
        program = self._compile_for(num_replicas)
        with placement.as_if_of(num_replicas):
            lowered = program.lower(*args)

        def call(*given: Any) -> Any:
            try:
                return compiled(*given)
            except (TypeError, ValueError):  # an argument has an unexpected placement
                self._called[num_replicas] = program
                return program(*given)

        with self._preparing:
            compiled = lowered.compile()
            self._prepared[num_replicas] = call


def _packed(result: jax.Array) -> bytes:
    """Serializes a mirrored array for another worker."""
    value = np.asarray(result.addressable_data(0))
    return json.dumps([value.dtype.name, value.shape]).encode() + b"\n" + value.tobytes()
