"""`VariableStore`: variables that several jobs share, by name.

Servers keep a job's own variables as long as the job lasts, and those of stores for as long as they
last themselves. A key of a shared variable begins with `@` and the store's name. One of the servers
knows which variables a store has, and where: who comes first creates, and the others get what is
there.
"""

from __future__ import annotations

import dataclasses
import re
import threading
import time
import zlib
from collections.abc import Iterator, MutableMapping
from typing import Any, Protocol

import numpy as np

from unison.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    PermissionDeniedError,
)
from unison.parameter_server.snapshots import Part
from unison.parameter_server.store import Shard, Store
from unison.storage.decoding import plain_dict, plain_list, plain_text, shape_of, whole_number

_RIGHTS = ("read", "update")
_NAME = re.compile(r"[A-Za-z0-9_.-]+")

#: Seconds between two looks for a variable that another job is creating.
_PAUSE = 0.05

_thread = threading.local()


class SharesVariables(Protocol):
    """What a `VariableStore` has to know of where a job's variables are."""

    @property
    def store(self) -> Store:
        """The servers."""
        ...

    def bounds_for(self, name: str, shape: tuple[int, ...], dtype: Any) -> list[tuple]:
        """Returns the server, the first row, and the row behind the last, of each shard."""


class VariableStore:
    """Variables that several jobs share, on servers that outlive these jobs.

    What is created inside, in the scope of a `ParameterServerStrategy`, has its name in the store:
    the job that comes first creates it, with its initial value; for the others it is there, with
    the value that it has. Names are those of variables (of Keras' layers, name the layers), and a
    number where one comes again.

    Args:
        name: The store's name: letters, digits, `_`, `.` and `-`.
        rights: "update", or "read": the servers then refuse what would change a variable, and a
            variable that is not there yet is waited for.

    Raises:
        ValueError: The name or the rights are none.

    Examples:
        >>> VariableStore("embeddings", rights="read")
        VariableStore('embeddings', rights='read')

    TF: the variables of `tf.compat.v1.train.replica_device_setter`, which programs share by name.
    """

    def __init__(self, name: str, rights: str = "update"):
        if not _NAME.fullmatch(name):
            raise ValueError(
                "Expected letters, digits, '_', '.' and '-' for the name of a store. Received: "
                f"{name!r}"
            )
        if rights not in _RIGHTS:
            raise ValueError(f"Expected one of {_RIGHTS} for rights. Received: {rights!r}")
        self.name = name
        self.rights = rights
        self._counts: dict[str, int] = {}
        self._outer: list[VariableStore | None] = []

    def __repr__(self) -> str:
        return f"VariableStore({self.name!r}, rights={self.rights!r})"

    def __enter__(self) -> VariableStore:
        self._outer.append(current_store())
        _thread.store = self
        return self

    def __exit__(self, *failure: object) -> None:
        _thread.store = self._outer.pop()

    def delete(self, where: Any) -> None:
        """Frees the store's variables on the servers of a strategy; no job should use them.

        Args:
            where: The strategy.

        Raises:
            PermissionDeniedError: The rights are "read".
        """
        store = where.store
        store.attach(self.name, self.rights)
        store.ask_all("drop", store=self.name)

    def shards(self, where: SharesVariables, name: str, value: np.ndarray) -> tuple[Shard, ...]:
        """Returns where a variable is, which is created with `value` if it is not there.

        Raises:
            InvalidArgumentError: It has another shape or dtype there.
            DeadlineExceededError: It is not there, and nobody creates it in time.
        """
        store = where.store
        store.attach(self.name, self.rights)
        count = self._counts[name] = self._counts.get(name, 0) + 1
        variable = name if count == 1 else f"{name}_{count - 1}"
        about = {
            "store": self.name,
            "variable": variable,
            "shape": value.shape,
            "dtype": value.dtype.name,
            "bounds": where.bounds_for(name, value.shape, value.dtype),
        }
        directory = zlib.crc32(self.name.encode()) % len(store.addresses)
        end = time.monotonic() + store.patience
        while True:
            answer = store.ask({directory: ("enter", (), about)})[directory]
            shards = tuple(
                Shard(server, f"@{self.name}/{variable}/{part}", start, stop)
                for part, (server, start, stop) in enumerate(answer["bounds"])
            )
            if answer["state"] == "there":
                return shards
            if answer["state"] == "yours":
                store.create(shards, value)
                store.ask({directory: ("created", (), about)})
                return shards
            if time.monotonic() > end:
                raise DeadlineExceededError(
                    message=f"Store {self.name!r} has no variable {variable!r} after "
                    f"{store.patience:g} s. A job with the right to update creates it: does one "
                    "run, and is the name the same there?"
                )
            time.sleep(_PAUSE)


def current_store() -> VariableStore | None:
    """Returns the store in which this thread creates variables; None: they are the job's own."""
    return getattr(_thread, "store", None)


def store_of(key: str) -> str | None:
    """Returns the store that a key of a variable names; None: it is a job's own."""
    return key[1:].partition("/")[0] if key.startswith("@") else None


def seen_whole(value: np.ndarray) -> np.ndarray:
    """Returns `value`, or a copy if its rows are changed where they are."""
    return np.array(value) if value.flags.writeable else value


# -- on a server --------------------------------------------------------------------------------


@dataclasses.dataclass
class _Entry:
    """A variable in the directory.

    Attributes:
        shape: Its shape.
        dtype: The name of its dtype.
        bounds: Its shards: the server, the first row, and the row behind the last.
        creator: The job that creates it, until it is there.
    """

    shape: list[int]
    dtype: str
    bounds: list[list[int]]
    creator: str | None


class SharedVariables:
    """What jobs share on one server: the values of its shards, and a part of the directory."""

    def __init__(self) -> None:
        #: Held while variables are looked at or changed, of whichever job.
        self.lock = threading.Lock()
        #: The shards, by key.
        self.values: dict[str, np.ndarray] = {}
        #: Whether something has changed on this server since the last snapshot, of any job.
        self.has_changed = False
        self._entries: dict[tuple[str, str], _Entry] = {}
        #: How many servers each store is on, and the index of this one.
        self._places: dict[str, tuple[int, int]] = {}

    def attach(self, store: str, place: tuple[int, int]) -> None:
        """Notes a job that uses a store.

        Raises:
            FailedPreconditionError: It names the servers otherwise than others do.
        """
        known = self._places.setdefault(store, place)
        if known != place:
            raise FailedPreconditionError(
                message=f"Store {store!r} is on {known[0]} servers, of which this one has index "
                f"{known[1]}. Received: {place[0]} servers, and index {place[1]}. Name the "
                "servers in the same order in all jobs."
            )

    def enter(self, job: str, may_create: bool, about: dict[str, Any]) -> tuple[str, list]:
        """Looks for a variable in the directory, and enters it where it is missing.

        Returns:
            "there", "coming" or, where the job has to create it, "yours"; and its bounds.

        Raises:
            InvalidArgumentError: It has another shape or dtype.
        """
        key = about["store"], about["variable"]
        entry = self._entries.get(key)
        if entry is None:
            if not may_create:
                return "coming", []
            entry = _Entry(about["shape"], about["dtype"], about["bounds"], job)
            self._entries[key] = entry
        if [entry.shape, entry.dtype] != [about["shape"], about["dtype"]]:
            raise InvalidArgumentError(
                message=f"Variable {key[1]!r} of store {key[0]!r} is {entry.dtype}{entry.shape}. "
                f"Received: {about['dtype']}{about['shape']}. Jobs that share a variable must "
                "agree on it; or give it another name."
            )
        if entry.creator is None:
            return "there", entry.bounds
        return ("yours" if entry.creator == job else "coming"), entry.bounds

    def note_created(self, store: str, variable: str) -> None:
        """Lets others have a variable."""
        self._entries[store, variable].creator = None
        self.has_changed = True

    def drop(self, store: str) -> None:
        """Frees what a store has on this server."""
        self.values = {key: v for key, v in self.values.items() if store_of(key) != store}
        self._entries = {key: entry for key, entry in self._entries.items() if key[0] != store}
        self.has_changed = True

    def leave(self, job: str) -> None:
        """Forgets what a job that has ended did not create to the end: another one may."""
        self._entries = {k: entry for k, entry in self._entries.items() if entry.creator != job}

    def part(self) -> Part:
        """Returns what a snapshot needs; the lock is held."""
        entries = [[*key, dataclasses.astuple(entry)] for key, entry in self._entries.items()]
        values = {key: seen_whole(value) for key, value in self.values.items()}
        return Part({"entries": entries, "places": dict(self._places)}, values)

    def restore(self, part: Part) -> None:
        """Takes what a snapshot has.

        Raises:
            ValueError, KeyError: It cannot have written that.
        """
        self.values = part.arrays
        for entry in plain_list(part.facts["entries"]):
            store, name, own = plain_list(entry, 3)
            shape, dtype, bounds, creator = plain_list(own, 4)
            self._entries[plain_text(store), plain_text(name)] = _Entry(
                list(shape_of(shape)),
                plain_text(dtype),
                [list(shape_of(plain_list(bound, 3))) for bound in plain_list(bounds)],
                None if creator is None else plain_text(creator),
            )
        for store, place in plain_dict(part.facts["places"]).items():
            count, own = plain_list(place, 2)
            self._places[store] = whole_number(count), whole_number(own)


class JobVariables(MutableMapping[str, np.ndarray]):
    """The shards that a job sees on one server: its own, and those of stores by its rights.

    Iterating over them gives its own.
    """

    def __init__(self, shared: SharedVariables):
        self._own: dict[str, np.ndarray] = {}
        self._shared = shared
        #: What it may do with the stores that it has attached to.
        self.rights: dict[str, str] = {}

    def __getitem__(self, key: str) -> np.ndarray:
        store = store_of(key)
        if store is None:
            return self._own[key]
        if store not in self.rights:
            raise PermissionDeniedError(message=f"The job is not attached to store {store!r}.")
        return self._shared.values[key]

    def __setitem__(self, key: str, value: np.ndarray) -> None:
        if store_of(key) is None:
            self._own[key] = value
        else:
            self.check_may_update(key)
            self._shared.values[key] = value

    def __delitem__(self, key: str) -> None:
        del self._own[key]  # what is shared stays

    def __iter__(self) -> Iterator[str]:
        return iter(self._own)

    def __len__(self) -> int:
        return len(self._own)

    def check_may_update(self, key: str) -> None:
        """Raises a PermissionDeniedError if the job may not update a variable."""
        store = store_of(key)
        if store is not None and self.rights.get(store) != "update":
            raise PermissionDeniedError(
                message=f"The job may not update variable {key.rpartition('/')[0][1:]!r} of store "
                f"{store!r}: its rights are {self.rights.get(store, 'none')!r}. Attach by "
                f"VariableStore({store!r}, rights='update')."
            )
