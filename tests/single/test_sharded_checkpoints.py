"""Checkpoints in Orbax's format, of one process: what is in them, corrupt ones, other programs'."""

import itertools
import json
import os
import pathlib
import random
import sys
import zipfile

import fsspec
import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import unison
from subprocess_program import run_program
from unison.data.files import checksums
from unison.errors import (
    DataLossError,
    FailedPreconditionError,
    NotFoundError,
    PermissionDeniedError,
    ResourceExhaustedError,
    UnavailableError,
)
from unison.storage import remote_folder
from unison.storage.patience import PATIENCE
from unison.train import (
    Checkpoint,
    CheckpointManager,
    CheckpointOptions,
    checkpoint_formats,
    chunk_plan,
    latest_checkpoint,
    list_variables,
    load_checkpoint,
    orbax_format,
    sharded_archive,
)

VALUE = ".ATTRIBUTES/VARIABLE_VALUE"


@pytest.fixture(autouse=True)
def divided_though_small(monkeypatch):
    monkeypatch.setattr("unison.runtime.placement._SMALLEST_DIVIDED", 1)


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of a few numbers, so that small arrays have several."""
    chunk_shape = chunk_plan.chunk_shape
    monkeypatch.setattr(
        chunk_plan, "chunk_shape", lambda part, itemsize: chunk_shape(part, itemsize, 256)
    )


def zero(num_replicas):
    return unison.ModelParallelStrategy(
        mesh={"batch": num_replicas}, devices=[f"CPU:{n}" for n in range(num_replicas)], zero=3
    )


class Position:
    """An object with a state of text and an array."""

    def __init__(self):
        self.state = {"file": "a.txt", "order": np.arange(3)}

    def get_state(self):
        return self.state

    def set_state(self, state):
        self.state = state


ROWS, COLUMNS = 24, 10


def objects(strategy, factor=1):
    """Variables of many dtypes, divided, whole, empty and without axes, and a state."""
    dtypes = (np.float32, ml_dtypes.bfloat16, np.int32, bool, np.complex64, ml_dtypes.float8_e4m3fn)
    numbers = np.arange(ROWS * COLUMNS).reshape(ROWS, COLUMNS) % 7
    with strategy.scope():
        variables = {
            np.dtype(dtype).name: unison.Variable((factor * numbers).astype(dtype))
            for dtype in dtypes
        }
        variables["none"] = unison.Variable(np.zeros((0, 4), np.float32))
        variables["one"] = unison.Variable(np.float32(factor * 5))
    return {"variables": variables, "position": Position()}


def assert_equal(restored, saved):
    for name, variable in saved["variables"].items():
        value = restored["variables"][name].numpy()
        np.testing.assert_array_equal(value, variable.numpy(), err_msg=name)
        assert value.dtype == variable.numpy().dtype
    np.testing.assert_equal(restored["position"].state, saved["position"].state)


@pytest.mark.parametrize("saves", [1, 4])
def test_any_division_restores_what_another_has_saved(tmp_path, small_chunks, saves):
    saved = objects(zero(saves))
    saved["position"].state["file"] = "b.txt"
    assert saved["variables"]["float32"].cell.is_divided is (saves > 1)
    checkpoint = Checkpoint(format="orbax", **saved)
    path = checkpoint.save(tmp_path / "ckpt")
    for strategy in (unison.OneDeviceStrategy("CPU:0"), zero(2), zero(3), zero(4)):
        restored = objects(strategy, factor=0)
        Checkpoint(**restored).restore(path).assert_consumed()
        assert_equal(restored, saved)


def test_an_asynchronous_one_holds_the_values_of_its_moment(tmp_path, small_chunks):
    strategy = zero(4)
    saved = objects(strategy)
    checkpoint = Checkpoint(format="orbax", **saved)
    for factor in (1, 2):  # the second one reuses the memory of the first
        variable = saved["variables"]["float32"]
        strategy.run(lambda: variable.assign(variable * 2))  # noqa: B023
        expected = variable.numpy()
        path = checkpoint.save(tmp_path / "ckpt", CheckpointOptions(enable_async=True))
        strategy.run(lambda: variable.assign(variable * 0))  # noqa: B023
        checkpoint.sync()
        restored = objects(zero(2), factor=0)
        Checkpoint(**restored).restore(path)
        np.testing.assert_array_equal(restored["variables"]["float32"].numpy(), expected)
        variable.assign(expected * factor)


@pytest.mark.parametrize("dtype", [*sorted(orbax_format.DTYPES), "uint4", "float8_e8m0fnu", "<U3"])
def test_arrays_of_every_dtype_are_saved(tmp_path, dtype):
    """Those that TensorStore does not write are beside the tree."""

    values = np.array([1, 2, 1]).astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))
    position = Position()
    position.state = {"values": values}
    weights = [] if dtype == "<U3" else [unison.Variable(jax.numpy.asarray(values))]
    objects = {"position": position, "weights": weights}
    Checkpoint(**objects).write(tmp_path / "archive")
    path = Checkpoint(format="orbax", **objects).write(tmp_path / "ckpt")
    other = Position()
    Checkpoint(position=other).read(path).expect_partial()
    assert other.state["values"].dtype == values.dtype
    np.testing.assert_array_equal(other.state["values"], values)
    for weight, saved in itertools.product(weights, (path, tmp_path / "archive")):
        read = load_checkpoint(saved).get_tensor(f"weights/0/{VALUE}")
        assert read.dtype == weight.numpy().dtype
        np.testing.assert_array_equal(read, weight.numpy())
    trees = ocp.PyTreeCheckpointer().restore(path) if dtype in orbax_format.DTYPES else None
    assert trees is None or trees["weights"]["0"].shape == (3,)


def test_formats_replace_each_other(tmp_path):
    weight = unison.Variable(1.0)
    for factor, format in enumerate(("archive", "orbax", "archive", "orbax")):
        weight.assign(float(factor))
        path = Checkpoint(format=format, weight=weight).write(tmp_path / "ckpt")
        assert os.listdir(tmp_path) == ["ckpt" if format == "orbax" else "ckpt.index"]
        assert load_checkpoint(path).get_tensor(f"weight/{VALUE}") == factor


def test_the_format_is_checked_and_may_be_the_name_of_an_object(tmp_path):
    weight = unison.Variable(1.0)
    with pytest.raises(ValueError, match=r"one of 'archive', 'orbax', 'tensorflow', or"):
        Checkpoint(format="zarr", weight=weight)
    path = Checkpoint(format=weight).write(tmp_path / "ckpt")
    assert list_variables(path) == [(f"format/{VALUE}", [])]


@pytest.mark.parametrize(
    ("format", "package", "extra"),
    [("orbax", "orbax.checkpoint", "orbax"), ("tensorflow", "google_crc32c", "records")],
)
def test_without_its_package_a_format_is_refused_at_once(format, package, extra, monkeypatch):
    checksums.crc32c.cache_clear()
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"pip install 'unison\[{extra}\]'"):
        Checkpoint(format=format, weight=unison.Variable(1.0))


# -- corrupt files -------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path):
    """A folder with two checkpoints of a divided variable, and what the second holds."""
    with zero(2).scope():
        weight = unison.Variable(np.zeros((64, 32), np.float32))
    checkpoint = Checkpoint(format="orbax", weight=weight)
    for factor in (1, 2):
        weight.assign(factor * np.arange(64 * 32, dtype=np.float32).reshape(64, 32))
        checkpoint.save(tmp_path / "ckpt")
    return tmp_path, weight.numpy()


def largest_file(folder):
    return max(filter(os.path.isfile, folder.glob("**/*")), key=lambda path: path.stat().st_size)


def test_a_flipped_bit_is_an_error_and_changes_nothing(run):
    """40 of 40 of Orbax's restores of such files return wrong numbers without a word."""
    folder, saved = run
    path = folder / "ckpt-2"
    chance = random.Random(0)
    files = {file: file.read_bytes() for file in path.glob("**/*") if file.is_file()}
    chunks = [half.tobytes() for half in np.split(saved, 2)]
    # They are written in any order, to one file or two.
    starts = [
        (file, content.index(chunk))
        for chunk in chunks
        for file, content in files.items()
        if chunk in content
    ]
    assert len(starts) == 2
    for _ in range(40):
        file, start = chance.choice(starts)
        changed = bytearray(files[file])
        changed[start + chance.randrange(len(chunks[0]))] ^= 1 << chance.randrange(8)
        file.write_bytes(changed)
        restored = unison.Variable(np.ones((64, 32), np.float32))
        with pytest.raises(DataLossError, match="checksum mismatch in array 'weight"):
            Checkpoint(weight=restored).restore(path)
        np.testing.assert_array_equal(restored.numpy(), np.ones((64, 32)))
        file.write_bytes(files[file])


def test_a_flipped_bit_anywhere_is_an_error_or_harmless(run):
    folder, expected = run
    chance = random.Random(1)
    files = [path for path in (folder / "ckpt-2").glob("**/*") if path.is_file()]
    for file in files:
        content = file.read_bytes()
        for _ in range(8):
            changed = bytearray(content)
            changed[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
            file.write_bytes(changed)
            restored = unison.Variable(np.ones((64, 32), np.float32))
            try:
                Checkpoint(weight=restored).restore(folder / "ckpt-2").expect_partial()
            except (DataLossError, NotFoundError):
                np.testing.assert_array_equal(restored.numpy(), np.ones((64, 32)))
            else:
                np.testing.assert_array_equal(restored.numpy(), expected)
        file.write_bytes(content)


@pytest.mark.parametrize("change", ["cut", "remove", "index", "metadata"])
def test_the_latest_whole_one_is_found(run, change):
    folder, _ = run
    file = largest_file(folder / "ckpt-2")
    if change == "cut":
        file.write_bytes(file.read_bytes()[:4000])
    elif change == "remove":
        file.unlink()
    else:
        (folder / "ckpt-2" / {"index": "unison.index", "metadata": "_METADATA"}[change]).unlink()
    assert latest_checkpoint(folder) == f"{folder}/ckpt-1"


WRONG = {
    "no arrays": lambda d: d.pop("elsewhere"),
    "a list": lambda d: d.update(elsewhere=[1]),
    "an array": lambda d: d["elsewhere"].update(other=7),
    "a large shape": lambda d: of(d).update(shape=[2**40, 32], chunk=[2**40, 32]),
    "many chunks": lambda d: of(d).update(chunk=[1, 1]),
    "a chunk that does not fit": lambda d: of(d).update(chunk=[63, 32]),
    "an empty chunk": lambda d: of(d).update(chunk=[0, 32]),
    "a chunk of another rank": lambda d: of(d).update(chunk=[64]),
    "a checksum of text": lambda d: of(d).update(crc32=["1"] * len(of(d)["crc32"])),
    "a dtype": lambda d: of(d).update(dtype="<f8"),
    "another name": lambda d: d["elsewhere"].update({"../x": d["elsewhere"].pop(WEIGHT)}),
}
WEIGHT = f"weight/{VALUE}"


def of(index):
    return index["elsewhere"][WEIGHT]


@pytest.mark.parametrize("wrong", WRONG)
def test_an_index_that_somebody_has_changed_is_corrupt(run, wrong):
    folder, _ = run
    path = folder / "ckpt-2" / "unison.index"
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    index = json.loads(members["checkpoint.json"])
    WRONG[wrong](index)
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in (members | {"checkpoint.json": json.dumps(index)}).items():
            archive.writestr(name, content)
    weight = unison.Variable(np.ones((64, 32), np.float32))
    with pytest.raises((DataLossError, ValueError)):
        Checkpoint(weight=weight).restore(folder / "ckpt-2")
    np.testing.assert_array_equal(weight.numpy(), np.ones((64, 32)))


# -- Orbax ---------------------------------------------------------------------------------------


def test_orbax_opens_it(tmp_path):
    layers = [{"kernel": unison.Variable(np.arange(6.0).reshape(2, 3))}, unison.Variable(4)]
    path = Checkpoint(format="orbax", layers=layers, epoch=unison.Variable(2)).write(
        tmp_path / "ckpt"
    )
    with ocp.StandardCheckpointer() as checkpointer:
        found = checkpointer.restore(path)
        assert (found["epoch"], found["layers"]["1"]) == (2, 4)
        np.testing.assert_array_equal(found["layers"]["0"]["kernel"], [[0, 1, 2], [3, 4, 5]])
        mesh = jax.make_mesh((2,), ("rows",), devices=jax.devices()[:2])
        sharding = NamedSharding(mesh, PartitionSpec("rows"))
        target = jax.tree.map(
            lambda each: jax.ShapeDtypeStruct(
                each.shape,
                each.dtype,
                sharding=sharding if each.ndim else NamedSharding(mesh, PartitionSpec()),
            ),
            found,
        )
        kernel = checkpointer.restore(path, target)["layers"]["0"]["kernel"]
        assert kernel.sharding == sharding
        np.testing.assert_array_equal(kernel, [[0, 1, 2], [3, 4, 5]])
    assert ocp.PyTreeCheckpointer().restore(path)["epoch"] == 2


TREE = {
    "params": {"w": np.arange(8, dtype=np.float32).reshape(4, 2), "b": np.float32(3.0)},
    "opt_state": [np.ones(4, np.int32), (np.zeros(2, np.float32), None)],
    "step": 7,
    "name": "gpt",
}


def saved_by_pytree(folder):
    ocp.PyTreeCheckpointer().save(folder, TREE)
    return folder


def saved_in_many_files(folder):
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False)
    ocp.Checkpointer(handler).save(folder, args=ocp.args.PyTreeSave(TREE))
    return folder


def saved_as_zarr3(folder):
    handler = ocp.PyTreeCheckpointHandler(use_zarr3=True)
    ocp.Checkpointer(handler).save(folder, args=ocp.args.PyTreeSave(TREE))
    return folder


def saved_as_arrays(folder):
    """As `jax.Array`s, one of them divided."""
    mesh = jax.make_mesh((4,), ("rows",))
    divided = jax.device_put(TREE["params"]["w"], NamedSharding(mesh, PartitionSpec("rows")))
    others = jax.tree.map(
        lambda each: each if isinstance(each, str) else jax.numpy.asarray(each), TREE
    )
    ocp.PyTreeCheckpointer().save(folder, others | {"params": {**others["params"], "w": divided}})
    return folder


def saved_by_manager(folder):
    with ocp.CheckpointManager(folder) as manager:
        manager.save(3, args=ocp.args.PyTreeSave(TREE))
    return folder / "3"


@pytest.mark.parametrize(
    "save",
    [saved_by_pytree, saved_in_many_files, saved_as_zarr3, saved_as_arrays, saved_by_manager],
)
def test_what_orbax_has_saved_is_restored(tmp_path, save):
    path = save(tmp_path / "saved")
    with zero(2).scope():
        w = unison.Variable(np.zeros((4, 2), np.float32))
    assert w.cell.is_divided
    b, ones, step = unison.Variable(0.0), unison.Variable(np.zeros(4, np.int32)), unison.Variable(0)
    checkpoint = Checkpoint(params={"w": w, "b": b}, opt_state=[ones], step=step)
    checkpoint.read(path).expect_partial()
    np.testing.assert_array_equal(w.numpy(), TREE["params"]["w"])
    assert (float(b), int(step)) == (3.0, 7)
    np.testing.assert_array_equal(ones.numpy(), np.ones(4))
    assert ("params/w", [4, 2]) in list_variables(path)
    np.testing.assert_array_equal(load_checkpoint(path).get_tensor("opt_state/1/0"), np.zeros(2))


def test_items_of_a_step_are_its_upper_names(tmp_path):
    """As MaxText saves: the items of a step in folders of their own."""
    with ocp.CheckpointManager(tmp_path, item_names=("items", "iter")) as manager:
        manager.save(
            1000,
            args=ocp.args.Composite(
                items=ocp.args.PyTreeSave({"params": {"params": {"w": np.arange(3.0)}}}),
                iter=ocp.args.JsonSave({"position": 3}),
            ),
        )
    weight = unison.Variable(np.zeros(3))
    Checkpoint(items={"params": {"params": {"w": weight}}}).read(tmp_path / "1000")
    np.testing.assert_array_equal(weight.numpy(), [0, 1, 2])


def test_the_state_of_a_flax_model_is_restored(tmp_path):
    from flax import nnx

    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "flax", nnx.state(model))
    kernel, bias = (
        unison.Variable(np.zeros((3, 2), np.float32)),
        unison.Variable(np.ones(2, np.float32)),
    )
    layers = {"kernel": {"value": kernel}, "bias": {"value": bias}}
    Checkpoint(**layers).read(tmp_path / "flax").assert_consumed()
    np.testing.assert_array_equal(kernel.numpy(), model.kernel[...])
    np.testing.assert_array_equal(bias.numpy(), model.bias[...])


def test_a_corrupt_tree_of_another_program_is_an_error(tmp_path):
    path = saved_by_pytree(tmp_path / "saved")
    (path / "manifest.ocdbt").write_bytes(b"nonsense")
    with pytest.raises(DataLossError, match="of Orbax is corrupt"):
        load_checkpoint(path)
    (path / "_METADATA").write_text('{"tree_metadata": [1]}')
    with pytest.raises(DataLossError, match="expected a dictionary"):
        load_checkpoint(path)


# -- the plan ------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_every_chunk_is_written_once_by_one_that_has_it(seed):
    chance = random.Random(seed)
    writers = range(chance.choice([1, 2, 5, 8]))
    plan = chunk_plan.ChunkPlan(writers)
    for _ in range(10):
        counts = [chance.choice([1, 1, 2, 4]) for _ in range(chance.randrange(4))]
        shape = tuple(count * chance.choice([1, 3, 8, 50]) for count in counts)
        cuts = [
            [(place * size // count, (place + 1) * size // count) for place in range(count)]
            for size, count in zip(shape, counts, strict=True)
        ]
        holders = {
            region: tuple(sorted(chance.sample(writers, chance.randint(1, len(writers)))))
            for region in itertools.product(*cuts)
        }
        grid, of_chunks = plan.add(chunk_plan.Spread(shape, np.dtype(np.float32), holders))
        written = np.zeros(shape, int)
        for number, writer in enumerate(of_chunks):
            region = grid.region(number)
            written[chunk_plan.slices_of(region)] += 1
            (around,) = (
                each
                for each in holders
                if all(a <= c and d <= b for (c, d), (a, b) in zip(region, each, strict=True))
            )
            assert writer in holders[around]
            assert list(grid.overlapping(region)) == [number]
        assert (written == 1).all()


def test_equal_copies_are_written_in_equal_shares():
    plan = chunk_plan.ChunkPlan(range(8))
    for _ in range(16):
        plan.add(chunk_plan.spread_on(range(8), (4096, 4096), np.dtype(np.float32)))
    assert set(plan.bytes_of.values()) == {16 * 4096 * 4096 * 4 // 8}


def test_remote_checkpoints_of_one_process(tmp_path):
    weight = unison.Variable(np.arange(3.0))
    manager = CheckpointManager(
        Checkpoint(format="orbax", weight=weight), "memory://parts/run", max_to_keep=1
    )
    for _ in range(2):
        path = manager.save()
    weight.assign([0, 0, 0])
    assert manager.restore_or_initialize() == path
    np.testing.assert_array_equal(weight.numpy(), [0, 1, 2])
    assert latest_checkpoint("memory://parts/run") == path
    checkpoint_formats.remove_checkpoint(path)
    assert latest_checkpoint("memory://parts/run") is None
    assert orbax_format.is_orbax_installed()


@pytest.fixture
def remote():
    """The URL of an empty folder in fsspec's memory."""
    url = "memory://remote-parts"
    yield url
    system, name = fsspec.core.url_to_fs(url)
    if system.exists(name):
        system.rm(name, recursive=True)


def test_a_remote_folder_is_read_by_orbax_and_by_any_division(tmp_path, small_chunks):
    saved = objects(zero(4))
    path = Checkpoint(format="orbax", **saved).save(f"file://{tmp_path}/ckpt")
    for strategy in (unison.OneDeviceStrategy("CPU:0"), zero(3)):
        for place in (path, path.removeprefix("file://")):  # also copied to a disk
            restored = objects(strategy, factor=0)
            Checkpoint(**restored).restore(place).assert_consumed()
            assert_equal(restored, saved)
    [tree_folder] = pathlib.Path(path.removeprefix("file://")).glob("tree-*")
    tree = ocp.PyTreeCheckpointer().restore(tree_folder)
    for name, variable in saved["variables"].items():
        if name != "none":
            np.testing.assert_array_equal(tree["variables"][name], variable.numpy())


def test_a_database_that_was_copied_to_a_remote_folder_is_read(tmp_path, remote):
    weight = unison.Variable(np.arange(6.0).reshape(2, 3))
    Checkpoint(format="orbax", weight=weight).write(tmp_path / "ckpt")
    system, name = fsspec.core.url_to_fs(remote)
    system.put(f"{tmp_path}/ckpt", f"{name}/ckpt", recursive=True)
    read = load_checkpoint(f"{remote}/ckpt").get_tensor(f"weight/{VALUE}")
    np.testing.assert_array_equal(read, weight.numpy())


def flipped(content):
    return bytes([content[0] ^ 1]) + content[1:]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (flipped, "checksum mismatch in array 'weight"),
        (lambda content: content[:-1], r"weight/0\.0 has other than 2048 bytes"),
        (lambda content: b"", "and their files"),
        (lambda content: content * 2, "has other than 2048 bytes"),
        (None, "and their files"),
    ],
    ids=["flipped", "short", "empty", "long", "missing"],
)
def test_a_wrong_remote_chunk_is_an_error_and_changes_nothing(remote, change, said):
    weight = unison.Variable(np.ones((32, 16), np.float32))
    path = Checkpoint(format="orbax", weight=weight).write(f"{remote}/ckpt")
    system, name = fsspec.core.url_to_fs(path)
    [name] = system.glob(f"{name}/tree-*/weight/0.0")
    if change is None:
        system.rm(name)
    else:
        system.pipe_file(name, change(system.cat_file(name)))
    weight.assign(np.zeros((32, 16)))
    with pytest.raises(DataLossError, match=said):
        Checkpoint(weight=weight).read(path)
    assert not weight.numpy().any()


def test_the_tree_of_a_remote_index_is_in_its_folder(remote, monkeypatch):
    checkpoint = Checkpoint(format="orbax", weight=unison.Variable(1.0))
    folder = sharded_archive.ShardedContent.remote_folder
    monkeypatch.setattr(
        sharded_archive.ShardedContent,
        "remote_folder",
        lambda self, path: f"{path}/../{os.path.basename(folder(self, path))}x",
    )
    path = checkpoint.write(f"{remote}/ckpt")
    with pytest.raises(DataLossError, match="expected a name that matches"):
        load_checkpoint(f"{remote}/ckpt/..")
    with pytest.raises(NotFoundError):
        load_checkpoint(path)


NAMES = ["enc::w", "a/b", "a\\b", "a\0b", "..", "", "%2F", "unison.index", "_METADATA", "x" * 300]


@pytest.mark.parametrize("url", ["file", "memory"])
def test_variables_of_any_name_are_saved_remotely(tmp_path, remote, url):
    folder = f"file://{tmp_path}" if url == "file" else remote
    variables = {name: unison.Variable(float(n)) for n, name in enumerate(NAMES)}
    path = Checkpoint(format="orbax", held=variables, unison=variables).save(f"{folder}/ckpt")
    assert latest_checkpoint(folder) == path
    for variable in variables.values():
        variable.assign(-1.0)
    Checkpoint(held=variables).restore(path).expect_partial()
    assert [float(variable) for variable in variables.values()] == list(range(len(NAMES)))


def test_a_write_that_fails_leaves_the_checkpoint_at_its_path(remote, monkeypatch):
    weights = [unison.Variable(np.full(3, 1.0)) for _ in range(4)]
    checkpoint = Checkpoint(format="orbax", weights=weights)
    path = checkpoint.write(f"{remote}/ckpt")
    for weight in weights:
        weight.assign(np.full(3, 2.0))
    write = remote_folder.RemoteFolder.write

    def full(self, name, content):
        if "/2/" in name or ".2/" in name:
            raise ResourceExhaustedError(message="No space is left.")
        write(self, name, content)

    with monkeypatch.context() as patch:
        patch.setattr(remote_folder.RemoteFolder, "write", full)
        with pytest.raises(ResourceExhaustedError):
            checkpoint.write(path)
    Checkpoint(weights=weights).read(path)
    assert weights[3].numpy().tolist() == [1.0] * 3
    assert checkpoint.write(path) == path  # which removes what the other has left
    system, name = fsspec.core.url_to_fs(path)
    assert len(system.ls(name)) == 2  # the index, and one tree
    system.rm(f"{name}/unison.index")  # as one that is killed while it removes it
    checkpoint_formats.remove_checkpoint(path)
    assert not system.exists(name)


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (PermissionError("Access Denied"), PermissionDeniedError),
        (OSError(16, "SlowDown"), UnavailableError),
        (ConnectionResetError("reset"), UnavailableError),
    ],
    ids=lambda each: getattr(each, "__name__", type(each).__name__),
)
def test_a_store_that_does_not_answer_is_no_corrupt_checkpoint(
    remote, monkeypatch, raised, expected
):
    weight = unison.Variable(np.ones((32, 16), np.float32))
    Checkpoint(format="orbax", weight=weight).save(f"{remote}/ckpt")
    system, _ = fsspec.core.url_to_fs(remote)

    def fail(*args, **options):
        raise raised

    monkeypatch.setattr(PATIENCE, "first_wait", 0.001)
    monkeypatch.setattr(type(system), "cat_file", fail)
    with pytest.raises(expected):
        latest_checkpoint(remote)


def test_a_remote_folder_with_other_files_is_not_replaced(remote):
    system, name = fsspec.core.url_to_fs(remote)
    system.pipe_file(f"{name}/mine/thesis.txt", b"all")
    checkpoint = Checkpoint(format="orbax", weight=unison.Variable(1.0))
    with pytest.raises(FailedPreconditionError, match=r"a folder that has 'thesis\.txt'"):
        checkpoint.write(f"{remote}/mine")
    assert system.cat_file(f"{name}/mine/thesis.txt") == b"all"


@pytest.mark.slow
def test_hosts_of_a_large_job_write_equal_shares():
    pytest.importorskip("libtpu")
    from benchmarks.checkpoint_plan import COPIES, bytes_of_hosts, shapes

    state = COPIES * 4 * sum(int(np.prod(shape)) for shape in shapes().values())
    of_hosts = bytes_of_hosts("v5p:4x8x8").values()
    assert sum(of_hosts) == state
    assert max(of_hosts) < 1.001 * state / 64


# -- what a reading found ------------------------------------------------------------------------


def test_a_folder_with_other_files_is_not_replaced(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("all")
    checkpoint = Checkpoint(format="orbax", weight=unison.Variable(1.0))
    with pytest.raises(FailedPreconditionError, match=r"a folder that has 'thesis.txt'"):
        checkpoint.write(tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "all"
    with pytest.raises(FailedPreconditionError, match="Expected no folder"):
        checkpoint.write(saved_by_pytree(tmp_path / "saved"))


def test_many_small_values_are_inside_of_compressed_nodes(tmp_path):
    zeros = [unison.Variable(np.zeros(250, np.float32)) for _ in range(150)]
    path = Checkpoint(format="orbax", zeros=zeros).save(tmp_path / "ckpt")
    assert latest_checkpoint(tmp_path) == path


def test_a_lost_file_of_another_programs_checkpoint_is_an_error(tmp_path):
    path = saved_in_many_files(tmp_path / "saved")
    (path / "params.w" / "0.0").unlink()
    with pytest.raises(DataLossError, match="of Orbax is corrupt"):
        load_checkpoint(path).get_tensor("params/w")


def test_a_shape_beyond_the_files_is_corrupt(tmp_path):
    path = saved_in_many_files(tmp_path / "saved")
    about = path / "params.w" / ".zarray"
    about.write_text(json.dumps(json.loads(about.read_text()) | {"shape": [2**57, 2]}))
    with pytest.raises(DataLossError, match="and their files"):
        load_checkpoint(path)


def test_only_the_counter_is_made_wide(tmp_path):
    class Counter(unison.Module):
        def __init__(self):
            self.w = unison.Variable(np.float32([1.5, 2.5]))

    module = unison.Module()
    module.save_counter = unison.Variable(np.float32(1.5))
    module._iterations = unison.Variable(np.float32(0.75))
    for format in ("archive", "orbax", "tensorflow"):
        path = Checkpoint(module, format=format).write(tmp_path / f"{format}-a")
        assert load_checkpoint(path).get_tensor(f"save_counter/{VALUE}") == 1.5
        assert load_checkpoint(path).get_tensor(f"_iterations/{VALUE}") == 0.75
        other = unison.Module()
        other.save_counter = Counter()
        path = Checkpoint(other, format=format).write(tmp_path / f"{format}-b")
        assert load_checkpoint(path).get_tensor(f"save_counter/w/{VALUE}").tolist() == [1.5, 2.5]


def test_values_that_wait_for_their_objects_say_that_the_checkpoint_was_deleted(tmp_path):
    parts = {"a": unison.Variable(np.ones(300)), "b": unison.Variable(np.ones(300))}
    path = Checkpoint(format="orbax", parts=unison.Module(), **parts).write(tmp_path / "ckpt")
    restored = Checkpoint(a=unison.Variable(np.zeros(300)))
    status = restored.read(path).expect_partial()
    checkpoint_formats.remove_checkpoint(path)
    with pytest.raises(NotFoundError, match="was deleted or replaced while values"):
        restored.b = unison.Variable(np.zeros(300))
    del status


AT_EXIT = """
import sys
import numpy as np
import unison
from unison.train import Checkpoint, CheckpointOptions

weight = unison.Variable(np.ones((4096, 1024), np.float32))
Checkpoint(format="orbax", weight=weight).save(
    f"{sys.argv[1]}/ckpt", CheckpointOptions(enable_async=True)
)
"""


def test_an_asynchronous_one_is_written_when_the_program_ends(tmp_path):
    run_program(AT_EXIT, str(tmp_path))
    weight = load_checkpoint(latest_checkpoint(tmp_path)).get_tensor(f"weight/{VALUE}")
    assert weight.sum() == 4096 * 1024


def test_values_of_a_replaced_checkpoint_are_not_called_corrupt(tmp_path):
    parts = {"a": unison.Variable(np.ones(300)), "b": unison.Variable(np.ones(300))}
    checkpoint = Checkpoint(format="orbax", **parts)
    path = checkpoint.write(tmp_path / "best")
    restored = Checkpoint(a=unison.Variable(np.zeros(300)))
    status = restored.read(path).expect_partial()
    parts["b"].assign(np.full(300, 2.0))
    checkpoint.write(path)
    with pytest.raises(NotFoundError, match="was deleted or replaced while values"):
        restored.b = unison.Variable(np.zeros(300))
    del status


def test_a_chunk_is_read_once(tmp_path, monkeypatch):
    weight = unison.Variable(np.arange(64, dtype=np.float32).reshape(16, 4))
    path = Checkpoint(format="orbax", weight=weight).write(tmp_path / "ckpt")
    with zero(4).scope():
        divided = unison.Variable(np.zeros((16, 4), np.float32))
    assert divided.cell.is_divided
    read = []
    start_reading = orbax_format.TreeReader.start_reading

    def counting(self, *args):
        read.append(args)
        return start_reading(self, *args)

    monkeypatch.setattr(orbax_format.TreeReader, "start_reading", counting)
    Checkpoint(weight=divided).read(path).assert_consumed()
    np.testing.assert_array_equal(divided.numpy(), weight.numpy())
    assert len(read) == 1


def test_a_tree_of_an_early_release_says_nothing_of_its_database(tmp_path):
    for save in (saved_by_pytree, saved_in_many_files):
        path = save(tmp_path / save.__name__)
        metadata = json.loads((path / "_METADATA").read_text())
        del metadata["use_ocdbt"]
        (path / "_METADATA").write_text(json.dumps(metadata))
        np.testing.assert_array_equal(
            load_checkpoint(path).get_tensor("params/w"), TREE["params"]["w"]
        )


IN_ANOTHER_THREAD = """
import sys, threading, time
import numpy as np
import unison
from unison.train import Checkpoint, CheckpointOptions

weight = unison.Variable(np.ones((2048, 1024), np.float32))
checkpoint = Checkpoint(weight=weight)
checkpoint.save(f"{sys.argv[1]}/ckpt", CheckpointOptions(enable_async=True))

def train():
    while threading.main_thread().is_alive():
        time.sleep(0.01)
    checkpoint.save(f"{sys.argv[1]}/ckpt", CheckpointOptions(enable_async=True))

threading.Thread(target=train).start()
"""


def test_a_thread_that_outlives_the_main_one_saves(tmp_path):
    run_program(IN_ANOTHER_THREAD, str(tmp_path))
    assert latest_checkpoint(tmp_path) == f"{tmp_path}/ckpt-2"
