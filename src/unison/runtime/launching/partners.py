"""`Partners`: copies of a machine's records in memory on another machine, and their way back.

The command on each machine (`unison run --nnodes`) owns the memory in which its workers write
records of their state (`HostMemory`). It outlives the workers, but not the machine. So each machine
also keeps a copy of the records of the machine before it, in the order of the ranks, as GEMINI does
(Wang et al., "GEMINI: Fast Failure Recovery in Distributed Training with In-Memory Checkpoints",
SOSP 2023). A thread sends new records to the next machine while the workers compute
(`record_copies`).

When workers are lost, all machines meet again (`nodes`), and say which records they hold. From then
on nothing is copied until each machine has fetched what its workers need for the newest step of
which every worker's record exists somewhere. Records of later steps are discarded: the workers will
write them again.

If the job may go on with another number of workers, that step may be one of the former ones. Each
machine then fetches the records of all of them, and holds them until its workers have written two
records since: all workers of the job have written the first of these.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from unison.net.acceptor import AcceptingThread, Acceptor
from unison.net.addresses import joined_address
from unison.net.handshake import Accepted, server_handshake
from unison.net.lines import Message
from unison.net.listening import listen
from unison.net.secret import key
from unison.runtime.host_memory import HostMemory
from unison.runtime.launching.held_slots import HeldSlots
from unison.runtime.launching.holdings import (
    HeldState,
    Holding,
    Meeting,
    are_records_held,
    current_holdings,
    newest_state,
)
from unison.runtime.launching.record_copies import FAILURES, CopySender, connected
from unison.runtime.launching.record_transfer import (
    CHANNEL,
    OVERWRITTEN,
    RecordConnection,
    parsed_offer,
)
from unison.storage.memory_slots import MemorySlots

logger = logging.getLogger("unison")

#: Seconds for which the end of threads is awaited.
_SECONDS_TO_END = 5.0

#: The most connections that are served at once.
_MOST_SERVED = 64


class Partners:
    """The records of a machine's workers and of the machine before it; as a context manager.

    A meeting of all machines calls `announce` before it and `begin` after it, while no worker of
    this machine runs. `begin` may exchange the slots of the host's memory for others: workers get
    them after it.

    Args:
        memory: The memory of this machine's workers. It is closed later than this.
        say: Called with sentences about the records, also in other threads.
        may_regroup: Whether the job may go on with another number of workers.

    Examples:
        >>> with HostMemory(2) as memory, Partners(memory) as partners:
        ...     partners.announce("127.0.0.1").steps
        {}
    """

    def __init__(
        self,
        memory: HostMemory,
        say: Callable[[str], None] = logger.warning,
        may_regroup: bool = False,
    ):
        self._memory = memory
        self._say = say
        self._may_regroup = may_regroup
        self._held = HeldSlots()
        #: The records of a run with another number of workers before, and that number.
        self._former: tuple[int, HeldSlots] | None = None
        #: The records held, by the number of workers; replaced as a whole, as threads read it.
        self._stores: dict[int, HeldSlots] = {}
        #: The number of the job's meetings up to this machine's last one.
        self._meetings = 0
        self._sender = CopySender(say, self._forget_former)
        self._changed = threading.Condition()
        self._is_closed = False
        #: The latest meeting, and whether the run of the workers that began with it goes on.
        self._met: Meeting | None = None
        self._is_running = False
        #: The connections that are served, and the one among them on which copies are received.
        self._served: set[RecordConnection] = set()
        self._copying: RecordConnection | None = None
        self._accepting: AcceptingThread[Accepted] | None = None
        self._host, self._address = "", ""

    def __enter__(self) -> Partners:
        return self

    def __exit__(self, *error: object) -> None:
        if self._accepting is not None:
            self._accepting.close()
        with self._changed:
            self._is_closed, self._is_running = True, False
            for connection in self._served:
                connection.interrupt()
        self._sender.close()
        with self._changed:
            self._changed.wait_for(lambda: not self._served, _SECONDS_TO_END)
        self._forget_former()
        self._held.close(kept=self._memory.slots)

    def announce(self, host: str) -> Holding:
        """Returns what this machine holds; nothing is copied from now on until `begin`.

        Args:
            host: The address of this machine at which others fetch records.

        Raises:
            OSError: The host does not belong to this machine.
        """
        self._listen(host)
        self._sender.stop()
        with self._changed:
            self._is_running = False
            if self._copying is not None:
                self._copying.interrupt()
            if not self._changed.wait_for(lambda: self._copying is None, _SECONDS_TO_END):
                # It is taking memory for a large record, which it will then discard.
                self._copying = None
                self._held.abandon_used(self._met.copied if self._met else ())
        steps, met = self._held.all_steps(), self._met
        if met is None:
            return Holding(self._address, None, 0, {})
        former = self._former and (self._former[0], self._former[1].all_steps())
        rank = met.rank if steps or former else None
        return Holding(self._address, rank, met.total, steps, former, self._meetings)

    def begin(self, met: Meeting) -> int | None:
        """Prepares the records for the next run of the workers, and copies new ones from now on.

        Args:
            met: The result of the meeting.

        Returns:
            The newest step of which every worker's record exists, if this machine's workers have
            theirs; None if there is none, or it could not be fetched.

        Raises:
            OSError: There is no memory for the workers' slots.
        """
        met = self._with_current_holdings(met)
        state = newest_state(met.holdings, met.total, self._may_regroup)
        is_former = state is not None and state.total != met.total
        spare = self._arrange(met, state)
        self._memory.slots[:] = self._held.of(met.own, spare)
        if state is None or is_former:
            self._held.discard_after(-1)
            self._held.keep_only({*met.own, *met.copied})
        else:
            self._held.discard_after(state.step)
        others = self._fetched(met, state)
        self._memory.former[:] = others or ()
        step = None if state is None else state.step
        with self._changed:
            self._met, self._is_running = met, True
        self._sender.begin(met, step, self._held)
        return None if others is None else step

    def _with_current_holdings(self, met: Meeting) -> Meeting:
        """Returns a meeting with the holdings that count; discards what this machine has missed."""
        latest = max((holding.meetings for holding in met.holdings), default=0)
        if self._meetings < latest:
            self._held.discard_after(-1)
            self._forget_former()
        self._meetings = latest + 1
        return met._replace(holdings=current_holdings(met.holdings))

    def _elsewhere(self, met: Meeting, step: int) -> list[int]:
        """Returns the workers that were the first ones of the hosts of own workers, and are not."""
        found: set[int] = set()
        for slots in self._memory.slots:
            with slots.records() as records:
                firsts = (_first_of_host(each.header) for each in records if each.step == step)
                found.update(first for first in firsts if first is not None)
        return sorted(found - set(met.own))

    def _arrange(self, met: Meeting, state: HeldState | None) -> list[MemorySlots]:
        """Arranges the slots of this run and of the former one; returns those that are spare."""
        total_before = None if self._met is None else self._met.total
        spare = list(self._memory.slots) if total_before is None else []
        if state is None or state.total == met.total:
            if total_before not in (None, met.total):
                if state is not None and self._former and self._former[0] == met.total:
                    before, self._held = self._held, self._former[1]
                    self._former = None
                    before.close(kept=[])
                else:
                    self._held.discard_after(-1)
                    spare = self._held.take_all()
            self._forget_former()
        elif total_before == state.total:
            self._forget_former()
            self._former, self._held = (state.total, self._held), HeldSlots()
        elif self._former is None or self._former[0] != state.total:
            self._forget_former()
            self._former = state.total, HeldSlots()
        self._stores = {met.total: self._held}
        if self._former is not None:
            self._stores[self._former[0]] = self._former[1]
        return spare

    def _forget_former(self) -> None:
        """Closes the slots of a run before."""
        former, self._former = self._former, None
        if former is not None:
            former[1].close(kept=self._memory.slots)

    # Fetching.

    def _fetched(self, met: Meeting, state: HeldState | None) -> list[MemorySlots] | None:
        """Fetches what is missing of a state.

        Returns:
            The slots of other workers that this machine's workers read; None if there is no state,
            or not all of it could be fetched.
        """
        if state is None:
            if are_records_held(met.holdings):
                self._say(
                    "there is no step of which every worker's state is in memory: the workers "
                    "begin from their checkpoint, or anew"
                )
            return None
        if state.total != met.total:
            assert self._former is not None
            return self._fetched_of(range(state.total), met, state, self._former[1])
        if self._fetched_of(met.own, met, state, self._held) is None:
            return None
        return self._fetched_of(self._elsewhere(met, state.step), met, state, self._held)

    def _fetched_of(
        self, workers: Sequence[int], met: Meeting, state: HeldState, into: HeldSlots
    ) -> list[MemorySlots] | None:
        """Fetches missing records of some workers; returns their slots, None if one is not got."""
        found = into.of(workers, spare=[])
        missing = [worker for worker in workers if state.step not in into.steps(worker)]
        for worker in missing:
            reason = self._fetch(met, worker, state, into)
            if reason is not None:
                self._say(
                    f"the state of worker {worker} at step {state.step} could not be fetched: "
                    f"{reason}; the workers begin from their checkpoint, or anew"
                )
                return None
        if missing:
            self._say(
                f"fetched the state at step {state.step} of workers {missing} from other machines"
            )
        return found

    def _fetch(self, met: Meeting, worker: int, state: HeldState, into: HeldSlots) -> str | None:
        """Fetches a record from one of the machines that have it; returns why it failed."""
        reason: str | None = "no other machine has it"
        for rank, holding in enumerate(met.holdings):
            if rank == met.rank or state.step not in holding.steps_of(state.total).get(worker, ()):
                continue
            try:
                reason = self._fetch_from(holding.at, worker, state, into)
            except FAILURES as error:
                reason = str(error)
            if reason is None:
                return None
            reason = f"{holding.at}: {reason}"
        return reason

    def _fetch_from(self, at: str, worker: int, state: HeldState, into: HeldSlots) -> str | None:
        step, total = state
        with contextlib.closing(connected(at)) as connection, into.using(worker) as slots:
            connection.send({"is": "fetch", "worker": worker, "step": step, "total": total})
            said = connection.receive()
            if said.get("is") == "missing":
                return "it is not there any more"
            offer = parsed_offer(said)
            if (offer.worker, offer.step) != (worker, step):
                raise ValueError(f"Expected worker {worker}, step {step}. Received: {offer}")
            assert slots is not None
            return connection.receive_record(offer, slots, None, lambda: not self._is_closed)

    # Serving.

    def _listen(self, host: str) -> None:
        """Listens at an address of this machine, if it does not yet."""
        if self._host == host:
            return
        if self._accepting is not None:
            self._accepting.close()
        secret = key()
        listener = listen(host, 0)
        address = joined_address(*listener.getsockname()[:2])
        acceptor = Acceptor([listener], lambda own: server_handshake(own, secret, [CHANNEL]))
        self._accepting = AcceptingThread(acceptor, [listener], self._admit, "unison-records")
        self._host, self._address = host, address

    def _admit(self, accepted: Accepted) -> None:
        connection = RecordConnection(accepted.stream)
        with self._changed:
            is_refused = self._is_closed or len(self._served) >= _MOST_SERVED
            if not is_refused:
                self._served.add(connection)
        if is_refused:
            connection.close()
            return
        thread = threading.Thread(
            target=self._serve, args=(connection,), name="unison-records", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:  # no more threads can be started
            self._end(connection)
            raise

    def _serve(self, connection: RecordConnection) -> None:
        try:
            while True:
                said = connection.receive()
                if said.get("is") == "fetch":
                    self._give(connection, said)
                elif said.get("is") == "copy":
                    self._receive_copies(connection, said)
                else:
                    return
        except FAILURES as error:
            logger.debug("A connection for records has ended: %s", error)
        except Exception:  # a message must not end the thread without a word
            logger.warning("A connection for records has failed.", exc_info=True)
        finally:
            self._end(connection)

    def _end(self, connection: RecordConnection) -> None:
        with self._changed:
            self._served.discard(connection)
            if self._copying is connection:
                self._copying = None
            connection.close()
            self._changed.notify_all()

    def _give(self, connection: RecordConnection, said: Message) -> None:
        """Sends the record that another machine asks for."""
        worker, step, total = (said.get(name) for name in ("worker", "step", "total"))
        if type(worker) is not int or type(step) is not int:
            raise ValueError("Expected the worker and the step of a record.")
        held = self._held_of(total)
        with contextlib.nullcontext() if held is None else held.using(worker) as slots:
            if slots is None or step not in slots.steps():
                connection.send({"is": "missing"})
                return
            reason = connection.send_record(worker, step, slots, lambda: not self._is_closed)
        if reason is not None:
            raise ConnectionError(f"the record of worker {worker} at step {step}: {reason}")

    def _held_of(self, total: Any) -> HeldSlots | None:
        """Returns the records of a job with so many workers; None if this machine has none.

        The number may be that of the meeting before the one after which a machine asks, if this one
        is not ready yet.
        """
        return self._stores.get(total) if type(total) is int else None

    def _receive_copies(self, connection: RecordConnection, said: Message) -> None:
        """Receives records of the machine before this one, until it closes the connection."""
        with self._changed:
            met = self._met
            workers = range(0) if met is None else met.copied
            is_expected = (
                met is not None
                and self._is_in(met)
                and self._copying in (None, connection)
                and said.get("run") == met.run
                and said.get("workers") == [workers.start, len(workers)]
            )
            if is_expected:
                self._copying = connection
        if met is None or not is_expected:
            connection.send({"is": "later"})
            return
        held = [[worker, self._held.steps(worker)] for worker in workers]
        connection.send({"is": "held", "records": held})
        while True:
            self._receive_copy(connection, met)

    def _receive_copy(self, connection: RecordConnection, met: Meeting) -> None:
        offer = parsed_offer(connection.receive())
        if offer.worker not in met.copied:
            raise ValueError(f"Expected one of {met.copied}. Received: worker {offer.worker}")
        with self._changed:
            if not self._is_in(met):
                raise ConnectionError("the workers are started again")
            self._held.of([offer.worker], spare=[])
        # The newest step of which all of that machine's records are here survives until there is
        # a newer one.
        keep = next(iter(self._held.common_steps(met.copied)), None)
        with self._held.using(offer.worker) as slots:
            assert slots is not None
            reason = connection.receive_record(offer, slots, keep, lambda: self._is_in(met))
        if reason is not None and reason != OVERWRITTEN and self._is_in(met):
            self._say(
                f"the copy of the state of worker {offer.worker} at step {offer.step} is "
                f"discarded: {reason}"
            )

    def _is_in(self, met: Meeting) -> bool:
        """Returns whether the run of the workers that began with a meeting goes on."""
        return self._is_running and self._met is met


def _first_of_host(header: Any) -> int | None:
    """Returns the first worker of the host on which a record was written; None if it does not say.

    What all workers of the host have in common is in that one's record.
    """
    about = header.get("about") if isinstance(header, dict) else None
    first = about.get("first") if isinstance(about, dict) else None
    return first if type(first) is int and first >= 0 else None
