"""Workers of an elastic job and its register talk over real connections. Here they are threads."""

import contextlib
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from connections import ended, served
from unison.errors import UnavailableError
from unison.net import proof
from unison.net.connecting import connect
from unison.net.lines import MOST_BYTES
from unison.net.listening import listen
from unison.runtime.elastic import Ended, Interrupted, Membership, View, Welcome
from unison.runtime.elastic.protocol import REGISTER_CHANNEL
from unison.runtime.elastic.register import Register
from unison.runtime.liveness import stragglers

TOKEN = "a secret"
#: Seconds after which a test has failed.
LIMIT = 60.0


class Job:
    """A register and its workers, which end with the test."""

    def __init__(self):
        self.events = []
        self.silence = 30.0
        self._open = contextlib.ExitStack()
        self.threads = self._open.enter_context(ThreadPoolExecutor(16))

    def register(self, least=1, most=3, *, silence=30.0, wait=30.0, start=30.0, **options):
        options = {"token": TOKEN, "on_event": self.events.append} | options
        register = Register(
            least, most, heartbeat_timeout=silence, wait=wait, start_timeout=start, **options
        )
        self.address = register.address
        self.silence = silence
        return self._open.enter_context(register)

    def worker(self, slot, *, address=None, token=TOKEN, wait=30.0, **about):
        about = {
            "name": f"worker {slot}",
            "host": "here",
            "replicas": 2,
            "slot": slot,
            "software": {"unison": "1"},
        } | about
        worker = Membership(
            address or self.address, token, about, f"127.0.0.1:{5000 + slot}", self.silence, wait
        )
        self._open.callback(worker.close)
        return worker

    def all(self, *calls):
        """What calls return that are made at the same time."""
        running = [self.threads.submit(call) for call in calls]
        return [each.result(LIMIT) for each in running]

    def group(self, *workers, step=None, is_open=True):
        """Makes workers the members of a view, and returns their views."""
        coming = [self.threads.submit(worker.regroup, step, is_open) for worker in workers]
        views = [each.result(LIMIT) for each in coming]
        self.all(*[worker.confirm for worker in workers])
        return views

    def start(self, count, **options):
        """Workers in their first view."""
        workers = [self.worker(slot, **options) for slot in range(count)]
        self.all(*[worker.enter for worker in workers])
        self.group(*workers)
        return workers

    def close(self):
        self._open.close()


@pytest.fixture
def job():
    job = Job()
    with contextlib.closing(job):
        yield job


def eventually(look):
    last = time.monotonic() + LIMIT
    while not (found := look()):
        assert time.monotonic() < last
        time.sleep(0.01)
    return found


def names(view: View) -> list[str]:
    return [member.name for member in view.members]


# The start


def test_the_workers_begin_in_the_order_of_their_slots(job):
    job.register(most=2)
    second, first = job.worker(1), job.worker(0)
    assert job.all(second.enter, first.enter) == [Welcome(2, is_joining=False)] * 2
    its, own = job.group(second, first)
    assert names(own) == ["worker 0", "worker 1"]
    assert (own.number, own.own, its.own, own.steps, own.source) == (1, 0, 1, (None, None), None)
    assert own.members == its.members
    assert own.members[1].address == "127.0.0.1:5001"
    assert own.members[1].replicas == 2


def test_the_job_begins_without_a_worker_whose_process_has_ended(job):
    register = job.register(most=3)
    workers = [job.worker(0), job.worker(2)]
    entering = [job.threads.submit(worker.enter) for worker in workers]
    register.lost(1)
    assert [each.result(LIMIT) for each in entering] == [Welcome(2, is_joining=False)] * 2


def test_the_job_begins_with_those_who_are_there_in_time(job):
    job.register(most=3, start=0.5)
    assert job.worker(0).enter() == Welcome(1, is_joining=False)


def test_too_few_in_time_end_the_job(job):
    register = job.register(2, 3, start=0.5)
    with pytest.raises(Ended, match=r"2 workers are needed to begin.*connected") as raised:
        job.worker(0).enter()
    assert raised.value.code == register.wait(LIMIT) == 77


def test_a_worker_with_other_software_is_refused(job):
    job.register(most=2)
    entering = job.threads.submit(job.worker(0).enter)
    eventually(lambda: job.events)
    with pytest.raises(Ended, match="other software") as raised:
        job.worker(1, software={"unison": "2"}).enter()
    assert raised.value.code == 79
    job.worker(1).enter()
    entering.result(LIMIT)


# Losses


def test_the_others_go_on_without_a_worker_whose_connection_closes(job):
    job.register()
    first, second, third = job.start(3)
    reasons = []
    first.on_interrupt(reasons.append)
    second.close()
    eventually(lambda: reasons and third.interrupted)
    assert reasons == ["worker 1 is lost: its connection has closed"] == [first.interrupted]
    view, _ = job.group(first, third, step=7)
    assert names(view) == ["worker 0", "worker 2"]
    assert (view.number, view.steps, view.source) == (2, (7, 7), 0)
    assert first.interrupted is None


def test_what_the_supervisor_sees_is_known_at_once(job):
    register = job.register(most=2)
    worker, _ = grouped_with_mute(job)
    register.lost(1)
    eventually(lambda: worker.interrupted)
    assert worker.interrupted == "worker 1 is lost: its process has ended"
    assert names(job.group(worker, step=3)[0]) == ["worker 0"]


def failing(job, **options):
    """The one that is left of two workers, and the register, when the other's program fails."""
    register = job.register(most=2, **options)
    first, second = job.start(2)
    second.failed("ValueError")
    second.close()
    eventually(lambda: first.interrupted)
    return first, register


def test_nobody_goes_on_when_a_program_fails_but_the_supervisor_ends_the_job(job):
    worker, register = failing(job)
    assert worker.interrupted == "worker 1 is lost: its program has failed: ValueError"
    coming = job.threads.submit(worker.regroup, 3, True)
    register.lost(1)
    register.end(78, "worker 1 has failed")
    with pytest.raises(Ended) as ended:
        coming.result(LIMIT)
    assert ended.value.code == 78
    assert [event["event"] for event in job.events].count("proposed") == 1
    assert {"event": "failed", "worker": "worker 1", "why": "ValueError"} in job.events


def test_the_others_go_on_when_a_program_fails_that_is_started_again(job):
    worker, _ = failing(job, ends_after_errors=False)
    assert names(job.group(worker, step=3)[0]) == ["worker 0"]


def test_the_others_go_on_when_nobody_ends_the_job_after_a_failure(job):
    worker, _ = failing(job, silence=0.5)
    assert names(job.group(worker, step=3)[0]) == ["worker 0"]


def test_a_silent_worker_is_lost(job):
    job.register(most=2, silence=2.0)
    worker, _ = grouped_with_mute(job)
    eventually(lambda: worker.interrupted)
    assert worker.interrupted == "worker 1 is lost: it has sent nothing for 2 s"
    assert names(job.group(worker, step=1)[0]) == ["worker 0"]


def test_one_that_does_not_stop_in_time_is_left_behind_and_comes_back_without_its_state(job):
    job.register(silence=2.0)
    first, late, third = job.start(3)
    third.close()
    eventually(lambda: late.interrupted)
    [view] = job.group(first, step=5)
    assert names(view) == ["worker 0"]
    coming = job.threads.submit(late.regroup, 6, True)
    eventually(lambda: first.interrupted)
    view = first.regroup(8, True)
    assert names(view) == ["worker 0", "worker 1"]
    assert (view.steps, view.source) == ((8, None), 0)
    assert coming.result(LIMIT).own == 1
    job.all(first.confirm, late.confirm)


def test_members_that_are_all_busy_are_waited_for(job):
    job.register(slots=1, silence=2.0)
    [busy] = job.start(1)
    newcomer = job.worker(1)
    newcomer.enter()
    coming = job.threads.submit(newcomer.regroup, None, True)
    eventually(lambda: busy.interrupted)
    time.sleep(4.5)
    assert busy.regroup(5, True).steps == coming.result(LIMIT).steps == (5, None)
    assert "lost" not in [event["event"] for event in job.events]


def test_the_state_with_the_greatest_step_is_taken(job):
    job.register()
    first, second, third = job.start(3)
    third.close()
    eventually(lambda: first.interrupted and second.interrupted)
    view, _ = job.all(lambda: first.regroup(4, True), lambda: second.regroup(5, True))
    assert (view.steps, view.source) == ((4, 5), 1)


def test_a_member_lost_while_a_view_is_formed_leads_to_the_next_one(job):
    job.register()
    first, second, third = workers = job.start(3)
    second.suspect("try again")
    job.all(*[lambda worker=worker: worker.regroup(2, True) for worker in workers])
    confirming = job.threads.submit(first.confirm)
    third.close()
    with pytest.raises(Interrupted, match="worker 2 is lost"):
        confirming.result(LIMIT)
    view, _ = job.group(first, second, step=2)
    assert (names(view), view.number) == (["worker 0", "worker 1"], 3)


def test_too_few_wait_and_then_end(job):
    register = job.register(2, 3, wait=0.5, slots=2)
    first, second = job.start(2)
    second.close()
    eventually(lambda: first.interrupted)
    needed = r"2 workers are needed to continue, and there is 1 \(worker 0\)"
    with pytest.raises(Ended, match=needed):
        first.regroup(3, True)
    assert register.wait(LIMIT) == 77


def test_connections_that_are_all_cut_lose_no_state(job):
    job.register(2, 2)
    cables = [Cable(job.address) for _ in range(2)]
    with contextlib.ExitStack() as open_cables:
        for cable in cables:
            open_cables.callback(cable.close)
        workers = [job.worker(slot, address=cables[slot].address) for slot in range(2)]
        job.all(*[worker.enter for worker in workers])
        job.group(*workers)
        for cable in cables:
            cable.cut()
        eventually(lambda: all(worker.interrupted for worker in workers))
        view, _ = job.group(*workers, step=4)
        assert view.steps == (4, 4)


def test_a_view_that_does_not_work_is_formed_again_and_then_without_whom_is_accused(job):
    job.register()
    workers = job.start(3)
    first, second, third = workers
    for number in (2, 3):
        first.suspect("worker 12 is fine, but worker 1 (at 127.0.0.1) cannot be reached")
        eventually(lambda: all(worker.interrupted for worker in workers))
        coming = [job.threads.submit(worker.regroup, 0, True) for worker in workers]
        view = coming[0].result(LIMIT)
        assert view.number == number
        if number == 2:
            assert names(view) == ["worker 0", "worker 1", "worker 2"]
            job.all(*[each.result for each in coming])
            job.all(*[worker.confirm for worker in workers])
    assert names(view) == names(coming[2].result(LIMIT)) == ["worker 0", "worker 2"]
    job.all(first.confirm, third.confirm)
    assert not coming[1].done()
    assert "benched" in [event["event"] for event in job.events]
    del second


# Newcomers


def test_a_newcomer_gets_the_state_of_those_who_are_there(job):
    job.register(slots=1)
    [first] = job.start(1)
    newcomer = job.worker(1)
    assert newcomer.enter() == Welcome(1, is_joining=True)
    time.sleep(0.5)
    assert first.interrupted is None  # it is not ready yet
    coming = job.threads.submit(newcomer.regroup, None, True)
    eventually(lambda: first.interrupted)
    assert first.interrupted == "worker 1 joins"
    view = first.regroup(9, True)
    assert (names(view), view.steps, view.source) == (["worker 0", "worker 1"], (9, None), 0)
    assert coming.result(LIMIT) == view._replace(own=1)
    job.all(first.confirm, newcomer.confirm)


def test_who_may_have_got_the_state_from_one_that_has_ended_is_waited_for(job):
    register = job.register(slots=1)
    with contextlib.closing(Cable(job.address)) as cable:
        [first] = job.start(1)
        heir = job.worker(1, address=cable.address)
        heir.enter()
        coming = job.threads.submit(heir.regroup, None, True)
        eventually(lambda: first.interrupted)
        first.regroup(9, True)
        assert coming.result(LIMIT).steps == (9, None)
        # It gets the state; before it can say so, its connection is cut, and the source ends.
        cable.cut()
        eventually(lambda: heir.interrupted)
        register.lost(0)
        newcomer = job.worker(0)
        newcomer.enter()
        coming = job.threads.submit(newcomer.regroup, None, True)
        time.sleep(0.5)
        assert not coming.done()
        with pytest.raises(Interrupted):
            heir.confirm()
        view = heir.regroup(9, True)
        while len(view.members) == 1:  # the new one was ready after the other
            view = heir.regroup(9, True)
        assert (names(view), view.steps, view.source) == (["worker 1", "worker 0"], (9, None), 0)
        assert coming.result(LIMIT).source == 0


def test_newcomers_wait_until_they_can_take_part_in_what_the_others_do(job):
    job.register(slots=1)
    first = job.worker(0)
    first.enter()
    job.group(first, is_open=False)
    newcomer = job.worker(1)
    newcomer.enter()
    coming = job.threads.submit(newcomer.regroup, None, True)
    time.sleep(0.5)
    assert first.interrupted is None
    first.open(True)
    eventually(lambda: first.interrupted)
    assert len(first.regroup(2, True).members) == 2
    coming.result(LIMIT)


def test_a_worker_too_many_waits_until_one_is_lost(job):
    job.register(2, 2)
    first, second = job.start(2)
    spare = job.worker(2)
    spare.enter()
    coming = job.threads.submit(spare.regroup, None, True)
    time.sleep(0.5)
    assert first.interrupted is None
    second.close()
    eventually(lambda: first.interrupted)
    assert names(first.regroup(3, True)) == ["worker 0", "worker 2"]
    assert coming.result(LIMIT).steps == (3, None)


def test_a_new_process_in_a_slot_takes_the_place_of_the_old_one(job):
    job.register(most=2)
    worker, _ = grouped_with_mute(job)
    again = job.worker(1)
    assert again.enter().is_joining
    eventually(lambda: worker.interrupted)
    assert worker.interrupted == "worker 1 is lost: its process has ended"
    coming = job.threads.submit(again.regroup, None, True)
    view = worker.regroup(3, True)
    while len(view.members) == 1:  # the new one was ready after the other
        view = worker.regroup(3, True)
    assert (names(view), view.steps) == (["worker 0", "worker 1"], (3, None))
    assert coming.result(LIMIT).own == 1


# Ends


def test_a_worker_that_is_to_end_soon_leaves_the_others_at_once(job):
    job.register(slots=2)
    first, second = job.start(2)
    second.notice()
    eventually(lambda: first.interrupted)
    assert first.interrupted == "worker 1 leaves"
    assert second.interrupted == "this worker is to end soon"
    leaving = job.threads.submit(second.regroup, 3, True)
    assert names(job.group(first, step=3)[0]) == ["worker 0"]
    with pytest.raises(Ended) as raised:
        leaving.result(LIMIT)
    assert raised.value.code == 143


def test_the_last_worker_with_the_state_leaves_it_for_whoever_comes(job):
    register = job.register(slots=1)
    [first] = job.start(1)
    newcomer = job.worker(1)
    newcomer.enter()
    first.notice()
    eventually(lambda: first.interrupted)
    with pytest.raises(Ended) as raised:
        first.regroup(3, False)
    assert (raised.value.code, raised.value.saves) == (143, True)
    coming = job.threads.submit(newcomer.regroup, None, True)
    first.close()
    time.sleep(0.2)
    assert not coming.done()
    register.lost(0)  # its process has ended: what it has left is there
    view = coming.result(LIMIT)
    assert (names(view), view.steps, view.source) == (["worker 1"], (None,), None)


def test_a_worker_that_is_to_end_soon_and_was_cut_off_asks_once_more(job):
    job.register(slots=2)
    with contextlib.closing(Cable(job.address)) as cable:
        workers = [job.worker(0), job.worker(1, address=cable.address)]
        job.all(*[worker.enter for worker in workers])
        job.group(*workers)
        cable.cut()
        workers[1].notice()
        eventually(lambda: "leaving" in [event["event"] for event in job.events])
        leaving = job.threads.submit(workers[1].regroup, 3, True)
        # The others have its state.
        assert names(job.group(workers[0], step=3)[0]) == ["worker 0"]
        with pytest.raises(Ended) as raised:
            leaving.result(LIMIT)
    assert (raised.value.code, raised.value.saves) == (143, False)


def test_a_worker_that_is_told_to_end_after_the_jobs_end_hears_of_that(job):
    register = job.register(slots=1)
    with contextlib.closing(Cable(job.address)) as cable:
        worker = job.worker(0, address=cable.address)
        worker.enter()
        job.group(worker)
        cable.cut()
        register.end(0, "all workers are done")
        worker.notice()
        with pytest.raises(Ended, match="all workers are done") as raised:
            worker.regroup(3, True)
    assert (raised.value.code, raised.value.saves) == (0, False)


def test_without_a_register_a_worker_that_is_to_end_soon_leaves_its_state_soon(job):
    register = job.register(slots=1)
    [worker] = job.start(1, wait=600.0)
    register.close()
    worker.notice()
    with pytest.raises(Ended, match="the register cannot be reached") as raised:
        worker.regroup(1, True)
    assert (raised.value.code, raised.value.saves) == (143, True)


def test_a_worker_without_a_state_that_is_to_end_soon_seeks_no_register(job):
    register = job.register(2, 2)
    worker = job.worker(0, wait=600.0)
    entering = job.threads.submit(worker.enter)
    eventually(lambda: job.events)
    register.close()
    worker.notice()
    with pytest.raises(Ended) as raised:
        entering.result(LIMIT)
    assert raised.value.code == 143


def test_the_job_has_ended_when_all_members_are_done(job):
    register = job.register(slots=2)
    first, second = job.start(2)
    newcomer = job.worker(2)
    newcomer.enter()
    first.done()
    first.close()
    eventually(lambda: "done" in [event["event"] for event in job.events])
    coming = job.threads.submit(newcomer.regroup, None, True)
    assert register.wait(0.5) is None
    assert second.interrupted is None  # the last steps are its own affair
    second.done()
    assert register.wait(LIMIT) == 0
    with pytest.raises(Ended) as raised:
        coming.result(LIMIT)
    assert raised.value.code == 0


def test_what_is_said_just_before_the_end_is_sent(job, monkeypatch):
    register = job.register(1, 1)
    (worker,) = job.start(1)
    say_all = worker._say_all

    def said_before(line):
        say_all(line)
        if not worker._is_closing:  # the program ends while the thread is here
            worker._is_closing = True
            worker.done()

    monkeypatch.setattr(worker, "_say_all", said_before)
    assert register.wait(LIMIT) == 0


def test_those_who_are_not_done_do_not_wait_for_one_that_is(job):
    register = job.register(3, 3, silence=2.0)
    first, second, third = job.start(3)
    third.done()
    third.close()
    eventually(lambda: first.interrupted and second.interrupted)
    assert first.interrupted == "worker 2 is done, and others are not after 2 s"
    view, _ = job.group(first, second, step=4)
    assert names(view) == ["worker 0", "worker 1"]
    first.done()
    second.done()
    assert register.wait(LIMIT) == 0


def test_the_supervisor_can_end_the_job(job):
    register = job.register(slots=1)
    [worker] = job.start(1)
    register.end(3, "worker 1 has failed")
    eventually(lambda: worker.interrupted)
    with pytest.raises(Ended, match="worker 1 has failed") as raised:
        worker.regroup(1, True)
    assert raised.value.code == register.wait(LIMIT) == 3


def test_workers_hear_of_the_end_although_the_register_closes_at_once(job):
    register = job.register(slots=1)
    [worker] = job.start(1)
    register.end(3, "enough")
    assert register.wait(LIMIT) == 3
    register.close()
    with pytest.raises(Ended, match="enough"):
        worker.regroup(1, True)


def test_a_register_that_is_lost_is_sought_for_some_time(job):
    register = job.register(slots=1)
    [worker] = job.start(1, wait=0.5)
    register.close()
    eventually(lambda: worker.interrupted)
    assert worker.interrupted == "the connection to the register is lost"
    with pytest.raises(
        UnavailableError, match=r"could not be reached for 0.5 s.*Check that the process"
    ):
        worker.regroup(1, True)


def test_a_silent_register_is_lost(job):
    with socket.create_server(("127.0.0.1", 0)) as mute:
        job.address = f"127.0.0.1:{mute.getsockname()[1]}"
        job.silence = 0.3
        with pytest.raises(UnavailableError, match="timed out during the handshake"):
            job.worker(0, wait=0.5).enter()


# Strangers


def test_who_does_not_know_the_secret_is_not_answered(job):
    job.register(most=1)
    with pytest.raises(UnavailableError, match=r"another token \(UNISON_ELASTIC_TOKEN\)"):
        job.worker(0, token="another", wait=0.3).enter()
    assert job.events == []
    assert job.worker(0).enter() == Welcome(1, is_joining=False)


def test_who_listens_where_the_register_was_learns_nothing(job):
    """Another process takes its port: it gets a nonce, and neither the secret nor a hello."""
    heard = []
    with listen("127.0.0.1", 0) as listener:
        host, port = listener.getsockname()
        worker = job.worker(0, address=f"{host}:{port}", wait=0.5)
        with listener.accept()[0] as connection:
            connection.settimeout(0.5)
            with contextlib.suppress(TimeoutError):
                while piece := connection.recv(1000):
                    heard.append(piece)
        with pytest.raises(UnavailableError):
            worker.enter()
    assert len(b"".join(heard)) == proof.HELLO_BYTES
    assert TOKEN.encode() not in b"".join(heard)


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00",
        b"[" * 100_000 + b"\n",
        b'{"is": "hello", "token": "a secret"}\n',
        bytes(1 << 20),
    ],
    ids=lambda said: repr(said[:20]),
)
def test_strangers_are_not_answered(job, said):
    job.register(most=1)
    host, port = job.address.split(":")
    with socket.create_connection((host, int(port)), timeout=LIMIT) as stranger:
        with contextlib.suppress(OSError):  # closed before all was said
            stranger.sendall(said)
            stranger.shutdown(socket.SHUT_WR)
        assert ended(stranger)
    assert job.events == []
    job.worker(0, name="worker").enter()


def test_strangers_that_say_nothing_keep_no_worker_out(job):
    job.register(most=1)
    host, port = job.address.split(":")
    with contextlib.ExitStack() as flood:
        for _ in range(300):
            flood.enter_context(socket.create_connection((host, int(port))))
        job.worker(0).enter()


HELLO = {
    "is": "hello",
    "id": "x",
    "name": "x",
    "host": "x",
    "address": "x",
    "replicas": 1,
    "slot": None,
    "software": {"unison": "1"},
}


@pytest.mark.parametrize(
    "said",
    [
        b"\x00\xff\n",
        b"[1]\n",
        b'{"is": 1}\n',
        b"{}\n",
        b'{"is": "beat", "step": 1, "doing": ""}\n',
        b"[" * 100_000 + b"\n",
        b"x" * (MOST_BYTES + 100_000),
        json.dumps(HELLO | {"replicas": "many"}).encode() + b"\n",
        json.dumps(HELLO | {"replicas": 2**70}).encode() + b"\n",
        json.dumps(HELLO | {"software": 3}).encode() + b"\n",
        json.dumps(HELLO).encode() + b'\n{"is": "ready", "view": -1}\n',
        json.dumps(HELLO).encode() + b'\n{"is": "format"}\n',
    ],
    ids=lambda said: repr(said[:40]),
)
def test_nonsense_ends_only_the_connection_that_says_it(job, said):
    job.register(most=1)
    worker = connected(job)
    worker.settimeout(LIMIT)
    with contextlib.closing(worker):
        with contextlib.suppress(OSError):  # closed before all was said
            worker.sendall(said)
        assert ended(worker)
    if b'"x"' in said and b"ready" not in said and b"format" not in said:
        assert job.events == []
    job.worker(0, name="worker").enter()


def test_what_no_register_says_is_the_end_of_the_connection_only(job):
    """A register of another version, say; the worker goes on to look for its own."""
    with served(secret=TOKEN.encode(), channels=[REGISTER_CHANNEL]) as strange:
        host, port = strange.address
        job.worker(0, address=f"{host}:{port}")
        for _ in range(3):
            with contextlib.closing(strange.next().stream) as stream:
                stream.settimeout(LIMIT)
                stream.sendall(b'{"is": "welcome"}\n')
                assert ended(stream)


def test_a_mistake_in_what_is_told_of_events_does_not_end_the_register(job, caplog):
    def fail(event):
        raise ZeroDivisionError(event)

    job.register(most=1, on_event=fail)
    assert job.worker(0).enter() == Welcome(1, is_joining=False)
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("limits", [(0, 1), (2, 1)])
def test_limits_that_cannot_be_are_named(limits):
    with pytest.raises(ValueError, match=r"Expected 1 <= min_workers <= max_workers\. Received"):
        Register(
            *limits,
            token=TOKEN,
            heartbeat_timeout=1.0,
            wait=1.0,
            start_timeout=1.0,
            on_event=print,
        )


def connected(job):
    """A connection to the register that has proved to know the secret, and says nothing."""
    host, port = job.address.split(":")
    where = (host, int(port))
    connection = connect(where, TOKEN.encode(), REGISTER_CHANNEL, seconds=LIMIT)
    connection.settimeout(LIMIT)
    return connection


class Mute:
    """A worker that says only what it is made to say."""

    def __init__(self, job, slot):
        self._connection = connected(job)
        job._open.callback(self._connection.close)
        self.say(**HELLO | {"name": f"worker {slot}", "slot": slot})

    def say(self, **message):
        self._connection.sendall(json.dumps(message).encode() + b"\n")


def grouped_with_mute(job):
    """A worker in a view with one that says nothing more."""
    mute = Mute(job, slot=1)
    worker = job.worker(0)
    worker.enter()
    coming = job.threads.submit(worker.regroup, None, True)
    mute.say(**{"is": "ready", "view": 0, "step": None, "formed": 0, "is_open": True})
    assert len(coming.result(LIMIT).members) == 2
    mute.say(**{"is": "formed", "view": 1})
    worker.confirm()
    return worker, mute


class Cable:
    """Passes connections on to an address, until it is cut."""

    def __init__(self, address):
        host, port = address.split(":")
        self._where = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._ends = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                ends = self._listener.accept()[0], socket.create_connection(self._where)
                self._ends += ends
                for source, target in (ends, ends[::-1]):
                    threading.Thread(target=_pass_on, args=(source, target), daemon=True).start()

    def cut(self):
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self):
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for end in self._ends:
            end.close()


def _pass_on(source, target):
    with contextlib.suppress(OSError):
        while received := source.recv(1 << 16):
            target.sendall(received)
        target.shutdown(socket.SHUT_RDWR)


# A member that keeps the others waiting


def test_a_member_that_is_late_is_asked_where_it_is_and_reported_once(job, monkeypatch):
    monkeypatch.setattr(stragglers, "_LEAST_SECONDS", 0.3)
    job.register(most=2)
    first, second = job.start(2)
    for worker in (first, second, first):
        worker.begin()

    def events(what):
        return [event for event in job.events if event["event"] == what]

    (late,) = eventually(lambda: events("late"))
    assert late["worker"] == "worker 1"
    assert late["about"].startswith("worker 1 has kept the others waiting for")
    # Here all workers are threads of one process, whose main thread is in this test.
    assert "test_a_member_that_is_late_is_asked_where_it_is_and_reported_once" in late["about"]
    time.sleep(0.5)
    second.begin()
    (goes_on,) = eventually(lambda: events("goes on"))
    assert goes_on["worker"] == "worker 1"
    assert len(events("late")) == 1


def test_in_the_next_view_all_begin_anew(job, monkeypatch):
    monkeypatch.setattr(stragglers, "_LEAST_SECONDS", 0.3)
    job.register(most=2)
    first, second = job.start(2)
    first.begin()
    first.suspect("an exchange has failed")
    job.group(first, second)
    time.sleep(1.0)
    assert not any(event["event"] == "late" for event in job.events)
