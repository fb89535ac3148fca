"""The part of a dataset that each of several workers reads: `AutoShardPolicy` on plans."""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from unison.data.caching.cache import Cache, KeepsElements
from unison.data.distribution.input_workers import InputWorkers, Talk
from unison.data.files import FileRecords
from unison.data.functions import ElementFunction
from unison.data.options import AutoShardPolicy, ShardHere, WithOptions, options_of
from unison.data.passes import Passes
from unison.data.plan import Plan, SameElements, Stream
from unison.data.sources.array_record import ArrayRecordFiles
from unison.data.sources.csv_columns import CsvColumns
from unison.data.sources.in_memory import Slices
from unison.data.sources.parquet import ParquetFiles
from unison.data.state import State
from unison.data.structure import LEAF, Leaves
from unison.data.transformations.batching import Batch, PaddedBatch, Rebatch, Unbatch
from unison.data.transformations.filtering import Filter
from unison.data.transformations.guarding import IgnoreErrors
from unison.data.transformations.keys import Keyed
from unison.data.transformations.mapping import Map
from unison.data.transformations.nesting import FlatMap
from unison.data.transformations.prefetching import Prefetch
from unison.data.transformations.repetition import Repeat
from unison.data.transformations.selection import Shard
from unison.data.transformations.shuffling import Shuffle
from unison.data.transformations.size_batching import BatchBySize
from unison.errors import InvalidArgumentError, NotFoundError

#: The transformations that may follow files so that dividing the files divides the elements, and
#: changes nothing else. Under `AUTO`, all others, `take` for instance, lead to `DATA`.
_KEEP_ELEMENTS_APART = (
    Batch,
    BatchBySize,
    Cache,
    CsvColumns,
    FileRecords,
    Filter,
    FlatMap,
    IgnoreErrors,
    Map,
    PaddedBatch,
    Prefetch,
    Rebatch,
    Repeat,
    Shuffle,
    Unbatch,
    WithOptions,
)

#: The transformations that read files whose names are not their input.
_SOURCES_OF_FILES = (ArrayRecordFiles, ParquetFiles)

#: The distance between the seeds of two workers whose elements have the same numbers.
_SEEDS_APART = 0x9E3779B97F4A7C15


def possible_policies(plan: Plan, workers: InputWorkers) -> list[AutoShardPolicy]:
    """Returns the policy of a dataset, and, under `AUTO`, its policy on other clusters.

    `AUTO` is `FILE` if several workers have files to read, otherwise `DATA`.
    """
    policy = options_of(plan).auto_shard_policy or AutoShardPolicy.AUTO
    if policy is not AutoShardPolicy.AUTO:
        return [policy]
    if plan.batch_size is None or not _may_divide_files(plan, 1):
        return [AutoShardPolicy.DATA]
    if workers.num_workers > 1 and _may_divide_files(plan, workers.num_workers):
        return [AutoShardPolicy.FILE, AutoShardPolicy.DATA]
    return [AutoShardPolicy.DATA, AutoShardPolicy.FILE]


def _may_divide_files(plan: Plan, num_workers: int) -> bool:
    """Whether dividing the files that a plan reads divides its elements."""
    if isinstance(plan, _SOURCES_OF_FILES):
        # With access by index, every worker reads its own rows of all files.
        return plan.rows() is None and len(plan.paths) >= num_workers
    if not isinstance(plan, _KEEP_ELEMENTS_APART):
        return False
    if _reads_files(plan):
        return _finite(plan.inputs[0]).cardinality() >= num_workers
    return _may_divide_files(plan.inputs[0], num_workers)


def comes_from_files(plan: Plan) -> bool:
    """Whether all elements of a plan come from files."""
    if _reads_files(plan):
        return True
    if not plan.inputs:
        return isinstance(plan, _SOURCES_OF_FILES) or _gives_text(plan)
    return all(map(comes_from_files, plan.inputs))


def _reads_files(plan: Plan) -> bool:
    """Whether a plan reads elements from files whose names are its input."""
    if isinstance(plan, FileRecords):
        return True
    return isinstance(plan, FlatMap) and _gives_text(plan.inputs[0])


def _gives_text(plan: Plan) -> bool:
    """Whether the elements contain text; if only a call would show it, whether its input does."""
    signature = plan.known_signature
    if signature is None:
        return any(map(_gives_text, plan.inputs))
    return any(spec.dtype.kind == "O" for spec in signature.specs)


def _finite(names: Plan) -> Plan:
    """Returns the largest part of a plan of names whose number is known: the repeated part."""
    while names.cardinality() < 0 and names.inputs:
        names = names.inputs[0]
    return names


# -- dividing files ----------------------------------------------------------------------------


def divided_by_files(plan: Plan, workers: InputWorkers) -> Plan:
    """Returns the plan of the elements of one worker's share of the files.

    Raises:
        NotFoundError: The elements do not come from files.
        InvalidArgumentError: There are fewer files than workers.
    """

    def divide(names: Plan) -> Plan:
        if names is _finite(names):
            return FileNames(names, workers.num_workers, workers.index)
        return names.with_inputs([divide(source) for source in names.inputs])

    def rewrite(each: Plan) -> Plan:
        if _reads_files(each):
            return each.with_inputs([divide(each.inputs[0])])
        if isinstance(each, _SOURCES_OF_FILES):
            return rewrite(_file_by_file(each))
        if not each.inputs:
            if _gives_text(each):
                return divide(each)
            raise NotFoundError(
                message=f"Found an unshardable source dataset: {each.name}. "
                "AutoShardPolicy.FILE divides names of files: of list_files, TextLineDataset, "
                "TFRecordDataset, or a dataset of texts. Use AutoShardPolicy.DATA or OFF, through "
                "`experimental_distribute.auto_shard_policy` of the dataset's options."
            )
        inputs = [rewrite(source) for source in each.inputs]
        if isinstance(each, KeepsElements):
            return each.of(inputs[0], f".worker{workers.index}")
        made = each.with_inputs(inputs)
        if isinstance(made, Keyed):
            # Elements have the numbers that they have on their own worker.
            vars(made)["_seed"] += workers.index * _SEEDS_APART
        return made

    return rewrite(plan)


def _file_by_file(source: ParquetFiles | ArrayRecordFiles) -> Plan:
    """Returns the elements of a source as elements of its files, whose names are known."""
    names = np.array([path.encode() for path in source.paths], object)

    def elements_of(name: Any) -> Plan:
        return source.of_file(name.decode())

    function = ElementFunction(elements_of, source.name, lambda leaf: leaf, lambda plan: plan)
    return FlatMap(Slices((names,), LEAF), function, source.name)


class FileNames(SameElements):
    """One worker's share of the names of files: every n-th name.

    Args:
        source: The plan of the names, the same on all workers.
        num_shares: The number of shares; 0 if this worker has no share.
        index: The index of the worker's share.
    """

    lasting: ClassVar[Sequence[str]] = ("_num_shares", "_index", "_dealt")
    lasts_on_worker = True

    def __init__(self, source: Plan, num_shares: int, index: int):
        super().__init__(source)
        self._num_shares = num_shares
        self._index = index
        # Names that the next pass reads instead of the share.
        self._dealt: list[Leaves] | None = None
        self._latest: weakref.ref[_NamesStream] | None = None

    def cardinality(self) -> int:
        length = self._input.cardinality()
        return length if length < 0 else len(range(length)[self._index :: self._num_shares])

    def deal(self, names: list[Leaves]) -> None:
        """Lets the next pass read `names`, and later passes nothing."""
        self._dealt = names
        self._num_shares = 0

    def take_unread(self) -> list[Leaves]:
        """Removes and returns the names that the last pass has not read yet, if it continues."""
        stream = None if self._latest is None else self._latest()
        return [] if stream is None else stream.take_all()

    def _stream(self) -> Stream:
        stream = _NamesStream(self._names_of_pass())
        self._latest = weakref.ref(stream)
        return stream

    def _names_of_pass(self) -> list[Leaves]:
        dealt, self._dealt = self._dealt, None
        if dealt is not None or not self._num_shares:
            return dealt or []
        names: list[Leaves] = []
        stream = self._input.stream()
        while (name := stream.next()) is not None:
            names.append(name)
        if len(names) < self._num_shares:
            raise InvalidArgumentError(
                message="Could not apply FILE based sharding: the dataset only has "
                f"{len(names)} file(s), which is not enough for the required {self._num_shares} "
                "shards/workers. Consider setting the auto sharding policy to either DATA or OFF "
                "using the `experimental_distribute.auto_shard_policy` option of `Options()`. Or, "
                "split your input files into a larger number of small files, so that every worker "
                "gets one."
            )
        return names[self._index :: self._num_shares]


class _NamesStream(Stream):
    """The names of files that have not been read yet."""

    moving = ("_unread",)

    def __init__(self, unread: list[Leaves]):
        self._unread = unread
        self._lock = threading.Lock()

    def next(self) -> Leaves | None:
        with self._lock:
            return self._unread.pop(0) if self._unread else None

    def take_all(self) -> list[Leaves]:
        """Removes and returns all of them."""
        with self._lock:
            unread, self._unread = self._unread, []
        return unread


def file_names_in(plan: Plan) -> list[FileNames]:
    """Returns the plan of the names of files in a plan."""
    if isinstance(plan, FileNames):
        return [plan]
    return [names for source in plan.inputs for names in file_names_in(source)]


# -- dividing something else -------------------------------------------------------------------


def divided_by_hint(plan: Plan, workers: InputWorkers) -> Plan:
    """Returns the plan with `shard(SHARD_HINT, SHARD_HINT)` replaced by the worker's `shard`.

    Without this, every worker reads all elements.
    """

    def rewrite(each: Plan) -> Plan:
        if isinstance(each, ShardHere):
            return Shard(each.inputs[0], workers.num_workers, workers.index)
        return _with_inputs(each, [rewrite(source) for source in each.inputs])

    return rewrite(plan)


def _with_inputs(plan: Plan, inputs: Sequence[Plan]) -> Plan:
    is_same = all(new is old for new, old in zip(inputs, plan.inputs, strict=True))
    return plan if is_same else plan.with_inputs(inputs)


# -- what workers must agree on ----------------------------------------------------------------


def agreed(plan: Plan, talk: Talk) -> Plan:
    """Returns the plan with the first worker's random state, and with maps that keep the order.

    The state is the seeds, and the number of passes that have begun: it may differ by worker.

    Raises:
        InvalidArgumentError: The workers have different datasets.
    """
    said = talk.ask([plan.description, [_randomness_of(each) for each in _tree(plan)]])
    for worker, (description, _) in enumerate(said):
        if description != said[0][0]:
            raise InvalidArgumentError(
                message="The workers must distribute equal datasets. Worker 0 has "
                f"{said[0][0]}, worker {worker} has {description}."
            )
    of_first = iter(said[0][1])

    def rewrite(each: Plan) -> Plan:
        randomness = next(of_first)  # in the order of `_tree`
        made = each.with_inputs([rewrite(source) for source in each.inputs])
        own = vars(made)
        own |= {name: copy.copy(value) for name, value in own.items() if isinstance(value, Passes)}
        own |= randomness["seeds"]
        if randomness["memory"] is not None:
            made.remember(randomness["memory"])
        if "_is_ordered" in own:
            own["_is_ordered"] = True  # otherwise, every worker would have another order
        return made

    return rewrite(plan)


def _tree(plan: Plan) -> Iterator[Plan]:
    yield plan
    for source in plan.inputs:
        yield from _tree(source)


def _randomness_of(plan: Plan) -> State:
    seeds = {name: value for name, value in vars(plan).items() if name in ("_seed", "seed")}
    return {"seeds": seeds, "memory": None if plan.lasts_on_worker else plan.memory()}
