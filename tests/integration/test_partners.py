"""Machines copy each other's records in memory, and fetch what a lost one had."""

import concurrent.futures
import contextlib
import json
import random
import socket
import struct
import subprocess
import sys
import time
import zlib

import pytest

from leaks import census, leaked
from peak_memory import most_bytes, peak_memory
from unison.errors import UnauthenticatedError, UnavailableError
from unison.net.connecting import connect
from unison.net.secret import KEY_VARIABLE, key, new_key
from unison.net.tls import TLS_VARIABLE
from unison.runtime.host_memory import HostMemory
from unison.runtime.launching import record_copies
from unison.runtime.launching.holdings import Holding, Meeting, newest_common_step
from unison.runtime.launching.nodes import meet_nodes
from unison.runtime.launching.partners import Partners
from unison.runtime.launching.record_transfer import (
    CHANNEL,
    PIECE_BYTES,
    RecordConnection,
    parsed_offer,
)
from unison.storage.memory_slots import MemorySlots

HOST = "127.0.0.1"

#: Seconds in which what these tests wait for has to come about.
PATIENCE = 20.0


class Machine:
    """A machine of a job: its workers' memory, and what it holds of others."""

    def __init__(self, workers=1):
        self.workers = workers
        self.said = []
        self._closing = contextlib.ExitStack()
        self.memory = self._closing.enter_context(HostMemory(workers))
        self.partners = self._closing.enter_context(Partners(self.memory, self.said.append))

    def close(self):
        self._closing.close()

    def write(self, step, place=0, data=None):
        """Writes a record as a worker does."""
        slots = self.memory.slots[place]
        data = f"state of step {step}".encode() if data is None else data
        slots.begin(len(data))[:] = data
        slots.commit(step, {"step": step})

    def read(self, step, place=0):
        with self.memory.slots[place].records() as records:
            return next((bytes(each.data) for each in records if each.step == step), None)

    def held(self):
        """The steps that it holds, by worker."""
        return self.partners._held.all_steps()


@pytest.fixture
def machine(monkeypatch):
    """Makes machines that know one key."""
    monkeypatch.setenv(KEY_VARIABLE, new_key())
    monkeypatch.setattr(record_copies, "_RETRY_AFTER", 0.05)
    with contextlib.ExitStack() as closing:

        def made(workers=1):
            each = Machine(workers)
            closing.callback(each.close)
            return each

        yield made


@pytest.fixture
def changing(machine):
    """Makes machines of a job that may go on with another number of workers."""

    def made(workers=1):
        each = machine(workers)
        each.partners._may_regroup = True
        return each

    return made


runs = iter(range(10**6))


def meet(*machines):
    """Begins a run of machines, whose ranks are their order; returns the steps that they have."""
    holdings = [each.partners.announce(HOST) for each in machines]
    run, workers = f"run {next(runs)}", [each.workers for each in machines]
    with concurrent.futures.ThreadPoolExecutor(len(machines)) as threads:
        begun = [
            threads.submit(each.partners.begin, Meeting(run, rank, workers, holdings))
            for rank, each in enumerate(machines)
        ]
        return [each.result(PATIENCE) for each in begun]


def wait_until(is_true):
    last = time.monotonic() + PATIENCE
    while not is_true():
        assert time.monotonic() < last
        time.sleep(0.01)


def client(machine):
    """A connection to a machine of one that knows the key."""
    at = machine.partners.announce(HOST).at if isinstance(machine, Machine) else machine
    return contextlib.closing(record_copies.connected(at))


@pytest.mark.parametrize("encryption", ["on", "always"])
def test_new_records_are_copied_to_the_next_machine(machine, encryption, monkeypatch):
    monkeypatch.setenv(TLS_VARIABLE, encryption)
    machines = [machine(2), machine(1), machine(1)]
    meet(*machines)
    for step in (5, 10):
        for each in machines:
            for place in range(each.workers):
                each.write(step, place)
        newest = [step, 5][: step // 5]
        wait_until(
            lambda newest=newest: (
                [each.held() for each in machines]
                == [
                    {0: newest, 1: newest, 3: newest},
                    {2: newest, 0: newest, 1: newest},
                    {3: newest, 2: newest},
                ]
            )
        )
    assert [each.said for each in machines] == [[], [], []]


def test_a_step_is_copied_when_all_workers_of_the_machine_have_it(machine):
    first, second = machine(2), machine(1)
    meet(first, second)
    first.write(5, 0)
    first.write(5, 1)
    first.write(10, 0)
    wait_until(lambda: second.held().get(1) == [5])
    time.sleep(0.2)
    assert second.held() == {0: [5], 1: [5]}
    first.write(10, 1)
    wait_until(lambda: second.held() == {0: [10, 5], 1: [10, 5]})


def former_records(machine):
    """The records of the former workers that the workers of a machine read, by worker and step."""
    found = {}
    for worker, slots in enumerate(machine.memory.former):
        with slots.records() as records:
            found |= {(worker, record.step): bytes(record.data) for record in records}
    return found


def test_fewer_machines_hold_the_records_of_all_former_workers(changing):
    first, lost, third = changing(1), changing(2), changing(1)
    meet(first, lost, third)
    for each in (first, lost, third):
        for place in range(each.workers):
            each.write(5, place, f"of {each.workers} at {place}".encode())
    wait_until(lambda: third.held().get(2) == [5] and first.held().get(3) == [5])
    lost.close()
    assert meet(first, third) == [5, 5]
    expected = {(0, 5): b"of 1 at 0", (1, 5): b"of 2 at 0", (2, 5): b"of 2 at 1"}
    expected[3, 5] = b"of 1 at 0"
    for each in (first, third):
        assert former_records(each) == expected
        assert each.memory.slots[0].steps() == []
    # Lost again before they have written anything: the former state is still there.
    assert meet(first, third) == [5, 5]
    fresh = changing(3)
    assert meet(first, fresh, third) == [5, 5, 5]
    assert former_records(fresh) == expected
    # The first record may be missing on another machine; the second one is not begun before.
    for each in (first, fresh, third):
        for place in range(each.workers):
            each.write(7, place)
    time.sleep(0.2)
    assert first.partners._former is not None
    for each in (first, fresh, third):
        for place in range(each.workers):
            each.write(9, place)
    wait_until(lambda: all(each.partners._former is None for each in (first, fresh, third)))
    assert meet(first, fresh, third) == [9, 9, 9]
    assert first.memory.former == []


def test_a_state_of_as_many_workers_as_before_is_theirs_again(changing):
    first, second, third = changing(1), changing(1), changing(1)
    meet(first, second, third)
    for each in (first, second, third):
        each.write(5)
    wait_until(lambda: first.held().get(2) == [5])
    third.close()
    assert meet(first, second) == [5, 5]
    again = changing(1)
    # Two workers have written nothing: the state of three is that of as many again.
    assert meet(first, second, again) == [5, 5, 5]
    assert first.memory.former == []
    assert again.read(5) == b"state of step 5"


def test_records_of_a_machine_that_missed_a_meeting_do_not_count(changing):
    first, second, late = changing(1), changing(1), changing(1)
    meet(first, second, late)
    for each in (first, second, late):
        each.write(5)
    wait_until(lambda: first.held().get(2) == [5])
    late.write(7, data=b"of another past")
    assert meet(first, second) == [5, 5]
    again = changing(1)
    assert meet(first, second, again) == [5, 5, 5]
    for each in (first, second, again):
        each.write(7)
    wait_until(lambda: first.held().get(2) == [7, 5])
    again.close()
    assert meet(first, second, late) == [7, 7, 7]
    assert late.read(7) == b"state of step 7"


def test_what_other_workers_of_a_host_have_in_common_is_fetched_from_it(changing):
    first, second = changing(2), changing(1)
    meet(first, second)
    for place in range(2):
        data = f"at {place}".encode()
        first.memory.slots[place].begin(len(data))[:] = data
        first.memory.slots[place].commit(5, {"about": {"first": 0}})
    second.write(5)
    wait_until(lambda: second.held().get(0) == [5])
    first.workers, third = 1, changing(1)
    assert meet(first, third, second) == [5, 5, 5]  # as many workers, on other machines
    (common,) = third.memory.former
    with common.records() as records:
        assert bytes(records[0].data) == b"at 0"
    assert first.memory.former == []


def test_without_regrouping_records_of_another_number_of_workers_are_discarded(machine):
    first, second = machine(1), machine(1)
    meet(first, second)
    for each in (first, second):
        each.write(5)
    wait_until(lambda: first.held().get(1) == [5])
    second.close()
    assert meet(first, machine(2)) == [None, None]
    assert first.memory.former == []


def test_the_state_of_a_lost_machine_is_fetched(machine):
    first, lost, third = machine(1), machine(2), machine(1)
    meet(first, lost, third)
    for each in (first, lost, third):
        for place in range(each.workers):
            each.write(5, place)
            each.write(10, place)
    wait_until(lambda: third.held().get(2) == [10, 5] and third.held().get(1) == [10, 5])
    expected = [lost.read(10, place) for place in range(2)]
    lost.close()
    fresh = machine(2)
    assert meet(first, fresh, third) == [10, 10, 10]
    assert [fresh.read(10, place) for place in range(2)] == expected
    assert fresh.said == ["fetched the state at step 10 of workers [1, 2] from other machines"]
    wait_until(lambda: fresh.held().get(0) == [10, 5])  # it keeps a copy again
    fresh.write(15, 0)
    fresh.write(15, 1)
    wait_until(lambda: third.held().get(1) == third.held().get(2) == [15, 10])


def test_nothing_is_fetched_without_a_common_step(machine):
    first, second = machine(), machine()
    meet(first, second)
    first.write(5)
    second.write(5)
    wait_until(lambda: first.held() == second.held() == {0: [5], 1: [5]})
    first.close()
    second.close()
    third, fourth = machine(), machine()
    assert meet(third, fourth) == [None, None]
    assert third.said == []  # a job that begins needs no words
    third.write(5)
    wait_until(lambda: fourth.held() == {0: [5]})
    fresh = machine()
    assert meet(third, fresh) == [None, None]
    assert third.held() == fresh.held() == {}
    assert "no step of which every worker's state is in memory" in third.said[0]


def test_records_of_later_steps_are_discarded(machine):
    """Or a step that is written again could be mixed with what was written before."""
    first, second = machine(), machine()
    meet(first, second)
    for each in (first, second):
        each.write(5)
    wait_until(lambda: first.held() == second.held() == {0: [5], 1: [5]})
    first.write(10)
    wait_until(lambda: second.held()[0] == [10, 5])
    assert meet(first, second) == [5, 5]
    assert first.held() == second.held() == {0: [5], 1: [5]}


def test_permuted_machines_exchange_what_their_workers_need(machine):
    machines = [machine(1), machine(2), machine(1)]
    meet(*machines)
    for each in machines:
        for place in range(each.workers):
            each.write(5, place, f"state of {machines.index(each)} {place}".encode())
    states = [b"state of 0 0", b"state of 1 0", b"state of 1 1", b"state of 2 0"]
    wait_until(lambda: sum(map(len, (each.held() for each in machines))) == 8)
    order = [machines[1], machines[2], machines[0]]
    assert meet(*order) == [5, 5, 5]
    found = [each.read(5, place) for each in order for place in range(each.workers)]
    assert found == states
    for each in order:
        for place in range(each.workers):
            each.write(10, place)
    wait_until(lambda: sorted(order[1].held()) == [0, 1, 2])  # what it need not keep is closed
    assert meet(*order) == [10, 10, 10]


def test_another_number_of_workers_makes_records_useless(machine):
    first, second = machine(1), machine(1)
    meet(first, second)
    first.write(5)
    second.write(5)
    wait_until(lambda: first.held() == second.held() == {0: [5], 1: [5]})
    assert meet(first, machine(2)) == [None, None]
    assert first.held() == {}


def test_a_machine_that_is_gone_is_copied_to_when_it_is_back(machine):
    first, second = machine(), machine()
    meet(first, second)
    second.close()
    first.write(5)
    wait_until(lambda: any("is not copied to the next machine" in each for each in first.said))
    first.write(10)
    back = machine()
    assert meet(first, back) == [None, None]
    first.write(15)
    back.write(15)
    wait_until(lambda: first.held() == back.held() == {0: [15], 1: [15]})


def offered(connection, worker, step, data, checksum=None, is_whole=True):
    """What the other end says of a record that is sent by hand."""
    connection.send(
        {"is": "record", "worker": worker, "step": step, "size": len(data), "header": 2}
    )
    answer = connection.receive()
    if answer["is"] != "go":
        return answer
    connection._send(b"{}")
    for start in range(0, len(data), PIECE_BYTES):
        piece = data[start : start + PIECE_BYTES]
        connection._send(struct.pack("<I", len(piece)) + piece)
    connection._send(struct.pack("<I", 0))
    checksum = zlib.crc32(data, zlib.crc32(b"{}")) if checksum is None else checksum
    connection.send({"is": "end", "checksum": checksum if is_whole else None})
    return connection.receive()


@contextlib.contextmanager
def copying_by_hand(second, workers=1):
    """A connection on which the machine takes records of the first one's workers."""
    at = second.partners.announce(HOST).at
    nobody = Holding("127.0.0.1:1", None, 0, {})
    run, total = f"run {next(runs)}", [workers, 1]
    second.partners.begin(Meeting(run, 1, total, [nobody, Holding(at, None, 0, {})]))
    with client(at) as connection:
        connection.send({"is": "copy", "run": run, "workers": [0, workers]})
        held = [[worker, []] for worker in range(workers)]
        assert connection.receive() == {"is": "held", "records": held}
        yield connection


def test_a_record_is_kept_only_if_its_data_has_the_checksum(machine):
    second = machine()
    with copying_by_hand(second) as connection:
        assert offered(connection, 0, 5, b"data")["is"] == "kept"
        answer = offered(connection, 0, 10, b"data", checksum=1)
        assert answer["is"] == "discarded"
        assert "checksum" in answer["about"]
    assert second.held() == {0: [5]}
    wait_until(lambda: second.said)
    assert "worker 0 at step 10 is discarded: its checksum is" in second.said[0]


def test_a_record_that_is_overwritten_while_it_is_sent_is_discarded(machine):
    second = machine()
    with copying_by_hand(second) as connection:
        assert offered(connection, 0, 5, b"data")["is"] == "kept"
        assert offered(connection, 0, 10, b"mixed", is_whole=False)["is"] == "discarded"
        assert second.held() == {0: [5]}
        assert offered(connection, 0, 15, b"newer")["is"] == "kept"
    assert second.held() == {0: [15, 5]}
    assert second.said == []


def test_the_newest_complete_step_survives_until_there_is_a_newer_one(machine):
    second = machine()
    with copying_by_hand(second, workers=2) as connection:
        for step in (5, 10):
            for worker in (0, 1):
                assert offered(connection, worker, step, b"data")["is"] == "kept"
        for step in (15, 20, 25):  # worker 1's are always overwritten too soon
            assert offered(connection, 0, step, b"data")["is"] == "kept"
            assert offered(connection, 1, step, b"data", is_whole=False)["is"] == "discarded"
    assert second.held() == {0: [25, 10], 1: [10]}


def test_a_sender_gives_up_a_record_that_is_overwritten(machine):
    """The other end reads nothing until the slot has been written again."""
    first = machine()
    first.write(5, data=bytes(3 * PIECE_BYTES))
    ours, theirs = socket.socketpair()
    sender, receiver = RecordConnection(ours), RecordConnection(theirs)
    with contextlib.closing(sender), contextlib.closing(receiver), HostMemory(1) as elsewhere:
        with concurrent.futures.ThreadPoolExecutor(1) as threads:
            sent = threads.submit(sender.send_record, 0, 5, first.memory.slots[0], lambda: True)
            offer = parsed_offer(receiver.receive())
            first.write(10)
            first.write(15)  # into the first slot
            into = elsewhere.slots[0]
            reason = receiver.receive_record(offer, into, None, lambda: True)
            assert reason == sent.result(PATIENCE) == "it was overwritten meanwhile"
        assert into.steps() == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"size": 1 << 60},
        {"size": -1},
        {"step": -1},
        {"step": True},
        {"worker": 7},
        {"header": 1 << 40},
        {"is": "else"},
    ],
    ids=str,
)
def test_an_implausible_record_is_refused_before_there_is_memory_for_it(machine, wrong):
    second = machine()
    with copying_by_hand(second) as connection:
        offer = {"is": "record", "worker": 0, "step": 5, "size": 4, "header": 2}
        connection.send(offer | wrong)
        try:
            assert connection.receive()["is"] == "refused"
        except ConnectionError:
            assert wrong != {"size": 1 << 60}
        assert second.held() == {}


def test_a_copy_is_never_of_two_records(machine):
    """Records are written as fast as possible, and each consists of one byte."""
    first, second = machine(), machine()
    meet(first, second)
    seen = set()
    step = 0
    last = time.monotonic() + 2.0
    while time.monotonic() < last or not seen:
        step += 1
        first.write(step, data=bytes([step % 256]) * 3_000_000)
        time.sleep(0.05 * (step % 5 == 0))  # sometimes there is time to copy it
        if second.held():
            with second.partners._held.using(0) as slots, slots.records() as records:
                for record in records:
                    data = bytes(record.data)
                    if record.step in slots.steps():  # it was not overwritten as it was read
                        seen.add(record.step)
                        assert data == bytes([record.step % 256]) * 3_000_000
    wait_until(lambda: second.held()[0][0] == step)
    with second.partners._held.using(0) as slots, slots.records() as records:
        assert bytes(records[0].data) == bytes([step % 256]) * 3_000_000
    assert all("more often than it can be copied" in each for each in first.said)
    assert second.said == []


def test_garbage_is_no_end_of_the_listener(machine):
    first, second = machine(), machine()
    meet(first, second)
    at = second.partners._address
    where = (HOST, int(at.rpartition(":")[2]))
    for noise in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 100_000, b"\x16\x03\x01" + b"a" * 500):
        with socket.create_connection(where, 5) as stranger, contextlib.suppress(OSError):
            stranger.sendall(noise)
    for noise in (b"\xff" * 100, struct.pack("<I", 3) + b"[1]", struct.pack("<I", 2) + b"{}"):
        stream = connect(where, key(), CHANNEL, seconds=PATIENCE)
        with contextlib.closing(stream), contextlib.suppress(OSError):
            stream.settimeout(PATIENCE)
            stream.sendall(noise)
            assert stream.recv(1) == b""
    for said in (
        {"is": "copy", "run": "another", "workers": [0, 1]},
        {"is": "copy", "run": [], "workers": "all"},
    ):
        with client(at) as connection:
            connection.send(said)
            assert connection.receive() == {"is": "later"}
    with client(at) as connection:
        connection.send({"is": "fetch", "worker": 9, "step": 5, "total": 2})
        assert connection.receive() == {"is": "missing"}
    first.write(5)
    wait_until(lambda: second.held() == {0: [5]})


def test_a_machine_with_another_key_is_refused(machine, monkeypatch):
    first = machine()
    at = first.partners.announce(HOST).at
    monkeypatch.setenv(KEY_VARIABLE, new_key())
    with pytest.raises(UnauthenticatedError, match="another key"):
        record_copies.connected(at)


def test_nothing_is_copied_between_two_runs(machine):
    first, second = machine(), machine()
    meet(first, second)
    first.write(5)
    wait_until(lambda: second.held() == {0: [5]})
    assert second.partners.announce(HOST).steps == {0: [5]}
    first.write(10)
    time.sleep(0.3)
    assert second.held() == {0: [5]}


def test_a_copy_that_stalls_is_interrupted_by_the_next_meeting(machine):
    second = machine()
    with copying_by_hand(second) as connection:
        assert offered(connection, 0, 5, b"data")["is"] == "kept"
        connection.send({"is": "record", "worker": 0, "step": 10, "size": 1000, "header": 2})
        assert connection.receive() == {"is": "go"}
        begun = time.monotonic()
        assert second.partners.announce(HOST).steps == {0: [5]}
        assert time.monotonic() - begun < 2


def test_a_next_machine_that_does_not_answer_blocks_nobody(machine):
    first = machine()
    at = first.partners.announce(HOST).at
    with socket.create_server((HOST, 0)) as silent:
        there = f"{HOST}:{silent.getsockname()[1]}"
        holdings = [Holding(each, None, 0, {}) for each in (at, there)]
        first.partners.begin(Meeting("run", 0, [1, 1], holdings))
        first.write(5)
        with silent.accept()[0]:
            first.write(10)
            begun = time.monotonic()
            assert first.partners.announce(HOST).steps == {0: [10, 5]}
            first.close()
            assert time.monotonic() - begun < 2


def test_a_record_that_cannot_be_fetched_is_told(machine):
    first = machine()
    at = first.partners.announce(HOST).at
    holdings = [Holding(at, None, 0, {}), Holding("127.0.0.1:1", 1, 2, {0: [5], 1: [5]})]
    assert first.partners.begin(Meeting("run", 0, [1, 1], holdings)) is None
    assert "the state of worker 0 at step 5 could not be fetched: 127.0.0.1:1: " in first.said[0]


@pytest.mark.parametrize("seed", range(3))
def test_machines_that_are_lost_at_any_time_go_on_with_one_past(machine, seed):
    """The data of a record names the run that has written it: one run goes on from another."""
    rng = random.Random(seed)
    machines = [machine(rng.randrange(1, 3)) for _ in range(3)]
    past, step = {}, 0  # the run that has written each step
    outcomes = []
    for run in range(8):
        begun = meet(*machines)
        assert len(set(begun)) == 1
        outcomes.append(begun[0])
        step = begun[0] or 0
        past = {each: past[each] for each in past if each <= step}
        worker = 0
        for each in machines:
            for place in range(each.workers):
                if step:
                    assert each.read(step, place) == f"{past[step]} {worker} {step}".encode()
                worker += 1
        for _ in range(rng.randrange(1, 5)):
            step += 1
            past[step] = run
            is_cut = rng.random() < 0.2  # some have written the step when they are lost
            worker = 0
            for each in machines:
                for place in range(each.workers):
                    if not is_cut or rng.random() < 0.5:
                        each.write(step, place, f"{run} {worker} {step}".encode())
                    worker += 1
            if is_cut:
                break
            time.sleep(rng.choice([0, 0.05, 0.2]))
        if rng.random() < 0.8:
            lost = rng.randrange(3)
            machines[lost].close()
            machines[lost] = machine(machines[lost].workers)
        if rng.random() < 0.3:
            rng.shuffle(machines)
    assert any(outcomes), outcomes


def test_closing_leaves_nothing(machine):
    def use():
        machines = [Machine(2) for _ in range(2)]
        meet(*machines)
        machines[0].write(5, 0)
        machines[0].write(5, 1)
        wait_until(lambda: machines[1].held().get(1) == [5])
        for each in machines:
            each.close()

    use()
    before = census()
    for _ in range(3):
        use()
    wait_until(lambda: not leaked(before, census(), 100 << 20))


def met(address, *machines):
    """What machines that meet at an address learn."""
    with concurrent.futures.ThreadPoolExecutor(len(machines)) as threads:
        meet_one = [
            threads.submit(
                meet_nodes,
                len(machines),
                address,
                each.workers,
                {},
                PATIENCE,
                partners=each.partners,
            )
            for each in machines
        ]
        return [each.result(2 * PATIENCE) for each in meet_one]


def test_machines_that_meet_keep_their_ranks_and_get_what_a_new_one_needs(machine):
    with socket.socket() as free:
        free.bind((HOST, 0))
        address = f"{HOST}:{free.getsockname()[1]}"
    machines = [machine(1), machine(2), machine(1)]
    ranks = [node.rank for node in met(address, *machines)]
    for rank, each in zip(ranks, machines, strict=True):
        for place in range(each.workers):
            each.write(5, place, f"state of {rank} {place}".encode())
    wait_until(lambda: sum(len(each.held()) for each in machines) == 8)
    lost = ranks.index(0)  # at the rendezvous
    expected = [machines[lost].read(5, place) for place in range(machines[lost].workers)]
    machines[lost].close()
    machines[lost] = machine(machines[lost].workers)
    assert [node.rank for node in met(address, *machines)] == ranks
    found = [machines[lost].read(5, place) for place in range(machines[lost].workers)]
    assert found == expected


def test_all_machines_of_a_job_copy_their_records_or_none(machine):
    with socket.socket() as free:
        free.bind((HOST, 0))
        address = f"{HOST}:{free.getsockname()[1]}"
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        both = [
            threads.submit(meet_nodes, 2, address, 1, {}, PATIENCE, partners=own)
            for own in (machine().partners, None)
        ]
        for each in both:
            with pytest.raises(UnavailableError, match="differ: records in memory"):
                each.result(2 * PATIENCE)


def test_the_newest_step_is_one_of_which_all_workers_records_exist():
    first = Holding("127.0.0.1:1", 0, 3, {0: [10, 5], 2: [15, 10]})
    second = Holding("127.0.0.1:2", 1, 3, {1: [15, 10], 0: [15]})
    of_another_job = Holding("127.0.0.1:3", None, 2, {0: [20], 1: [20], 2: [20]})
    machines = [first, second, of_another_job]
    assert newest_common_step(machines, 3) == 15
    assert newest_common_step([first, second._replace(steps={1: [5]})], 3) is None


#: The command of a machine with a worker, told when to meet, to write, and to read.
COMMAND = """
import json, sys
from unison.runtime.host_memory import HostMemory
from unison.runtime.launching.nodes import meet_nodes
from unison.runtime.launching.partners import Partners

with HostMemory(1) as memory, Partners(memory) as partners:
    for line in sys.stdin:
        what, value = json.loads(line)
        slots = memory.slots[0]
        answer = None
        if what == "meet":
            answer = meet_nodes(3, value, 1, {}, 20.0, partners=partners).rank
        elif what == "write":
            slots.begin(8)[:] = value.to_bytes(8, "little")
            slots.commit(value, {})
        elif what == "held":
            answer = sum(map(len, partners._held.all_steps().values()))
        else:
            with slots.records() as records:
                answer = [int.from_bytes(each.data, "little") for each in records]
        print(json.dumps(answer), flush=True)
"""


def test_a_machine_whose_command_is_killed_gets_its_state_back(monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, new_key())
    with socket.socket() as free:
        free.bind((HOST, 0))
        address = f"{HOST}:{free.getsockname()[1]}"

    def started():
        return subprocess.Popen(
            [sys.executable, "-c", COMMAND],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    commands = []

    def ask(what, *values):
        """What each machine answers; all are asked at once."""
        for command, value in zip(commands, values * (1 if len(values) > 1 else 3), strict=True):
            command.stdin.write(json.dumps([what, value]) + "\n")
            command.stdin.flush()
        return [json.loads(command.stdout.readline()) for command in commands]

    with contextlib.ExitStack() as ending:

        def start():
            command = started()
            ending.enter_context(command)
            ending.callback(command.kill)
            return command

        commands += [start() for _ in range(3)]
        ranks = ask("meet", address)
        assert sorted(ranks) == [0, 1, 2]
        for step in (10, 20):
            ask("write", step)
        wait_until(lambda: ask("held", None) == [4, 4, 4])
        for lost in range(3):  # one of them is at the rendezvous
            commands[lost].kill()
            commands[lost].wait(PATIENCE)
            commands[lost] = start()
            assert ask("meet", address) == ranks
            assert all(20 in steps for steps in ask("read", None))
            wait_until(lambda: all(count >= 2 for count in ask("held", None)))
            time.sleep(0.2)


def test_slots_keep_a_record_and_discard_later_ones():
    slots = MemorySlots.create("test")
    with contextlib.closing(slots):
        for step in (1, 2):
            slots.begin(1)
            slots.commit(step, None)
        slots.begin(1, keep=1)
        assert slots.steps() == [1]
        slots.commit(3, None)
        assert slots.steps() == [3, 1]
        slots.discard_after(1)
        assert slots.steps() == [1]
        slots.discard_after(-1)
        assert slots.steps() == []


#: A machine in a process of its own, which says what it holds.
PROGRAM = """
import json, sys
from unison.runtime.host_memory import HostMemory
from unison.runtime.launching.holdings import Holding, Meeting
from unison.runtime.launching.partners import Partners

with HostMemory(1) as memory, Partners(memory) as partners:
    at = partners.announce("127.0.0.1").at
    print(at, flush=True)
    nobody = Holding(sys.stdin.readline().strip(), None, 0, {})
    partners.begin(Meeting("run", 1, [1, 1], [nobody, Holding(at, None, 0, {})]))
    for line in sys.stdin:
        print(json.dumps(partners._held.steps(0)), flush=True)
"""


def test_a_large_record_is_copied_to_another_process_in_seconds(machine):
    size = 200_000_000
    first = machine()
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        try:
            at = first.partners.announce(HOST).at
            theirs = other.stdout.readline().strip()
            other.stdin.write(f"{at}\n")
            other.stdin.flush()
            holdings = [Holding(each, None, 0, {}) for each in (at, theirs)]
            first.partners.begin(Meeting("run", 0, [1, 1], holdings))

            def held():
                other.stdin.write("\n")
                other.stdin.flush()
                return json.loads(other.stdout.readline())

            assert held() == []
            first.write(5, data=bytes(size))
            with peak_memory() as peak:
                begun = time.monotonic()
                while not held():
                    assert time.monotonic() < begun + PATIENCE
                    time.sleep(0.01)
                seconds = time.monotonic() - begun
            print(f"{size / seconds / 1e6:.0f} MB/s")
            # Both have mapped the record, and nothing else that is large.
            assert peak.bytes < 1.5 * size
            assert most_bytes(other) < 2 * size
        finally:
            other.kill()
