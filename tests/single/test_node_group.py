"""The machines of a job may be lost, and others may come; here they are threads."""

import concurrent.futures
import contextlib
import socket
import time

import pytest

from unison.errors import UnavailableError
from unison.net.secret import KEY_VARIABLE, new_key
from unison.runtime.launching.node_group import NodeCounts, NodeGroup
from unison.runtime.launching.nodes import meet_nodes

#: Seconds in which what these tests wait for has to come about.
PATIENCE = 20.0

#: Seconds for which the first meeting waits for a third machine.
LAST_CALL = 1.0


class Machine:
    """The command of a machine.

    Args:
        address: Where the machines meet.
        threads: In which they do.
        program: What they run.
    """

    def __init__(self, address, threads, program="train.py"):
        host, port = address.split(":")
        self._address, self._program, self._threads = address, program, threads
        self.newest = None
        counts = NodeCounts(2, 3)
        self.group = NodeGroup(counts, (host, int(port)), LAST_CALL, lambda: self.newest)

    def meet(self, timeout=PATIENCE):
        """Begins to meet the others, and to watch them then."""
        about, counts = {"program": self._program}, NodeCounts(2, 3)

        def met():
            node = meet_nodes(counts, self._address, 1, about, timeout, group=self.group)
            self.group.watch()
            return node

        return self._threads.submit(met)

    def is_lost(self):
        """Loses the machine: its connections end without a word."""
        group = self.group
        group._stop_watching()
        if group._gathering is not None:
            group._gathering.close()
            group._entrance.close()
            group._gathering = None
        if group._line is not None:
            group._line.close()
            group._line = None


@pytest.fixture
def machines(monkeypatch):
    """Makes machines of one job, of which there may be two to three."""
    monkeypatch.setenv(KEY_VARIABLE, new_key())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with concurrent.futures.ThreadPoolExecutor(8) as threads, contextlib.ExitStack() as ending:

        def made(count, **given):
            found = [Machine(address, threads, **given) for _ in range(count)]
            for each in found:
                ending.enter_context(each.group)
            return found

        yield made


def wait_until(is_true):
    last = time.monotonic() + PATIENCE
    while not is_true():
        assert time.monotonic() < last
        time.sleep(0.01)


def met(first, *others):
    """Returns what machines learn that meet now, the first of which is that of the rendezvous."""
    meeting = [first.meet()]
    wait_until(lambda: first.group._gathering is not None)
    nodes = [each.result(PATIENCE) for each in (*meeting, *(other.meet() for other in others))]
    assert sorted(node.rank for node in nodes) == list(range(len(nodes)))
    return nodes


def test_as_many_as_are_there_begin_after_the_last_call(machines):
    nodes = met(*machines(2))
    assert {(node.machines, node.at_start) for node in nodes} == {(2, 2)}


def test_all_begin_at_once(machines):
    begun = time.monotonic()
    assert {node.machines for node in met(*machines(3))} == {3}
    assert time.monotonic() - begun < LAST_CALL


def test_too_few_time_out(machines):
    (alone,) = machines(1)
    with pytest.raises(UnavailableError, match="Timed out waiting for 1 of 2 machines"):
        alone.meet(timeout=1.0).result(PATIENCE)


def test_a_lost_machine_lets_the_others_meet_again(machines):
    first, second, third = machines(3)
    met(first, second, third)
    assert not first.group.is_over
    third.is_lost()
    wait_until(lambda: first.group.is_over and second.group.is_over)
    nodes = met(first, second)
    assert {(node.machines, node.at_start) for node in nodes} == {(2, 3)}
    assert not first.group.is_over


def test_a_machine_that_has_lost_a_worker_lets_all_meet_again(machines):
    first, second, third = machines(3)
    met(first, second, third)
    early = second.meet()
    wait_until(lambda: first.group.is_over and third.group.is_over)
    meeting = [early, first.meet(), third.meet()]
    assert {each.result(PATIENCE).machines for each in meeting} == {3}


def test_another_machine_takes_part_once_the_state_was_kept(machines):
    first, second, third = machines(3)
    met(first, second)
    first.newest = 5
    coming = third.meet()
    time.sleep(0.5)
    assert not first.group.is_over
    first.newest = 7
    wait_until(lambda: first.group.is_over and second.group.is_over)
    nodes = [each.result(PATIENCE) for each in (first.meet(), second.meet(), coming)]
    assert {(node.machines, node.at_start) for node in nodes} == {(3, 2)}


def test_a_machine_too_many_waits_until_another_one_is_lost(machines):
    first, second, third, fourth = machines(4)
    met(first, second, third)
    waiting = fourth.meet()
    time.sleep(0.3)
    first.newest = 1
    time.sleep(0.3)
    assert not first.group.is_over
    second.is_lost()
    wait_until(lambda: first.group.is_over)
    meeting = [first.meet(), third.meet(), waiting]
    assert {each.result(PATIENCE).machines for each in meeting} == {3}


def test_a_machine_that_leaves_disturbs_nobody(machines):
    first, second, third = machines(3)
    met(first, second, third)
    third.group.leave(has_failed=False)
    wait_until(lambda: len(first.group._gathering._members) == 1)
    time.sleep(0.3)
    assert not first.group.is_over
    assert not second.group.is_over


def test_nobody_comes_to_a_job_of_which_a_machine_is_done(machines):
    first, second, third, fourth = machines(4)
    met(first, second, third)
    third.group.leave(has_failed=False)
    wait_until(lambda: len(first.group._gathering._members) == 1)
    late = fourth.meet(timeout=2.0)
    time.sleep(0.3)
    first.newest = 7
    time.sleep(0.3)
    assert not first.group.is_over
    first.group.leave(has_failed=False)
    with pytest.raises(UnavailableError, match="The job has ended"):
        late.result(PATIENCE)


def test_a_state_that_is_not_there_any_more_is_not_a_newer_one(machines):
    first, second, third = machines(3)
    met(first, second)
    first.newest = 5
    coming = third.meet()
    time.sleep(0.3)
    first.newest = None
    time.sleep(0.3)
    assert not first.group.is_over
    first.newest = 6
    wait_until(lambda: first.group.is_over)
    meeting = [first.meet(), second.meet(), coming]
    assert {each.result(PATIENCE).machines for each in meeting} == {3}


def test_an_error_while_it_watches_lets_all_meet_again(machines):
    first, second, third = machines(3)
    met(first, second)

    def fails():
        raise OSError("no such descriptor")

    first.group._newest = fails
    coming = third.meet()
    wait_until(lambda: first.group.is_over)
    meeting = [first.meet(), second.meet(), coming]
    assert {each.result(PATIENCE).machines for each in meeting} == {3}


def test_the_end_at_the_rendezvous_is_the_end_of_the_job(machines):
    first, second = machines(2)
    met(first, second)
    first.group.leave()
    wait_until(lambda: second.group.has_ended)
    assert not second.group.is_over  # its workers end by themselves


def test_a_machine_with_another_program_is_sent_away(machines):
    first, second = machines(2)
    (other,) = machines(1, program="other.py")
    met(first, second)
    with pytest.raises(UnavailableError, match=r"program 'train.py' and 'other.py'"):
        other.meet().result(PATIENCE)
    first.newest = 1
    time.sleep(0.3)
    assert not first.group.is_over


def test_a_lost_rendezvous_is_where_its_command_is_called_again(machines):
    first, second, third = machines(3)
    met(first, second, third)
    first.is_lost()
    wait_until(lambda: second.group.is_over and third.group.is_over)
    (again,) = machines(1)
    begun = time.monotonic()
    nodes = met(again, second, third)
    assert {(node.machines, node.at_start) for node in nodes} == {(3, 3)}
    assert time.monotonic() - begun < LAST_CALL
