"""`Dataset`: the pipeline as users write it."""

from __future__ import annotations

import itertools
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, Literal

import numpy as np

from unison.data import files
from unison.data import options as options_
from unison.data.caching.cache import Cache
from unison.data.caching.dataset_files import KeptDataset
from unison.data.caching.saving import Snapshot, datasets_of, load, save
from unison.data.functions import ElementFunction, as_it_is, note_place
from unison.data.iterators import ElementIterator, Optional, PlanElements, require_python
from unison.data.leaves import as_leaf
from unison.data.observers import when_made
from unison.data.options import Options
from unison.data.plan import AUTOTUNE, INFINITE, UNKNOWN, Plan
from unison.data.ragged import RaggedArray
from unison.data.randomness import fresh_seed
from unison.data.sources.array_record import ArrayRecordFiles
from unison.data.sources.external import plan_of_source
from unison.data.sources.in_memory import Counter, Generator, Range, Slices, single_element
from unison.data.sources.parquet import ParquetFiles
from unison.data.sources.random_numbers import Random
from unison.data.specs import ArraySpec, Signature, as_shape
from unison.data.structure import LEAF, Leaves, Structure, flatten, tuple_of
from unison.data.transformations import (
    batching,
    choosing,
    combination,
    filtering,
    nesting,
    resampling,
    selection,
    size_batching,
    stratified,
    windows,
)
from unison.data.transformations.bucketing import bucketed
from unison.data.transformations.device_prefetching import PrefetchToDevice
from unison.data.transformations.guarding import AssertCardinality, IgnoreErrors
from unison.data.transformations.keys import Keyed
from unison.data.transformations.mapping import Map
from unison.data.transformations.prefetching import Prefetch
from unison.data.transformations.repetition import Repeat
from unison.data.transformations.scanning import Scan
from unison.data.transformations.shuffling import Shuffle
from unison.errors import InvalidArgumentError


class Dataset:
    """Elements, and the transformations that compute them as they are iterated over.

    An element is an array, a number, `bytes`, or tuples, named tuples and dictionaries of them.
    Arrays are NumPy's, and keep their dtype; text is `bytes`. Every transformation returns a new
    dataset, and a dataset can be iterated over any number of times.

    Make one by a class method (`from_tensor_slices`, `range`, `from_generator`, ...).

    Args:
        plan: The computation of the elements.

    Examples:
        >>> images, labels = np.arange(6.0).reshape(3, 2), np.array([7, 8, 9])
        >>> dataset = Dataset.from_tensor_slices((images, labels)).batch(2)
        >>> for image, label in dataset:
        ...     print(image.tolist(), label.tolist())
        [[0.0, 1.0], [2.0, 3.0]] [7, 8]
        [[4.0, 5.0]] [9]

    TF: `tf.data.Dataset`.
    """

    def __init__(self, plan: Plan):
        #: The computation of the elements.
        self.plan = plan
        for observer in when_made:
            observer()

    # -- overridden by `unison.tf` ---------------------------------------------------------

    #: The class of the results of `get_next_as_optional`.
    optional: ClassVar[type[Optional]] = Optional

    @staticmethod
    def _of(plan: Plan) -> Dataset:
        """Returns the dataset of a plan."""
        return Dataset(plan)

    @classmethod
    def _function(cls, function: Callable[..., Any], stage: str) -> ElementFunction:
        """Returns a user's function in the form that plans call."""
        return ElementFunction(function, stage, cls.shown, cls._leaf)

    #: Returns a part of an element, as the user has written it, as a leaf.
    _leaf = staticmethod(as_leaf)

    @classmethod
    def shown(cls, leaf: Any) -> Any:
        """Returns a leaf in the form that users see."""
        if isinstance(leaf, RaggedArray) and not leaf.splits:
            return leaf.flat  # a row
        return cls._of(leaf) if isinstance(leaf, Plan) else leaf

    @classmethod
    def shown_spec(cls, spec: Any) -> Any:
        """Returns the spec of a leaf in the form that users see."""
        return spec

    @classmethod
    def _device(cls, device: Any) -> Any:
        """Returns the device that a user has named, or the sharding."""
        return device

    @classmethod
    def _seed(cls, seed: int | None) -> int:
        """Returns the seed to use if a user gives `seed`."""
        return fresh_seed() if seed is None else int(seed)

    # -- sources ---------------------------------------------------------------------------

    @classmethod
    def from_tensor_slices(cls, tensors: Any) -> Dataset:
        """Returns the dataset of the rows of arrays.

        The arrays are not copied, and may be memory-mapped.

        Args:
            tensors: An array, or a structure of arrays with as many rows; lists become arrays.

        Raises:
            ValueError: An array has no rows, or the arrays have different numbers of rows.

        TF: `tf.data.Dataset.from_tensor_slices`.
        """
        leaves, structure = cls._element(tensors)
        return cls._of(Slices(leaves, structure))

    @classmethod
    def from_tensors(cls, tensors: Any) -> Dataset:
        """Returns the dataset of one element. TF: `tf.data.Dataset.from_tensors`."""
        return cls._of(single_element(*cls._element(tensors)))

    @classmethod
    def from_generator(
        cls,
        generator: Callable[..., Iterable[Any]],
        output_types: Any = None,
        output_shapes: Any = None,
        args: Sequence[Any] | None = None,
        output_signature: Any = None,
    ) -> Dataset:
        """Returns the dataset of the elements of a function's iterator.

        Args:
            generator: Called for every iteration; returns an iterable.
            output_types: The dtypes of the elements' leaves, in their structure.
            output_shapes: Their shapes, likewise; unknown if left out.
            args: Passed to `generator`, as leaves.
            output_signature: Instead of the two, specs in the elements' structure: anything with
                a shape and a dtype. Without any of these, the first element determines them.

        Raises:
            TypeError: `generator` is not callable, or the signature is given in both ways.

        Examples:
            >>> list(Dataset.from_generator(lambda n: range(n), args=(3,)))
            [np.int64(0), np.int64(1), np.int64(2)]

        TF: `tf.data.Dataset.from_generator`.
        """
        if not callable(generator):
            raise TypeError(f"`generator` must be a Python callable. Received: {generator!r}")
        signature = _generator_signature(output_types, output_shapes, output_signature)
        leaves = tuple(cls._leaf(arg) for arg in args or ())
        return cls._of(Generator(lambda: generator(*leaves), signature))

    @classmethod
    def range(cls, *args: Any, output_type: Any = np.int64) -> Dataset:
        """Returns the dataset of Python's `range(*args)`. TF: `tf.data.Dataset.range`."""
        if not 1 <= len(args) <= 3:
            raise ValueError(
                "Dataset.range takes a stop, a start and a stop, or these and a step. Received: "
                f"{len(args)} arguments"
            )
        numbers = [_integer(arg, "the bounds of a range") for arg in args]
        bounds = [0, numbers[0], 1] if len(numbers) == 1 else [*numbers, 1][:3]
        return cls._of(Range(bounds, output_type))

    @classmethod
    def counter(
        cls,
        start: int = 0,
        step: int = 1,
        dtype: Any = np.int64,
    ) -> Dataset:
        """Returns the endless dataset of start, start + step, ...

        TF: `tf.data.Dataset.counter`.
        """
        return cls._of(Counter(int(start), int(step), dtype))

    @classmethod
    def random(
        cls, seed: int | None = None, rerandomize_each_iteration: bool | None = None
    ) -> Dataset:
        """Returns the endless dataset of random int64 numbers from 0 up to 2**32.

        Args:
            seed: Determines the numbers.
            rerandomize_each_iteration: Whether every pass has different numbers.

        Examples:
            >>> numbers = Dataset.random(seed=4).take(3)
            >>> list(numbers) == list(numbers)
            True

        TF: `tf.data.Dataset.random` (its numbers are others).
        """
        return cls._of(Random(cls._seed(seed), bool(rerandomize_each_iteration)))

    @classmethod
    def list_files(
        cls,
        file_pattern: Any,
        shuffle: bool | None = None,
        seed: int | None = None,
    ) -> Dataset:
        """Returns the dataset of the names of the files that a pattern matches.

        Args:
            file_pattern: A pattern with `*`, `?` and `[...]`, or several of them. A pattern with
                `://` is fsspec's.
            shuffle: Whether they are in random order, a new one in each pass; the default.
                Otherwise they are sorted.
            seed: The seed of that order.

        Raises:
            InvalidArgumentError: No file matches.

        TF: `tf.data.Dataset.list_files`.
        """
        names = np.array(files.matching_files(file_pattern), object)
        dataset = cls._of(Slices((names,), LEAF))
        return dataset if shuffle is False else dataset.shuffle(len(names), seed)

    @classmethod
    def from_source(cls, source: Any) -> Dataset:
        """Returns the dataset of the elements that another object holds.

        An object with `__len__` and `__getitem__` (a list, a PyTorch `Dataset`, a Grain
        `MapDataset` or data source, a Hugging Face `Dataset`) has access by index: `shuffle`
        permutes its indices. If it has `__getitems__`, whole batches are requested from that; from
        Hugging Face datasets, whole columns. PyTorch's tensors become arrays that share their
        memory.

        Args:
            source: Such an object; an iterable (a PyTorch or Grain `DataLoader`, a Grain
                `IterDataset`, a Hugging Face `IterableDataset`), or a function that returns one;
                a Ray `Dataset`, or a worker's split of it (its rows, as dictionaries); an array or
                memory map, or tuples and dictionaries of these; a list of memory maps, which are
                the parts of one array.

        Raises:
            TypeError: It is neither of these.

        Examples:
            >>> squares = [n * n for n in range(4)]
            >>> list(Dataset.from_source(squares).batch(4))
            [array([0, 1, 4, 9])]
        """
        if isinstance(source, Dataset):
            return cls._of(source.plan)
        return cls._of(plan_of_source(source))

    @classmethod
    def from_parquet(cls, paths: Any, columns: Sequence[str] | None = None) -> Dataset:
        """Returns the dataset of the rows of Parquet files, as dictionaries of columns.

        Files of up to 256 MiB together, decompressed, have access by index; larger ones are read
        in order, and shuffled through the buffer of `shuffle`.

        Args:
            paths: Names of files or patterns, one or several; with `://` in it, fsspec's.
            columns: The columns to read; default: all.

        Raises:
            ImportError: pyarrow is not installed (`unison[parquet]`).
            InvalidArgumentError: No file matches, or no array can hold a column. When they are
                read: a value is missing.
            DataLossError: A file is damaged.
        """
        return cls._of(ParquetFiles(paths, columns))

    @classmethod
    def from_array_record(cls, paths: Any) -> Dataset:
        """Returns the dataset of the records of ArrayRecord files, as `bytes`, by index.

        Args:
            paths: Names of local files or patterns, one or several.

        Raises:
            ImportError: Grain is not installed (`unison[grain]`).
            InvalidArgumentError: No file matches, or one is not local.
            DataLossError: A file is damaged.
        """
        return cls._of(ArrayRecordFiles(paths))

    @classmethod
    def zip(cls, *args: Any, datasets: Any = None) -> Dataset:
        """Returns the dataset of tuples of one element of each dataset.

        Args:
            args: The datasets, or one structure of them; lists do not count as one.
            datasets: Another place for that structure.

        Raises:
            TypeError: An argument is not a dataset.

        TF: `tf.data.Dataset.zip`.
        """
        if not args and datasets is None:
            raise TypeError("Must pass at least one dataset to `zip`.")
        given = datasets if not args else args[0] if len(args) == 1 else args
        leaves, structure = flatten(given)
        for leaf in leaves:
            if not isinstance(leaf, Dataset):
                raise TypeError(
                    "zip takes datasets, and tuples and dictionaries of them. Received an object "
                    f"of type {type(leaf).__name__}: {leaf!r}"
                )
        return cls._of(combination.Zip([leaf.plan for leaf in leaves], structure))

    @classmethod
    def sample_from_datasets(
        cls,
        datasets: Sequence[Dataset],
        weights: Sequence[float] | None = None,
        seed: int | None = None,
        stop_on_empty_dataset: bool = False,
    ) -> Dataset:
        """Returns the dataset of elements drawn at random from datasets.

        Args:
            datasets: At least one dataset.
            weights: The relative frequency of each dataset; equal frequencies if left out.
            seed: Determines the draws.
            stop_on_empty_dataset: Whether the result ends when one of them ends; otherwise it
                continues with the others.

        Raises:
            ValueError: There is no dataset, or the number of weights differs.
            TypeError: The datasets' elements have different structures.

        TF: `tf.data.Dataset.sample_from_datasets`.
        """
        plans = _plans(datasets)
        shares = np.ones(len(plans)) if weights is None else np.asarray(weights, float)
        if shares.shape != (len(plans),) or not 0 < shares.sum() < np.inf or shares.min() < 0:
            raise ValueError(
                f"Expected {len(plans)} weights, one a dataset, finite, none negative and not all "
                f"0. Received: {weights!r}"
            )
        sample = choosing.Sample(plans, shares.tolist(), cls._seed(seed), stop_on_empty_dataset)
        return cls._of(sample)

    @classmethod
    def choose_from_datasets(
        cls,
        datasets: Sequence[Dataset],
        choice_dataset: Dataset,
        stop_on_empty_dataset: bool = True,
    ) -> Dataset:
        """Returns the dataset of elements of the datasets that another dataset chooses.

        Args:
            datasets: At least one dataset.
            choice_dataset: The indices of the datasets, int64 scalars.
            stop_on_empty_dataset: Whether the result ends when an ended dataset is chosen;
                otherwise that choice is skipped.

        Raises:
            TypeError: The datasets' elements have different structures, or the choices are no
                indices.

        TF: `tf.data.Dataset.choose_from_datasets`.
        """
        plans = _plans(datasets)
        choice = choice_dataset.plan.signature
        if choice != Signature(LEAF, (ArraySpec((), np.dtype(np.int64)),)):
            raise TypeError(
                "Elements of `choice_dataset` must be int64 scalars. Received: "
                f"{choice.element_spec}"
            )
        return cls._of(choosing.Choose(plans, choice_dataset.plan, stop_on_empty_dataset))

    # -- functions of elements -------------------------------------------------------------

    def map(
        self,
        map_func: Callable[..., Any],
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
        *,
        executor: str = "thread",
        vectorized: bool = False,
        seed: int | None = None,
    ) -> Dataset:
        """Returns the dataset of a function's results.

        Args:
            map_func: Takes an element (a tuple as several arguments). Returns
                anything that an element can be.
            num_parallel_calls: The number of threads or processes that call it. `AUTOTUNE`
                measures whether threads are faster; with processes, it starts one per CPU.
            deterministic: Whether the results keep the order of the elements (default: True).
            executor: "thread", or "process" for functions that keep Python busy. Worker processes
                get the function pickled, get elements as NumPy arrays, and take many elements at a
                time.
            vectorized: Whether `map_func` takes stacked elements, and returns stacked results.
                Their number is not specified: the result for an element must not depend on it.
            seed: The seed of random numbers. If given, `map_func` takes a key after the element: a
                uint32 array of shape [2], determined by the seed, the number of the pass over the
                dataset, and the number of the element. NumPy's `default_rng`, JAX's random
                functions and `tf.image.stateless_random_*` accept it. Vectorized: keys of
                shape [n, 2].

        Raises:
            InvalidArgumentError: Invalid `num_parallel_calls` or `executor`.

        Examples:
            >>> list(Dataset.range(3).map(lambda x: x * 10))
            [np.int64(0), np.int64(10), np.int64(20)]
            >>> def noisy(x, key):
            ...     return x + np.random.default_rng(key).normal()
            >>> [f"{x:.3f}" for x in Dataset.range(2).map(noisy, seed=1)]
            ['-0.429', '2.234']

        TF: `tf.data.Dataset.map`.
        """
        plan = self.plan if seed is None else Keyed(self.plan, int(seed))
        in_processes = executor == "process"
        function = (
            ElementFunction(map_func, "map", as_it_is, as_leaf)
            if in_processes
            else self._function(map_func, "map")
        )
        options = options_.options_of(self.plan)
        calls = options.parallel_calls(num_parallel_calls)
        is_ordered = options.keeps_order(deterministic)
        return self._of(Map(plan, function, calls, is_ordered, executor, vectorized))

    def filter(self, predicate: Callable[..., Any]) -> Dataset:
        """Returns the dataset of the elements for which `predicate` is true.

        TF: `tf.data.Dataset.filter`.
        """
        return self._of(filtering.Filter(self.plan, self._function(predicate, "filter")))

    def take_while(self, predicate: Callable[..., Any]) -> Dataset:
        """Returns the dataset of the elements before the first one for which `predicate` is false.

        TF: `tf.data.Dataset.take_while`.
        """
        return self._of(filtering.TakeWhile(self.plan, self._function(predicate, "take_while")))

    def scan(
        self,
        initial_state: Any,
        scan_func: Callable[..., Any],
    ) -> Dataset:
        """Returns the dataset of the outputs of a function of a state and an element.

        Args:
            initial_state: The first state, any structure.
            scan_func: Takes the state and an element; returns the next state and the output.

        Examples:
            >>> total = Dataset.range(4).scan(0, lambda state, x: (state + x, state + x))
            >>> [int(x) for x in total]
            [0, 1, 3, 6]

        TF: `tf.data.Dataset.scan`.
        """
        state, structure = self._element(initial_state)
        function = self._function(scan_func, "scan")
        return self._of(Scan(self.plan, state, structure, function))

    def reduce(
        self,
        initial_state: Any,
        reduce_func: Callable[..., Any],
    ) -> Any:
        """Returns the last state of a function that is called with a state and each element.

        Args:
            initial_state: The first state, any structure.
            reduce_func: Takes the state and an element; returns the next state.

        Examples:
            >>> Dataset.range(5).reduce(0, lambda state, x: state + x)
            np.int64(10)

        TF: `tf.data.Dataset.reduce`.
        """
        require_python("Dataset.reduce()")
        if self.plan.cardinality() == INFINITE:
            raise InvalidArgumentError(
                message="reduce would never end: the dataset is infinite. Use take or take_while."
            )
        state, structure = self._element(initial_state)
        function = self._function(reduce_func, "reduce")
        stream = self.plan.stream()
        epoch = function.begin()
        for index in itertools.count():
            element = stream.next()
            if element is None:
                break
            arguments = tuple_of(structure, self.plan.structure)
            try:
                state = function(state + element, arguments, epoch, index)
                if function.structure != structure:
                    raise TypeError(
                        "The function of reduce must return a state of the structure of the first "
                        f"one, {structure}. Received: {function.structure}"
                    )
            except Exception as error:
                note_place(error, "reduce", index)
                raise
        return structure.pack([self.shown(leaf) for leaf in state])

    # -- order and number ------------------------------------------------------------------

    def shuffle(
        self,
        buffer_size: int,
        seed: int | None = None,
        reshuffle_each_iteration: bool | None = True,
    ) -> Dataset:
        """Returns the dataset of the elements in a random order.

        Each element is drawn from a buffer of the next `buffer_size` elements. For arrays and
        ranges, no buffer is filled: their indices are shuffled, and whole batches are read.

        Args:
            buffer_size: For a uniform order, the length of the dataset or more.
            seed: Determines the orders; drawn from NumPy's global generator if left out.
            reshuffle_each_iteration: Whether every pass has a new order.

        TF: `tf.data.Dataset.shuffle` (its orders are others).
        """
        reshuffles = reshuffle_each_iteration is not False
        return self._of(
            Shuffle(self.plan, _integer(buffer_size, "buffer_size"), self._seed(seed), reshuffles)
        )

    def repeat(self, count: int | None = None) -> Dataset:
        """Returns the elements repeated `count` times; endlessly for None or -1.

        TF: `tf.data.Dataset.repeat`.
        """
        return self._of(Repeat(self.plan, -1 if count is None else _integer(count, "count")))

    def take(self, count: int) -> Dataset:
        """Returns the first `count` elements, all of them for -1. TF: `tf.data.Dataset.take`."""
        return self._of(selection.Take(self.plan, _integer(count, "count")))

    def skip(self, count: int) -> Dataset:
        """Returns the elements after the first `count`, none for -1. TF: `tf.data.Dataset.skip`."""
        return self._of(selection.Skip(self.plan, _integer(count, "count")))

    def shard(self, num_shards: int, index: int) -> Dataset:
        """Returns every `num_shards`-th element, starting at `index`.

        `shard(SHARD_HINT, SHARD_HINT)` stands for the shard of each worker; see
        `AutoShardPolicy.HINT`.

        TF: `tf.data.Dataset.shard`.
        """
        if num_shards == index == options_.SHARD_HINT:
            return self._of(options_.ShardHere(self.plan))
        return self._of(
            selection.Shard(self.plan, _integer(num_shards, "num_shards"), _integer(index, "index"))
        )

    def enumerate(self, start: int = 0) -> Dataset:
        """Returns pairs of a number, counted from `start`, and the element.

        TF: `tf.data.Dataset.enumerate`.
        """
        return self._of(combination.Enumerate(self.plan, _integer(start, "start")))

    def concatenate(self, dataset: Dataset) -> Dataset:
        """Returns these elements and then those of `dataset`.

        Raises:
            TypeError: They have different structures or dtypes.

        TF: `tf.data.Dataset.concatenate`.
        """
        if not isinstance(dataset, Dataset):
            raise TypeError(f"concatenate takes a dataset. Received: {dataset!r}")
        return self._of(combination.Concatenate([self.plan, dataset.plan]))

    # -- batches ---------------------------------------------------------------------------

    def batch(
        self,
        batch_size: int,
        drop_remainder: bool = False,
    ) -> Dataset:
        """Returns the dataset of consecutive elements stacked.

        Args:
            batch_size: Their number; the last batch may be smaller.
            drop_remainder: Whether a smaller last batch is dropped.

        TF: `tf.data.Dataset.batch`.
        """
        return self._of(
            batching.Batch(self.plan, _integer(batch_size, "batch_size"), drop_remainder)
        )

    def ragged_batch(
        self, batch_size: int, drop_remainder: bool = False, row_splits_dtype: Any = np.int64
    ) -> Dataset:
        """Returns the dataset of consecutive elements, with rows of different lengths.

        Arrays whose shape is known are stacked. Others become ragged, up to the last axis whose
        size is not known.

        Args:
            batch_size: Their number; the last batch may be smaller.
            drop_remainder: Whether a smaller last batch is dropped.
            row_splits_dtype: The dtype of the splits between rows: int32 or int64.

        Examples:
            >>> rows = Dataset.from_generator(lambda: [[1], [2, 3]])
            >>> batch = next(iter(rows.ragged_batch(2)))
            >>> batch.flat, batch.splits
            (array([1, 2, 3]), (array([0, 1, 3]),))

        TF: `tf.data.Dataset.ragged_batch`.
        """
        size = _integer(batch_size, "batch_size")
        return self._of(batching.RaggedBatch(self.plan, size, drop_remainder, row_splits_dtype))

    def padded_batch(
        self,
        batch_size: int,
        padded_shapes: Any = None,
        padding_values: Any = None,
        drop_remainder: bool = False,
    ) -> Dataset:
        """Returns the dataset of consecutive elements, padded to one shape and stacked.

        Args:
            batch_size: Their number; the last batch may be smaller.
            padded_shapes: A shape for every leaf, in their structure; a size of None (or -1)
                stands for the largest of the batch. Default: the sizes that are known.
            padding_values: The padding: one value, or one per leaf. Default: 0, empty text.
            drop_remainder: Whether a smaller last batch is dropped.

        Examples:
            >>> rows = Dataset.from_generator(lambda: [[1], [2, 3]])
            >>> print(next(iter(rows.padded_batch(2))))
            [[1 0]
             [2 3]]

        TF: `tf.data.Dataset.padded_batch`.
        """
        padded = batching.PaddedBatch(
            self.plan,
            _integer(batch_size, "batch_size"),
            padded_shapes,
            padding_values,
            drop_remainder,
        )
        return self._of(padded)

    def unbatch(self) -> Dataset:
        """Returns the dataset of the rows of every element. TF: `tf.data.Dataset.unbatch`."""
        return self._of(batching.Unbatch(self.plan))

    def rebatch(
        self,
        batch_size: Any,
        drop_remainder: bool = False,
    ) -> Dataset:
        """Returns the examples of batches in batches of other sizes.

        Args:
            batch_size: The size, or several sizes that are used in turn.
            drop_remainder: Whether a last batch that is too small is dropped.

        TF: `tf.data.Dataset.rebatch`.
        """
        sizes = np.atleast_1d(np.asarray(batch_size)).tolist()
        return self._of(batching.Rebatch(self.plan, sizes, drop_remainder))

    def group_by_window(
        self,
        key_func: Callable[..., Any],
        reduce_func: Callable[..., Any],
        window_size: int | None = None,
        window_size_func: Callable[..., Any] | None = None,
    ) -> Dataset:
        """Returns the elements of the datasets that a function returns for elements with one key.

        Args:
            key_func: Returns the key of an element, an int64.
            reduce_func: Takes a key and the dataset of a window; returns a dataset.
            window_size: The number of elements of a window.
            window_size_func: Instead, a function of the key that returns this number.

        TF: `tf.data.Dataset.group_by_window`.
        """
        if (window_size is None) == (window_size_func is None):
            raise ValueError("Pass either window_size or window_size_func.")
        size_function = self._function(window_size_func or (lambda key: window_size), "window_size")
        group = windows.GroupByWindow(
            self.plan,
            self._function(key_func, "group_by_window"),
            self._function(reduce_func, "group_by_window"),
            lambda key: int(size_function((np.int64(key),), LEAF)[0]),
        )
        return self._of(group)

    def bucket_by_sequence_length(
        self,
        element_length_func: Callable[..., Any],
        bucket_boundaries: Sequence[int],
        bucket_batch_sizes: Sequence[int],
        padded_shapes: Any = None,
        padding_values: Any = None,
        pad_to_bucket_boundary: bool = False,
        no_padding: bool = False,
        drop_remainder: bool = False,
    ) -> Dataset:
        """Returns padded batches of elements of similar lengths.

        Args:
            element_length_func: Returns the length of an element.
            bucket_boundaries: The lengths at which a new bucket begins.
            bucket_batch_sizes: The batch size of each bucket, one more than boundaries.
            padded_shapes: As `padded_batch` takes them.
            padding_values: As `padded_batch` takes them.
            pad_to_bucket_boundary: Whether unknown sizes are padded to one less than
                the bucket's upper boundary. The last bucket must then stay empty.
            no_padding: Whether the elements of a bucket are stacked without padding.
            drop_remainder: Whether a smaller last batch of a bucket is dropped.

        TF: `tf.data.Dataset.bucket_by_sequence_length`.
        """

        def batches_of(window: Plan, size: int, shapes: Any) -> Plan:
            if no_padding:
                return batching.Batch(window, size, drop_remainder)
            return batching.PaddedBatch(window, size, shapes, padding_values, drop_remainder)

        batches = bucketed(
            self.plan,
            self._function(element_length_func, "bucket_by_sequence_length"),
            [int(boundary) for boundary in bucket_boundaries],
            [int(size) for size in bucket_batch_sizes],
            batches_of,
            padded_shapes,
            pad_to_bucket_boundary,
        )
        return self._of(batches)

    def batch_by_size(
        self,
        max_size: float,
        size_func: Callable[..., Any],
        *,
        counts_padding: bool = True,
        max_count: int | None = None,
        sort_window: int = 1,
        drop_oversize: bool = False,
        padded_shapes: Any = None,
        padding_values: Any = None,
    ) -> Dataset:
        """Returns padded batches with as many elements as a budget of tokens or bytes allows.

        Args:
            max_size: The maximum size of a batch.
            size_func: Returns the size of an element, a number.
            counts_padding: Whether the size of a batch is its number of elements times the largest
                size; otherwise it is the sum of their sizes.
            max_count: The maximum number of elements in a batch; None for no limit.
            sort_window: The number of elements that are read ahead and grouped by size,
                which reduces the padding.
            drop_oversize: Whether an element larger than `max_size` is left out; otherwise it is an
                error.
            padded_shapes: As `padded_batch` takes them.
            padding_values: As `padded_batch` takes them.

        Examples:
            >>> rows = Dataset.from_generator(lambda: [[1], [2, 3], [4, 5, 6], [7]])
            >>> for batch in rows.batch_by_size(4, len):
            ...     print(batch.tolist())
            [[1, 0], [2, 3]]
            [[4, 5, 6]]
            [[7]]
        """
        batches = size_batching.BatchBySize(
            self.plan,
            self._function(size_func, "batch_by_size"),
            size_batching.Budget(max_size, counts_padding, max_count),
            _integer(sort_window, "sort_window"),
            drop_oversize,
            padded_shapes,
            padding_values,
        )
        return self._of(batches)

    def stratified_batch(
        self,
        batch_size: int,
        class_func: Callable[..., Any],
        num_classes: int,
        weights: Any = None,
        *,
        exhausted: Literal["repeat", "stop"] = "repeat",
        buffer_size: int = 1024,
        seed: int | None = None,
    ) -> Dataset:
        """Returns shuffled batches that contain every class in given proportions.

        The numbers are exact: remainders are given to different classes from batch to batch, so
        that over many batches the proportions are exact to the element.

        Args:
            batch_size: The number of elements in a batch; there are no smaller batches.
            class_func: Returns the class of an element, an integer of at least 0 and less than
                `num_classes`. If elements have access by index, it is called for every
                element before the first batch.
            num_classes: The number of classes.
            weights: The share of each class; they need not add up to 1. Equal shares if left out;
                with `np.bincount(labels)`, those of the data.
            exhausted: The behaviour when a class runs out. "repeat": its elements are repeated, and
                a pass ends when every element has been used at least once (oversampling). "stop":
                the pass ends, and no element has been used twice (undersampling).
            buffer_size: The number of elements of a class that are buffered without access by
                index. With "repeat", a class that runs short while another class's buffer is full
                repeats elements; with "stop", an element whose buffer is full replaces another one.
            seed: Determines the orders, which differ between passes.

        Raises:
            ValueError: The number of weights differs, or they are not proportions.

        Examples:
            >>> labels = np.array([0, 0, 0, 0, 0, 0, 1, 1])
            >>> batches = Dataset.from_tensor_slices(labels).stratified_batch(4, int, 2, seed=1)
            >>> [sorted(batch.tolist()) for batch in batches]
            [[0, 0, 1, 1], [0, 0, 1, 1], [0, 0, 1, 1]]
        """
        if exhausted not in ("repeat", "stop"):
            raise ValueError(
                f'Expected exhausted to be "repeat" or "stop". Received: exhausted={exhausted!r}'
            )
        shares = np.ones(num_classes) if weights is None else np.asarray(weights, float)
        if shares.shape != (num_classes,):
            raise ValueError(
                f"Expected as many weights as num_classes={num_classes}. Received: {weights!r}"
            )
        batches = stratified.StratifiedBatch(
            self.plan,
            _integer(batch_size, "batch_size"),
            self._function(class_func, "stratified_batch"),
            shares,
            exhausted == "repeat",
            _integer(buffer_size, "buffer_size"),
            self._seed(seed),
        )
        return self._of(batches)

    def rejection_resample(
        self,
        class_func: Callable[..., Any],
        target_dist: Any,
        initial_dist: Any = None,
        seed: int | None = None,
    ) -> Dataset:
        """Returns pairs of a class and an element, with the classes in given proportions.

        For this, elements are left out and others are used twice: the dataset is read a
        second time in parallel. `stratified_batch` has exact numbers in every batch.

        Args:
            class_func: Returns the class of an element, an integer of at least 0.
            target_dist: The proportion of each class in the result.
            initial_dist: The proportion of each class in the input; estimated while reading if left
                out.
            seed: Determines which elements are left out.

        Raises:
            ValueError: They are not proportions, or their number differs.

        TF: `tf.data.Dataset.rejection_resample`.
        """
        target = stratified.shares_of(target_dist, "target_dist")
        initial = None
        if initial_dist is not None:
            initial = stratified.shares_of(initial_dist, "initial_dist")
            if len(initial) != len(target):
                raise ValueError(
                    f"Expected as many shares in initial_dist as in target_dist, {len(target)}. "
                    f"Received: initial_dist={initial_dist!r}"
                )
        function = self._function(class_func, "rejection_resample")
        seed = self._seed(seed)
        return self._of(resampling.RejectionResample(self.plan, function, target, initial, seed))

    # -- datasets of datasets --------------------------------------------------------------

    def flat_map(self, map_func: Callable[..., Any]) -> Dataset:
        """Returns the elements of the datasets that a function returns for every element.

        Examples:
            >>> lines = Dataset.range(3).flat_map(lambda n: Dataset.range(n))
            >>> [int(x) for x in lines]
            [0, 0, 1]

        TF: `tf.data.Dataset.flat_map`.
        """
        return self._of(nesting.FlatMap(self.plan, self._function(map_func, "flat_map")))

    def interleave(
        self,
        map_func: Callable[..., Any],
        cycle_length: int | None = None,
        block_length: int | None = None,
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
    ) -> Dataset:
        """Returns the elements of the datasets that a function returns for every element, in turn.

        Args:
            map_func: Returns the dataset of an element.
            cycle_length: The number of datasets that are read at a time; default: the number of
                CPUs.
            block_length: The number of elements that are taken from each in its turn; default 1.
            num_parallel_calls: The number of datasets that are read ahead, in threads; `AUTOTUNE`:
                all that are being read.
            deterministic: Whether the order of the turns is kept (default: True), even if this
                means waiting; otherwise, the next turn is that of any dataset with an element
                ready.

        TF: `tf.data.Dataset.interleave`.
        """
        if cycle_length is None or cycle_length == AUTOTUNE:
            cycle_length = os.cpu_count() or 1
        options = options_.options_of(self.plan)
        interleaved = nesting.Interleave(
            self.plan,
            self._function(map_func, "interleave"),
            _integer(cycle_length, "cycle_length"),
            1 if block_length is None else _integer(block_length, "block_length"),
            options.parallel_calls(num_parallel_calls),
            options.keeps_order(deterministic),
        )
        return self._of(interleaved)

    def window(
        self,
        size: int,
        shift: int | None = None,
        stride: int = 1,
        drop_remainder: bool = False,
    ) -> Dataset:
        """Returns datasets of consecutive elements, one for each leaf.

        Args:
            size: The number of elements in a window.
            shift: The distance between the beginnings of two windows; default: `size`.
            stride: The distance between two elements of a window.
            drop_remainder: Whether incomplete windows are dropped.

        TF: `tf.data.Dataset.window`.
        """
        by = _integer(size if shift is None else shift, "shift")
        return self._of(
            windows.Window(
                self.plan, _integer(size, "size"), by, _integer(stride, "stride"), drop_remainder
            )
        )

    # -- speed -----------------------------------------------------------------------------

    def cache(self, filename: str | os.PathLike = "") -> Dataset:
        """Returns the same elements, computed once and then stored.

        They are stored when a pass has reached the end. Later passes have access by index, so that
        `shuffle` permutes indices.

        Args:
            filename: They are stored in files, in the folder `filename + ".cache"`, for later
                processes. If left out: in memory. Files are written block by block,
                and each block is checked (CRC-32) when it is first read.

        Raises:
            InvalidArgumentError: The files hold the elements of another pipeline.
            DataLossError: The files are corrupt.

        TF: `tf.data.Dataset.cache`.
        """
        path = os.fsdecode(filename) if filename else None
        return self._of(Cache(self.plan, path))

    def save(
        self,
        path: str | os.PathLike,
        compression: str | None = None,
        shard_func: Callable[..., Any] | None = None,
    ) -> None:
        """Writes the elements to a folder, from which `load` reads them.

        They replace the existing ones atomically.

        Args:
            path: The folder; with `://`, it is fsspec's.
            compression: None, "GZIP", or "SNAPPY" (needs pyarrow). Uncompressed elements are
                memory-mapped, with access by index.
            shard_func: Returns the number of an element's shard, an int64. Default: one shard.

        Examples:
            >>> import tempfile
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     Dataset.range(4).save(folder)
            ...     list(Dataset.load(folder).batch(2))
            [array([0, 1]), array([2, 3])]

        TF: `tf.data.Dataset.save` (the files are others).
        """
        require_python("Dataset.save()")
        function = None if shard_func is None else self._function(shard_func, "save")
        save(self.plan, os.fsdecode(path), compression, function)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike,
        element_spec: Any = None,
        *,
        reader_func: Callable[[Any], Dataset] | None = None,
    ) -> Dataset:
        """Returns the dataset that `save` or `snapshot` has written to a folder.

        Args:
            path: The folder.
            element_spec: The expected specs of the elements; the stored ones if left out.
            reader_func: Takes the dataset of the shards, each a dataset, and returns the dataset
                of their elements. Default: one element of each shard in turn.

        Raises:
            NotFoundError: The folder has no dataset.
            InvalidArgumentError: Its elements have other specs.
            DataLossError: Its files are corrupt; raised for elements when they are read.

        TF: `tf.data.Dataset.load`.
        """
        expected = None
        if element_spec is not None:
            expected = _generator_signature(None, None, element_spec)
        return cls._of(cls._reader(reader_func, "load")(load(os.fsdecode(path), expected)))

    def snapshot(
        self,
        path: str | os.PathLike,
        compression: str | None = "AUTO",
        reader_func: Callable[[Any], Dataset] | None = None,
        shard_func: Callable[..., Any] | None = None,
    ) -> Dataset:
        """Returns the same elements, which the first pass writes to a folder for later passes.

        Of the pipeline that computed them, only the structure and dtypes of the elements are
        checked: remove the folder when it changes.

        Args:
            path: The folder; with `://`, it is fsspec's.
            compression: As in `save`; "AUTO" is no compression.
            reader_func: As in `load`.
            shard_func: As in `save`.

        TF: `tf.data.Dataset.snapshot`.
        """
        function = None if shard_func is None else self._function(shard_func, "snapshot")
        chosen = None if compression == "AUTO" else compression
        read = self._reader(reader_func, "snapshot")
        return self._of(Snapshot(self.plan, os.fsdecode(path), chosen, function, read))

    @classmethod
    def _reader(
        cls, reader_func: Callable[[Any], Dataset] | None, stage: str
    ) -> Callable[[KeptDataset], Plan]:
        """Returns the function from the shards' elements to a plan."""

        def read(kept: KeptDataset) -> Plan:
            if reader_func is None and len(kept.shards) == 1:
                return kept.shards[0]
            shards = cls._of(datasets_of(kept.shards))
            if reader_func is None:
                elements = shards.interleave(lambda shard: shard, len(kept.shards))
                return AssertCardinality(elements.plan, len(kept))
            elements = reader_func(shards)
            if not isinstance(elements, Dataset):
                raise TypeError(
                    f"`reader_func` of {stage} must return a Dataset. Received: {elements!r}"
                )
            return elements.plan

        return read

    def prefetch(self, buffer_size: int) -> Dataset:
        """Returns the same elements, which a thread computes ahead.

        Args:
            buffer_size: The number of elements that it computes ahead; `AUTOTUNE` for a few, 0 for
                none.

        TF: `tf.data.Dataset.prefetch`.
        """
        return self._of(Prefetch(self.plan, _integer(buffer_size, "buffer_size")))

    def prefetch_to_device(self, size: int = 2, device: Any = None) -> Dataset:
        """Returns the same elements as `jax.Array`s, which a thread copies to a device ahead.

        It must be the last transformation. Text stays on the host, and numbers get the dtypes
        that JAX supports.

        Args:
            size: The number of elements that it copies ahead; `AUTOTUNE` for a few.
            device: A `jax.Device`, or a `jax.sharding.Sharding`, which divides every array between
                several (with several processes, each provides its part); default: JAX's default
                one.

        Raises:
            InvalidArgumentError: `size` is not a positive number.

        Examples:
            >>> import jax
            >>> mesh = jax.make_mesh((1,), ("data",))
            >>> rows = jax.NamedSharding(mesh, jax.P("data"))
            >>> batches = Dataset.range(8).batch(4).prefetch_to_device(2, rows)
            >>> next(iter(batches)).sharding == rows
            True

        TF: `tf.data.experimental.prefetch_to_device`.
        """
        return self._of(PrefetchToDevice(self.plan, int(size), lambda: self._device(device)))

    # -- the rest --------------------------------------------------------------------------

    def apply(self, transformation_func: Callable[[Any], Any]) -> Dataset:
        """Returns `transformation_func(self)`, which must be a dataset.

        TF: `tf.data.Dataset.apply`.
        """
        dataset = transformation_func(self)
        if not isinstance(dataset, Dataset):
            raise TypeError(
                "`transformation_func` must return a Dataset. Received: "
                f"{dataset!r} of type {type(dataset).__name__}"
            )
        return dataset

    def assert_cardinality(self, expected_cardinality: int) -> Dataset:
        """Returns the same elements, with an error if their number differs.

        TF: `tf.data.experimental.assert_cardinality`.
        """
        return self._of(
            AssertCardinality(self.plan, _integer(expected_cardinality, "expected_cardinality"))
        )

    def unique(self) -> Dataset:
        """Returns the elements without repetitions. TF: `tf.data.Dataset.unique`."""
        return self._of(filtering.Unique(self.plan))

    def ignore_errors(self, log_warning: bool = False) -> Dataset:
        """Returns the elements, except those whose computation fails.

        Args:
            log_warning: Whether each failure is logged.

        TF: `tf.data.Dataset.ignore_errors`.
        """
        return self._of(IgnoreErrors(self.plan, log_warning))

    def with_options(self, options: Options) -> Dataset:
        """Returns the same elements, with options that are merged with the previous ones.

        Options of order and threads apply to the transformations that follow.

        TF: `tf.data.Dataset.with_options`.
        """
        if not isinstance(options, Options):
            raise TypeError(f"Expected Options. Received: {options!r}")
        return self._of(options_.WithOptions(self.plan, options))

    def options(self) -> Options:
        """Returns the options that are set. TF: `tf.data.Dataset.options`."""
        return options_.options_of(self.plan)

    def get_single_element(self) -> Any:
        """Returns the only element.

        Raises:
            InvalidArgumentError: There is no element, or more than one.

        TF: `tf.data.Dataset.get_single_element`.
        """
        iterator = iter(self)
        element = next(iterator, _MISSING)
        if element is _MISSING:
            raise InvalidArgumentError(message="Dataset was empty.")
        if next(iterator, _MISSING) is not _MISSING:
            raise InvalidArgumentError(message="Dataset had more than one element.")
        return element

    def cardinality(self) -> Any:
        """Returns the number of elements, or `INFINITE_CARDINALITY` or `UNKNOWN_CARDINALITY`.

        TF: `tf.data.Dataset.cardinality`.
        """
        return self.plan.cardinality()

    @property
    def element_spec(self) -> Any:
        """The shapes and dtypes of an element's leaves, in its structure.

        If only an element determines them (after `map` with a NumPy function), the first one is
        computed, and the sizes of arrays are left unknown.
        """
        signature = self.plan.signature
        return signature.map(self.shown_spec).element_spec

    def as_numpy_iterator(self) -> Iterator[Any]:
        """Returns an iterator over the elements with NumPy leaves.

        TF: `tf.data.Dataset.as_numpy_iterator`.
        """
        elements = PlanElements(self.plan, Dataset.shown)
        return ElementIterator(elements, lambda: self.plan.signature.element_spec)

    def __iter__(self) -> Any:
        require_python("Iterating over a dataset")
        elements = PlanElements(self.plan, self.shown)
        return ElementIterator(elements, lambda: self.element_spec, self.optional)

    def __len__(self) -> int:
        length = self.plan.cardinality()
        if length == INFINITE:
            raise TypeError("The dataset is infinite.")
        if length == UNKNOWN:
            raise TypeError("The dataset length is unknown.")
        return length

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        signature = self.plan.known_signature
        spec = "?" if signature is None else signature.map(self.shown_spec).element_spec
        return f"<{self.plan.name}Dataset element_spec={spec}>"

    @classmethod
    def _element(cls, value: Any) -> tuple[Leaves, Structure]:
        leaves, structure = flatten(value)
        return tuple(map(cls._leaf, leaves)), structure


_MISSING = object()


def _integer(value: Any, name: str) -> int:
    """Returns an argument that must be an integer, Python's or NumPy's or an array of one.

    Raises:
        TypeError: It is not an integer; a float is never rounded.
    """
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"Expected an integer for {name}. Received: {value!r}") from None


def _plans(datasets: Sequence[Dataset]) -> list[Plan]:
    if not datasets:
        raise ValueError("Expected at least one dataset. Received: none")
    return [dataset.plan for dataset in datasets]


def _generator_signature(types: Any, shapes: Any, signature: Any) -> Signature | None:
    if signature is not None:
        if types is not None or shapes is not None:
            raise TypeError("Pass either output_signature, or output_types and output_shapes.")
        specs, structure = flatten(signature)
        return Signature(structure, tuple(map(ArraySpec.like, specs)))
    if types is None:
        return None
    dtypes, structure = flatten(types)
    known = [None] * len(dtypes) if shapes is None else structure.flatten(shapes)
    pairs = zip(known, dtypes, strict=True)
    return Signature(structure, tuple(ArraySpec(as_shape(s), np.dtype(t)) for s, t in pairs))
