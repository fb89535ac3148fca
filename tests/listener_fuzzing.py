"""A machine that sends listeners what they do not expect, and looks whether they still serve.

Each case is made from the seed, the listener's name and the case's number, so that one that fails
is made again by them:

    python tests/listener_fuzzing.py register --seed 5 --first 117 --cases 1

Before the proof of the key it sends noise, other protocols, mutated first words and answers, and
mutated handshakes of TLS; after it, messages that are mutated byte by byte, or in their structure
with everything else right. Connections are closed properly, reset, half closed, or held.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import socket
import ssl
import struct
import time

from leaks import Census, census, leaked, settled
from listener_conversations import LISTENERS, Running, running_listeners, where
from mutations import mutated_bytes
from unison.errors import OpError
from unison.net import proof
from unison.net.handshake import client_handshake, completed
from unison.net.proof import ClientProof
from unison.net.secret import key
from unison.net.tls import client_context

#: Bytes by which the process may grow.
MOST_MEMORY = 100 << 20

#: Seconds for one operation of a connection.
_SECONDS = 2.0

#: How many cases there are between two looks whether rightful clients are served.
_CASES_A_LOOK = 25

#: How many connections are held at once.
_MOST_HELD = 40


class Case:
    """One connection to a listener, or one that fails.

    Args:
        name: The listener's.
        running: The process that it is in.
        rng: By which the case is made.
    """

    def __init__(self, name: str, running: Running, rng: random.Random):
        self._listener = LISTENERS[name]
        self._where = where(running.listeners[name])
        self._secret = running.token.encode() if self._listener.uses_token else key()
        self._rng = rng

    def run(self) -> socket.socket | None:
        """Does it; returns a connection that is to be held for a while."""
        listener, rng = self._listener, self._rng
        kinds = [self._noise, self._no_message]
        if listener.channel:
            kinds += [self._hello, self._answer, self._after_proof, self._after_proof]
        if listener.is_encrypted:
            kinds += [self._tls]
        with contextlib.suppress(OSError, OpError, EOFError):
            connection = rng.choice(kinds)()
            if connection is not None:
                return self._end(connection)
        return None

    def _connected(self) -> socket.socket:
        family = socket.AF_UNIX if isinstance(self._where, str) else socket.AF_INET
        connection = socket.socket(family)
        connection.settimeout(_SECONDS)
        try:
            connection.connect(self._where)
        except BaseException:
            connection.close()
            raise
        return connection

    def _sent(self, data: bytes) -> socket.socket:
        connection = self._connected()
        with contextlib.suppress(OSError):  # closed before all was sent
            connection.sendall(data)
        return connection

    def _noise(self) -> socket.socket:
        rng = self._rng
        return self._sent(
            rng.choice(
                [
                    b"",
                    rng.randbytes(rng.randrange(1, 3000)),
                    b"GET / HTTP/1.1\r\n\r\n",
                    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
                    b"{" * 5000,
                    b"\0" * 100_000,
                    b"\x16\x03\x01" + rng.randbytes(500),
                ]
            )
        )

    def _no_message(self) -> socket.socket:
        """What comes after the proof, without it."""
        listener, rng = self._listener, self._rng
        frames = [listener.encode(message) for message in listener.messages(rng)]
        data = b"".join(frames)
        return self._sent(mutated_bytes(rng, data) if rng.random() < 0.7 else data)

    def _hello(self) -> socket.socket:
        """First words that are wrong, or of another channel."""
        rng = self._rng
        channel = rng.choice([self._listener.channel, b"another", b"\xff" * 16])
        hello = ClientProof(self._secret, channel).hello
        return self._sent(mutated_bytes(rng, hello) if rng.random() < 0.8 else hello)

    def _answer(self) -> socket.socket:
        """An answer to the challenge that is wrong."""
        rng = self._rng
        secret = self._secret if rng.random() < 0.7 else rng.randbytes(32)
        about = self._listener.about if rng.random() < 0.5 else rng.randbytes(rng.randrange(64))
        client = ClientProof(secret, self._listener.channel, about)
        connection = self._sent(client.hello)
        challenge = b""
        while len(challenge) < proof.CHALLENGE_BYTES:
            piece = connection.recv(proof.CHALLENGE_BYTES - len(challenge))
            if not piece:
                return connection
            challenge += piece
        answer = client.answer(challenge)
        with contextlib.suppress(OSError):
            connection.sendall(mutated_bytes(rng, answer) if rng.random() < 0.8 else answer)
        return connection

    def _tls(self) -> socket.socket:
        """A handshake of TLS that is wrong, or has something else behind it."""
        rng = self._rng
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        handshake = client_context().wrap_bio(incoming, outgoing)
        with contextlib.suppress(ssl.SSLWantReadError):
            handshake.do_handshake()
        hello = outgoing.read()
        if rng.random() < 0.7:
            return self._sent(mutated_bytes(rng, hello))
        connection = self._sent(hello)
        incoming.write(connection.recv(1 << 16))
        handshake.do_handshake()
        handshake.write(mutated_bytes(rng, ClientProof(self._secret, b"another").hello))
        data = outgoing.read()
        connection.sendall(data if rng.random() < 0.5 else mutated_bytes(rng, data))
        return connection

    def _after_proof(self) -> socket.socket | None:
        """Right messages, among them one that is wrong."""
        listener, rng = self._listener, self._rng
        opened = self._connected()
        is_encrypted = (
            listener.is_encrypted and opened.family != socket.AF_UNIX and rng.random() < 0.3
        )
        steps = client_handshake(
            opened, self._secret, listener.channel, listener.about, is_encrypted
        )
        stream = completed(steps, opened.fileno(), time.monotonic() + _SECONDS)
        stream.settimeout(_SECONDS)
        said = listener.messages(rng)
        wrong = rng.randrange(len(said))
        by_structure = listener.mutated is not None and rng.random() < 0.7
        frames = []
        for place, message in enumerate(said):
            if place != wrong:
                frames.append(listener.encode(message))
            elif by_structure and listener.mutated is not None:
                frames.append(listener.encode(listener.mutated(rng, message)))
            else:
                frames.append(mutated_bytes(rng, listener.encode(message)))
        with contextlib.suppress(OSError):
            if rng.random() < 0.5:
                stream.sendall(b"".join(frames))
            else:
                for frame in frames:
                    stream.sendall(frame)
        if isinstance(stream, socket.socket):
            return stream
        stream.close()
        return None

    def _end(self, connection: socket.socket) -> socket.socket | None:
        """Ends a connection in one of the ways in which connections end."""
        how = self._rng.randrange(6)
        if how == 0:
            return connection
        with contextlib.closing(connection), contextlib.suppress(OSError):
            if how == 1:
                linger = struct.pack("ii", 1, 0)  # it is reset
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            elif how == 2:
                connection.shutdown(socket.SHUT_WR)
                connection.settimeout(0.02)
                connection.recv(1000)
            elif how == 3:
                connection.settimeout(0.005)
                connection.recv(1000)
        return None


class Fuzzing:
    """The machine; a context manager, which starts the listeners and ends them."""

    def __init__(self, seed: int):
        self._seed = seed
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Fuzzing:
        self._running = self._stack.enter_context(running_listeners())
        for name in LISTENERS:  # what is made once is made by now
            self._look(name)
            for number in range(5):
                self._case(name, -number, [])
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def run(
        self, name: str, cases: int | None = None, seconds: float | None = None, first: int = 0
    ) -> int:
        """Fuzzes a listener; returns how many cases there were.

        Args:
            name: The listener's.
            cases: How many cases there are; None: as many as there is time for.
            seconds: For how long.
            first: The number of the first case.

        Raises:
            AssertionError: It does not serve rightful clients any more, has not given back what it
                has taken, or has printed a traceback. The message names the cases.
        """
        end = time.monotonic() + (float("inf") if seconds is None else seconds)
        held: list[socket.socket] = []
        before = self._settled(None)
        number = first
        while (cases is None or number < first + cases) and time.monotonic() < end:
            self._case(name, number, held)
            number += 1
            if (number - first) % _CASES_A_LOOK == 0:
                self._look(name, max(first, number - _CASES_A_LOOK), number)
        self._look(name, max(first, number - _CASES_A_LOOK), number)
        for connection in held:
            connection.close()
        after = self._settled(before)
        about = self._about(name, first, number)
        found = leaked(before, after, MOST_MEMORY)
        assert not found, f"{about}: {found}"
        said = self._running.printed()
        assert "Traceback" not in said, f"{about}: {said[-3000:]}"
        return number - first

    def _case(self, name: str, number: int, held: list[socket.socket]) -> None:
        rng = random.Random(f"{self._seed} {name} {number}")
        connection = Case(name, self._running, rng).run()
        if connection is not None:
            held.append(connection)
            if len(held) > _MOST_HELD:
                held.pop(rng.randrange(len(held))).close()

    def _look(self, name: str, first: int = 0, end: int = 0) -> None:
        """Looks whether a rightful client is served."""
        failure = self._running.failure(name)
        if failure is not None:
            raise AssertionError(
                f"No rightful client is served, {self._about(name, first, end)}: {failure!r}\n"
                f"{self._running.printed()[-3000:]}"
            ) from failure

    def _about(self, name: str, first: int, end: int) -> str:
        return f"{name}, seed {self._seed}, cases {first} to {end - 1}"

    def _settled(self, before: Census | None) -> Census:
        """What the process holds: as soon as that is no more than before, or at last."""
        if before is not None:
            return settled(self._held, before, MOST_MEMORY)[0]
        held = self._held()
        while True:
            time.sleep(0.1)
            last, held = held, self._held()
            if not leaked(last, held, MOST_MEMORY) and not leaked(held, last, MOST_MEMORY):
                return held

    def _held(self) -> Census:
        return census(self._running.process.pid)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("listener", choices=[*LISTENERS, "all"])
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4)))
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--cases", type=int, help="how many cases (default: as there is time for)")
    parser.add_argument("--seconds", type=float, help="for how long (default: 60, without --cases)")
    options = parser.parse_args()
    seconds = options.seconds or (None if options.cases else 60.0)
    os.environ.setdefault("UNISON_KEY", "ab" * 32)
    with Fuzzing(options.seed) as fuzzing:
        for name in LISTENERS if options.listener == "all" else [options.listener]:
            count = fuzzing.run(name, options.cases, seconds, options.first)
            print(f"{name}: seed {options.seed}, {count} cases", flush=True)


if __name__ == "__main__":
    main()
