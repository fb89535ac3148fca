"""Files that appear whole: written aside and renamed, and what killed writers leave."""

import os
import stat
from pathlib import Path

import pytest

from unison.errors import (
    DataLossError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
)
from unison.storage import atomic, files, writers


def content_of(path):
    return path.read_bytes()


# -- appearing whole -----------------------------------------------------------------------------


def test_a_file_takes_its_place_when_the_block_ends(tmp_path):
    path = tmp_path / "new folder" / "file"
    with atomic.replacing(str(path)) as file:
        file.write(b"whole")
        assert not path.exists()
    assert content_of(path) == b"whole"
    assert os.listdir(path.parent) == ["file"]


def test_what_was_there_stays_when_the_block_fails(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"before")
    with pytest.raises(TypeError), atomic.replacing(str(path)) as file:
        file.write(b"part" + file.name)  # a name is no bytes
    assert content_of(path) == b"before"
    assert os.listdir(tmp_path) == ["file"]


def test_a_private_file_is_its_owners_from_the_beginning(tmp_path):
    with atomic.replacing(str(tmp_path / "secret"), mode=0o600) as file:
        assert stat.S_IMODE(os.fstat(file.fileno()).st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600


def test_of_two_writers_that_make_a_file_the_first_one_makes_it(tmp_path):
    path = str(tmp_path / "once")
    for content in (b"first", b"second"):
        with atomic.aside(path) as new:
            with new.opened() as file:
                file.write(content)
            assert new.publish_if_absent() == (content == b"first")
    assert content_of(tmp_path / "once") == b"first"
    assert os.listdir(tmp_path) == ["once"]


def test_a_folder_takes_the_place_of_another_one(tmp_path):
    path = tmp_path / "folder"
    for name in ("one", "two"):
        with atomic.replacing_folder(str(path), last=name) as aside:
            Path(aside, name).touch()
        assert os.listdir(path) == [name]
    assert os.listdir(tmp_path) == ["folder"]


def test_a_link_in_place_of_a_file_aside_is_not_followed(tmp_path, monkeypatch):
    monkeypatch.setattr(atomic.secrets, "token_hex", lambda size: "0a1b")
    (tmp_path / "victim").write_bytes(b"precious")
    link = tmp_path / f".file.{writers.own_name()}-0a1b.tmp"
    link.symlink_to(tmp_path / "victim")
    with pytest.raises(FileExistsError), atomic.replacing(str(tmp_path / "file")) as file:
        file.write(b"other")
    assert content_of(tmp_path / "victim") == b"precious"


# -- what killed writers leave -------------------------------------------------------------------


def test_writers_in_containers_of_one_name_are_told_apart(monkeypatch):
    def machine_of(namespace):
        monkeypatch.setattr(writers.os, "readlink", lambda path: namespace)
        writers.machine.cache_clear()
        return writers.machine()

    try:
        assert machine_of("pid:[1]") == machine_of("pid:[1]") != machine_of("pid:[2]")
    finally:
        writers.machine.cache_clear()


def test_file_that_is_being_written_is_not_taken_for_an_abandoned_one(tmp_path):
    path = str(tmp_path / "file")
    with atomic.replacing(path) as file:
        file.write(b"part")
        atomic.remove_abandoned(str(tmp_path) + os.sep)
        file.write(b", whole")
    assert content_of(tmp_path / "file") == b"part, whole"


def test_a_link_that_looks_abandoned_is_removed_and_not_followed(tmp_path):
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "precious").write_bytes(b"years")
    (tmp_path / "folder").mkdir()
    link = tmp_path / "folder" / f".file.{writers.machine()}-{2**22 + 1}-1-0a1b.tmp"
    link.symlink_to(tmp_path / "victim")
    atomic.remove_abandoned(str(tmp_path / "folder") + os.sep)
    assert os.listdir(tmp_path / "folder") == []
    assert os.listdir(tmp_path / "victim") == ["precious"]


# -- elsewhere -----------------------------------------------------------------------------------


def test_a_file_behind_fsspec_is_read_and_removed():
    with atomic.replacing("memory://storage/file") as file:
        file.write(b"far")
    with files.open_to_read("memory://storage/file") as file:
        assert file.read() == b"far"
    files.remove("memory://storage/file")
    assert not files.exists("memory://storage/file")


def test_a_folder_behind_fsspec_is_copied(tmp_path):
    for name in ("a", "inner/b"):
        with atomic.replacing(f"memory://copied/{name}") as file:
            file.write(name.encode())
    files.download("memory://copied", str(tmp_path))
    assert content_of(tmp_path / "a") == b"a"
    assert content_of(tmp_path / "inner" / "b") == b"inner/b"


def test_a_name_behind_fsspec_leads_nowhere_else(tmp_path, monkeypatch):
    import fsspec

    system = fsspec.filesystem("memory")
    monkeypatch.setattr(type(system), "find", lambda self, path: [f"{path}/../../stolen"])
    with pytest.raises(DataLossError, match="lead out of the folder"):
        files.download("memory://bucket/run", str(tmp_path))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nothing", NotFoundError),
        ("folder", FailedPreconditionError),
        ("long" * 99, InvalidArgumentError),
        ("loop", InvalidArgumentError),
    ],
)
def test_what_is_no_file_has_its_error(tmp_path, name, expected):
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(expected, match=name[:20]):
        files.open_to_read(str(tmp_path / name))
