"""Workers that name one path, as threads find what the first one writes, in the program's order."""

import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor

import pytest

from unison.cells import Layout
from unison.errors import FailedPreconditionError
from unison.train import journal, shared_path

#: Which worker a thread is.
process = threading.local()

#: The workers that do not come any more.
passed = set()


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
    for module in (shared_path, journal):
        monkeypatch.setattr(module, "CoordinationStore", lambda: store)
    monkeypatch.setattr(journal, "_PATIENCE", 0.5)
    monkeypatch.setattr(journal.process_group, "timeout", lambda: 5.0)
    monkeypatch.setattr(journal.jax, "process_count", lambda: 2)
    monkeypatch.setattr(journal.liveness, "passed", lambda since: passed)
    monkeypatch.setattr(shared_path, "_has_warned", False)
    passed.clear()
    journals = [journal.Journal(), journal.Journal()]

    def begin(worker, name, layout=Layout.MIRRORED):
        path = str(tmp_path / name)
        placement = types.SimpleNamespace(spans_processes=True)
        cell = types.SimpleNamespace(
            placement=placement,
            layout=layout,
            needs_all_processes=layout is not Layout.MIRRORED,
            name="total",
        )
        process.index = worker
        return shared_path.begin_writing(path, path, [cell])

    monkeypatch.setattr(shared_path.jax, "process_index", lambda: process.index)
    monkeypatch.setattr(shared_path, "_journal", lambda service: journals[process.index])
    return begin


@pytest.fixture
def write(tmp_path):
    return lambda name: lambda: (tmp_path / name).write_text(name)


def refuse():
    raise AssertionError("this is written by the first worker")


def test_writes_that_threads_announce_at_once_have_their_own_numbers(of_worker):
    announce = of_worker(0, "first")._journal.announce
    with ThreadPoolExecutor(8) as threads:
        numbers = [*threads.map(announce, map(str, range(8)))]
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


def both(of_worker, *names, layout=Layout.LOCAL):
    """What both workers begin, at once: the first of the names is the first worker's."""
    with ThreadPoolExecutor(2) as threads:
        begun = [threads.submit(of_worker, i, name, layout) for i, name in enumerate(names)]
        return [each.result(20) for each in begun]


def test_values_that_each_has_a_part_of_are_written_when_all_have_come(of_worker, write):
    first, second = both(of_worker, "one", "one")
    assert not first.is_alone
    assert not second.is_alone
    assert first.finish(write("one")) is True
    assert second.finish(refuse) is False


def test_workers_come_together_for_paths_of_their_own(of_worker, write):
    for writing, name in zip(both(of_worker, "own-0", "own-1"), ("own-0", "own-1"), strict=True):
        assert not writing.is_alone
        assert writing.finish(write(name)) is True


def test_the_first_worker_writes_alone_what_others_have_passed(of_worker, write, caplog):
    passed.add(1)
    for name in ("alone-0", "alone-1"):
        writing = of_worker(0, name, Layout.LOCAL)
        assert writing.is_alone
        assert writing.finish(write(name)) is True
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "this worker's copies of total" in warning
    passed.clear()
    together = both(of_worker, "together", "together")
    assert [writing.is_alone for writing in together] == [False, False]


def test_another_worker_writes_alone_what_the_first_has_passed(of_worker, write):
    passed.add(0)
    writing = of_worker(1, "alone", Layout.LOCAL)
    assert writing.is_alone
    assert writing.finish(write("alone")) is True


def test_who_comes_to_what_the_first_writes_alone_does_not_write_it_again(of_worker, write):
    passed.add(1)
    of_worker(0, "one", Layout.LOCAL).finish(write("one"))
    assert of_worker(1, "one", Layout.LOCAL).finish(refuse) is False


def test_shards_are_not_written_alone(of_worker):
    passed.add(1)
    with pytest.raises(FailedPreconditionError, match="All workers must save"):
        of_worker(0, "shards", Layout.SHARDED)
    with pytest.raises(FailedPreconditionError, match="All workers must save"):
        of_worker(1, "shards", Layout.SHARDED)


def test_coming_together_waits_for_what_threads_look_for(of_worker, write):
    of_worker(0, "background").finish(write("background"))
    background = of_worker(1, "background")
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(of_worker, 0, "gathered", Layout.LOCAL)
        gathered = threads.submit(of_worker, 1, "gathered", Layout.LOCAL)
        time.sleep(0.1)
        assert background.finish(refuse) is False
        first.result(10).finish(write("gathered"))
        assert gathered.result(10).finish(refuse) is False


@pytest.fixture
def short_memory(monkeypatch):
    monkeypatch.setattr(journal, "_KEPT", 8)
    monkeypatch.setattr(journal, "_FORGOTTEN_AT_ONCE", 4)


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


def test_a_failed_write_of_another_path_is_skipped(of_worker):
    """The first worker fails before it knows who comes; the other one writes something else."""
    first = of_worker(0, "announced")._journal
    failed = first.announce("one", gathers=True)
    first.tell(failed, {"error": ["ValueError", "no"]})
    with ThreadPoolExecutor(1) as threads:

        def come():
            process.index = 1
            return shared_path._journal(1).come("two", lambda mark: True)

        came = threads.submit(come)
        process.index = 0
        number = first.announce("two", gathers=True)
        assert first.wait_for_all(number) is journal.Arrival.TOGETHER
        assert came.result(10) == (number, journal.Arrival.TOGETHER)
