"""Restoring a checkpoint's values into a graph of objects, now and as the graph grows."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import logging
import weakref
from collections.abc import Iterable
from typing import Any

from unison.errors import DataLossError
from unison.module import WAITING
from unison.storage.decoding import decoding
from unison.train.checkpoint_formats import AnyArchive
from unison.train.graph import Parts, announce_new_parts, has_state, is_variable, settle
from unison.train.sharded_archive import ShardedArchive
from unison.train.structures import decode_structure
from unison.train.values import assign, check_fits, read_for

logger = logging.getLogger("unison")

#: The number of names that a message lists.
SHOWN = 10

_serial_numbers = itertools.count()
_live: weakref.WeakSet[Restoration] = weakref.WeakSet()


@dataclasses.dataclass
class _Missing:
    """The missing parts of an object.

    Attributes:
        owner: The object.
        children: The nodes of the parts, by name.
        callback: Called when the object may have new parts.
    """

    owner: Any
    children: dict[str, int]
    callback: Any


class Restoration:
    """Matches objects with the nodes of a checkpoint by the names on the path to them.

    Existing objects get their values immediately, all or none. Missing objects are
    pending: what is set as an attribute later, or created when a Keras object is built, gets its
    value then. A name is matched once; with several pending restorations, the latest one wins.

    Args:
        archive: The checkpoint.
        root: The object of the checkpoint's first node.
        parts: Returns an object's parts, by name.
        others: Objects whose attributes are parts of `root`, too.

    Raises:
        ValueError: The shape of a variable differs from that of its value in the checkpoint.
        InvalidArgumentError: Its dtype differs.
        DataLossError: The checkpoint is corrupt.
    """

    def __init__(self, archive: AnyArchive, root: Any, parts: Parts, others: tuple[Any, ...] = ()):
        self.archive = archive
        self.root = root
        self.parts = parts
        self._others = others
        self._serial_number = next(_serial_numbers)
        #: The objects of the nodes, by the nodes' indices.
        self.bound: dict[int, Any] = {}
        self._identities: set[int] = set()
        self._missing: dict[int, _Missing] = {}
        self.report = Report(archive)
        settle(root, parts)
        self._bind([(root, 0)])
        _live.add(self)
        weakref.finalize(self, self.report.warn)

    def __contains__(self, value: Any) -> bool:
        """Whether `value` is the object of a node."""
        return id(value) in self._identities

    def __deepcopy__(self, memo: Any) -> Restoration:
        return self  # a copied object has no pending parts of its own

    def resume(self, owner: Any | None = None) -> None:
        """Looks for missing parts: of `owner`, or of every object."""
        found = []
        for missing in list(self._missing.values()):
            # A list or a dictionary cannot report that it has grown.
            if owner is None or missing.owner is owner or isinstance(missing.owner, list | dict):
                parts = self.parts(missing.owner)
                present = missing.children.keys() & parts.keys()
                found += [(parts[name], missing.children.pop(name)) for name in present]
                if not missing.children:
                    self._stop_waiting(missing)
        if found:
            self._bind(found)

    def _bind(self, pairs: Iterable[tuple[Any, int]]) -> None:
        """Assigns objects to nodes, and their parts to the nodes' children."""
        bound: dict[int, Any] = {}
        lacking = []
        queue = collections.deque(pairs)
        while queue:
            owner, number = queue.popleft()
            known = bound.get(number, self.bound.get(number))
            if known is not None:
                self._warn_of_two(known, owner, number)
                continue
            bound[number] = owner
            parts = self.parts(owner)
            children = self.archive.nodes[number].children
            queue.extend((parts[name], children[name]) for name in children if name in parts)
            absent = {name: child for name, child in children.items() if name not in parts}
            if absent:
                lacking.append((owner, absent))
        self._give_values(bound)
        self.bound |= bound
        self._identities.update(map(id, bound.values()))
        for owner, absent in lacking:
            self._wait_for(owner, absent)

    def _give_values(self, bound: dict[int, Any]) -> None:
        """Restores the objects' values, after all have been read and checked."""
        nodes, archive = self.archive.nodes, self.archive
        variables, states = {}, {}
        for number, owner in bound.items():
            key, state = nodes[number].variable, nodes[number].state
            if key is not None and is_variable(owner):
                check_fits(owner, *archive.arrays[key], where=f"{archive.prefix}: {key}")
                variables[number] = owner
            elif state is not None and has_state(owner):
                states[number] = owner
        if not self.bound and len(variables) + len(states) < len(self.report.unused):
            archive.verify()  # values that are restored later must not turn out to be corrupt then
        if isinstance(archive, ShardedArchive):
            archive.read_ahead(str(nodes[number].variable) for number in variables)
        arrays = {
            number: read_for(variable, archive, str(nodes[number].variable))
            for number, variable in variables.items()
        }
        with decoding(f"Checkpoint {archive.prefix}", "Restore another one."):
            contents = {n: decode_structure(nodes[n].state["value"], archive.read) for n in states}
        # States first: an object may reject its state, and then nothing is changed.
        given = [(states[n], contents[n]) for n in self._still_without(states)]
        _set_states(given, f"Checkpoint {archive.prefix}")
        for number in self._still_without(variables):
            assign(variables[number], arrays[number])
        self.report.unused -= variables.keys() | states.keys()

    def _still_without(self, owners: dict[int, Any]) -> list[int]:
        """Returns the indices of the nodes to restore, one per object."""
        numbers = {id(owner): number for number, owner in reversed(owners.items())}
        return [
            number
            for identity, number in numbers.items()
            if identity not in self._identities and not self._is_overruled(owners[number])
        ]

    def _is_overruled(self, owner: Any) -> bool:
        return any(other._serial_number > self._serial_number and owner in other for other in _live)

    def _wait_for(self, owner: Any, absent: dict[str, int]) -> None:
        if id(owner) in self._missing:
            self._missing[id(owner)].children.update(absent)
            return
        callback = functools.partial(self.resume, owner)
        self._missing[id(owner)] = _Missing(owner, absent, callback)
        for target in self._targets(owner):
            vars(target).setdefault(WAITING, []).insert(0, callback)
            announce_new_parts(target)

    def _stop_waiting(self, missing: _Missing) -> None:
        del self._missing[id(missing.owner)]
        for target in self._targets(missing.owner):
            vars(target)[WAITING].remove(missing.callback)

    def _targets(self, owner: Any) -> list[Any]:
        """Returns the objects whose attributes are parts of `owner`."""
        others = self._others if owner is self.root else ()
        return [target for target in (owner, *others) if hasattr(target, "__dict__")]

    def _warn_of_two(self, known: Any, owner: Any, number: int) -> None:
        if known is not owner:
            logger.warning(
                "Checkpoint %s has one object at %s, for which the program has two: %r got its "
                "value, %r did not.",
                self.archive.prefix,
                self.report.name_of(number),
                known,
                owner,
            )


def _set_states(pairs: list[tuple[Any, Any]], source: str) -> None:
    """Restores the states of objects; if one rejects its own, the others are reset."""
    before = [(owner, owner.get_state()) for owner, _ in pairs] if len(pairs) > 1 else []
    for count, (owner, state) in enumerate(pairs):
        try:
            owner.set_state(state)
        except BaseException as error:
            for changed, earlier in before[:count]:
                changed.set_state(earlier)
            if isinstance(error, DataLossError):  # which names the object, and not the file
                raise DataLossError(message=f"{source}: {error.message}") from error
            raise


class Report:
    """The unused values of a checkpoint.

    Attributes:
        unused: The indices of the nodes with a value that no object has.
        expects_partial: Whether unused values are expected.
    """

    def __init__(self, archive: AnyArchive):
        self._prefix = archive.prefix
        self._nodes = archive.nodes
        self.unused = {number for number, node in enumerate(archive.nodes) if node.has_value}
        self.expects_partial = False

    def name_of(self, number: int) -> str:
        """Returns the path to a node, such as `(root).model.dense.kernel`.

        A node without a path, which is never saved, is shown by its index.
        """
        paths: dict[int, str] = {0: "(root)"}
        queue = collections.deque([0])
        while queue and number not in paths:
            current = queue.popleft()
            for name, child in self._nodes[current].children.items():
                if child not in paths:
                    paths[child] = f"{paths[current]}.{name}"
                    queue.append(child)
        return paths.get(number, f"(node {number})")

    def names_of_unused(self) -> str:
        """Returns the paths of the first of the unused values."""
        shown = [self.name_of(number) for number in sorted(self.unused)[:SHOWN]]
        return ", ".join(shown) + (", ..." if len(self.unused) > SHOWN else "")

    def warn(self) -> None:
        """Logs the unused values, unless they are expected."""
        if self.unused and not self.expects_partial:
            logger.warning(
                "%d values of checkpoint %s were not restored: %s. If that is intended, "
                "call expect_partial() on what restore() returns.",
                len(self.unused),
                self._prefix,
                self.names_of_unused(),
            )
