"""`TPUStrategy` where there is no TPU: what it says, and its rules on devices that play the TPU."""

from __future__ import annotations

import importlib.util

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import unison
import unison.tf as tf
from unison.runtime.cluster import ClusterSpec
from unison.runtime.cluster_resolvers import SimpleClusterResolver, TPUClusterResolver
from unison.runtime.tpu import slices, system
from unison.runtime.tpu import topology as topologies
from unison.runtime.tpu.slices import MissingTPULibraryError, UnknownSliceError
from unison.runtime.tpu.system import NoTPUError
from unison.runtime.tpu.topology import DeviceAssignment, Topology

#: Where TensorFlow 2.21 says that the four cores of a TPU of this shape are.
SQUARE = Topology([2, 2, 1, 1], [[[0, 0, 0, 0], [0, 1, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0]]])


@pytest.fixture
def no_slice(monkeypatch):
    """This machine is none of a slice, whatever its environment says."""
    for name in ("TPU_WORKER_HOSTNAMES", "TPU_PROCESS_ADDRESSES", "TPU_WORKER_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    return monkeypatch


@pytest.fixture
def cpus_as_cores(no_slice):
    """The four logical CPU devices play the cores of a TPU of two by two chips."""
    cores = jax.devices("cpu")
    places = dict(zip(cores, SQUARE.device_coordinates[0].tolist(), strict=True))
    no_slice.setattr(system, "_attached_cores", lambda: list(cores))
    for module in (topologies, unison.strategies.tpu):
        no_slice.setattr(module, "coordinates_of", lambda core: tuple(places[core]))
    return cores


# -- the resolver --------------------------------------------------------------------------


@pytest.mark.parametrize("tpu", [None, "", "local", "your-tpu-address", "grpc://10.0.0.2:8470"])
def test_any_name_means_the_tpu_of_this_machine(no_slice, tpu):
    resolver = TPUClusterResolver(tpu=tpu, zone="europe-west4-a", project="p")
    assert resolver.cluster_spec() == ClusterSpec({})
    assert (resolver.task_type, resolver.task_id, resolver.is_chief) == ("worker", 0, True)
    assert resolver.num_accelerators() == {}


def test_the_machines_of_a_slice_are_its_workers(no_slice):
    no_slice.setenv("TPU_WORKER_HOSTNAMES", "t-0,t-1")
    no_slice.setenv("TPU_WORKER_ID", "1")
    resolver = TPUClusterResolver()
    assert resolver.cluster_spec().as_dict() == {"worker": ["t-0:8476", "t-1:8476"]}
    assert resolver.task_id == 1
    assert not resolver.is_chief


def test_local_means_no_other_machine_of_the_slice(no_slice):
    no_slice.setenv("TPU_WORKER_HOSTNAMES", "t-0,t-1")
    no_slice.setenv("TPU_WORKER_ID", "1")
    assert TPUClusterResolver(tpu="local").cluster_spec() == ClusterSpec({})


def test_a_name_that_is_no_text_is_refused():
    with pytest.raises(TypeError, match="tpu must be a name"):
        TPUClusterResolver(tpu=8)


# -- no TPU --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "use",
    [
        tf.tpu.experimental.initialize_tpu_system,
        tf.tpu.experimental.shutdown_tpu_system,
        tf.distribute.TPUStrategy,
        tf.distribute.experimental.TPUStrategy,
    ],
)
def test_without_a_tpu_the_error_says_how_to_compile_for_one(no_slice, use):
    with pytest.raises(NoTPUError, match=r"TPUClusterResolver\(tpu='mine'\)") as raised:
        use(TPUClusterResolver(tpu="mine"))
    for mend in ("Cloud TPU VM", "unison plan", 'TPUStrategy(topology="v5e:2x4")', "Mirrored"):
        assert mend in str(raised.value)


def test_connecting_by_name_without_a_tpu_is_an_error(no_slice):
    with pytest.raises(NoTPUError):
        TPUClusterResolver.connect()


def test_a_wrong_topology_lists_the_slices_there_are():
    with pytest.raises(UnknownSliceError, match="Did you mean 'v5e:2x4'") as raised:
        unison.TPUStrategy(topology="v5e:2x5")
    assert "v6e: 1x1, 2x2, 2x4" in str(raised.value)


def test_a_missing_libtpu_names_the_extra(monkeypatch):
    slices.describe_slice.cache_clear()
    found = importlib.util.find_spec
    monkeypatch.setattr(
        slices.importlib.util, "find_spec", lambda name: None if name == "libtpu" else found(name)
    )
    with pytest.raises(MissingTPULibraryError, match=r"pip install 'unison\[tpu\]'"):
        unison.TPUStrategy(topology="v5e:2x4")


def test_a_tpu_to_run_on_and_one_to_compile_for_exclude_each_other():
    with pytest.raises(ValueError, match="Received: both"):
        unison.TPUStrategy(TPUClusterResolver(tpu="local"), topology="v5e:2x4")


# -- connecting ----------------------------------------------------------------------------


def test_connecting_to_a_cluster_of_one_does_nothing(no_slice):
    tf.config.experimental_connect_to_cluster(TPUClusterResolver(tpu="local"))
    tf.config.experimental_connect_to_cluster(ClusterSpec({"worker": ["a:1"]}), "worker", 0)


def test_connecting_to_a_cluster_after_jax_has_started_is_an_error():
    two = SimpleClusterResolver(ClusterSpec({"worker": ["a:1", "b:1"]}), "", "worker", 0)
    with pytest.raises(RuntimeError, match="before JAX starts"):
        tf.config.experimental_connect_to_cluster(two)


def test_connecting_to_something_else_is_refused():
    with pytest.raises(TypeError, match="`ClusterSpec` or a `ClusterResolver`"):
        tf.config.experimental_connect_to_cluster("grpc://10.0.0.2")


# -- the topology, as TensorFlow 2.21 has it ------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "count", "cores"),
    [
        ([1, 2, 1, 1], 2, [[[0, 0, 0, 0], [0, 1, 0, 0]], [[1, 0, 0, 0], [1, 1, 0, 0]]]),
        ([2, 1, 1, 1], 2, [[[0, 0, 0, 0], [1, 0, 0, 0]], [[0, 1, 0, 0], [1, 1, 0, 0]]]),
        (None, 1, [[[0, 0, 0, 0]]]),
    ],
)
def test_replicas_get_blocks_of_cores(shape, count, cores):
    built = DeviceAssignment.build(SQUARE, shape, num_replicas=count)
    assert built.core_assignment.tolist() == cores
    assert (built.num_replicas, built.num_cores_per_replica) == (count, len(cores[0]))


@pytest.mark.parametrize(
    ("shape", "count", "message"),
    [
        ([1, 1, 1, 1], 5, "requested 5 replicas but only 4 replicas with shape"),
        ([3, 1, 1, 1], 1, "computation footprint .* does not fit in TPU topology shape"),
        ([2, 1], 1, "`computation_shape` must be 4 positive numbers"),
    ],
)
def test_blocks_that_do_not_fit_are_refused(shape, count, message):
    with pytest.raises(ValueError, match=message):
        DeviceAssignment.build(SQUARE, shape, num_replicas=count)


def test_a_core_of_two_replicas_is_refused():
    with pytest.raises(ValueError, match="Expected every core once"):
        DeviceAssignment(SQUARE, [[[0, 0, 0, 0]], [[0, 0, 0, 0]]])


def test_strides_interleave_the_blocks():
    built = DeviceAssignment.build(SQUARE, [2, 1, 1, 1], [1, 1, 1, 1], 2)
    apart = DeviceAssignment.build(
        Topology([4, 1, 1, 1], [[[x, 0, 0, 0] for x in range(4)]]), [2, 1, 1, 1], [2, 1, 1, 1], 2
    )
    assert built.lookup_replicas(0, 1) == [0, 1]
    assert apart.core_assignment[:, :, 0].tolist() == [[0, 2], [1, 3]]


def test_coordinates_name_devices():
    assert SQUARE.cpu_device_name_at_coordinates([1, 1, 0, 0], "worker") == (
        "/job:worker/task:0/device:CPU:0"
    )
    assert SQUARE.missing_devices.tolist() == []
    with pytest.raises(ValueError, match="Expected the coordinates of a core"):
        SQUARE.task_ordinal_at_coordinates([2, 0, 0, 0])


def test_starting_a_tpu_tells_its_topology(cpus_as_cores):
    topology = tf.tpu.experimental.initialize_tpu_system(TPUClusterResolver(tpu="local"))
    assert topology.mesh_shape.tolist() == [2, 2, 1, 1]
    assert topology.device_coordinates.tolist() == SQUARE.device_coordinates.tolist()


# -- training on several cores per replica --------------------------------------------------


def pairs(cpus_as_cores) -> unison.TPUStrategy:
    assignment = DeviceAssignment.build(SQUARE, [1, 2, 1, 1], num_replicas=2)
    return unison.TPUStrategy(TPUClusterResolver(tpu="local"), assignment)


def small_model() -> keras.Model:
    keras.utils.set_random_seed(7)
    model = keras.Sequential([keras.layers.Dense(16, activation="relu"), keras.layers.Dense(3)])
    model.compile(
        optimizer="adam",
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def test_each_core_is_a_replica_by_default(cpus_as_cores):
    strategy = unison.TPUStrategy(TPUClusterResolver(tpu="local"))
    assert strategy.num_replicas_in_sync == 4
    assert strategy.cluster_resolver.tpu == "local"


@pytest.mark.parametrize("batch", [8, 5])
def test_a_model_trains_on_pairs_of_cores_as_on_one_device(cpus_as_cores, batch):
    x = np.random.default_rng(0).normal(size=(21, 4)).astype("float32")
    y = np.arange(21) % 3
    alone = small_model()
    expected = alone.fit(x, y, batch_size=batch, epochs=2, shuffle=False, verbose=0).history
    strategy = pairs(cpus_as_cores)
    with strategy.scope():
        model = small_model()
    history = model.fit(x, y, batch_size=batch, epochs=2, shuffle=False, verbose=0).history
    assert strategy.num_replicas_in_sync == 2
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-5)
    np.testing.assert_allclose(model.predict(x, verbose=0), alone.predict(x, verbose=0), rtol=1e-4)


def test_what_is_split_is_computed_on_all_cores_of_a_replica(cpus_as_cores):
    strategy = pairs(cpus_as_cores)
    with strategy.scope():
        weights = unison.Variable(
            np.arange(12.0, dtype="float32").reshape(4, 3),
            aggregation=unison.VariableAggregation.SUM,
        )

    def step(x):
        halves = strategy.experimental_split_to_logical_devices(x, [1, 2])
        product = halves @ weights.read_value()
        weights.assign_add(jnp.ones((4, 3)))
        whole = strategy.experimental_replicate_to_logical_devices(product)
        return whole, unison.get_replica_context().all_reduce("SUM", whole)

    x = np.arange(16.0, dtype="float32").reshape(2, 2, 4)
    of_replicas, total = strategy.run(step, (unison.PerReplica(list(x)),))
    expected = x @ np.arange(12.0).reshape(4, 3)
    np.testing.assert_allclose(np.stack(of_replicas.values), expected)
    np.testing.assert_allclose(total.values[1], expected.sum(0))
    assert float(weights.numpy()[0, 0]) == 2.0


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([2], "Length of `partition_dimensions` must equal to the rank"),
        ([1, 1], "should be the same as the number of logical devices"),
        ([1, 3], "must be divisible by corresponding value"),
    ],
)
def test_a_split_that_is_none_is_refused(cpus_as_cores, parts, message):
    strategy = pairs(cpus_as_cores)
    with pytest.raises(ValueError, match=message):
        strategy.experimental_split_to_logical_devices(jnp.ones((2, 4)), parts)


def test_a_core_that_a_replica_has_not_cannot_be_assigned_to(cpus_as_cores):
    strategy = pairs(cpus_as_cores)
    assert strategy.experimental_assign_to_logical_device(3.0, 1) == 3.0
    with pytest.raises(ValueError, match="only total of 2 logical devices"):
        strategy.experimental_assign_to_logical_device(3.0, 2)


def test_a_saved_model_of_pairs_of_cores_loads_alone(cpus_as_cores, tmp_path):
    strategy = pairs(cpus_as_cores)
    with strategy.scope():
        model = small_model()
    x = np.ones((4, 4), "float32")
    model.fit(x, np.zeros(4), batch_size=4, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(loaded.predict(x, verbose=0), model.predict(x, verbose=0), rtol=1e-5)
