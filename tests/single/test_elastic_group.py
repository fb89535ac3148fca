"""How workers come into a group with the state that its members have, whatever fails meanwhile.

The workers are groups of this process: the first in its main thread, another one in a thread. No
program is run; their states are bytes.
"""

import contextlib
import secrets
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

import unison
from unison import train
from unison.errors import DataLossError
from unison.runtime import logs, process_group
from unison.runtime.cluster import ClusterSpec
from unison.runtime.cluster_resolvers import SimpleClusterResolver
from unison.runtime.elastic import (
    ElasticGroup,
    Entry,
    GroupChanged,
    GroupClusterResolver,
    persisted_state,
)
from unison.runtime.elastic.environment import ElasticEnvironment
from unison.runtime.elastic.persisted_state import Origin
from unison.runtime.elastic.protocol import LEFT_BY_NOTICE, REFUSED, TOO_FEW_WORKERS
from unison.runtime.elastic.register import Register
from unison.storage import checksummed

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(
        shutil.which("c++") is None, reason="the package was built without a C++ compiler"
    ),
]

#: Seconds after which a test has failed.
LIMIT = 60.0


class State:
    """A state of bytes, which remembers what was done with it."""

    can_be_resumed = True

    def __init__(self, held=b"new", part=b""):
        self.held, self.part = held, part
        self.packed = 0
        self.taken = []
        self.parts = None

    def pack(self):
        self.packed += 1
        return self.held

    def pack_part(self):
        return self.part

    def unpack(self, held, keeps_part):
        self.held = held
        self.taken.append((held, keeps_part))

    def resume(self, held, parts):
        self.held, self.parts = held, parts


class Job:
    """A register, and workers that end with the test."""

    def __init__(self, folder):
        self.folder = folder
        self._token = secrets.token_hex(8)  # nobody else's: sockets are named by it
        self._open = contextlib.ExitStack()
        self._threads = self._open.enter_context(ThreadPoolExecutor(4))
        self.start()

    def start(self, slots=1):
        """Begins a run of the job, with so many workers."""
        self.register = self._open.enter_context(
            Register(
                1,
                3,
                token=self._token,
                heartbeat_timeout=30.0,
                wait=30.0,
                start_timeout=30.0,
                on_event=lambda event: None,
                slots=slots,
            )
        )

    def worker(self, slot, folder=None):
        """Returns a worker that has come to the job."""
        address = self.register.address
        about = f"worker {slot}", slot, "127.0.0.1", 30.0, 30.0, str(folder or self.folder)
        group = ElasticGroup(ElasticEnvironment(address, self._token, *about))
        self._open.callback(group.close)
        return group

    def first(self, state, step=7):
        """Returns the worker that begins the job, with a state of a step."""
        group = self.worker(0)
        group.regroup(None)
        group.enter(state)
        group.renumber(step)
        group.open(True)
        return group

    def lose(self, group, slot):
        """Ends a worker, as if its process had."""
        group.close()
        self.register.lost(slot)

    def meanwhile(self, call):
        """Has something called in a thread, and returns what returns its result."""
        running = self._threads.submit(call)
        return lambda: running.result(LIMIT)

    def close(self):
        self._open.close()


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.setattr(logs, "say_who", lambda name: None)
    with contextlib.closing(Job(tmp_path)) as job:
        yield job


def at(group, point, do):
    """Has something done when a worker comes to a point of a recovery for the first time."""
    tell, left = group.tell, [do]

    def told(what, **about):
        tell(what, **about)
        if about.get("at") == point and left:
            left.pop()()

    group.tell = told


class LostError(Exception):
    """A worker's process has ended."""


def is_over(group):
    return waits_for(lambda: group.is_over)


def waits_for(look):
    """Returns whether something is so, within the limit."""
    here = threading.Event()
    for _ in range(int(LIMIT / 0.01)):
        if look():
            return True
        here.wait(0.01)
    return False


# A newcomer


def test_whoever_joins_gets_the_state_of_the_others(job):
    old, new = State(b"old"), State()
    first = job.first(old)
    second = job.worker(1)
    entry = job.meanwhile(lambda: second.enter(new))
    assert is_over(first)
    assert first.regroup(old, is_open=True) == (0, False)
    assert entry() is Entry.JOINED
    assert (new.taken, second.step) == ([(b"old", False)], 7)
    assert first.view.steps == (7, None)


def has_given_its_state(job, first, second, new, then):
    """`second` enters; `first` does something when it has given it its state in a view."""
    has_taken = threading.Event()
    at(second, "formed", has_taken.set)

    def wait_and_go_on():
        assert has_taken.wait(LIMIT)
        then()

    at(first, "formed", wait_and_go_on)
    entry = job.meanwhile(lambda: second.enter(new))
    assert is_over(first)
    return entry


def test_a_state_that_was_taken_over_is_not_given_again_where_the_view_fails(job):
    old, new = State(b"old"), State()
    first, second = job.first(old), job.worker(1)

    def fail():
        first._membership.suspect("a wire is broken")

    entry = has_given_its_state(job, first, second, new, fail)
    assert first.regroup(old, is_open=True) == (0, False)
    assert entry() is Entry.JOINED
    assert first.view.number == 3
    # It has said that it has the state, and got nothing more.
    assert first.view.steps == (7, 7)
    assert (old.packed, new.taken, second.step) == (1, [(b"old", False)], 7)


def test_a_state_that_was_taken_over_outlives_whoever_gave_it(job):
    old, new = State(b"old"), State()
    first, second = job.first(old), job.worker(1)

    def be_lost():
        job.lose(first, 0)
        raise LostError

    entry = has_given_its_state(job, first, second, new, be_lost)
    with pytest.raises(LostError):
        first.regroup(old, is_open=True)
    # The view that it was to begin with never was; it goes on alone, from the step it has got.
    assert entry() is Entry.JOINED
    assert (second.view.number, second.view.steps) == (3, (7,))
    assert (new.held, second.step) == (b"old", 7)


def test_whoever_has_not_got_the_state_yet_gets_it_in_the_next_view(job):
    old, new = State(b"old"), State()
    first, second = job.first(old), job.worker(1)

    def fail():
        first._membership.suspect("a wire is broken")
        assert is_over(first)

    at(first, "connected", fail)
    entry = job.meanwhile(lambda: second.enter(new))
    assert is_over(first)
    first.regroup(old, is_open=True)
    assert entry() is Entry.JOINED
    assert first.view.steps == (7, None)
    assert (old.packed, new.taken, second.step) == (1, [(b"old", False)], 7)


def test_a_member_that_has_missed_a_step_keeps_what_is_its_own(job):
    old, behind = State(b"old"), State(b"behind")
    first, second = job.first(old), job.worker(1)
    entry = job.meanwhile(lambda: second.enter(behind))
    assert is_over(first)
    first.regroup(old, is_open=True)
    entry()
    first.renumber(8)
    regrouped = job.meanwhile(lambda: second.regroup(behind))
    assert is_over(first)
    first.regroup(old)
    assert regrouped() == (1, True)
    assert first.view.steps == (8, 7)
    assert behind.taken == [(b"old", False), (b"old", True)]
    assert second.step == 8


@pytest.mark.parametrize("later", [None, State()], ids=["between loops", "in the next loop"])
def test_a_member_in_a_loop_that_the_others_have_ended_is_started_anew(job, later):
    old, behind = State(b"old"), State(b"behind")
    first, second = job.first(old), job.worker(1)
    entry = job.meanwhile(lambda: second.enter(behind))
    assert is_over(first)
    first.regroup(old, is_open=True)
    entry()
    first.renumber(8)
    if later is not None:
        first.enter(later)
    regrouped = job.meanwhile(lambda: second.regroup(behind))
    assert is_over(first)
    first.regroup(later)
    with pytest.raises(SystemExit) as ended:
        regrouped()
    assert ended.value.code == REFUSED
    assert first.view.steps == (8,)
    assert behind.taken == [(b"old", False)]


def test_whoever_comes_to_a_loop_that_the_others_have_ended_joins_the_next_one(job):
    old, new = State(b"old"), State()
    first = job.first(State())
    first.enter(old)  # their second loop
    second = job.worker(1)
    has_joined = threading.Event()

    def enter_both():
        entries = [second.enter(State()), second.enter(new)]
        has_joined.set()
        return entries

    entries = job.meanwhile(enter_both)
    while not has_joined.is_set():
        assert waits_for(lambda: first.is_over or has_joined.is_set())
        if first.is_over:
            first.regroup(old, is_open=True)
    assert entries() == [Entry.EARLY, Entry.JOINED]
    assert (new.taken, second.step) == ([(b"old", False)], 7)


def test_an_answer_outlives_whoever_gave_it_too(job):
    old, behind, new = State(b"old"), State(), State()
    first, second = job.first(old), job.worker(1)
    entry = job.meanwhile(lambda: second.enter(behind))
    assert is_over(first)
    first.regroup(old, is_open=True)
    entry()
    third = job.worker(2)
    entry = job.meanwhile(lambda: third.enter(new))
    assert is_over(first)
    assert is_over(second)
    # The first one has learnt something, and the second one has not.
    assert first.answer(lambda: "learnt", str.encode, bytes.decode) == "learnt"
    second.recover = lambda: second.regroup(behind, is_open=True)
    have_taken = [threading.Event(), threading.Event()]
    at(second, "formed", have_taken[0].set)
    at(third, "formed", have_taken[1].set)

    def ask():
        raise GroupChanged(message="the group has changed")

    answer = job.meanwhile(lambda: second.answer(ask, str.encode, bytes.decode))

    def be_lost():
        assert all(taken.wait(LIMIT) for taken in have_taken)
        job.lose(first, 0)
        raise LostError

    at(first, "formed", be_lost)
    with pytest.raises(LostError):
        first.regroup(old, is_open=True)
    assert answer() == "learnt"
    assert entry() is Entry.JOINED
    assert second.view.steps == (7, 7)


# What a job leaves


def test_a_job_that_ends_leaves_the_latest_state_and_the_parts_of_all(job):
    old, new = State(b"old", b"the first one's"), State(part=b"the second one's")
    first, second = job.first(old), job.worker(1)
    entry = job.meanwhile(lambda: second.enter(new))
    assert is_over(first)
    first.regroup(old, is_open=True)
    entry()
    old.held = b"older"
    first.renumber(8)
    second.renumber(9)
    job.register.end(TOO_FEW_WORKERS, "the test ends it")
    regrouped = job.meanwhile(lambda: second.regroup(new))
    for ends in (lambda: first.regroup(old), regrouped):
        with pytest.raises(SystemExit) as ended:
            ends()
        assert ended.value.code == TOO_FEW_WORKERS
    job.start()
    state = State()
    group = job.worker(0)
    group.regroup(None)
    assert group.enter(state) is Entry.RESUMED
    assert (state.held, group.step) == (b"old", 9)
    assert state.parts == [b"the first one's", b"the second one's"]
    assert group.enter(State()) is Entry.NEW


def test_the_last_worker_that_is_told_to_end_leaves_its_state_for_the_next_process(job):
    first = job.first(State(b"old"))
    first._membership.notice()
    assert is_over(first)
    with pytest.raises(SystemExit) as ended:
        first.regroup(State(b"old"))
    assert ended.value.code == LEFT_BY_NOTICE
    job.lose(first, 0)
    state = State()
    again = job.worker(0)
    assert again.enter(state) is Entry.RESUMED
    assert (state.held, again.step) == (b"old", 7)


def test_whoever_has_never_had_the_state_leaves_none(job):
    old = State(b"old")
    first = job.first(old)
    first.open(False)
    second = job.worker(1)
    entry = job.meanwhile(lambda: second.enter(State(b"of nobody")))
    job.register.end(TOO_FEW_WORKERS, "the test ends it")
    with pytest.raises(SystemExit):
        entry()
    assert persisted_state.kept_state(job.folder) is None
    with pytest.raises(SystemExit):
        first.regroup(old)
    assert persisted_state.kept_state(job.folder).origin[:3] == (1, 1, 7)


def test_when_all_who_had_the_state_are_lost_newcomers_begin_where_the_last_run_ended(job):
    persisted_state.keep_state(
        job.folder, Origin(1, 4, 5, "abc"), lambda: b'[1, 1, [4, "abc"]]\nleft'
    )
    old, new = State(b"old"), State()
    first, second = job.first(old), job.worker(1)
    assert old.held == b"left"
    first.open(False)
    job.lose(first, 0)
    assert second.enter(new) is Entry.RESUMED
    assert (new.held, second.step) == (b"left", 5)


def test_machines_without_a_common_folder_share_what_each_has(job, tmp_path, monkeypatch):
    monkeypatch.setattr(threading, "main_thread", threading.current_thread)  # all of them are
    folders = [tmp_path / "one", tmp_path / "other"]
    for place, (folder, part) in enumerate(zip(folders, [b"one", b"other"], strict=True)):
        folder.mkdir()
        origin = Origin(1, 4, 5 + place, "abc")
        held = b'[1, 1, [4, "abc"]]\n' + b"later" * place
        persisted_state.keep_state(folder, origin, lambda held=held: held)
        persisted_state.keep_part(folder, origin, place, part)
    job.start(slots=2)

    def resume(slot):
        group, state = job.worker(slot, folders[slot]), State()
        group.regroup(None)
        return group.enter(state), state.held, state.parts, group.step

    both = [job.meanwhile(lambda slot=slot: resume(slot)) for slot in range(2)]
    expected = Entry.RESUMED, b"later", [b"one", b"other"], 6
    assert [each() for each in both] == [expected] * 2


def test_an_earlier_state_does_not_take_the_place_of_a_later_one(tmp_path):
    for origin in [(1, 2, 30), (2, 1, 10), (1, 3, 40), (2, 1, 9), (2, 1, 10)]:
        persisted_state.keep_state(
            tmp_path, Origin(*origin, "abc"), lambda n=origin: repr(n).encode()
        )
    assert persisted_state.kept_state(tmp_path) == (Origin(2, 1, 10, "abc"), b"(2, 1, 10)")


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("state", lambda folder, _: persisted_state.kept_state(folder)),
        ("state-1-2-abc-0", persisted_state.kept_parts),
    ],
)
def test_a_corrupt_file_is_named(tmp_path, name, read):
    origin = Origin(1, 2, 30, "abc")
    persisted_state.keep_part(tmp_path, origin, 0, b"a part")
    persisted_state.keep_state(tmp_path, origin, lambda: b"a state")
    path = tmp_path / name
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(DataLossError, match=rf"/{name} is corrupt: checksum mismatch.* Remove it"):
        read(tmp_path, origin)
    persisted_state.keep_state(tmp_path, origin._replace(step=31), lambda: b"a later one")
    assert persisted_state.kept_state(tmp_path).held == b"a later one"


@pytest.mark.parametrize(
    "header",
    [b"{", b"7", b'{"run": "1", "view": 2, "step": 3, "group": "abc"}', b'{"run": 1}', b"[" * 9999],
)
def test_a_state_of_right_checksum_and_wrong_content_is_corrupt(tmp_path, header):
    with (tmp_path / "state").open("wb") as file:
        checksummed.write(file, [header, b"\nheld"])
    with pytest.raises(DataLossError, match=r"/state is corrupt: .* Remove it to start without it"):
        persisted_state.kept_state(tmp_path)
    persisted_state.keep_state(tmp_path, Origin(1, 1, 1, "abc"), lambda: b"")
    assert persisted_state.kept_state(tmp_path).origin.step == 1


@pytest.mark.parametrize("about", [b"", b"[1, 2]", b'[1, "x", null]', b'[1, 1, ["4", "abc"]]'])
def test_a_state_that_says_nothing_of_where_it_is_from_is_corrupt(job, about):
    persisted_state.keep_state(job.folder, Origin(1, 4, 5, "abc"), lambda: about + b"\nleft")
    with pytest.raises(DataLossError, match=r"state of the job is corrupt.* Remove it"):
        job.first(State())


def test_parts_belong_to_one_group_and_go_with_it(tmp_path):
    origin = Origin(1, 2, 30, "abc")
    persisted_state.keep_part(tmp_path, origin, 1, b"one")
    persisted_state.keep_part(tmp_path, origin._replace(step=29), 0, b"zero")
    persisted_state.keep_part(tmp_path, origin._replace(group="def"), 2, b"of another")
    persisted_state.keep_part(tmp_path, origin._replace(view=1), 3, b"of an earlier view")
    persisted_state.keep_state(tmp_path, origin, lambda: b"")
    assert persisted_state.kept_parts(tmp_path, origin) == {0: b"zero", 1: b"one"}
    assert persisted_state.kept_parts(tmp_path, origin._replace(view=1)) == {}
    persisted_state.keep_state(tmp_path, Origin(2, 1, 31, "ghi"), lambda: b"")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["state", "state.lock"]


# Who it says it is


def test_the_cluster_is_the_present_group(job, monkeypatch):
    old, new = State(b"old"), State()
    first, second = job.first(old), job.worker(1)
    resolver, its = GroupClusterResolver(first), GroupClusterResolver(second)
    monkeypatch.setattr(process_group, "_elastic", second)
    assert (resolver.task_type, resolver.task_id, resolver.is_chief) == ("worker", 0, True)
    assert resolver.cluster_spec().num_tasks("worker") == 1
    # It is alone, and nobody's chief.
    assert (its.task_type, its.task_id, its.is_chief) == ("worker", None, False)
    assert its.cluster_spec().num_tasks("worker") == 0
    assert its.master() == ""
    assert not process_group.is_first()

    between = []
    at(first, "stopped", lambda: between.append((resolver.task_id, resolver.master())))
    alone = resolver.master()
    entry = job.meanwhile(lambda: second.enter(new))
    assert is_over(first)
    first.regroup(old, is_open=True)
    entry()
    assert between == [(0, alone)]  # threads may ask while the next group is formed
    assert (resolver.task_id, its.task_id, its.is_chief) == (0, 1, False)
    assert its.cluster_spec() == resolver.cluster_spec()
    addresses = [resolver.master(), its.master()]
    assert its.cluster_spec().as_dict() == {"worker": addresses}

    job.lose(first, 0)
    assert is_over(second)
    second.regroup(new)
    assert (its.task_id, its.is_chief) == (0, True)
    assert its.cluster_spec().as_dict() == {"worker": addresses[1:]}
    assert process_group.is_first()


def test_a_worker_that_has_not_joined_yet_overwrites_nothing(tmp_path, monkeypatch):
    alone = SimpleNamespace(num_members=1, index=0, is_joining=True)
    monkeypatch.setattr(process_group, "_elastic", alone)
    strategy = unison.MirroredStrategy(["CPU:0"])
    checkpoint = train.Checkpoint(weight=unison.Variable(1.0))
    assert not strategy.extended.should_checkpoint
    checkpoint.write(tmp_path / "weights")
    assert list(tmp_path.iterdir()) == []
    alone.is_joining = False
    assert strategy.extended.should_checkpoint
    checkpoint.write(tmp_path / "weights")
    assert [path.name for path in tmp_path.iterdir()] == ["weights.index"]


def test_a_preemption_handler_takes_the_cluster_of_a_group(tmp_path, monkeypatch):
    group = SimpleNamespace(num_members=2, index=0, is_joining=False)
    group.all_gather_json = lambda value, what: [value, value]
    cluster = ClusterSpec({"worker": ["127.0.0.1:4001", "127.0.0.1:4002"]})
    resolver = SimpleClusterResolver(cluster, task_type="worker", task_id=0)
    checkpoint = train.Checkpoint(weight=unison.Variable(1.0))
    with pytest.raises(ValueError, match="have joined the 2 workers"):
        train.PreemptionCheckpointHandler(resolver, checkpoint, tmp_path)
    monkeypatch.setattr(process_group, "_elastic", group)
    train.PreemptionCheckpointHandler(resolver, checkpoint, tmp_path).stop()


# A worker whose loop a signal handler has ended


def two_members(job, old, new):
    """Returns two workers of a view with equal states of a step."""
    first, second = job.first(old), job.worker(1)
    entry = job.meanwhile(lambda: second.enter(new))
    assert is_over(first)
    first.regroup(old, is_open=True)
    assert entry() is Entry.JOINED
    new.taken.clear()
    return first, second


def regroup_with_another(group, state):
    """Leaves a view that ends, for the next one that another worker is in; that may be late."""
    assert is_over(group)
    group.regroup(state, is_open=True)
    while group.num_members == 1:
        assert is_over(group)
        group.regroup(state, is_open=True)


def test_the_others_go_on_without_a_worker_that_steps_aside(job):
    old = State(b"old")
    first, second = two_members(job, old, State())
    second.step_aside(0)
    assert is_over(first)
    first.regroup(old, is_open=True)
    assert [member.name for member in first.view.members] == ["worker 0"]
    assert (second.view, second.num_members, second.placement.num_replicas) == (None, 1, 4)


def test_a_worker_that_has_stepped_aside_joins_the_others_where_they_are(job):
    old, new = State(b"old"), State()
    first, second = two_members(job, old, new)
    second.step_aside(0)
    assert is_over(first)
    first.regroup(old, is_open=True)
    first.renumber(9)
    old.held = b"later"
    entry = job.meanwhile(lambda: second.enter(new))
    assert is_over(first)
    first.regroup(old, is_open=True)
    assert entry() is Entry.JOINED
    assert (new.held, second.step, second.num_members) == (b"later", 9, 2)


@pytest.mark.parametrize("computes", [False, True])
def test_it_gets_the_place_of_the_others_also_where_their_step_is_its_own(job, computes):
    old, new = State(b"old"), State()
    first, second = two_members(job, old, new)
    second.step_aside(0)
    if computes:
        second.launch_alone(lambda: None, (), "a program")
        new.held = b"its own"
    entry = job.meanwhile(lambda: second.enter(new))
    regroup_with_another(first, old)
    assert entry() is Entry.JOINED
    assert (new.taken, second.step) == ([(b"old", False)], 7)


def test_a_worker_that_is_interrupted_as_it_joins_again_joins_once_more(job):
    """The handler raises between the view's begin and the end of `enter`."""
    old, new = State(b"old"), State()
    first, second = two_members(job, old, new)
    second.step_aside(0)
    tell = second.tell

    def interrupted(point, **about):
        tell(point, **about)
        if point == "view":
            second.tell = tell
            raise LostError

    second.tell = interrupted
    entry = job.meanwhile(lambda: second.enter(new))
    regroup_with_another(first, old)
    with pytest.raises(LostError):
        entry()
    second.step_aside(0)
    assert second.view is None
    first.renumber(9)
    old.held = b"later"
    entry = job.meanwhile(lambda: second.enter(new))
    regroup_with_another(first, old)
    assert entry() is Entry.JOINED
    assert (new.held, second.step, second.num_members) == (b"later", 9, 2)


def come_together(group, state):
    """Comes to a loop, and waits for another worker in it."""
    group.enter(state)
    if group.num_members == 1:
        regroup_with_another(group, state)


def test_workers_that_have_all_stepped_aside_have_equal_states_again(job):
    """One of them has taken part in a step more."""
    states = [State(b"seven"), State()]
    workers = two_members(job, *states)
    states[1].held = b"eight"
    workers[1].renumber(8)
    for worker in workers:
        worker.step_aside(0)
    come = job.meanwhile(lambda: come_together(workers[1], states[1]))
    come_together(workers[0], states[0])
    come()
    assert states[0].held == states[1].held
    assert workers[0].step == workers[1].step


def test_a_worker_that_is_alone_in_its_group_stays_there(job):
    first = job.first(State(b"old"))
    view = first.view
    first.step_aside(0)
    assert first.view is view
    assert not first.is_over
