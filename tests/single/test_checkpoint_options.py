"""Asynchronous saving, full disks, and random generators in checkpoints."""

import os
import resource
import subprocess
import threading

import numpy as np
import pytest

import unison
import unison.tf as tf
from keras_comparison import mirrored
from subprocess_program import run_program
from unison.errors import ResourceExhaustedError
from unison.storage import writers
from unison.train import (
    Checkpoint,
    CheckpointManager,
    CheckpointOptions,
    archive,
    archive_content,
    latest_checkpoint,
)

ASYNC = CheckpointOptions(enable_async=True)


@pytest.fixture
def prefix(tmp_path):
    return str(tmp_path / "ckpt")


@pytest.fixture
def slow_disk(monkeypatch):
    """Lets nothing be written until it is told to go on."""
    may_write = threading.Event()

    def write_archive(*args):
        assert may_write.wait(60)
        archive.write_archive(*args)

    monkeypatch.setattr(archive_content, "write_archive", write_archive)
    yield may_write
    may_write.set()


@pytest.mark.parametrize(
    "options", [ASYNC, CheckpointOptions(experimental_enable_async_checkpoint=True)]
)
def test_values_are_those_of_the_moment_of_the_save(prefix, slow_disk, options):
    value = unison.Variable(np.float32(1.0))
    checkpoint = Checkpoint(value=value)
    path = checkpoint.save(prefix, options)
    value.assign(2.0)
    assert latest_checkpoint(os.path.dirname(prefix)) is None
    slow_disk.set()
    checkpoint.sync()
    assert latest_checkpoint(os.path.dirname(prefix)) == path
    checkpoint.restore(path)
    assert float(value) == 1.0


def test_next_save_and_restoring_wait_for_what_is_written(prefix, slow_disk):
    value = unison.Variable(np.float32(1.0))
    checkpoint = Checkpoint(value=value)
    path = checkpoint.save(prefix, ASYNC)
    value.assign(2.0)
    threading.Timer(0.3, slow_disk.set).start()
    checkpoint.restore(path)
    assert float(value) == 1.0


@pytest.mark.parametrize("act", ["sync", "save"])
def test_error_of_the_thread_is_raised_once_where_somebody_waits(prefix, monkeypatch, act):
    def refuse(*args):
        raise ResourceExhaustedError(message="the disk is full")

    checkpoint = Checkpoint(value=unison.Variable(1.0))
    with monkeypatch.context() as patched:
        patched.setattr(archive_content, "write_archive", refuse)
        checkpoint.save(prefix, ASYNC)
        with pytest.raises(ResourceExhaustedError, match="the disk is full"):
            checkpoint.sync() if act == "sync" else checkpoint.save(prefix)
    checkpoint.save(prefix)
    checkpoint.sync()


def test_manager_counts_what_is_written(tmp_path, slow_disk):
    manager = CheckpointManager(Checkpoint(value=unison.Variable(1.0)), tmp_path, max_to_keep=2)
    path = manager.save(options=ASYNC)
    assert (manager.checkpoints, manager.latest_checkpoint) == ([], None)
    slow_disk.set()
    for _ in range(2):
        manager.save(options=ASYNC)
    manager.sync()
    assert path not in manager.checkpoints
    assert sorted(os.listdir(tmp_path)) == ["checkpoint", "ckpt-2.index", "ckpt-3.index"]


def test_callbacks_are_told_the_path(prefix):
    told = []
    options = CheckpointOptions(experimental_write_callbacks=[told.append])
    path = Checkpoint(value=unison.Variable(1.0)).write(prefix, options)
    assert told == [path]


@pytest.mark.parametrize("act", ["sync", "restore", "save", "save in the background"])
def test_callbacks_in_the_thread_may_use_the_checkpoint(prefix, slow_disk, act):
    value = unison.Variable(np.float32(1.0))
    checkpoint = Checkpoint(value=value)
    acts = {
        "sync": lambda path: checkpoint.sync(),
        "restore": checkpoint.restore,
        "save": lambda path: checkpoint.save(prefix),
        "save in the background": lambda path: checkpoint.save(prefix, ASYNC),
    }
    options = CheckpointOptions(enable_async=True, experimental_write_callbacks=[acts[act]])

    def save_twice():
        checkpoint.save(prefix, options)
        checkpoint.save(prefix)
        checkpoint.sync()

    saving = threading.Thread(target=save_twice, daemon=True)
    saving.start()
    threading.Timer(0.3, slow_disk.set).start()  # the second save waits for the first one by then
    saving.join(60)
    assert not saving.is_alive()
    last = 3 if act.startswith("save") else 2
    assert latest_checkpoint(os.path.dirname(prefix)) == f"{prefix}-{last}"


PROGRAM_THAT_ENDS = """
import sys
import numpy as np
import unison
from unison.train import Checkpoint, CheckpointOptions
value = unison.Variable(np.ones(3_000_000, np.float32))
Checkpoint(value=value).save(sys.argv[1], CheckpointOptions(enable_async=True))
"""


def test_end_of_the_program_waits_for_what_is_written(prefix):
    assert run_program(PROGRAM_THAT_ENDS, prefix, imported=("jax", "unison")).returncode == 0
    assert latest_checkpoint(os.path.dirname(prefix)) == f"{prefix}-1"


# -- full disks ----------------------------------------------------------------------------------


def test_file_that_may_not_grow_leaves_the_checkpoint_that_was_there(prefix):
    value = unison.Variable(np.zeros(100_000, np.float32))
    checkpoint = Checkpoint(value=value)
    path = checkpoint.save(prefix)
    value.assign(np.ones(100_000, np.float32))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(ResourceExhaustedError, match="No space is left"):
            checkpoint.save(prefix)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert latest_checkpoint(os.path.dirname(prefix)) == path
    assert sorted(os.listdir(os.path.dirname(prefix))) == ["checkpoint", "ckpt-1.index"]


# -- what killed writers leave -------------------------------------------------------------------


def test_what_a_killed_writer_left_is_deleted_and_what_one_writes_is_not(tmp_path):
    dead = subprocess.Popen(["true"])
    dead.wait()
    here, own = writers.machine(), os.getpid()
    abandoned = [f"{here}-{dead.pid}-0-0a1b", f"{here}-{own}-1-0a1b"]  # whose number is ours now
    written = [f"{here}-{own}-{writers.started_at(own)}-0a1b", f"elsewhere-{dead.pid}-0-0a1b"]
    for writer in [*abandoned, *written]:
        (tmp_path / f".ckpt-1.index.{writer}.tmp").write_text("a part")
    CheckpointManager(Checkpoint(), tmp_path, 2)
    assert set(os.listdir(tmp_path)) == {f".ckpt-1.index.{writer}.tmp" for writer in written}


# -- random generators ---------------------------------------------------------------------------


@pytest.mark.parametrize("replicas", [1, 2])
def test_random_generator_goes_on_where_it_was(prefix, replicas):
    with mirrored(replicas).scope():
        generator = tf.random.Generator.from_seed(3)
        other = tf.random.Generator.from_seed(4)
    generator.normal([2])
    path = Checkpoint(generator=generator).write(prefix)
    following = np.asarray(generator.normal([3]))
    Checkpoint(generator=other).read(path).assert_consumed()
    np.testing.assert_equal(np.asarray(other.normal([3])), following)


@pytest.mark.parametrize(
    ("option", "value", "remedy"),
    [
        ("experimental_skip_slot_variables", True, r"Checkpoint\(model=model\)"),
        ("experimental_sharding_callback", print, "shards"),
    ],
)
def test_an_option_that_checkpoints_cannot_follow_is_refused(option, value, remedy):
    assert not getattr(CheckpointOptions(), option)
    with pytest.raises(ValueError, match=f"{option} is not supported by Unison: .*{remedy}"):
        CheckpointOptions(**{option: value})
