"""What files hold is checked before it is believed: names, sizes, checksums."""

import json
import os
import re
import signal
import struct

import ml_dtypes
import numpy as np
import pytest

from unison.errors import DataLossError, InvalidArgumentError, NotFoundError
from unison.storage import checksummed, decoding, locks, names

RUN = re.compile(r"run-[0-9a-f]{4}")


@pytest.fixture
def folder(tmp_path):
    """A folder beside another one that nobody has named."""
    (tmp_path / "folder" / "run-0a1b").mkdir(parents=True)
    (tmp_path / "victim" / "precious").mkdir(parents=True)
    (tmp_path / "victim" / "thesis").write_text("years")
    return tmp_path / "folder"


# -- names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["../victim", "/etc", "..", ".", "", "run-0a1b/..", "run-0a1b\0", "run-0A1B", 7, None, ["run"]],
    ids=repr,
)
def test_a_name_that_does_not_match_is_refused(name):
    with pytest.raises(DataLossError, match=r"index is corrupt: expected a name that matches"):
        names.checked_name(name, RUN, "index")


@pytest.mark.parametrize("name", ["..", "a/b", "a\\b", "a\0b", "."], ids=repr)
def test_a_name_is_one_whatever_its_pattern_allows(name):
    with pytest.raises(DataLossError):
        names.checked_name(name, re.compile("(?s).*"), "index")


def test_a_path_is_inside_its_folder(folder):
    assert names.path_inside(str(folder), "run-0a1b", "x") == str(folder / "run-0a1b" / "x")
    assert names.path_inside("memory://kept", "run", "x") == "memory://kept/run/x"
    with pytest.raises(DataLossError, match="leads out of the folder"):
        names.path_inside(str(folder), "..", "victim")


def test_a_link_does_not_lead_out_of_its_folder(folder):
    (folder / "run-0000").symlink_to("../victim")
    with pytest.raises(DataLossError, match="leads out of the folder"):
        names.path_inside(str(folder), "run-0000", "thesis")


def test_a_folder_that_is_a_link_itself_is_where_the_user_wants_it(folder, tmp_path):
    (tmp_path / "link").symlink_to(folder)
    assert names.path_inside(str(tmp_path / "link"), "run-0a1b")


def test_removing_a_link_leaves_what_it_leads_to(folder, tmp_path):
    (folder / "run-0000").symlink_to(tmp_path / "victim")
    (folder / "run-0a1b" / "inside").symlink_to(tmp_path / "victim")
    names.remove_folder(str(folder), "run-0000", RUN)
    names.remove_folder(str(folder), "run-0a1b", RUN)
    assert os.listdir(folder) == []
    assert sorted(os.listdir(tmp_path / "victim")) == ["precious", "thesis"]


def test_what_has_another_name_is_not_removed(folder, tmp_path):
    for name in ("../victim", str(tmp_path / "victim"), "run-"):
        with pytest.raises(DataLossError):
            names.remove_folder(str(folder), name, RUN)
    assert sorted(os.listdir(tmp_path / "victim")) == ["precious", "thesis"]


# -- numbers, text and dtypes --------------------------------------------------------------------


@pytest.mark.parametrize("value", [-1, 2**63, True, 2.0, float("inf"), "3", None, [3]], ids=repr)
def test_only_a_whole_number_within_bounds_is_one(value):
    with pytest.raises(ValueError, match="expected a whole number from 0 to"):
        decoding.whole_number(value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), True, "3", None, 10**400], ids=type)
def test_only_a_finite_number_is_one(value):
    with pytest.raises(ValueError, match="expected a number"):
        decoding.real_number(value)


def test_the_size_of_an_array_does_not_overflow():
    assert decoding.bytes_of([2**40, 2**40], np.dtype(np.float32)) == 2**82


@pytest.mark.parametrize(
    "shape", [[2**40, 2**40], [2**40, 2**40, 0], [1] * 99, "12", [-1]], ids=str
)
def test_a_shape_that_no_array_has_is_refused(shape):
    with pytest.raises(ValueError, match=r"no array has the shape|expected"):
        decoding.shape_of(shape)


@pytest.mark.parametrize("name", ["<f4", "bool", "bfloat16", "complex128", "int4", "float8_e5m2"])
def test_a_dtype_of_numbers_has_its_name(name):
    assert decoding.dtype_named(name) == np.dtype(getattr(ml_dtypes, name, name))


@pytest.mark.parametrize(
    "name", ["O", "|O", "object", "O,O", "f4,f4", "V8", "(2,)f4", "nonsense", "S5", "f" * 999, 4]
)
def test_what_is_no_dtype_of_numbers_is_refused(name):
    with pytest.raises(ValueError, match="dtype"):
        decoding.dtype_named(name)


def test_json_that_is_nested_too_deeply_is_an_error_like_others():
    with pytest.raises(ValueError, match="nested too deeply"):
        decoding.parsed_json("[" * 100_000)
    with pytest.raises(ValueError, match="not valid JSON"):
        decoding.parsed_json(b'"\xff"')


# -- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (lambda: {}["key"], "'key' is missing"),
        (lambda: [][3], "IndexError"),
        (lambda: struct.unpack("<I", b""), "requires a buffer of 4 bytes"),
        (lambda: int(float("inf")), "OverflowError"),
        (lambda: json.loads("["), "Expecting value"),
    ],
)
def test_wrong_bytes_end_in_one_error_that_names_the_file(wrong, reason):
    with (
        pytest.raises(DataLossError, match=rf"data/x is corrupt: .*{reason}.*\. Remove it\."),
        decoding.decoding("data/x", "Remove it."),
    ):
        wrong()


@pytest.mark.parametrize("error", [InvalidArgumentError(message="a"), ImportError("b")])
def test_errors_that_say_more_stay(error):
    with pytest.raises(type(error), match=r"^[ab]$"), decoding.decoding("data/x"):
        raise error


def test_the_message_is_short_whatever_the_file_says():
    with pytest.raises(DataLossError) as error, decoding.decoding("x"):
        raise ValueError("a" * 10_000)
    assert len(str(error.value)) < 500


# -- the container -------------------------------------------------------------------------------


def test_a_header_and_bytes_come_back(tmp_path):
    path = tmp_path / "file"
    with path.open("wb") as file:
        checksummed.write(file, [checksummed.header_line({"a": 1}), b"\nby", b"tes"])
    header, data = checksummed.header_and_data(checksummed.read(str(path)))
    assert (header, bytes(data)) == ({"a": 1}, b"\nbytes")
    assert checksummed.peeked_header(str(path)) == {"a": 1}


@pytest.mark.parametrize("place", [0, 8, 9, 12, -1])
def test_each_flipped_bit_is_a_checksum_mismatch(tmp_path, place):
    path = tmp_path / "file"
    with path.open("wb") as file:
        checksummed.write(file, [checksummed.header_line([1]), b"bytes"])
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataLossError, match=r"file is corrupt: checksum mismatch.* Write it again"):
        checksummed.read(str(path), "Write it again.")


def test_an_empty_file_is_a_checksum_mismatch_and_a_missing_one_is_not_found(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DataLossError, match="checksum mismatch"):
        checksummed.read(str(tmp_path / "file"))
    with pytest.raises(NotFoundError):
        checksummed.read(str(tmp_path / "nothing"))


# -- locks ---------------------------------------------------------------------------------------


def test_a_lock_is_held_by_one(tmp_path):
    path = str(tmp_path / "lock")
    with locks.locked(path, 0.0) as first, locks.locked(path, 0.05) as second:
        assert (first, second) == (True, False)
    with locks.locked(path, 0.0) as third:
        assert third


def test_a_shared_lock_is_held_by_several(tmp_path):
    (tmp_path / "lock").touch()
    with (tmp_path / "lock").open("rb") as one, (tmp_path / "lock").open("rb") as other:
        assert locks.lock(one, shared=True)
        assert locks.lock(other, shared=True)
        assert not locks.lock(other)


def test_the_error_of_a_signal_handler_says_nothing_about_the_file():
    class AlarmError(Exception):
        pass

    def handler(number, frame):
        raise AlarmError

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(AlarmError), decoding.decoding("state"):
            signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
