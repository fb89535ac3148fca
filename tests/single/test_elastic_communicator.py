"""The transport of one view: exchanges between members on one machine and on several.

The members are threads, or processes where some are killed; that they are on different machines is
only said. No program of JAX takes part, except where the ticket of a program is looked at.
"""

import contextlib
import ctypes
import itertools
import os
import shutil
import signal
import socket
import threading
import time
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from connections import served
from unison.runtime.elastic.communicator import Broken, Communicator
from unison.runtime.elastic.meeting import Call, Meeting
from unison.runtime.elastic.protocol import MEMBERS_CHANNEL, Member, View
from unison.runtime.shared_memory.library import Kind, Ticket, exchange, library

pytestmark = pytest.mark.skipif(
    shutil.which("c++") is None, reason="the package was built without a C++ compiler"
)

SECONDS = 30.0

#: The hosts of the members, and how many replicas each has.
LAYOUTS = {
    "one host of three": ("aaa", (1, 1, 1)),
    "one host of two": ("aa", (1, 1)),
    "three hosts of one": ("abc", (1, 1, 1)),
    "two hosts of one": ("ab", (1, 1)),
    "hosts of two and one": ("aab", (1, 1, 1)),
    "hosts in turns": ("abab", (1, 1, 1, 1)),
    "several replicas each": ("aba", (2, 1, 3)),
    "two replicas on each of two hosts": ("ab", (2, 2)),
    "several replicas alone": ("a", (3,)),
    "alone": ("a", (1,)),
}

DTYPES = {
    "bfloat16": (ml_dtypes.bfloat16, 16),
    "float16": (np.float16, 10),
    "float32": (np.float32, 11),
    "float64": (np.float64, 12),
    "int8": (np.int8, 2),
    "int16": (np.int16, 3),
    "int32": (np.int32, 4),
    "int64": (np.int64, 5),
    "uint8": (np.uint8, 6),
    "uint16": (np.uint16, 7),
    "uint32": (np.uint32, 8),
    "uint64": (np.uint64, 9),
}

_numbers = itertools.count(1)


def perform(ticket, kind, operands, results, senders=(), words=""):
    """An operation of a replica, as a program performs it; changes the ticket."""
    dtype = next(number for _, (t, number) in DTYPES.items() if np.dtype(t) == operands[0].dtype)

    def pointers(arrays):
        count = len(arrays)
        return (
            (ctypes.c_void_p * count)(*(array.ctypes.data for array in arrays)),
            (ctypes.c_size_t * count)(*(array.nbytes for array in arrays)),
        )

    code = library().unison_exchange_run(
        kind,
        (words or f"{kind.name} of {[array.shape for array in operands]}").encode(),
        (ctypes.c_int64 * max(len(senders), 1))(*senders),
        ticket.ctypes.data_as(ctypes.POINTER(ctypes.c_uint32)),
        dtype,
        len(operands),
        *pointers(operands),
        *pointers(results),
    )
    assert code == 0


def members_of(hosts, replicas, stack):
    listeners = []
    for _ in hosts:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listeners.append(listener)
    members = tuple(
        Member(f"id{i}", f"worker {i}", host, f"127.0.0.1:{listener.getsockname()[1]}", count)
        for i, (host, count, listener) in enumerate(zip(hosts, replicas, listeners, strict=True))
    )
    return members, listeners


def in_threads(*calls):
    """The results of functions that run at the same time."""
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call) for call in calls]
        for future in wait(futures, SECONDS, FIRST_EXCEPTION).done:
            future.result()
        return [future.result(SECONDS) for future in futures]


@contextlib.contextmanager
def group_of(hosts, replicas=None, **options):
    """The communicators of a view's members, which are threads of this process."""
    with contextlib.ExitStack() as stack:
        replicas = replicas or (1,) * len(hosts)
        members, listeners = members_of(hosts, replicas, stack)
        number = next(_numbers)

        def join(own):
            view = View(number, members, own)
            return Communicator(
                view, "secret", listeners[own], SECONDS, **{"patience": SECONDS} | options
            )

        group = in_threads(*(lambda own=i: join(own) for i in range(len(members))))
        try:
            yield group
        finally:
            for member in group:
                member.close()


@pytest.fixture(params=LAYOUTS, scope="module")
def group(request):
    with group_of(*LAYOUTS[request.param]) as group:
        yield group


@pytest.fixture(scope="module")
def tickets(group):
    """Every replica's ticket, which all operations of the group's tests use one after the other."""
    return [row for member in group for row in member.first_ticket()]


def by_all(tickets, of_replica):
    """What `of_replica(rank, ticket)` returns on every replica."""
    return in_threads(*(lambda r=r, t=t: of_replica(r, t) for r, t in enumerate(tickets)))


def some(rank, shape, dtype=np.float32):
    return np.random.default_rng(rank).integers(0, 30, shape).astype(dtype)


def test_ranks_are_the_replicas_member_after_member(group, tickets):
    assert [int(ticket[Ticket.RANK]) for ticket in tickets] == list(range(len(tickets)))
    assert all(ticket[Ticket.FAILED] == 0 for ticket in tickets)


@pytest.mark.parametrize("size", [0, 1, 7, 16_385, 300_001])
@pytest.mark.parametrize(("kind", "numpy"), [(Kind.SUM, np.sum), (Kind.MAX, np.max)])
def test_a_reduction_of_several_arrays_in_place(tickets, kind, numpy, size):
    shapes = [(size,), (3,), (0,), (size // 2, 2)]

    def of_replica(rank, ticket):
        arrays = [some(rank + 100 * i, shape) for i, shape in enumerate(shapes)]
        perform(ticket, kind, arrays, arrays)
        return arrays

    results = by_all(tickets, of_replica)
    for i, shape in enumerate(shapes):
        everybodys = np.stack([some(rank + 100 * i, shape) for rank in range(len(tickets))])
        for result in results:
            np.testing.assert_array_equal(result[i], numpy(everybodys, 0))


@pytest.mark.parametrize("name", DTYPES)
def test_numbers_of_every_type(tickets, name):
    dtype = DTYPES[name][0]

    def of_replica(rank, ticket):
        results = []
        for size, kind in itertools.product((5, 70_001), (Kind.SUM, Kind.MAX, Kind.MIN)):
            operand = some(rank, size).astype(dtype)
            results.append(np.empty_like(operand))
            perform(ticket, kind, [operand], [results[-1]])
        return results

    results = by_all(tickets, of_replica)
    for i, size in enumerate((5, 70_001)):
        values = np.stack([some(rank, size) for rank in range(len(tickets))])
        for result in results:
            for j, function in enumerate((np.sum, np.max, np.min)):
                expected = function(values, 0).astype(dtype)
                np.testing.assert_array_equal(result[3 * i + j], expected)


def test_all_replicas_get_the_same_bits(tickets):
    def of_replica(rank, ticket):
        results = []
        for size in (100, 70_001):
            values = np.random.default_rng(rank).standard_normal(size).astype(np.float32)
            perform(ticket, Kind.SUM, [values], [values])
            results.append(values)
        return results

    results = by_all(tickets, of_replica)
    for i in range(2):
        assert len({result[i].tobytes() for result in results}) == 1


@pytest.mark.parametrize("size", [1, 50_001])
def test_every_other_kind(tickets, size):
    count = len(tickets)
    senders = [-1 if count > 1 and r == 0 else (r + 1) % count for r in range(count)]

    def of_replica(rank, ticket):
        own, blocks = some(rank, size), some(rank, (count, size))
        gathered, scattered = np.empty((count, size), np.float32), np.empty(size, np.float32)
        permuted, sent = np.empty_like(own), np.empty_like(blocks)
        given = own.copy()
        perform(ticket, Kind.GATHER, [own], [gathered])
        perform(ticket, Kind.SUM_AND_SCATTER, [blocks], [scattered])
        perform(ticket, Kind.PERMUTE, [own], [permuted], senders)
        perform(ticket, Kind.ALL_TO_ALL, [blocks], [sent])
        for source in range(count):
            perform(ticket, Kind.BROADCAST, [own], [given], [source], f"from {source}")
            np.testing.assert_array_equal(given, some(source, size))
        return gathered, scattered, permuted, sent

    for rank, results in enumerate(by_all(tickets, of_replica)):
        gathered, scattered, permuted, sent = results
        everybodys = [some(r, size) for r in range(count)]
        blocks = np.stack([some(r, (count, size)) for r in range(count)])
        np.testing.assert_array_equal(gathered, everybodys)
        np.testing.assert_array_equal(scattered, blocks.sum(0)[rank])
        sender = senders[rank]
        np.testing.assert_array_equal(permuted, everybodys[sender] if sender >= 0 else 0 * permuted)
        np.testing.assert_array_equal(sent, blocks[:, rank])


def test_members_gather_bytes_of_any_length(group):
    def of_member(member, own):
        return [
            member.all_gather((b"%d" % own) * length)
            for length in (0, own, 1000 * own, 0 if own else 200_000)
        ]

    results = in_threads(*(lambda m=m, i=i: of_member(m, i) for i, m in enumerate(group)))
    members = range(len(group))
    for result in results:
        assert result[0] == [b""] * len(group)
        assert result[1] == [(b"%d" % i) * i for i in members]
        assert result[2] == [(b"%d" % i) * (1000 * i) for i in members]
        assert result[3] == [b"0" * 200_000, *[b""] * (len(group) - 1)]


def test_members_are_given_arrays(group):
    def arrays(seed):
        floats, truths = some(seed, (70, 1000)), some(seed, 5) > 3
        return [floats, np.array(seed), truths, np.empty((0, 3)), some(seed, 5_000_000)]

    def of_member(member, own):
        received = []
        for source in range(len(group)):
            values = arrays(source)
            if source != own:
                values = [np.zeros_like(value) for value in values]
            else:
                values[0].flags.writeable = False
            member.broadcast(source, values)
            received.append(values)
        return received

    results = in_threads(*(lambda m=m, i=i: of_member(m, i) for i, m in enumerate(group)))
    for source in range(len(group)):
        expected = arrays(source)
        for result in results:
            for mine, other in zip(result[source], expected, strict=True):
                np.testing.assert_array_equal(mine, other)


def test_sums_larger_than_a_block_of_several_machines(tickets):
    def of_replica(rank, ticket):
        values = some(rank, 4_500_001)
        perform(ticket, Kind.SUM, [values], [values])
        return values

    expected = sum(some(rank, 4_500_001) for rank in range(len(tickets)))
    for result in by_all(tickets, of_replica):
        np.testing.assert_array_equal(result, expected)


# -- failures ----------------------------------------------------------------------------------

BETWEEN = {"by memory": "aa", "by sockets": "ab", "by both": "aab"}


@pytest.fixture(params=BETWEEN)
def hosts(request):
    return BETWEEN[request.param]


def a_sum(ticket, size=5):
    values = np.ones(size, np.float32)
    perform(ticket, Kind.SUM, [values], [values])
    return values


def test_an_operation_ends_when_the_view_is_aborted(hosts):
    with group_of(hosts) as group:
        tickets = [member.first_ticket()[0] for member in group]
        tickets[0][Ticket.COMMITTED] = 7
        threading.Timer(0.3, group[0].abort, ["worker 9 is to join"]).start()
        results = in_threads(*(lambda t=t: a_sum(t) for t in tickets[:-1]))  # the last is late
        assert [result.tolist() for result in results] == [[0.0] * 5] * len(results)
        assert tickets[0].tolist()[3:] == [1, 7]
        assert group[0].failure == (14, "worker 9 is to join")
        # Now nothing waits for anybody, and all that follows has failed, too.
        assert a_sum(tickets[0]).tolist() == [0.0] * 5
        assert tickets[0].tolist()[1:] == [2, tickets[0][Ticket.GROUP], 1, 7]
        with pytest.raises(Broken, match="worker 9 is to join"):
            group[0].all_gather(b"")
        # The others need not wait for the register to hear of it. One operation may still end well,
        # if they have what all others gave.
        for _ in range(2):
            a_sum(tickets[-1])
        assert tickets[-1][Ticket.FAILED] == 1
        assert group[-1].failure.code == 14


def test_members_stop_talking_when_the_view_is_aborted(hosts):
    with group_of(hosts) as group:
        threading.Timer(0.3, group[1].abort, ["worker 9 is to join"]).start()
        with pytest.raises(Broken, match=r"worker 9 is to join"):
            group[1].all_gather(b"only me")


def test_a_large_operation_is_aborted_in_its_middle(hosts):
    with group_of(hosts) as group:
        tickets = [member.first_ticket()[0] for member in group]
        values = [np.ones(4_000_000, np.float32) for _ in group]

        def of_member(i):
            while not tickets[i][Ticket.FAILED]:
                perform(tickets[i], Kind.SUM, [values[i]], [values[i]])
                values[i][:] = np.where(tickets[i][Ticket.FAILED], 0, 1)

        threading.Timer(0.4, group[0].abort, ["enough"]).start()
        in_threads(*(lambda i=i: of_member(i) for i in range(len(group))))
        numbers = [int(ticket[Ticket.OPERATION]) for ticket in tickets]
        assert max(numbers) - min(numbers) <= 1


def test_who_does_not_come_in_time_is_named(hosts):
    with group_of(hosts, patience=0.3) as group:
        ticket = group[0].first_ticket()[0]
        a_sum(ticket)
        assert ticket[Ticket.FAILED] == 1
        code, why = group[0].failure
        assert code == 4
        assert "worker 1 did not reach operation 0, SUM of [(5,)]" in why


def test_members_that_perform_different_operations_are_told(hosts):
    with group_of(hosts) as group:
        tickets = [member.first_ticket()[0] for member in group]
        in_threads(*(lambda i=i, t=t: a_sum(t, 5 + (i == 1)) for i, t in enumerate(tickets)))
        assert all(ticket[Ticket.FAILED] for ticket in tickets)
        code, why = group[1].failure
        assert code == 9
        assert "SUM of [(5,)]" in why
        assert "SUM of [(6,)]" in why


def test_arrays_of_other_sizes_are_not_filled(hosts):
    with group_of(hosts) as group:

        def of_member(member, size):
            with pytest.raises(Broken) as complaint:
                member.broadcast(0, [np.zeros(size)])
            return str(complaint.value)

        sizes = [3, 4, 3][: len(group)]
        said = in_threads(
            *(lambda m=m, s=s: of_member(m, s) for m, s in zip(group, sizes, strict=True))
        )
        assert "1 arrays, 24 bytes" in said[0]
        assert "1 arrays, 32 bytes" in said[0]


def sockets_and_memory():
    """What this process has open and mapped."""
    opened = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing
            opened.append(os.readlink(f"/proc/self/fd/{number}"))
    kept = sorted(name for name in opened if name.startswith(("socket:", "/memfd:")))
    return kept, Path("/proc/self/maps").read_text().count("memfd:unison")


def test_closing_gives_up_everything_and_late_programs_fail(hosts):
    before = sockets_and_memory()
    with group_of(hosts) as group:
        assert sockets_and_memory() != before
        tickets = [member.first_ticket()[0] for member in group]
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(a_sum, tickets[0])
            time.sleep(0.1)
            for member in group:
                member.close()
            assert waiting.result(SECONDS).tolist() == [0.0] * 5
        late = a_sum(tickets[1])
        assert late.tolist() == [0.0] * 5
        assert [ticket[Ticket.FAILED] for ticket in tickets[:2]] == [1, 1]
        with pytest.raises(Broken, match="closed"):
            group[0].all_gather(b"")
        group[0].abort("nobody cares")
        group[0].close()
    assert sockets_and_memory() == before


def test_who_has_ended_its_last_operation_may_close_while_others_end_it(hosts):
    for _ in range(20):
        with group_of(hosts) as group:

            def of_member(member):
                ticket = member.first_ticket()[0]
                result = a_sum(ticket, 300_000)
                member.close()
                return result[0], ticket[Ticket.FAILED]

            results = in_threads(*(lambda m=m: of_member(m) for m in group))
            assert results == [(len(hosts), 0)] * len(hosts)


# -- members that are processes ----------------------------------------------------------------


def endless_sums(view, listener, said):
    """What a process does until it is killed."""
    member = Communicator(view, "secret", listener, SECONDS)
    ticket = member.first_ticket()[0]
    values = np.ones(500_000, np.float32)
    while not ticket[Ticket.FAILED]:
        perform(ticket, Kind.SUM, [values], [values])
        values[:] = 1
        if ticket[Ticket.OPERATION] == 3:
            os.write(said, b"3")


def forked(function, *args):
    """The id of a process that runs a function, and ends."""
    process = os.fork()
    if process:
        return process
    try:
        function(*args)
    finally:
        os._exit(0)


@pytest.mark.filterwarnings("ignore:os.fork")
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_member_that_is_killed_or_hangs_in_an_operation_ends_the_view(hosts, victim, how):
    before = sorted(Path("/dev/shm").glob("unison*"))
    with contextlib.ExitStack() as stack:
        members, listeners = members_of(hosts, (1,) * len(hosts), stack)
        number = next(_numbers)
        came, said = os.pipe()
        process = forked(endless_sums, View(number, members, victim), listeners[victim], said)
        stack.callback(os.waitpid, process, 0)
        stack.callback(os.kill, process, signal.SIGKILL)
        for end in (came, said):
            stack.callback(os.close, end)
        others = [i for i in range(len(hosts)) if i != victim]
        formed = []

        def of_member(own):
            view = View(number, members, own)
            member = Communicator(view, "secret", listeners[own], SECONDS, patience=SECONDS)
            formed.append(member)
            ticket = member.first_ticket()[0]
            values = np.ones(500_000, np.float32)
            while not ticket[Ticket.FAILED]:
                values[:] = 1
                perform(ticket, Kind.SUM, [values], [values])
                assert (values == (0 if ticket[Ticket.FAILED] else len(hosts))).all()
            return member.failure

        def end():
            os.read(came, 1)
            time.sleep(0.05)
            os.kill(process, how)
            if how is signal.SIGSTOP or hosts.count(hosts[victim]) > 1:
                time.sleep(0.3)
                for member in formed:  # nobody but the register can know of it
                    member.abort("a member is lost")

        _, *failures = in_threads(end, *(lambda i=i: of_member(i) for i in others))
        assert {failure.code for failure in failures} == {14}
        for member in formed:
            member.close()
        # The next view has nothing of the last one.
        left = tuple(member for i, member in enumerate(members) if i != victim)

        def again(own):
            view = View(number + 10**6, left, own)
            member = Communicator(view, "secret", listeners[others[own]], SECONDS)
            said = member.all_gather(b"%d" % own)
            member.close()
            return said

        expected = [b"%d" % i for i in range(len(left))]
        results = in_threads(*(lambda i=i: again(i) for i in range(len(left))))
        assert results == [expected] * len(left)
    assert sorted(Path("/dev/shm").glob("unison*")) == before


# -- forming a view ----------------------------------------------------------------------------


def test_who_does_not_connect_is_named(hosts):
    with contextlib.ExitStack() as stack:
        members, listeners = members_of(hosts, (1,) * len(hosts), stack)
        began = sockets_and_memory()

        def join(own):
            view = View(next(_numbers), members, own)
            return Communicator(view, "secret", listeners[own], 0.3)

        with pytest.raises(Broken, match=r"worker 1.* did not connect, within 0.3 s"):
            join(0)
        with pytest.raises(Broken, match=r"worker 0 (could not be reached|said nothing)"):
            join(len(hosts) - 1 if hosts[-1] != "a" else 1)
        assert sockets_and_memory() == began


def test_forming_ends_when_the_view_is_not_to_be(hosts):
    with contextlib.ExitStack() as stack:
        members, listeners = members_of(hosts, (1,) * len(hosts), stack)
        over = []
        threading.Timer(0.2, over.append, ["worker 1 has left"]).start()
        for own in range(2):
            view = View(next(_numbers), members, own)
            with pytest.raises(Broken, match="worker 1 has left"):
                Communicator(
                    view,
                    "secret",
                    listeners[own],
                    SECONDS,
                    is_over=lambda: over[0] if over else None,
                )


def test_strangers_and_members_of_other_views_are_turned_away():
    with contextlib.ExitStack() as stack:
        (_, caller), (listener, _) = members_of("ab", (1, 1), stack)
        address = ("127.0.0.1", listener.getsockname()[1])
        right = Call(5, 1, 0, 0)

        def strangers():
            mute = stack.enter_context(socket.create_connection(address))
            loud = stack.enter_context(socket.create_connection(address))
            loud.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(200))
            gone = socket.create_connection(address)
            gone.close()
            outcomes = []
            for token, call in (("guessed", right), ("secret", right._replace(view=4))):
                with pytest.raises(Broken) as complaint:
                    Meeting(token, 0.5, lambda: None).connect(call, address, "worker 0")
                outcomes.append(str(complaint.value))
            connection = Meeting("secret", SECONDS, lambda: None).connect(
                right, address, caller.name
            )
            stack.enter_context(connection).sendall(b"hello")
            return mute, outcomes

        def accept():
            meeting = Meeting("secret", SECONDS, lambda: None)
            connections = meeting.accept(listener, [right], lambda call: "worker 1")
            connection = stack.enter_context(connections[right])
            connection.settimeout(SECONDS)
            return connection.recv(5)

        (_, outcomes), heard = in_threads(strangers, accept)
        assert heard == b"hello"
        another_token, another_view = outcomes
        assert "another key" in another_token
        assert "connection closed during the handshake" in another_view


def test_a_caller_leaves_who_does_not_know_the_token():
    with served(secret=b"guessed", channels=[MEMBERS_CHANNEL]) as impostor:
        meeting = Meeting("secret", 0.3, lambda: None)
        with pytest.raises(Broken, match=r"worker 0 could not be reached.*another key"):
            meeting.connect(Call(5, 1, 0, 0), impostor.address, "worker 0")
        assert impostor.accepted == []


# -- the tickets of programs -------------------------------------------------------------------


def in_program(ticket, function):
    return jax.block_until_ready(jax.jit(function)(jnp.asarray(ticket)))


def test_a_program_whose_exchange_fails_does_not_raise():
    with group_of("ab") as group:
        group[0].abort("worker 1 is lost")

        def function(ticket):
            ticket, (total,) = exchange(Kind.SUM, "a", ticket, [jnp.ones(3)], [(3,)], [True])
            ticket, (every,) = exchange(Kind.GATHER, "b", ticket, [total + 1], [(2, 3)], [False])
            ticket, _ = exchange(Kind.COMMIT, "commit", ticket, [], [], [])
            return ticket, total, every

        ticket, total, every = in_program(group[0].first_ticket()[0], function)
        assert ticket.tolist()[3:] == [1, 0]
        assert total.tolist() == [0.0] * 3
        assert every.tolist() == [[0.0] * 3] * 2


def test_programs_of_one_replica_alone_copy():
    with group_of("a") as (alone,):

        def function(ticket):
            results = []
            for kind in (Kind.SUM, Kind.MAX, Kind.SUM_AND_SCATTER, Kind.GATHER, Kind.ALL_TO_ALL):
                ticket, (result,) = exchange(
                    kind, "a", ticket, [jnp.arange(6.0)[None]], [(1, 6)], [False]
                )
                results.append(result)
            ticket, (own,) = exchange(
                Kind.PERMUTE, "p", ticket, [jnp.arange(6.0)[None]], [(1, 6)], [False], [0]
            )
            ticket, _ = exchange(Kind.COMMIT, "commit", ticket, [], [], [])
            return ticket, [*results, own]

        ticket, results = in_program(alone.first_ticket()[0], function)
        assert ticket.tolist()[3:] == [0, 1]
        assert all(result.tolist() == [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]] for result in results)
        assert alone.all_gather(b"x") == [b"x"]
        alone.broadcast(0, [np.ones(3)])


def test_the_replicas_of_a_worker_take_a_programs_effect_together():
    with group_of("ab", (2, 1)) as group:
        tickets = [row for member in group for row in member.first_ticket()]

        def commit(ticket):
            perform(ticket, Kind.COMMIT, [np.empty(0, np.float32)], [np.empty(0, np.float32)])

        by_all(tickets, lambda rank, ticket: commit(ticket))
        assert [ticket.tolist()[3:] for ticket in tickets] == [[0, 1]] * 3
        tickets[0][Ticket.FAILED] = 1  # its sibling ended the last operation just in time
        by_all(tickets, lambda rank, ticket: commit(ticket))
        assert [ticket.tolist()[3:] for ticket in tickets] == [[1, 1], [1, 1], [0, 2]]
        # Closed, between two of them: none.
        fresh = list(group[0].first_ticket())
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(commit, fresh[0])
            time.sleep(0.1)
            group[0].close()
            waiting.result(SECONDS)
        commit(fresh[1])
        assert [ticket.tolist()[3:] for ticket in fresh] == [[1, 0], [1, 0]]
