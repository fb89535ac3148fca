"""Arrays of the host on devices: as `jax.device_put` places them."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import unison
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


def test_jax_arrays_are_placed_as_jax_places_them(places):
    keys = jax.random.split(jax.random.key(0), 4)
    weak = jnp.broadcast_to(jnp.asarray(3.0), (4, 2))
    assert weak.weak_type
    elsewhere = jax.device_put(jnp.ones((4, 2), "bfloat16"), jax.devices()[3])
    with jax.enable_x64(True):
        wide = jnp.arange(8).reshape(4, 2)
    for array in (jnp.ones((4, 6)), keys, weak, elsewhere, wide, jnp.zeros((0, 2))):
        for place in places:
            if place == places[1] and array is keys:
                continue  # they have one axis
            ours, theirs = placed(array, place), jax.device_put(array, place)
            assert (ours.aval, ours.sharding) == (theirs.aval, theirs.sharding)
            np.testing.assert_array_equal(_plain(ours), _plain(theirs))


def _plain(array):
    is_key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(array) if is_key else array)


def test_a_new_shape_compiles_no_program(places, two_replicas):
    compiled = []

    def note(event, seconds, **details):
        if event.endswith("backend_compile_duration"):
            compiled.append(details.get("fun_name"))

    arrays = [jnp.ones((14, size)) for size in (3, 5)]
    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        for array in arrays:
            placed(array, places[0])
            two_replicas.placement.repeat(array)
            unison.PerReplica([array, array]).stacked(two_replicas.placement)
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    assert compiled == []


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
