"""Arrays of the host on devices: as `jax.device_put` places them."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from unison.runtime.transfers import placed

DTYPES = ["bool", "uint8", "int64", "float16", "float32", "float64", "complex128"]


@pytest.fixture
def places():
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    shardings = [NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("x",), (None, "x"), ())]
    return [*shardings, jax.devices()[1]]


@pytest.mark.parametrize("dtype", [*DTYPES, ml_dtypes.bfloat16], ids=str)
@pytest.mark.parametrize("enabled", [False, True], ids=["32 bits", "64 bits"])
def test_arrays_are_placed_as_jax_places_them(places, dtype, enabled):
    with jax.enable_x64(enabled):
        whole = np.arange(24).reshape(4, 6).astype(dtype)
        for place in places:
            for array in (whole, np.asfortranarray(whole), whole[::-2], whole[:0]):
                ours, theirs = placed(array, place), jax.device_put(array, place)
                assert (ours.dtype, ours.sharding) == (theirs.dtype, theirs.sharding)
                assert ours.committed
                np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


def test_scalars_are_placed_as_jax_places_them(places):
    for scalar in (np.array(3.5), np.float32(2), 7, 2.5, True, jnp.float32(1)):
        for place in places[-2:]:
            ours, theirs = placed(scalar, place), jax.device_put(scalar, place)
            assert (ours.dtype, ours.weak_type) == (theirs.dtype, theirs.weak_type)
            assert (ours.sharding, ours.tolist()) == (theirs.sharding, theirs.tolist())


def test_trees_are_placed_and_what_is_in_place_stays(places):
    ready = jax.device_put(np.ones((2, 2)), places[0])
    tree = placed({"ready": ready, "new": [np.zeros((4, 2))]}, places[0])
    assert tree["ready"] is ready
    assert tree["new"][0].sharding == places[0]


def test_a_guard_against_implicit_transfers_lets_them_pass(places):
    with jax.transfer_guard("disallow"):
        assert placed(np.ones((2, 2)), places[0]).sharding == places[0]
    with jax.transfer_guard("disallow_explicit"), pytest.raises(RuntimeError, match="Disallowed"):
        placed(np.ones((2, 2)), places[0])


def test_a_traced_value_is_placed_by_the_program(places):
    assert jax.jit(lambda x: placed(x + 1, places[-1]))(1.0) == 2.0


def test_what_cannot_be_divided_is_an_error(places):
    with pytest.raises(ValueError, match="divi"):
        placed(np.ones((3, 2)), places[0])
