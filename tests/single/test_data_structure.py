"""Elements: their structure, their leaves as NumPy has them, and what is known of them."""

from collections import OrderedDict, namedtuple

import jax.numpy as jnp
import numpy as np
import pytest

from unison.data import ArraySpec, Dataset
from unison.data.leaves import as_leaf, stack
from unison.data.structure import flatten
from unison.errors import InvalidArgumentError

Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    "element",
    [
        1,
        (1, 2),
        (1, (2, {"a": 3, "b": (4,)})),
        Point(1, (2, 3)),
        {"b": 1, "a": 2},
        OrderedDict(b=1, a=2),
        (1, None),
        {"x": Point(1, None)},
    ],
)
def test_an_element_is_packed_from_its_leaves(element):
    leaves, structure = flatten(element)
    packed = structure.pack(leaves)
    assert packed == element
    assert type(packed) is type(element)
    assert structure.flatten(element) == leaves


def test_dictionaries_are_flattened_by_sorted_key_and_keep_their_own_order():
    leaves, structure = flatten({"b": 1, "a": 2})
    assert leaves == (2, 1)
    assert list(structure.pack(leaves)) == ["b", "a"]
    assert structure == flatten({"a": 0, "b": 0})[1]


def test_a_list_is_a_leaf_or_a_tuple():
    assert flatten(([1, 2], 3))[0] == ([1, 2], 3)
    leaves, structure = flatten(([1, 2], 3), lists_are_tuples=True)
    assert structure.pack(leaves) == ((1, 2), 3)


@pytest.mark.parametrize("other", [(1,), (1, 2, 3), {"a": 1}, 1, (1, None)])
def test_another_structure_is_an_error_that_shows_both(other):
    structure = flatten((1, {"k": 2}))[1]
    with pytest.raises(ValueError, match=r"Expected an element of structure \(\., \{'k': \.\}\)"):
        structure.flatten(other)


@pytest.mark.parametrize(
    ("value", "leaf"),
    [
        (1, np.int64(1)),
        (1.5, np.float64(1.5)),
        (True, np.bool_(True)),
        (np.float32(2), np.float32(2)),
        ("text", b"text"),
        (b"\x00\xff", b"\x00\xff"),
        (np.str_("é"), "é".encode()),
        (np.array("a"), b"a"),
        (np.array(2**40), np.int64(2**40)),
    ],
)
def test_a_value_without_axes_is_a_numpy_scalar_or_bytes(value, leaf):
    made = as_leaf(value)
    assert made == leaf
    assert type(made) is type(leaf)


def test_arrays_keep_their_dtype_also_of_64_bits():
    for dtype in ("int64", "float64", "uint8", "bool", "complex64", jnp.bfloat16):
        assert as_leaf(np.zeros(2, dtype)).dtype == dtype


def test_a_jax_array_is_a_leaf_like_any_other():
    leaf = as_leaf(jnp.arange(3, dtype="float32"))
    assert isinstance(leaf, np.ndarray)
    assert leaf.dtype == np.float32


@pytest.mark.parametrize(
    "text",
    [["a", "é"], np.array(["a", "é"]), np.array(["a", b"\xc3\xa9"], object)],
)
def test_text_becomes_an_array_of_bytes(text):
    leaf = as_leaf(text)
    assert leaf.dtype == object
    assert leaf.tolist() == [b"a", "é".encode()]


def test_rows_of_different_lengths_are_no_array():
    with pytest.raises(ValueError, match="same length"):
        as_leaf([[1, 2], [3]])


def test_an_object_is_no_leaf():
    with pytest.raises(TypeError, match=r"numbers, text, arrays of them, or datasets.*object"):
        as_leaf(object())


def test_elements_of_different_shapes_are_not_stacked_and_the_error_names_the_place():
    elements = [(np.zeros(2),), (np.zeros(2),), (np.zeros(3),)]
    with pytest.raises(InvalidArgumentError, match=r"component 0.*\[2\].*element 2.*\[3\]"):
        stack(elements)


def test_elements_of_different_dtypes_are_not_stacked():
    with pytest.raises(InvalidArgumentError, match=r"int64.*element 1.*float64"):
        stack([(np.int64(1),), (np.float64(2),)])


def test_stacked_text_stays_text():
    (stacked,) = stack([(b"a",), (b"long",)])
    assert stacked.tolist() == [b"a", b"long"]
    (stacked,) = stack([(as_leaf(["a", "b"]),), (as_leaf(["c", "d"]),)])
    assert stacked.shape == (2, 2)


def test_the_element_spec_has_the_structure_of_the_elements():
    dataset = Dataset.from_tensor_slices({"x": np.zeros((4, 3), "float32"), "y": [1, 2, 3, 4]})
    assert dataset.element_spec == {
        "x": ArraySpec((3,), np.dtype("float32")),
        "y": ArraySpec((), np.dtype("int64")),
    }


def test_a_spec_describes_what_fits_it():
    spec = ArraySpec((None, 2), np.dtype("float32"))
    assert spec.describes(np.zeros((5, 2), "float32"))
    assert not spec.describes(np.zeros((5, 3), "float32"))
    assert not spec.describes(np.zeros((5, 2)))
    assert ArraySpec(None, np.dtype("float64")).describes(np.float64(1))


def test_a_numpy_function_leaves_sizes_open_that_only_calls_would_tell():
    dataset = Dataset.range(1, 4).map(lambda n: np.zeros(n))
    assert dataset.element_spec == ArraySpec((None,), np.dtype("float64"))
    assert [len(row) for row in dataset] == [1, 2, 3]


def test_what_an_empty_dataset_maps_to_is_not_known():
    with pytest.raises(ValueError, match="inferred from an element, and there is none"):
        Dataset.range(0).map(lambda x: x).element_spec  # noqa: B018
