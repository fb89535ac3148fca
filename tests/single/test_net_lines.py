"""Lines of JSON over connections that never wait, and what is not a message."""

import contextlib
import json
import socket

import pytest

from connections import served, until
from unison.net import tls
from unison.net.lines import MOST_BYTES, Line, decoded


@pytest.fixture(params=["local", "plain", "encrypted"])
def ends(request, monkeypatch):
    with contextlib.ExitStack() as stack:
        if request.param == "local":
            streams = socket.socketpair()
        else:
            monkeypatch.setenv(
                tls.TLS_VARIABLE, "always" if request.param == "encrypted" else "off"
            )
            server = stack.enter_context(served())
            streams = server.connect(), server.next().stream
        lines = [Line(stream) for stream in streams]
        for line in lines:
            stack.callback(line.close)
        yield lines


def received(line, count=1):
    messages = []
    until(lambda: messages.extend(line.receive()) or len(messages) >= count or not line.is_open)
    return messages


def test_messages_arrive_in_their_order(ends):
    one, other = ends
    for number in range(100):
        one.send({"is": "beat", "number": number})
    assert [message["number"] for message in received(other, 100)] == list(range(100))


def test_large_messages_arrive_while_nobody_waits(ends):
    one, other = ends
    text = "é" * 100_000
    messages = []

    def pass_on():
        one.flush()
        messages.extend(other.receive())
        return len(messages) == 5

    for _ in range(5):
        one._most_waiting = None
        one.send({"text": text})
    until(pass_on)
    assert [message["text"] for message in messages] == [text] * 5
    assert one.num_waiting == 0


def test_messages_can_be_taken_one_by_one(ends):
    one, other = ends
    for number in range(3):
        one.send({"number": number})
    (first,) = until(lambda: other.receive(most=1))
    rest = received(other, 2)
    assert [message["number"] for message in (first, *rest)] == [0, 1, 2]


def test_no_message_means_that_nothing_has_come(ends):
    one, other = ends
    assert other.receive() == []
    assert other.is_open
    del one


def test_the_last_messages_are_received_before_the_end(ends):
    one, other = ends
    one.send({"is": "left"})
    one.close()
    assert received(other) == [{"is": "left"}]
    until(lambda: other.receive() == [] and not other.is_open)


def test_one_that_does_not_read_is_given_up(ends):
    one, _ = ends
    for _ in range(30):
        one.send({"text": "x" * 500_000})
    assert not one.is_open


def test_a_line_that_is_too_long_ends_the_connection(ends):
    one, other = ends
    one._most_waiting = None
    one.send_encoded(b"x" * (MOST_BYTES + 100_000))

    def look():
        one.flush()
        return other.receive() == [] and not other.is_open

    until(look)


@pytest.mark.parametrize(
    "line",
    [
        b"GET / HTTP/1.1\r",
        b"\x00\xff",
        b"",
        b"7",
        b"[1]",
        b"null",
        b'{"a":' * 100 + b"1" + b"}" * 100,
        b"[" * 60_000,
        b'{"a": ' + b"9" * 5000 + b"}",
        b'{"a": 99999999999999999999}',
        b'{"a": "\\ud800"}',
        b'{"\\udfff": 1}',
        b'{"a": 1',
    ],
    ids=lambda line: repr(line[:20]),
)
def test_what_is_not_a_message_ends_the_connection_after_those_before_it(line):
    one, other = socket.socketpair()
    with one:
        receiving = Line(other)
        one.sendall(b'{"is": "first"}\n' + line + b"\n" + b'{"is": "later"}\n')
        assert received(receiving) == [{"is": "first"}]
        assert not receiving.is_open
        receiving.close()


def test_brackets_in_text_are_not_nesting():
    message = {"text": '[{"' * 200 + "\\" * 3, "list": [[1], [2]] * 50}
    assert decoded(json.dumps(message).encode()) == message


def test_numbers_that_are_not_finite_may_be_reported():
    assert decoded(b'{"loss": Infinity}')["loss"] == float("inf")
