"""`VariableStore`: variables that several jobs share, by name.

Servers keep a job's own variables until the job ends, and those of stores until the servers end.
The key of a shared variable begins with `@` and the store's name. One of the servers has the
directory of a store's variables and their shards: the first job creates a variable, and the others
use the existing one.
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
from unison.thread_local import ThreadLocal

_RIGHTS = ("read", "update")
_NAME = re.compile(r"[A-Za-z0-9_.-]+")

#: Seconds between two polls for a variable that another job is creating.
_PAUSE = 0.05


class SharesVariables(Protocol):
    """The part of a job's placement that a `VariableStore` needs."""

    @property
    def store(self) -> Store:
        """The servers."""
        ...

    def bounds_for(
        self, name: str, shape: tuple[int, ...], dtype: Any, is_whole: bool = False
    ) -> list[tuple]:
        """Returns the server, the first row, and the end row (exclusive) of each shard."""


class VariableStore:
    """Variables that several jobs share, on servers that outlive these jobs.

    Variables that are created inside the context, in the scope of a `ParameterServerStrategy`, are
    identified by their names in the store: the first job creates a variable, with its initial
    value; the others use the existing one, with its current value. The names are those of the
    variables (for Keras, name the layers), with a number appended to repeated ones.

    Args:
        name: The store's name: letters, digits, `_`, `.` and `-`.
        rights: "update", or "read": the servers then reject changes of variables, and the job waits
            for variables that do not exist yet.

    Raises:
        ValueError: The name or the rights are invalid.

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
        self._outer.append(_current.value)
        _current.value = self
        return self

    def __exit__(self, *failure: object) -> None:
        _current.value = self._outer.pop()

    def delete(self, where: Any) -> None:
        """Frees the store's variables on the servers of a strategy; no job should be using them.

        Args:
            where: The strategy.

        Raises:
            PermissionDeniedError: The rights are "read".
        """
        store = where.store
        store.attach(self.name, self.rights)
        store.ask_all("drop", store=self.name)

    def shards(
        self, where: SharesVariables, name: str, value: np.ndarray, is_whole: bool = False
    ) -> tuple[Shard, ...]:
        """Returns the shards of a variable, and creates it with `value` if it does not exist.

        One that is whole is created in one shard.

        Raises:
            InvalidArgumentError: The existing variable has another shape or dtype.
            DeadlineExceededError: It does not exist, and no job creates it in time.
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
            "bounds": where.bounds_for(name, value.shape, value.dtype, is_whole),
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


_current: ThreadLocal[VariableStore | None] = ThreadLocal(None)


def current_store() -> VariableStore | None:
    """Returns the store in which this thread creates variables; None for the job's own ones."""
    return _current.value


def store_of(key: str) -> str | None:
    """Returns the store that a variable's key names; None if the variable is a job's own."""
    return key[1:].partition("/")[0] if key.startswith("@") else None


def seen_whole(value: np.ndarray) -> np.ndarray:
    """Returns `value`, or a copy if its rows are changed in place."""
    return np.array(value) if value.flags.writeable else value


# -- on a server --------------------------------------------------------------------------------


@dataclasses.dataclass
class _Entry:
    """A variable in the directory.

    Attributes:
        shape: Its shape.
        dtype: The name of its dtype.
        bounds: Its shards: the server, the first row, and the end row (exclusive).
        creator: The job that is creating it; None once it exists.
    """

    shape: list[int]
    dtype: str
    bounds: list[list[int]]
    creator: str | None


class SharedVariables:
    """The shared variables on one server: the values of its shards, and a part of the directory."""

    def __init__(self) -> None:
        #: Held while variables of any job are read or changed.
        self.lock = threading.Lock()
        #: The shards, by key.
        self.values: dict[str, np.ndarray] = {}
        #: Whether anything of any job has changed on this server since the last snapshot.
        self.has_changed = False
        self._entries: dict[tuple[str, str], _Entry] = {}
        #: The number of servers of each store, and the index of this one.
        self._places: dict[str, tuple[int, int]] = {}

    def attach(self, store: str, place: tuple[int, int]) -> None:
        """Registers a job's use of a store.

        Raises:
            FailedPreconditionError: It lists the servers differently than other jobs do.
        """
        known = self._places.setdefault(store, place)
        if known != place:
            raise FailedPreconditionError(
                message=f"Store {store!r} is on {known[0]} servers, of which this one has index "
                f"{known[1]}. Received: {place[0]} servers, and index {place[1]}. Name the "
                "servers in the same order in all jobs."
            )

    def enter(self, job: str, may_create: bool, about: dict[str, Any]) -> tuple[str, list]:
        """Looks up a variable in the directory, and adds it if it is missing.

        Returns:
            "there", "coming" or, if the job has to create it, "yours"; and its bounds.

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
        """Makes a created variable available to other jobs."""
        self._entries[store, variable].creator = None
        self.has_changed = True

    def drop(self, store: str) -> None:
        """Frees a store's variables on this server."""
        self.values = {key: v for key, v in self.values.items() if store_of(key) != store}
        self._entries = {key: entry for key, entry in self._entries.items() if key[0] != store}
        self.has_changed = True

    def leave(self, job: str) -> None:
        """Deletes entries that an ended job did not finish creating: another job may do so."""
        self._entries = {k: entry for k, entry in self._entries.items() if entry.creator != job}

    def part(self) -> Part:
        """Returns the state for a snapshot; the lock must be held."""
        entries = [[*key, dataclasses.astuple(entry)] for key, entry in self._entries.items()]
        values = {key: seen_whole(value) for key, value in self.values.items()}
        return Part({"entries": entries, "places": dict(self._places)}, values)

    def restore(self, part: Part) -> None:
        """Restores the state from a snapshot.

        Raises:
            ValueError, KeyError: The snapshot's content is invalid.
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
    """The shards that a job can access on one server: its own, and those of stores by its rights.

    Iteration yields only its own.
    """

    def __init__(self, shared: SharedVariables):
        self._own: dict[str, np.ndarray] = {}
        self._shared = shared
        #: Its rights on the stores that it has attached to.
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
        del self._own[key]  # shared variables are not deleted

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
