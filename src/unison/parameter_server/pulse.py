"""`Pulse`: heartbeats that detect a stopped or unreachable process.

If this process serves monitoring of the job, it also requests the other process's reports.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from unison.errors import UnavailableError
from unison.monitoring import first_worker
from unison.net.array_messages import Connection
from unison.parameter_server.messages import connect

#: Seconds between two heartbeats.
_EVERY = 1.0


class Pulse:
    """Sends heartbeats to a process, and closes a connection to it if there is no reply.

    A wait for a reply on that connection then raises an `UnavailableError`.

    Args:
        name: The name of the process: "worker 0", "ps 1".
        address: The address at which it listens.
        connection: The connection to close.
        patience: Returns the timeout in seconds.
        on_silence: Called once after the timeout, before the connection is closed.

    Raises:
        OpError: The process does not reply at the start.
    """

    def __init__(
        self,
        name: str,
        address: str,
        connection: Connection,
        patience: Callable[[], float],
        on_silence: Callable[[], None] = lambda: None,
    ):
        self._pulse = connect(address, patience(), "The process", role="pulse")
        self._name = name
        self._connection = connection
        self._patience = patience
        self._on_silence = on_silence
        self._heard = time.monotonic()
        self._is_ended = threading.Event()
        #: Why the process was given up; None if it was not.
        self.verdict: str | None = None
        for part in (self._listen, self._ask):
            threading.Thread(target=part, name="unison-pulse", daemon=True).start()

    def close(self) -> None:
        """Stops the heartbeats."""
        self._is_ended.set()
        self._pulse.close()

    def _listen(self) -> None:
        try:
            while True:
                answer = self._pulse.receive()
                self._heard = time.monotonic()
                if answer.fields.get("report") is not None:
                    first_worker.hear(self._name, answer["report"])
        except UnavailableError:
            if not self._is_ended.is_set():  # the process has ended
                self._connection.close()
            self._is_ended.set()

    def _ask(self) -> None:
        while not self._is_ended.wait(_EVERY):
            try:
                self._pulse.send("ping", wants_report=first_worker.serves(self._name))
            except UnavailableError:
                return
            patience = self._patience()
            if time.monotonic() - self._heard > patience:
                self.verdict = f"it has sent no heartbeat for {patience:g} s"
                self._on_silence()
                self._connection.close()
                self.close()
