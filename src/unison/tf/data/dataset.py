"""`tf.data.Dataset`: `unison.data.Dataset` of tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from unison import data as core
from unison.data.functions import ElementFunction
from unison.data.iterators import ElementIterator, PlanElements, require_python
from unison.data.iterators import Optional as CoreOptional
from unison.data.leaves import as_leaf
from unison.data.plan import Plan
from unison.data.ragged import RaggedArray
from unison.data.specs import RaggedSpec
from unison.data.structure import flatten
from unison.runtime import device_strings
from unison.runtime.precision import device_array
from unison.tf import config, dtypes
from unison.tf.data.functions import TensorFunction
from unison.tf.data.options import Options
from unison.tf.ragged.specs import RaggedTensorSpec
from unison.tf.ragged.tensor import RaggedTensor
from unison.tf.random_keys import next_key
from unison.tf.sparse import SparseTensor
from unison.tf.tensor_spec import TensorShape, TensorSpec, TypeSpec, type_spec_from_value
from unison.tf.tensors import convert_to_tensor, identity, start_devices
from unison.tf.text import StringTensor
from unison.unsupported import UnsupportedMember
from unison.values import PerReplica

#: Arguments of TensorFlow's that make no difference, by method; `name` is one of every method's.
_WITHOUT_EFFECT = {
    "batch": {"num_parallel_calls", "deterministic"},
    "map": {"synchronous", "use_unbounded_threadpool"},
    "sample_from_datasets": {"rerandomize_each_iteration"},
}


def tensor_of(leaf: Any) -> Any:
    """Returns a leaf as a tensor; of a nested dataset, the dataset."""
    if isinstance(leaf, bytes):
        return StringTensor(leaf)
    if isinstance(leaf, Plan):
        return Dataset(leaf)
    if isinstance(leaf, jax.Array):
        return leaf
    if isinstance(leaf, RaggedArray):
        return _ragged_of(leaf)
    if leaf.dtype.kind == "O":
        return leaf.view(StringTensor)
    return device_array(np.asarray(leaf))


def _ragged_of(leaf: RaggedArray) -> Any:
    """Returns a ragged leaf as a tensor: a row as a dense one.

    The arrays of a distributed batch are on the devices already, one for each replica.
    """
    are_placed = isinstance(leaf.flat, PerReplica | jax.Array)
    flat = leaf.flat if are_placed else tensor_of(leaf.flat)
    if not leaf.splits:
        return flat
    return RaggedTensor.of(flat, leaf.splits, is_padded=are_placed)


def numpy_of(leaf: Any) -> Any:
    """Returns a leaf as NumPy's type; ragged ones as arrays of rows."""
    if isinstance(leaf, RaggedArray):
        tensor = _ragged_of(leaf)
        return tensor.numpy() if leaf.splits else leaf.flat
    return core.Dataset.shown(leaf)


def leaf_of(value: Any) -> Any:
    """Returns a tensor, or a convertible value, as a leaf; Python numbers have 32 bits."""
    if isinstance(value, RaggedTensor):
        return value.ragged_array
    if isinstance(value, bytes | str | core.Dataset) or hasattr(value, "__array__"):
        return as_leaf(value)
    return as_leaf(convert_to_tensor(value))


def spec_of(spec: Any) -> Any:
    """Returns the spec of a leaf as TensorFlow's."""
    if isinstance(spec, core.DatasetSpec):
        inner = spec.signature
        return DatasetSpec(inner.map(spec_of).element_spec)
    if isinstance(spec, RaggedSpec):
        return RaggedTensorSpec(spec.shape, spec.dtype, spec.ragged_rank, spec.splits_dtype)
    return TensorSpec(spec.shape, spec.dtype)


class DatasetSpec(TypeSpec):
    """The spec of an element that is a dataset itself.

    Args:
        element_spec: What its elements are.
        dataset_shape: Without meaning.

    TF: `tf.data.DatasetSpec`.
    """

    def __init__(self, element_spec: Any, dataset_shape: Any = ()):
        self.element_spec = element_spec
        self.dataset_shape = TensorShape(dataset_shape)

    @classmethod
    def from_value(cls, value: Dataset) -> DatasetSpec:
        """Returns the spec of a dataset."""
        return cls(value.element_spec)

    def is_compatible_with(self, spec_or_value: Any) -> bool:
        """Whether it is a dataset of such elements, or its spec."""
        other = spec_or_value
        return isinstance(other, Dataset | DatasetSpec) and other.element_spec == self.element_spec

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DatasetSpec) and other.element_spec == self.element_spec

    def __hash__(self) -> int:
        return hash(DatasetSpec)

    def __repr__(self) -> str:
        return f"DatasetSpec({self.element_spec!r}, {self.dataset_shape!r})"


class Optional(CoreOptional):
    """TF: `tf.experimental.Optional`."""

    @classmethod
    def from_value(cls, value: Any) -> Optional:
        """Returns a value, any structure of tensors, as an optional element."""
        leaves, structure = flatten(value)
        tensors = [identity(leaf) for leaf in leaves]
        spec = structure.pack([type_spec_from_value(tensor) for tensor in tensors])
        return cls(structure.pack(tensors), lambda: spec)

    def has_value(self) -> jax.Array:
        """Whether there is an element, as a tensor."""
        return convert_to_tensor(super().has_value())


class Iterator(ElementIterator):
    """TF: `tf.data.Iterator`."""


class NumpyIterator(ElementIterator):
    """TF: `tf.data.NumpyIterator`."""

    save = UnsupportedMember("use tf.train.Checkpoint(iterator=iterator).save, or get_state()")
    restore = UnsupportedMember("use tf.train.Checkpoint(iterator=iterator).restore, or set_state")

    def next(self) -> Any:
        """Returns the next element; raises StopIteration at the end."""
        return next(self)


def _is_sparse(value: Any) -> bool:
    return isinstance(value, SparseTensor)


class Dataset(core.Dataset):
    """Elements, and the transformations that compute them as they are iterated over.

    The elements are tensors, and so are the arguments of the functions of `map` and its kin. A
    function that only computes with tensors is compiled; see `unison.tf.data.functions`.

    Examples:
        >>> dataset = Dataset.from_tensor_slices([1, 2, 3]).map(lambda x: 2 * x)
        >>> [int(x) for x in dataset], dataset.element_spec
        ([2, 4, 6], TensorSpec(shape=(), dtype=tf.int32, name=None))

    TF: `tf.data.Dataset`.
    """

    optional = Optional

    fingerprint = UnsupportedMember("use dataset.plan.description, and the files' sizes and dates")
    sparse_batch = UnsupportedMember("use padded_batch")

    @staticmethod
    def _of(plan: Plan) -> Dataset:
        return Dataset(plan)

    @classmethod
    def from_tensor_slices(cls, tensors: Any, name: str | None = None) -> core.Dataset:
        """Returns a dataset of the slices of tensors along their first axis.

        Raises:
            TypeError: A tensor is sparse.
            ValueError: The tensors have different lengths.

        TF: `tf.data.Dataset.from_tensor_slices`.
        """
        if any(map(_is_sparse, jax.tree.leaves(tensors, is_leaf=_is_sparse))):
            raise TypeError(
                "Dataset.from_tensor_slices does not cut sparse tensors. Use "
                "tf.sparse.to_dense(x), or tf.RaggedTensor.from_sparse(x)."
            )
        return super().from_tensor_slices(tensors)

    @classmethod
    def _function(cls, function: Callable[..., Any], stage: str) -> ElementFunction:
        return TensorFunction(function, stage, tensor_of, leaf_of)

    _leaf = staticmethod(leaf_of)

    @classmethod
    def shown(cls, leaf: Any) -> Any:
        return tensor_of(leaf)

    @classmethod
    def shown_spec(cls, spec: Any) -> Any:
        return spec_of(spec)

    @classmethod
    def _device(cls, device: Any) -> Any:
        start_devices()
        is_soft = config.get_soft_device_placement()
        return device_strings.resolve(device, soft=is_soft) if isinstance(device, str) else device

    @classmethod
    def _seed(cls, seed: int | None) -> int:
        # Where none is given, `tf.random.set_seed` decides.
        return int(jax.random.bits(next_key(None)) if seed is None else seed)

    @classmethod
    def from_generator(
        cls,
        generator: Callable[..., Any],
        output_types: Any = None,
        output_shapes: Any = None,
        args: Any = None,
        output_signature: Any = None,
        name: str | None = None,
    ) -> Dataset:
        """Returns the dataset of the elements of a function's iterator; see `unison.data.Dataset`.

        TF: `tf.data.Dataset.from_generator`.
        """
        if output_types is None and output_signature is None:
            raise TypeError(
                "To specify the output signature you need to provide either the "
                "`output_signature` argument or the `output_types` argument."
            )
        made = super().from_generator(
            generator, output_types, output_shapes, args, output_signature
        )
        return cls._of(made.plan)

    @classmethod
    def load(
        cls,
        path: Any,
        element_spec: Any = None,
        compression: str | None = None,
        reader_func: Callable[..., Any] | None = None,
        wait: bool = False,
    ) -> Dataset:
        """Returns the dataset that `save` or `snapshot` has written to a folder.

        The files say how they are compressed, and there is nothing to wait for: a dataset is there
        as a whole, or not at all.

        TF: `tf.data.Dataset.load`.
        """
        del compression, wait
        return cls._of(super().load(path, element_spec, reader_func=reader_func).plan)

    def with_options(self, options: Any, name: str | None = None) -> Dataset:
        """Returns the same elements, with options that are added to those that are set.

        TF: `tf.data.Dataset.with_options`.
        """
        set_before = self.options()
        made = super().with_options(set_before.merge(options).as_core())
        return self._of(made.plan)

    def options(self) -> Any:
        """Returns the options that are set. TF: `tf.data.Dataset.options`."""
        return Options.of(super().options())

    def cardinality(self) -> jax.Array:
        """Returns the number of elements, or `INFINITE_CARDINALITY` or `UNKNOWN_CARDINALITY`.

        TF: `tf.data.Dataset.cardinality`.
        """
        return convert_to_tensor(super().cardinality(), dtypes.int64)

    def as_numpy_iterator(self) -> NumpyIterator:
        """Returns an iterator over the elements with NumPy leaves.

        TF: `tf.data.Dataset.as_numpy_iterator`.
        """
        elements = PlanElements(self.plan, numpy_of)
        return NumpyIterator(elements, lambda: self.element_spec)

    def __iter__(self) -> Iterator:
        require_python("Iterating over a dataset")
        start_devices()
        elements = PlanElements(self.plan, tensor_of)
        return Iterator(elements, lambda: self.element_spec, self.optional)


def _without(arguments: set[str], method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a method that accepts more arguments, without effect."""

    @functools.wraps(method)
    def accepting(*args: Any, **kwargs: Any) -> Any:
        for argument in arguments & kwargs.keys():
            del kwargs[argument]
        return method(*args, **kwargs)

    return accepting


def _accept_arguments_without_effect() -> None:
    for name, method in vars(core.Dataset).items():
        if name.startswith("_") or name in vars(Dataset):
            continue
        arguments = {"name"} | _WITHOUT_EFFECT.get(name, set())
        if isinstance(method, classmethod):
            setattr(Dataset, name, classmethod(_without(arguments, method.__func__)))
        elif callable(method):
            setattr(Dataset, name, _without(arguments, method))


_accept_arguments_without_effect()


class TextLineDataset(Dataset):
    """The lines of text files; see `unison.data.TextLineDataset`.

    TF: `tf.data.TextLineDataset`.
    """

    def __init__(
        self,
        filenames: Any,
        compression_type: str | None = None,
        buffer_size: int | None = None,
        num_parallel_reads: int | None = None,
        name: str | None = None,
    ):
        made = core.TextLineDataset(filenames, compression_type, buffer_size, num_parallel_reads)
        super().__init__(made.plan)


class TFRecordDataset(Dataset):
    """The records of TFRecord files; see `unison.data.TFRecordDataset`.

    TF: `tf.data.TFRecordDataset`.
    """

    def __init__(
        self,
        filenames: Any,
        compression_type: str | None = None,
        buffer_size: int | None = None,
        num_parallel_reads: int | None = None,
        name: str | None = None,
    ):
        made = core.TFRecordDataset(filenames, compression_type, buffer_size, num_parallel_reads)
        super().__init__(made.plan)


class FixedLengthRecordDataset(Dataset):
    """The records of files of records of one length; see `unison.data.FixedLengthRecordDataset`.

    TF: `tf.data.FixedLengthRecordDataset`.
    """

    def __init__(
        self,
        filenames: Any,
        record_bytes: int,
        header_bytes: int | None = None,
        footer_bytes: int | None = None,
        buffer_size: int | None = None,
        compression_type: str | None = None,
        num_parallel_reads: int | None = None,
        name: str | None = None,
    ):
        made = core.FixedLengthRecordDataset(
            filenames,
            record_bytes,
            header_bytes,
            footer_bytes,
            buffer_size,
            compression_type,
            num_parallel_reads,
        )
        super().__init__(made.plan)
