"""Workers that name one path, as threads find what the first one writes, in the program's order."""

import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor

import pytest

from unison.cells import Layout
from unison.errors import DeadlineExceededError, UnknownError
from unison.train import shared_path


class Store:
    """A coordination service: a key that has a value gets no other one."""

    service = 1

    def __init__(self):
        self.values = {}
        self._changed = threading.Condition()

    def put(self, key, value):
        time.sleep(0.01)
        with self._changed:
            assert key not in self.values, f"ALREADY_EXISTS: {key}"
            self.values[key] = value
            self._changed.notify_all()

    def get(self, key, seconds):
        with self._changed:
            self._changed.wait_for(lambda: key in self.values, seconds)
            return self.values.get(key)

    def remove_all(self, folder):
        with self._changed:
            for key in [key for key in self.values if key.startswith(f"{folder}/")]:
                del self.values[key]


@pytest.fixture
def of_worker(monkeypatch, tmp_path):
    """`begin_writing` of a file, as a worker calls it: 0 is the first one."""
    store = Store()
    monkeypatch.setattr(shared_path, "CoordinationStore", lambda: store)
    monkeypatch.setattr(shared_path, "_PATIENCE", 0.5)
    monkeypatch.setattr(shared_path.process_group, "timeout", lambda: 5.0)
    journals = [shared_path._Journal(), shared_path._Journal()]

    def begin(worker, name, layout=Layout.MIRRORED):
        path = str(tmp_path / name)
        placement = types.SimpleNamespace(spans_processes=True)
        cell = types.SimpleNamespace(placement=placement, layout=layout, name="total")
        with monkeypatch.context() as patched:
            patched.setattr(shared_path.jax, "process_index", lambda: worker)
            patched.setattr(shared_path, "_journal", lambda service: journals[worker])
            return shared_path.begin_writing(path, path, [cell])

    return begin


@pytest.fixture
def write(tmp_path):
    return lambda name: lambda: (tmp_path / name).write_text(name)


def refuse():
    raise AssertionError("this is written by the first worker")


def test_writes_that_threads_announce_at_once_have_their_own_numbers(of_worker):
    journal = of_worker(0, "first")._journal
    with ThreadPoolExecutor(8) as threads:
        numbers = [*threads.map(journal.announce, map(str, range(8)))]
    assert sorted(numbers) == [*range(1, 9)]


def test_a_write_that_a_thread_does_later_is_announced_when_it_begins(of_worker, write):
    background = of_worker(0, "background")
    meanwhile = of_worker(0, "meanwhile")
    assert (background.number, meanwhile.number) == (0, 1)
    meanwhile.finish(write("meanwhile"))
    background.finish(write("background"))
    for name in ("background", "meanwhile"):
        assert of_worker(1, name).finish(refuse) is False


def test_writes_are_found_whichever_thread_looks_first(of_worker, write):
    for name in ("background", "meanwhile"):
        of_worker(0, name).finish(write(name))
    background, meanwhile = of_worker(1, "background"), of_worker(1, "meanwhile")
    with ThreadPoolExecutor(2) as threads:
        late = threads.submit(meanwhile.finish, refuse)
        time.sleep(0.1)
        early = threads.submit(background.finish, refuse)
        assert (early.result(10), late.result(10)) == (False, False)


def test_a_write_that_is_given_up_holds_nobody_up(of_worker, write):
    for name in ("given up", "next"):
        of_worker(0, name).finish(write(name))
    of_worker(1, "given up").fail(ValueError("no value"))
    began = of_worker(1, "next")
    assert began._journal._searches == [began._search]
    assert began.finish(refuse) is False


def test_a_write_for_which_not_all_came_has_an_outcome(of_worker, monkeypatch):
    def nobody(*args):
        raise DeadlineExceededError(message="worker 1 has not come")

    monkeypatch.setattr(shared_path.process_group, "all_gather_json", nobody)
    with pytest.raises(DeadlineExceededError, match="All workers must save"):
        of_worker(0, "gathered", Layout.LOCAL)
    with pytest.raises(
        (DeadlineExceededError, UnknownError), match="The first worker could not write"
    ):
        of_worker(1, "gathered").finish(refuse)


def test_coming_together_waits_for_what_threads_look_for(of_worker, write, monkeypatch):
    of_worker(0, "background").finish(write("background"))
    background = of_worker(1, "background")
    told = []
    monkeypatch.setattr(
        shared_path.process_group, "all_gather_json", lambda own, why: told.append(own) or told
    )
    first = of_worker(0, "gathered", Layout.LOCAL)
    with ThreadPoolExecutor(1) as threads:
        gathered = threads.submit(of_worker, 1, "gathered", Layout.LOCAL)
        time.sleep(0.1)
        assert background.finish(refuse) is False
        first.finish(write("gathered"))
        assert gathered.result(10).finish(refuse) is False


@pytest.fixture
def short_memory(monkeypatch):
    monkeypatch.setattr(shared_path, "_KEPT", 8)
    monkeypatch.setattr(shared_path, "_FORGOTTEN_AT_ONCE", 4)


def test_only_the_latest_writes_are_remembered(of_worker, write, short_memory):
    for number in range(50):
        first = of_worker(0, f"ckpt-{number}")
        first.finish(write(f"ckpt-{number}"))
        assert of_worker(1, f"ckpt-{number}").finish(refuse) is False
    assert len(first._journal._store.values) <= 2 * (8 + 4) + 1


def test_worker_that_comes_late_goes_on_with_what_is_remembered(of_worker, write, short_memory):
    for number in range(30):
        of_worker(0, f"alone-{number}").finish(write(f"alone-{number}"))
    of_worker(0, "together").finish(write("together"))
    assert of_worker(1, "together").finish(refuse) is False


def test_write_whose_end_is_forgotten_is_done_again(of_worker, write, short_memory):
    of_worker(0, "slow")  # whose end nobody is told
    late = of_worker(1, "slow")
    for number in range(30):
        of_worker(0, f"other-{number}").finish(write(f"other-{number}"))
    assert late._journal.find(late._path, late._search) is None
    assert late._journal.outcome(0, late._path) is None


def test_what_is_written_inside_of_a_write_needs_no_agreement(of_worker, write):
    def write_two():
        write("outer")()
        assert type(of_worker(0, "inner")) is shared_path.Writing

    of_worker(0, "outer").finish(write_two)
    assert of_worker(1, "outer").finish(refuse) is False
    of_worker(0, "next").finish(write("next"))
    assert of_worker(1, "next").finish(refuse) is False
