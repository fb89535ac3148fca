"""Of a process that is killed, at whatever moment, nothing stays for good: no memory, no folder.

Each program kills itself where something of it exists for a short time. What only another process
can remove goes when that does the same thing next.
"""

import os
import signal
import time

import pytest

from leaks import named_shared_memory
from subprocess_program import run_program

#: Makes something call `die`, by which the program ends as by `kill -9`.
DYING = """
import os, signal, sys
from unittest import mock

def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def killed(tmp_path):
    """Runs a program that kills itself, and returns what it has left behind.

    That is what is new in the folder of temporary files, and in that of shared memory.
    """

    def run(source):
        before = named_shared_memory()
        temporary = tmp_path / "temporary"
        temporary.mkdir(exist_ok=True)
        environment = {"TMPDIR": str(temporary), "XDG_RUNTIME_DIR": str(temporary)}
        done = run_program(DYING + source, env=environment, imported=("jax", "unison"))
        assert done.returncode == -signal.SIGKILL, done.stderr
        return [*named_shared_memory() - before, *left_in(temporary)]

    return run


def left_in(folder):
    return [path for path in folder.iterdir() if path.name != "unison"]


HANDOVER = """
import unison
from unison.train import archive, handover

state = handover.Handover(weight=unison.Variable([1.0, 2.0]))
"""


def test_a_worker_that_is_killed_while_it_hands_over_its_state(killed):
    assert (
        killed(HANDOVER + "with mock.patch.object(archive, '_write_array', die): state.pack()")
        == []
    )


def test_a_worker_that_is_killed_while_it_takes_over_a_state(killed):
    dying = "held = state.pack()\nwith mock.patch.object(archive.Archive, 'read', die):"
    assert killed(HANDOVER + dying + " state.unpack(held)") == []


def test_workers_that_are_killed_while_they_come_to_share_memory(killed):
    program = """
from unison.runtime.shared_memory import group

with mock.patch.object(group, "all_gather_json", die):
    group._common_segment(["here"], 2)
"""
    assert killed(program) == []


def test_a_process_that_is_killed_with_workers_for_its_data(killed):
    program = """
import time
from unison.data import Dataset
import numpy as np

if __name__ == "__main__":
    numbers = Dataset.range(100)
    data = numbers.map(lambda x: np.full(1000, x), executor="process", num_parallel_calls=2)
    next(iter(data.as_numpy_iterator()))
    die()
"""
    assert killed(program) == []


@pytest.mark.parametrize("at", ["ftruncate", "close"])
def test_a_parameter_server_that_is_killed_while_it_makes_or_sends_a_slot(killed, at):
    program = """
from unison.net.slots import Outbox

with mock.patch.object(os, AT, die):
    slot, file = Outbox().slot(1 << 20)
    slot.taken()[:] = 1
    os.close(file)
"""
    assert killed(program.replace("AT", repr(at))) == []


def test_a_worker_that_is_killed_while_its_group_comes_to_share_memory(killed):
    program = """
from unison.runtime.elastic import communicator

with mock.patch.object(os, "posix_fallocate", die):
    communicator._new_memory(1 << 20, mock.MagicMock())
"""
    assert killed(program) == []


# -- what the next one removes ---------------------------------------------------------------


FOLDER = """
from unison.storage.temporary_folders import temporary_folder

with temporary_folder("example") as folder:
    open(os.path.join(folder, "file"), "w").close()
    {do}
"""


def make_old(paths):
    then = time.time() - 3600
    for path in paths:
        os.utime(path, (then, then))


def use(source, tmp_path):
    temporary = tmp_path / "temporary"
    environment = {"TMPDIR": str(temporary), "XDG_RUNTIME_DIR": str(temporary)}
    done = run_program(source, env=environment, imported=("jax", "unison"))
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_next_temporary_folder_takes_those_of_killed_processes_with_it(killed, tmp_path):
    (left,) = killed(FOLDER.format(do="die()"))
    make_old([left])
    use("import os\n" + FOLDER.format(do="pass"), tmp_path)
    assert left_in(tmp_path / "temporary") == []


def test_a_folder_that_is_in_use_or_was_made_just_now_stays(killed, tmp_path):
    (young,) = killed(FOLDER.format(do="die()"))
    source = """
import os, time
from unison.storage.temporary_folders import temporary_folder

with temporary_folder("example") as folder:
    os.utime(os.path.dirname(folder), (0, 0))
    with temporary_folder("example"):
        print(os.path.exists(folder))
"""
    assert use(source, tmp_path) == "True\n"
    assert left_in(tmp_path / "temporary") == [young]


JOB = """
from unison.runtime.launching import JobFolder

with JobFolder(None) as folder:
    folder.token()
    {do}
"""


def test_the_next_job_removes_the_folder_of_one_that_was_killed_without_a_state(killed, tmp_path):
    (left,) = killed(JOB.format(do="die()"))
    make_old([left])
    use(JOB.format(do="pass"), tmp_path)
    assert left_in(tmp_path / "temporary") == []


def test_a_state_that_a_killed_job_has_left_stays(killed, tmp_path):
    (left,) = killed(JOB.format(do="(folder.path / 'state').touch(); die()"))
    make_old([left])
    use(JOB.format(do="pass"), tmp_path)
    assert left_in(tmp_path / "temporary") == [left]


PUBLISHED = """
from unison.monitoring import running_jobs

job = running_jobs.RunningJob(os.getpid(), "train.py", "127.0.0.1:4000", "secret")
{patch}
with running_jobs.published(job):
    {do}
"""


@pytest.mark.parametrize(
    "patch", ["", "mock.patch.object(running_jobs.json, 'dumps', die).start()"], ids=["json", "new"]
)
def test_the_next_job_removes_what_says_where_a_killed_one_was_watched(killed, tmp_path, patch):
    killed(PUBLISHED.format(patch=patch, do="die()"))
    folder = tmp_path / "temporary" / "unison"
    (left,) = folder.iterdir()
    make_old([left])
    told = use(
        "import os\nfrom unison.net.runtime_folder import runtime_folder\n"
        + PUBLISHED.format(patch="", do="print(os.listdir(running_jobs.runtime_folder()))"),
        tmp_path,
    )
    assert left.name not in told
    assert list(folder.iterdir()) == []
