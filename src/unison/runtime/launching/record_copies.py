"""`CopySender`: the thread that copies new records of a machine's workers to the next machine."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence

from unison.errors import OpError
from unison.net.acceptor import HANDSHAKE_SECONDS
from unison.net.addresses import split_address
from unison.net.connecting import connect
from unison.net.lines import Message
from unison.net.secret import key
from unison.runtime.launching.held_slots import HeldSlots
from unison.runtime.launching.holdings import Meeting
from unison.runtime.launching.record_transfer import CHANNEL, OVERWRITTEN, RecordConnection

logger = logging.getLogger("unison")

#: Errors of a connection, or of what the other end has sent.
FAILURES = (OSError, OpError, ValueError)

#: Seconds between two looks for new records, until a failed copy is tried again, and for which the
#: end of the thread is awaited.
_LOOK_AFTER = 0.05
_RETRY_AFTER = 1.0
_SECONDS_TO_END = 5.0

#: The number of failures in a row after which one is told: the first ones may be of a machine that
#: is about to begin, or has been lost.
_FAILURES_TO_SAY = 5


class CopySender:
    """Sends the newest step of which all own workers have records, before a newer one.

    The workers write a further record when it has sent the last one, or is too slow: a record that
    is overwritten while it is sent is given up.

    Args:
        say: Called with sentences about what goes wrong, in its thread.
        forget_former: Called, in its thread, when the records of a run before are not needed.
    """

    def __init__(self, say: Callable[[str], None], forget_former: Callable[[], None]):
        self._held = HeldSlots()
        self._say = say
        self._forget_former = forget_former
        self._lock = threading.Lock()
        self._closing = threading.Event()
        #: The meeting with which the present run of the workers began; None: there is no run.
        self._met: Meeting | None = None
        self._restored: int | None = None
        self._connection: RecordConnection | None = None
        self._thread: threading.Thread | None = None

    def begin(self, met: Meeting, restored: int | None, held: HeldSlots) -> None:
        """Copies new records from now on.

        Args:
            met: The meeting with which this run of the workers begins.
            restored: The step from which they go on; None: they begin anew.
            held: The records.
        """
        with self._lock:
            self._met, self._restored, self._held = met, restored, held
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="unison-copies", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Copies nothing until `begin`."""
        with self._lock:
            self._met = None
            if self._connection is not None:
                self._connection.interrupt()

    def close(self) -> None:
        """Ends the thread."""
        self._closing.set()
        self.stop()
        if self._thread is not None:
            self._thread.join(_SECONDS_TO_END)

    def _run(self) -> None:
        copied: set[tuple[str, int]] = set()
        failures = 0
        while not self._closing.wait(_LOOK_AFTER):
            met = self._met
            if met is None:
                continue
            try:
                self._copy_new_records(met, copied)
                failures = 0
            except Exception as error:  # the thread goes on: workers wait for it
                if not isinstance(error, FAILURES):
                    logger.exception("Copying the workers' state has failed.")
                failures += 1
                if failures == _FAILURES_TO_SAY and self._is_in(met):
                    self._say(f"the workers' state is not copied to the next machine: {error}")
                self._closing.wait(_RETRY_AFTER)

    def _is_in(self, met: Meeting) -> bool:
        """Returns whether the run of the workers that began with a meeting goes on."""
        return self._met is met

    def _copy_new_records(self, met: Meeting, copied: set[tuple[str, int]]) -> None:
        """Sends what the next machine does not have, the newest step first.

        Args:
            met: The meeting with which this run of the workers began.
            copied: The runs, and the steps in them, of which it has all records; it is updated.

        Raises:
            OSError: The next machine cannot be reached, or does not take records now.
            ValueError: It has sent something invalid.
        """
        own = met.own
        steps = self._held.common_steps(own)
        copied &= {(met.run, step) for step in steps}
        if not steps:
            return
        with self._lock:
            if self._is_in(met) and (self._restored is None or steps[0] > self._restored):
                # All workers have gone on: nobody fetches what others need of this machine.
                self._held.keep_only({*own, *met.copied})
                if len(steps) > 1 and (self._restored is None or steps[-1] > self._restored):
                    self._forget_former()
        missing = [step for step in steps if (met.run, step) not in copied]
        if len(met.workers) < 2 or not missing:
            return
        with self._connected(met) as connection:
            connection.send({"is": "copy", "run": met.run, "workers": [own.start, len(own)]})
            held = _parsed_held(connection.receive())
            for step in missing:
                # An older step is sent only to where there is an empty slot.
                most = 2 if step == steps[0] else 1
                if not self._send_step(connection, met, step, held, most):
                    break
                copied.add((met.run, step))
            self._mark_copied(met, [step for step in steps if (met.run, step) in copied])

    def _mark_copied(self, met: Meeting, steps: Sequence[int]) -> None:
        """Tells the own workers, which wait for it, the newest step that the next machine has."""
        for worker in met.own if steps else ():
            with self._held.using(worker) as slots:
                if slots is not None and self._is_in(met):
                    slots.mark_copied(max(steps))

    @contextlib.contextmanager
    def _connected(self, met: Meeting) -> Iterator[RecordConnection]:
        """Yields a connection to the next machine, which ends with the run of the workers."""

        def look() -> None:
            if not self._is_in(met):
                raise ConnectionError("the workers are started again")

        connection = connected(met.next_at, look)
        try:
            with self._lock:
                look()
                self._connection = connection
            yield connection
        finally:
            with self._lock:
                self._connection = None
                connection.close()

    def _send_step(
        self,
        connection: RecordConnection,
        met: Meeting,
        step: int,
        held: dict[int, list[int]],
        most: int,
    ) -> bool:
        """Sends all workers' records of a step; returns whether nothing is left to send."""
        for worker in met.own:
            theirs = held.setdefault(worker, [])
            if step in theirs or len(theirs) > most:
                continue
            with self._held.using(worker) as slots:
                if slots is None:
                    return False
                reason = connection.send_record(worker, step, slots, lambda: self._is_in(met))
            if reason == OVERWRITTEN:
                return False
            if reason is not None:
                raise ConnectionError(f"the record of worker {worker} at step {step}: {reason}")
            theirs.append(step)
        return True


def connected(at: str, look: Callable[[], None] | None = None) -> RecordConnection:
    """Returns a connection to the machine that holds records at an address.

    Args:
        at: The address.
        look: Called 20 times a second during the handshake; an exception that it raises ends it.

    Raises:
        OSError: It cannot be reached, or has another key.
        FailedPreconditionError: The two ends do not agree about TLS.
    """
    where = split_address(at)
    return RecordConnection(connect(where, key(), CHANNEL, seconds=HANDSHAKE_SECONDS, look=look))


def _parsed_held(answer: Message) -> dict[int, list[int]]:
    """Returns the steps that the next machine has, by worker.

    Raises:
        ConnectionError: It does not take records now.
        ValueError: The answer is invalid.
    """
    if answer.get("is") != "held":
        raise ConnectionError("it does not take records yet")
    try:
        return {int(worker): [int(step) for step in steps] for worker, steps in answer["records"]}
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"Expected the steps of records. Received: {answer!s:.100}") from error
