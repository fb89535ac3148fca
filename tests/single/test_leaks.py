"""Retraces, strategies and killed data workers leave nothing behind; a leak is found."""

import mmap
import os
import pathlib
import socket
import subprocess
import sys
import threading

import jax
import numpy as np
import pytest

from leaks import census, leaked
from subprocess_program import FEW_OPTIMIZATIONS, PYTHON_PATH, run_program

TESTS = pathlib.Path(__file__).parents[1]
PROGRAM = (TESTS / "leak_program.py").read_text()

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

#: Warm-up rounds, and rounds. Tests of `tests/soak` have more.
ROUNDS = {
    "retraces_of_run": (6, 20),
    "retraces_of_fit": (6, 20),
    "recompiled_models": (3, 8),
    "strategies": (3, 8),
    "killed_data_workers": (2, 6),
}
#: The loop that `make test` runs, too.
SMOKE = "retraces_of_run"


@pytest.mark.parametrize(
    "loop",
    [pytest.param(loop, marks=[pytest.mark.smoke] * (loop == SMOKE)) for loop in ROUNDS],
)
def test_nothing_is_left_of(loop):
    path = os.pathsep.join([str(TESTS), PYTHON_PATH])
    done = run_program(
        PROGRAM,
        loop,
        *ROUNDS[loop],
        env={**FEW_OPTIMIZATIONS, "PYTHONPATH": path},
        timeout=200,
        imported=("jax", "keras", "unison"),
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]


# -- what the census finds -------------------------------------------------------------------


def found(make, folder=None):
    """Makes something that stays, and returns what two censuses around it say."""
    folders = [] if folder is None else [folder]
    before = census(folders=folders)
    held = make()
    try:
        return leaked(before, census(folders=folders), memory=16 << 20)
    finally:
        end = getattr(held, "close", None)
        if end is not None:
            end()


def test_where_nothing_is_held_nothing_is_found():
    assert found(lambda: None) == []


def test_a_descriptor_is_found_by_its_kind():
    (told,) = found(socket.socket)
    assert told == "descriptors: 1 more, of which {'descriptors: socket:[]': 1}"


def test_a_thread_is_found():
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    (told,) = found(thread.start)
    over.set()
    thread.join()
    assert told.startswith("threads: 1 more")


def test_shared_memory_without_a_name_is_found_when_its_descriptor_is_closed():
    def mapped():
        file = os.memfd_create("planted")
        os.ftruncate(file, 4096)
        held = mmap.mmap(file, 4096)
        os.close(file)
        return held

    # Python's own map has a copy of the descriptor.
    descriptor, told = found(mapped)
    assert descriptor.startswith("descriptors: 1 more")
    assert "shared memory: /memfd:planted" in told


def test_shared_memory_with_a_name_is_found():
    path = pathlib.Path(f"/dev/shm/unison-planted-{os.getpid()}")
    try:
        told = found(path.touch)
    finally:
        path.unlink()
    assert any("'shared memory: with a name': 1" in line for line in told)


def test_a_temporary_file_is_found(tmp_path):
    (told,) = found((tmp_path / "planted").touch, tmp_path)
    assert told.startswith("temporary files: 1 more")


def test_a_process_that_nobody_waits_for_is_found():
    child = subprocess.Popen(["true"])
    before = census()
    assert before.count("processes") >= 1
    child.wait()
    assert census().count("processes") == before.count("processes") - 1


def test_a_compiled_program_is_found():
    held = []
    planted = jax.jit(lambda x: x * 3.25)
    told = found(lambda: held.append(planted.lower(np.ones(7)).compile()))
    assert any(line.startswith("compiled programs: 1 more") for line in told)


def test_memory_is_found():

    def fresh():  # what is allocated may be memory that was freed before
        held = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for page in range(0, len(held), mmap.PAGESIZE):
            held[page] = 1
        return held

    (told,) = found(fresh)
    assert told.startswith("memory: ")
    assert told.endswith(" MiB more; 16.0 MiB are allowed")


def test_as_many_more_as_are_allowed_are_no_leak():
    before = census()
    with socket.socket():
        assert leaked(before, census(), memory=16 << 20, descriptors=1) == []
