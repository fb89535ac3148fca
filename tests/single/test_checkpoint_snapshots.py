"""Asynchronous saving: what is saved is what was there when `save` was called."""

import gc
import threading
import zipfile

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import unison
from keras_comparison import mirrored, regression_data
from unison.cells import Cell, Layout
from unison.train import Checkpoint, CheckpointOptions, load_checkpoint
from unison.train.archive import Node, write_archive
from unison.train.shared_path import Writing
from unison.train.snapshot import Snapshot

ASYNC = CheckpointOptions(enable_async=True)
VALUE = ".ATTRIBUTES/VARIABLE_VALUE"


@pytest.fixture
def prefix(tmp_path):
    return str(tmp_path / "ckpt")


@pytest.fixture
def late_copies(monkeypatch):
    """Lets the thread begin to copy when the test says so."""
    may_copy = threading.Event()
    finish = Snapshot.finish

    def late(snapshot):
        in_the_program = threading.current_thread() is threading.main_thread()
        assert in_the_program or may_copy.wait(60)
        finish(snapshot)

    monkeypatch.setattr(Snapshot, "finish", late)
    yield may_copy
    may_copy.set()


@pytest.fixture(params=[True, False], ids=["on CPUs", "on accelerators"])
def two_replicas(request):
    """A strategy that takes the CPU's devices for what they are, or for accelerators."""
    strategy = mirrored(2)
    strategy.placement.is_host = request.param
    return strategy


def variable(strategy, layout, value):
    """A variable of 8 rows whose copies are stored in a layout."""
    kind = {}
    if layout is Layout.LOCAL:
        kind = {
            "synchronization": unison.VariableSynchronization.ON_READ,
            "aggregation": unison.VariableAggregation.SUM,
        }
    with strategy.scope():
        made = unison.Variable(value, **{"aggregation": unison.VariableAggregation.MEAN} | kind)
    if layout is Layout.SHARDED:
        made.cell.shard()
    assert made.cell.layout is layout
    return made


@pytest.mark.parametrize("layout", [Layout.MIRRORED, Layout.LOCAL, Layout.SHARDED])
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_program_that_overwrites_what_is_not_copied_yet_changes_nothing_that_is_saved(
    prefix, late_copies, two_replicas, layout, dtype
):
    strategy = two_replicas
    value = np.arange(16).reshape(8, 2).astype(dtype)
    saved = variable(strategy, layout, value)
    if layout is Layout.SHARDED:
        overwrite = lambda: saved.assign(jnp.zeros((8, 2), dtype))  # noqa: E731
    else:
        overwrite = lambda: strategy.run(lambda: saved.assign_add(jnp.ones((8, 2), dtype)))  # noqa: E731
    overwrite()
    saved.assign(value)
    overwrite()  # compiled, and the buffers are the program's own
    saved.assign(value)
    checkpoint = Checkpoint(saved=saved)
    checkpoint.write(prefix, ASYNC)
    overwrite()
    overwrite()
    late_copies.set()
    checkpoint.sync()
    read = load_checkpoint(prefix).get_tensor(f"saved/{VALUE}")
    assert read.dtype == dtype
    np.testing.assert_array_equal(read, value)


def test_training_goes_on_over_what_is_not_copied_yet(tmp_path, late_copies, two_replicas):
    x, y = regression_data(32)
    with two_replicas.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.05), "mse", metrics=["mae"])
    checkpoint = Checkpoint(model=model)

    class Save(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                checkpoint.write(f"{tmp_path}/late", ASYNC)
                Checkpoint(model=model).write(f"{tmp_path}/at_once")

    model.fit(x, y, batch_size=8, shuffle=False, verbose=0, callbacks=[Save()])
    late_copies.set()
    checkpoint.sync()
    late, at_once = (load_checkpoint(tmp_path / name) for name in ("late", "at_once"))
    names = at_once.get_variable_to_shape_map()
    assert len(names) > 10
    for name in names:
        np.testing.assert_array_equal(late.get_tensor(name), at_once.get_tensor(name), name)


@pytest.mark.parametrize("layout", [Layout.MIRRORED, Layout.SHARDED])
def test_programs_do_not_wait_for_what_an_accelerator_copies(layout):
    strategy = mirrored(2)
    strategy.placement.is_host = False
    value = np.arange(16.0).reshape(8, 2)
    saved = variable(strategy, layout, value)
    snapshot = Snapshot({})
    copied = snapshot.value_of(saved.cell)
    copied[...] = -1
    strategy.run(lambda: saved.assign_add(jnp.ones((8, 2))))
    assert (copied == -1).all()  # not by this thread, before the program
    np.testing.assert_array_equal(saved.numpy(), value + 1)
    snapshot.finish()
    np.testing.assert_array_equal(copied, value)


def test_values_are_copied_by_programs_where_no_memory_can_be_pinned(monkeypatch):
    strategy = mirrored(2)
    strategy.placement.is_host = False
    saved = variable(strategy, Layout.MIRRORED, np.arange(16.0).reshape(8, 2))
    snapshot = Snapshot({})

    def fail(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: pinned memory")

    with monkeypatch.context() as patched:
        patched.setattr(jax, "device_put", fail)
        copied = snapshot.value_of(saved.cell)
    saved.assign(jnp.zeros((8, 2)))
    snapshot.finish()
    np.testing.assert_array_equal(copied, np.arange(16).reshape(8, 2))


def test_two_checkpoints_of_one_variable_are_each_of_their_instant(tmp_path, late_copies):
    strategy = mirrored(2)
    value = variable(strategy, Layout.MIRRORED, np.zeros((8, 2), np.float32))
    first, second = Checkpoint(value=value), Checkpoint(value=value)
    first.write(tmp_path / "first", ASYNC)
    second.write(tmp_path / "second", ASYNC)
    strategy.run(lambda: value.assign_add(jnp.ones((8, 2))))
    late_copies.set()
    first.sync()
    second.sync()
    for name in ("first", "second"):
        assert load_checkpoint(tmp_path / name).get_tensor(f"value/{VALUE}").sum() == 0


def test_nothing_is_copied_before_the_call_returns(prefix, late_copies, monkeypatch):
    value = variable(mirrored(2), Layout.MIRRORED, np.ones((8, 2), np.float32))
    checkpoint = Checkpoint(value=value)
    copied = []
    combine = Cell.combine
    monkeypatch.setattr(Cell, "combine", lambda *args: copied.append(1) or combine(*args))
    monkeypatch.setattr(Cell, "numpy", lambda cell: copied.append(1))
    _ = checkpoint.save_counter
    checkpoint.write(prefix, ASYNC)
    assert not copied


def test_memory_of_the_copies_is_used_again_and_no_longer_than_the_variables(prefix):
    large = variable(mirrored(2), Layout.MIRRORED, np.zeros((1 << 20, 2), np.float32))
    small = variable(mirrored(2), Layout.MIRRORED, np.zeros((8, 2), np.float32))
    checkpoint = Checkpoint(large=large, small=small)
    addresses = []
    for _ in range(2):
        checkpoint.write(prefix, ASYNC)
        checkpoint.sync()
        addresses.append([checkpoint._copies[v.cell][0].ctypes.data for v in (large, small)])
    assert addresses[0] == addresses[1]
    checkpoint.large = None
    del large
    gc.collect()
    assert len(checkpoint._copies) == 1


def test_copies_without_a_common_value_are_refused_by_the_call(prefix):
    with mirrored(2).scope():
        value = unison.Variable(0.0, synchronization=unison.VariableSynchronization.ON_READ)
    with pytest.raises(ValueError, match="no common value"):
        Checkpoint(value=value).write(prefix, ASYNC)


def test_worker_that_writes_nothing_copies_nothing(prefix, monkeypatch):
    strategy = mirrored(2)
    value = variable(strategy, Layout.MIRRORED, np.ones((8, 2), np.float32))
    copied = []
    monkeypatch.setattr("unison.train.snapshot._copy_whole", lambda *args: copied.append(1))

    class Elsewhere(Writing):
        def finish(self, write):
            return False

    monkeypatch.setattr("unison.train.checkpoint.begin_writing", lambda *args: Elsewhere())
    for options in (CheckpointOptions(), ASYNC):
        checkpoint = Checkpoint(value=value)
        checkpoint.write(prefix, options)
        checkpoint.sync()
    strategy.run(lambda: value.assign_add(jnp.ones((8, 2))))
    assert not copied


@pytest.mark.parametrize(
    "array",
    [
        np.float64(3.5),
        np.zeros((0, 3), np.int8),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(10)[::3],
        np.array(["text", "b"]),
        np.arange(600_000, dtype=np.float32),
    ],
)
def test_array_is_written_as_numpy_writes_it(tmp_path, array):
    write_archive(str(tmp_path / "ckpt"), [Node(variable="array")], {"array": np.asarray(array)})
    np.savez(tmp_path / "numpy.npz", array=np.asarray(array, order="C"))
    with (
        zipfile.ZipFile(tmp_path / "ckpt.index") as ours,
        zipfile.ZipFile(tmp_path / "numpy.npz") as numpys,
    ):
        assert ours.read("array.npy") == numpys.read("array.npy")
