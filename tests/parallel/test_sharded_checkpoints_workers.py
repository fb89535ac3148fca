"""Checkpoints in parts: two workers write theirs, and anybody restores them."""

import glob
import os
import pathlib
import signal
from typing import NamedTuple

import numpy as np
import pytest

from unison import errors
from unison.runtime import devices
from unison.train import Checkpoint, CheckpointManager, latest_checkpoint, load_checkpoint
from warm_workers import launch

SECONDS = 150
VALUE = ".ATTRIBUTES/VARIABLE_VALUE"
ROWS, COLUMNS = 64, 48


@pytest.fixture(autouse=True, scope="module")
def four_devices():
    """Starts JAX with the four logical devices before reading a checkpoint does so with one."""
    devices.prepare_backend()


def on_workers(program, *args, workers=2, devices=2):
    return launch(program, workers, args, devices, timeout=SECONDS, on_line=lambda *line: None)


def weights_of(strategy, factor=1.0):
    """A divided variable, one that all have, and a sum of copies."""
    import unison

    with strategy.scope():
        return {
            "divided": unison.Variable(
                factor * np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS),
                name="divided",
            ),
            "small": unison.Variable(np.float32(factor * 3.0), name="small"),
            "total": unison.Variable(
                np.float32(0.0),
                name="total",
                synchronization=unison.VariableSynchronization.ON_READ,
                aggregation=unison.VariableAggregation.SUM,
            ),
        }


def zero(num_replicas):
    import unison

    return unison.ModelParallelStrategy(mesh={"batch": num_replicas}, zero=3)


def check(weights, factor=1.0):
    expected = factor * np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS)
    np.testing.assert_array_equal(weights["divided"].numpy(), expected)
    assert float(weights["small"].numpy()) == factor * 3.0
    assert float(weights["total"].numpy()) == 8.0


def save(folder):
    """Saves at once and in the background; returns the bytes that this worker has written."""
    import jax

    from unison.train import CheckpointOptions

    chunks = bytes_of_chunks()
    strategy = zero(4)
    weights = weights_of(strategy)
    assert weights["divided"].cell.is_divided
    strategy.run(lambda: weights["total"].assign_add(2.0))
    checkpoint = Checkpoint(**weights)
    manager = CheckpointManager(checkpoint, f"{folder}/run", max_to_keep=2)
    for _ in range(3):
        manager.save()
    path = manager.save(options=CheckpointOptions(enable_async=True))
    weights["small"].assign(9.0)  # not in that checkpoint
    manager.sync()
    own = glob.glob(f"{path}/ocdbt.process_{jax.process_index()}/**", recursive=True)
    in_files = sum(os.path.getsize(found) for found in own if os.path.isfile(found))
    return manager.checkpoints, in_files or chunks[-1]


def bytes_of_chunks():
    """Returns the list of the bytes that this process writes into remote folders from now on."""
    from unison.train.remote_tree import RemoteTreeWriter

    written, write = [], RemoteTreeWriter.write

    def counting(self, arrays):
        written.append(sum(each.nbytes for own in arrays.values() for each in own.chunks.values()))
        write(self, arrays)

    RemoteTreeWriter.write = counting
    return written


class Saved(NamedTuple):
    """Checkpoints that two workers have saved.

    Attributes:
        folder: The local folder they are in.
        url: The folder, as the workers name it.
        results: Their checkpoints, and how many bytes each has written.
    """

    folder: pathlib.Path
    url: str
    results: list


@pytest.fixture(scope="module", params=["", "file://"], ids=["local", "remote"])
def saved(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("parts")
    url = f"{request.param}{folder}"
    return Saved(folder, url, on_workers(save, url))


def test_each_worker_writes_its_part(saved):
    array = ROWS * COLUMNS * 4
    for _, written in saved.results:
        assert array / 2 <= written < array / 2 + 3000  # what OCDBT adds


def test_old_checkpoints_are_deleted_with_their_folders(saved):
    assert sorted(os.listdir(saved.folder / "run")) == ["checkpoint", "ckpt-3", "ckpt-4"]
    expected = [f"{saved.url}/run/ckpt-3", f"{saved.url}/run/ckpt-4"]
    assert saved.results[0][0] == saved.results[1][0] == expected


def chunks_read():
    """Returns the list of the arrays and regions that this process reads from now on."""
    from unison.train import sharded_archive

    read = []

    def counted(start_reading):
        def counting(self, of_array, region):
            read.append((of_array, region))
            return start_reading(self, of_array, region)

        return counting

    for reader in (sharded_archive.TreeReader, sharded_archive.RemoteTreeReader):
        reader.start_reading = counted(reader.start_reading)
    return read


def restore(path, num_replicas):
    read = chunks_read()
    weights = weights_of(zero(num_replicas), factor=0.0)
    Checkpoint(**weights).restore(path).assert_consumed()
    check(weights)
    return [region for of_array, region in read if of_array == ("divided",)]


def test_workers_of_the_same_number_read_their_parts(saved):
    first, second = on_workers(restore, f"{saved.url}/run/ckpt-4", 4)
    rows = ROWS // 4
    assert sorted(first) == [((row, row + rows), (0, COLUMNS)) for row in (0, rows)]
    assert sorted(second) == [((row, row + rows), (0, COLUMNS)) for row in (2 * rows, 3 * rows)]


def test_one_process_restores_what_two_have_saved(saved):
    import unison

    path = latest_checkpoint(f"{saved.url}/run")
    assert path == f"{saved.url}/run/ckpt-4"
    for strategy in (unison.OneDeviceStrategy("CPU:0"), zero(2)):
        weights = weights_of(strategy, factor=0.0)
        Checkpoint(**weights).restore(path).assert_consumed()
        check(weights)
    divided = load_checkpoint(path).get_tensor(f"divided/{VALUE}")
    assert divided.shape == (ROWS, COLUMNS)


def restore_another_division(path):
    weights = weights_of(zero(3), factor=0.0)  # 64 rows on three: the columns are divided
    assert weights["divided"].cell.is_divided
    Checkpoint(**weights).restore(path).assert_consumed()
    check(weights)


def test_three_workers_restore_what_two_have_saved(saved):
    on_workers(restore_another_division, f"{saved.url}/run/ckpt-4", workers=3, devices=1)


def fall_back(folder):
    import unison  # noqa: F401

    weights = weights_of(zero(4), factor=0.0)
    manager = CheckpointManager(Checkpoint(**weights), folder, max_to_keep=2)
    path = manager.restore_or_initialize()
    check(weights)
    return path


def test_workers_agree_on_the_last_whole_one(saved, tmp_path):
    """A flipped bit in a part of one worker's."""
    import shutil

    shutil.copytree(saved.folder / "run", tmp_path / "run")
    of_second = tmp_path / "run/ckpt-4/ocdbt.process_1"
    flip_a_bit(of_second if of_second.exists() else tmp_path / "run/ckpt-4")
    run = saved.url.replace(str(saved.folder), f"{tmp_path}/run")
    assert on_workers(fall_back, run) == [f"{run}/ckpt-3"] * 2


def flip_a_bit(folder):
    """Flips a bit in the largest file of a folder, where the arrays are."""
    largest = max(folder.glob("**/*"), key=lambda path: path.stat().st_size * path.is_file())
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)


def save_apart(folder):
    import jax

    import unison

    strategy = zero(4)
    weights = weights_of(strategy)
    strategy.run(lambda: weights["total"].assign_add(2.0))
    index = jax.process_index()
    path = Checkpoint(**weights).write(f"{folder}/of-{index}")
    try:
        Checkpoint(format="orbax", **weights).write(f"{folder}/explicit-{index}")
    except errors.FailedPreconditionError as error:
        refused = str(error)
    mirrored = unison.Variable(np.float32(index))
    Checkpoint(format="orbax", mirrored=mirrored).write(f"{folder}/mirrored-{index}")
    return path, refused


def test_workers_with_a_path_each_write_all_to_it(tmp_path):
    results = on_workers(save_apart, str(tmp_path))
    for index, (path, refused) in enumerate(results):
        assert os.path.isfile(f"{path}.index")
        weights = weights_of(zero(2), factor=0.0)
        Checkpoint(**weights).read(path).assert_consumed()
        check(weights)
        assert "Let every worker call save with the same path" in refused
        assert (
            load_checkpoint(f"{tmp_path}/mirrored-{index}").get_tensor(f"mirrored/{VALUE}") == index
        )


def writer_into(folder):
    """The class by which a worker writes its chunks into a folder."""
    from unison.train import sharded_archive

    return sharded_archive.RemoteTreeWriter if "://" in folder else sharded_archive.TreeWriter


def fail_in_one(folder):
    import jax

    weights = weights_of(zero(4))
    writer = writer_into(folder)
    write = writer.write

    def full(self, arrays):
        if jax.process_index() == 1:
            raise errors.ResourceExhaustedError(message="No space is left to write it.")
        write(self, arrays)

    writer.write = full
    try:
        Checkpoint(**weights).save(f"{folder}/ckpt")
    except errors.ResourceExhaustedError as error:
        raised = str(error)
    latest = latest_checkpoint(folder)
    writer.write = write
    Checkpoint(**weights).save(f"{folder}/ckpt")
    return raised, latest


@pytest.mark.parametrize("url", ["", "file://"])
def test_the_error_of_one_worker_is_raised_on_all_and_nothing_is_left(tmp_path, url):
    (first, latest), (second, _) = on_workers(fail_in_one, f"{url}{tmp_path}")
    assert first.startswith("Worker 1 could not write")
    assert "No space is left" in first
    assert "No space is left" in second
    assert latest is None
    assert sorted(os.listdir(tmp_path)) == ["checkpoint", "ckpt-1"]


def die_while_writing(folder, method):
    import jax

    weights = weights_of(zero(4))
    write = getattr(Checkpoint(**weights), method)
    write(f"{folder}/ckpt")
    weights["small"].assign(-1.0)
    if jax.process_index() == 1:
        writer_into(folder).write = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
    write(f"{folder}/ckpt")


def test_a_worker_that_is_killed_while_it_writes_leaves_the_last_one_whole(tmp_path):
    with pytest.raises(RuntimeError, match="SIGKILL"):
        on_workers(die_while_writing, str(tmp_path), "write")
    weights = weights_of(zero(2), factor=0.0)
    Checkpoint(**weights).read(tmp_path / "ckpt").expect_partial()
    assert float(weights["small"].numpy()) == 3.0
    Checkpoint(format="orbax", **weights).write(tmp_path / "ckpt")  # removes what it has left
    assert os.listdir(tmp_path) == ["ckpt"]


def save_what_differs(folder):
    """Values of each worker's own, of different sizes, beside those that all have."""
    import jax

    import unison

    strategy = zero(4)
    index = jax.process_index()
    own = unison.Variable(np.full(1000 if index == 0 else 10, index, np.float32))
    best = unison.Variable(np.float32(index))
    weights, more = weights_of(strategy), weights_of(strategy)
    objects = {"own": own, "best": best, "more": more, **weights}
    path = Checkpoint(**objects).write(f"{folder}/ckpt")
    try:
        Checkpoint(other=weights if index else more["divided"], **weights).write(f"{folder}/other")
    except errors.FailedPreconditionError as error:
        return path, str(error)


def test_of_what_differs_the_first_workers_is_saved(tmp_path):
    (path, refused), _ = on_workers(save_what_differs, str(tmp_path))
    reader = load_checkpoint(path)
    assert reader.get_tensor(f"own/{VALUE}").tolist() == [0.0] * 1000
    assert reader.get_tensor(f"best/{VALUE}") == 0.0
    expected = np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS)
    for name in ("divided", "more/divided"):
        np.testing.assert_array_equal(reader.get_tensor(f"{name}/{VALUE}"), expected)
    assert "The workers save different objects" in refused
    assert os.listdir(tmp_path) == ["ckpt"]


def test_what_a_killed_worker_has_left_in_a_remote_folder_is_no_checkpoint(tmp_path):
    with pytest.raises(RuntimeError, match="SIGKILL"):
        on_workers(die_while_writing, f"file://{tmp_path}", "save")
    path = latest_checkpoint(f"file://{tmp_path}")
    assert path == f"file://{tmp_path}/ckpt-1"
    weights = weights_of(zero(2), factor=0.0)
    Checkpoint(**weights).read(path).expect_partial()
    assert float(weights["small"].numpy()) == 3.0
    left = f"file://{tmp_path}/ckpt-2"
    with pytest.raises(errors.NotFoundError):
        load_checkpoint(left)
    Checkpoint(format="orbax", **weights).write(left)
    assert load_checkpoint(left).get_tensor(f"small/{VALUE}") == 3.0
    assert len(os.listdir(tmp_path / "ckpt-2")) == 2  # the index, and one tree


def save_in_own_memory(url):
    """A file system of which each process has its own."""
    weights = weights_of(zero(4))
    path = Checkpoint(**weights).write(f"{url}/ckpt")
    shape = load_checkpoint(path).get_tensor(f"divided/{VALUE}").shape
    try:
        Checkpoint(format="orbax", **weights).write(f"{url}/explicit")
    except errors.FailedPreconditionError as error:
        return shape, str(error)


def test_workers_with_separate_remote_file_systems_gather():
    for shape, refused in on_workers(save_in_own_memory, "memory://parts"):
        assert shape == (ROWS, COLUMNS)
        assert "Let every worker call save" in refused


def save_on_separate_disks(folder):
    import jax

    from unison.train import shared_path

    weights = weights_of(zero(4))
    if jax.process_index() == 1:
        shared_path._sees = lambda *args: False
    path = Checkpoint(**weights).write(f"{folder}/ckpt")
    try:
        Checkpoint(format="orbax", **weights).write(f"{folder}/explicit")
    except errors.FailedPreconditionError as error:
        return path, str(error)


def test_workers_with_separate_disks_gather(tmp_path):
    for path, refused in on_workers(save_on_separate_disks, str(tmp_path)):
        assert load_checkpoint(path).get_tensor(f"divided/{VALUE}").shape == (ROWS, COLUMNS)
        assert "Let every worker call save" in refused
    assert os.listdir(tmp_path) == ["ckpt.index"]


def read_one_of_several(path):
    read = chunks_read()
    Checkpoint(divided=weights_of(zero(4), factor=0.0)["divided"]).read(path).expect_partial()
    return len(read)


def test_a_worker_that_restores_a_part_reads_that(saved):
    assert on_workers(read_one_of_several, f"{saved.url}/run/ckpt-4") == [2, 2]


def fail_before_the_others_come(folder):
    import jax

    from unison.train import shared_path

    weights = weights_of(zero(4))
    mark_beside = shared_path._mark_beside

    def full(path):
        raise errors.ResourceExhaustedError(message="No space is left to write the mark.")

    if jax.process_index() == 0:
        shared_path._mark_beside = full
    try:
        Checkpoint(**weights).write(f"{folder}/ckpt")
    except errors.ResourceExhaustedError as error:
        raised = str(error)
    shared_path._mark_beside = mark_beside
    Checkpoint(**weights).write(f"{folder}/ckpt")
    return raised


def test_an_error_of_the_first_worker_is_raised_on_all(tmp_path):
    for raised in on_workers(fail_before_the_others_come, str(tmp_path)):
        assert "No space is left to write the mark" in raised
    assert os.listdir(tmp_path) == ["ckpt"]
