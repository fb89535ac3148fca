"""Symbolic links in folders with checkpoints: none that leads out of the folder is followed."""

import json
import os

import numpy as np
import orbax.checkpoint as ocp
import pytest

import unison
from unison.errors import DataLossError
from unison.train import Checkpoint, CheckpointManager, latest_checkpoint, load_checkpoint

#: The chunks of its arrays are files that anybody can make: no checksums, no compression.
TREE = {"w": np.arange(600, dtype=np.float32)}


def save_files(folder, tree):
    """A checkpoint of another program, each of whose chunks is a file."""
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=False)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(folder, args=ocp.args.PyTreeSave(tree))


def chunk_of(folder):
    return folder / "w" / "0"


def linked(path, target):
    """Puts a link in place of a file or a folder."""
    path.rename(target) if not target.exists() else path.unlink()
    path.symlink_to(target)


def write_parts(folder):
    """A checkpoint of Unison in parts."""
    variable = unison.Variable(np.arange(600, dtype=np.float32))
    Checkpoint(format="orbax", w=variable).write(folder)


def read(folder):
    variable = unison.Variable(np.zeros(600, np.float32))
    Checkpoint(w=variable).read(folder).expect_partial()
    return variable.numpy()


def test_a_chunk_that_is_a_link_to_a_file_elsewhere_is_not_read(tmp_path):
    save_files(tmp_path / "ckpt", TREE)
    (tmp_path / "private").write_bytes(b"secret" * 400)
    linked(chunk_of(tmp_path / "ckpt"), tmp_path / "private")
    with pytest.raises(DataLossError, match=r"ckpt/w/0 leads out of the folder .*Copy what it"):
        load_checkpoint(tmp_path / "ckpt")


@pytest.mark.parametrize("name", ["w", "_METADATA"])
def test_parts_of_a_tree_that_are_links_to_elsewhere_are_not_read(tmp_path, name):
    save_files(tmp_path / "ckpt", TREE)
    linked(tmp_path / "ckpt" / name, tmp_path / "elsewhere")
    with pytest.raises(DataLossError, match="leads out of the folder"):
        load_checkpoint(tmp_path / "ckpt")


def test_an_item_of_a_step_that_is_a_link_to_elsewhere_is_not_read(tmp_path):
    save_files(tmp_path / "elsewhere", TREE)
    (tmp_path / "step").mkdir()
    (tmp_path / "step" / "params").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataLossError, match="step/params leads out of the folder"):
        load_checkpoint(tmp_path / "step")


@pytest.mark.parametrize("name", ["unison.index", "d", "manifest.ocdbt", "ocdbt.process_0"])
def test_files_of_a_checkpoint_in_parts_that_are_links_to_elsewhere_are_not_read(tmp_path, name):
    write_parts(tmp_path / "ckpt")
    linked(tmp_path / "ckpt" / name, tmp_path / "elsewhere")
    with pytest.raises(DataLossError, match=f"ckpt/{name} leads out of the folder"):
        read(tmp_path / "ckpt")


@pytest.mark.timeout(30)
def test_a_chunk_that_is_a_pipe_is_not_waited_for(tmp_path):
    save_files(tmp_path / "ckpt", TREE)
    chunk_of(tmp_path / "ckpt").unlink()
    os.mkfifo(chunk_of(tmp_path / "ckpt"))
    with pytest.raises(DataLossError, match="ckpt/w/0 is a pipe or a device"):
        load_checkpoint(tmp_path / "ckpt")


def test_links_within_a_checkpoint_are_followed(tmp_path):
    save_files(tmp_path / "ckpt", TREE)
    linked(chunk_of(tmp_path / "ckpt"), tmp_path / "ckpt" / "moved")
    np.testing.assert_array_equal(load_checkpoint(tmp_path / "ckpt").get_tensor("w"), TREE["w"])


@pytest.mark.parametrize("save", [write_parts, lambda folder: save_files(folder, TREE)], ids=[0, 1])
def test_a_checkpoint_may_be_given_as_a_link(tmp_path, save):
    save(tmp_path / "ckpt")
    (tmp_path / "link").symlink_to(tmp_path / "ckpt")
    np.testing.assert_array_equal(read(tmp_path / "link"), TREE["w"])


# -- which one is the latest ---------------------------------------------------------------------


def write(path, value=1.0):
    path.parent.mkdir(exist_ok=True)
    return Checkpoint(a=unison.Variable(value)).write(path)


def name_latest(folder, name):
    folder.mkdir(exist_ok=True)
    (folder / "checkpoint").write_text(f"model_checkpoint_path: {json.dumps(str(name))}\n")


def link_to_the_folder(here, elsewhere):
    (here / "sub").symlink_to(elsewhere)
    return "sub/ckpt-1"


def link_to_the_file(here, elsewhere):
    (here / "ckpt-1.index").symlink_to(elsewhere / "ckpt-1.index")
    return "ckpt-1"


@pytest.mark.parametrize("link", [link_to_the_folder, link_to_the_file])
def test_a_checkpoint_behind_a_link_to_elsewhere_is_not_the_latest(tmp_path, link, caplog):
    write(tmp_path / "elsewhere" / "ckpt-1")
    (tmp_path / "here").mkdir()
    name_latest(tmp_path / "here", link(tmp_path / "here", tmp_path / "elsewhere"))
    assert latest_checkpoint(tmp_path / "here") is None
    assert "not in its folder" in caplog.text


def test_an_earlier_checkpoint_that_is_a_link_to_elsewhere_is_not_taken(tmp_path, caplog):
    write(tmp_path / "elsewhere" / "ckpt-1")
    here = tmp_path / "here"
    name_latest(here, "ckpt-2")  # which is not there
    link_to_the_file(here, tmp_path / "elsewhere")
    assert latest_checkpoint(here) is None
    assert "not in its folder" in caplog.text


def test_a_list_of_checkpoints_that_is_a_link_to_elsewhere_is_not_read(tmp_path, caplog):
    name_latest(tmp_path / "elsewhere", "ckpt-1")
    write(tmp_path / "here" / "ckpt-1")
    (tmp_path / "here" / "checkpoint").symlink_to(tmp_path / "elsewhere" / "checkpoint")
    assert latest_checkpoint(tmp_path / "here") is None
    assert "a link of what is not in its folder" in caplog.text


@pytest.mark.parametrize("is_absolute", [False, True])
def test_the_folder_itself_may_be_a_link(tmp_path, is_absolute):
    path = write(tmp_path / "real" / "ckpt-1")
    name_latest(tmp_path / "real", path if is_absolute else "ckpt-1")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    found = latest_checkpoint(tmp_path / "link")
    assert os.path.realpath(found) == os.path.realpath(path)


def test_links_within_the_folder_are_followed(tmp_path):
    (tmp_path / "here").mkdir()
    path = write(tmp_path / "here" / "steps" / "ckpt-1")
    (tmp_path / "here" / "sub").symlink_to("steps")
    name_latest(tmp_path / "here", "sub/ckpt-1")
    assert os.path.realpath(latest_checkpoint(tmp_path / "here")) == os.path.realpath(path)


def test_a_manager_in_a_folder_that_is_a_link_goes_on(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    variable = unison.Variable(1.0)
    for _ in range(2):
        manager = CheckpointManager(Checkpoint(v=variable), tmp_path / "link", 1)
        manager.restore_or_initialize()
        manager.save()
    assert [os.path.basename(path) for path in manager.checkpoints] == ["ckpt-2"]


def test_remote_folders_have_their_latest_checkpoint():
    folder = "memory://links/run"
    manager = CheckpointManager(Checkpoint(v=unison.Variable(1.0)), folder, 2)
    manager.save()
    assert latest_checkpoint(folder) == f"{folder}/ckpt-1"
