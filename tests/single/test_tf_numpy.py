"""`tf.experimental.numpy`: the expected values are NumPy's."""

import numpy as np
import pytest

import unison.tf as tf
import unison.tf.experimental.numpy as tnp
from unison.tf.missing import public_names

#: Names of types without a meaning on devices.
REFUSED = {"string_", "unicode_"}

A = [[1.0, 2.0], [3.0, 4.0]]
CALLS = {
    "add": ([1.0, 2.0], 1),
    "average": ([1.0, 2.0], None, [1.0, 3.0]),
    "compress": ([True, False], [1, 2]),
    "clip": ([1.0, 5.0], [2.0, 2.0], 3.0),
    "concatenate": ([[1], [2]],),
    "cross": ([1.0, 0.0, 0.0], [0.0, 1.0, 0.0]),
    "diff": ([1, 4, 9],),
    "einsum": ("ij,ij->i", A, A),
    "fix": ([-1.5, 1.5],),
    "full": ([2, 2], [1, 2]),
    "linspace": ([0.0, 1.0], [2.0, 3.0], 3),
    "matmul": (A, A),
    "mean": (A, 0),
    "meshgrid": ([1, 2], [3, 4]),
    "pad": ([1], [[1, 1]]),
    "repeat": ([1, 2], [2, 3]),
    "polyval": ([1.0, 2.0], [3.0]),
    "select": ([[True, False], [True, True]], [[1, 2], [3, 4]]),
    "sort": ([3, 1, 2],),
    "split": ([1, 2], 2),
    "stack": ([[1], [2]], 1),
    "take": ([5, 6, 7], [2, 0]),
    "tile": ([1, 2], 2),
    "vstack": ([[1], [2]],),
    "where": ([True, False], [1, 2], [3, 4]),
    "zeros": ((2, 1),),
}


@pytest.mark.parametrize("name", CALLS)
def test_functions_give_what_numpy_gives(name):
    arguments = CALLS[name]
    expected = getattr(np, name)(*(np.array(arguments[0]), 2) if name == "split" else arguments)
    result = getattr(tnp, name)(*arguments)
    np.testing.assert_allclose(np.asarray(result), np.asarray(expected), rtol=1e-6)


def test_lists_are_arguments_by_name():
    assert tnp.stack(arrays=[[1], [2]], axis=1).tolist() == [[1, 2]]
    assert tnp.take([5, 6, 7], indices=[0]).tolist() == [5]
    assert int(tnp.sum(a=[1, 2])) == 3
    with pytest.raises(TypeError, match="axes"):
        tnp.sum([1, 2], axes=0)


def test_all_names_are_there_except_types_of_text():
    names = public_names("tf.experimental.numpy")
    assert {name for name in names if not hasattr(tnp, name)} == REFUSED
    assert set(names) <= set(dir(tnp))
    assert isinstance(tf.constant(1.0), tnp.ndarray)


def test_functions_are_parts_of_programs_with_gradients():
    v = tf.Variable([1.0, 4.0])
    with tf.GradientTape() as tape:
        loss = tf.function(lambda: tnp.sum(tnp.sqrt(v)))()
    assert tape.gradient(loss, v).tolist() == [0.5, 0.25]


def test_draws_have_the_shape_that_is_named():
    tnp.random.seed(1)
    assert tnp.random.randn(2, 3).shape == tnp.random.rand(2, 3).shape == (2, 3)
    drawn = tnp.random.randint(2, 5, size=100)
    assert {2, 3, 4} == set(drawn.tolist())
    assert 2.0 <= float(tnp.random.uniform(2.0, 3.0)) < 3.0
    assert tnp.random.poisson(3.0, 4).dtype == tf.int32


def test_other_promotions_of_dtypes_are_refused():
    tnp.experimental_enable_numpy_behavior()
    with pytest.raises(ValueError, match="strict"):
        tnp.experimental_enable_numpy_behavior(dtype_conversion_mode="safe")
