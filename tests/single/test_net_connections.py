"""Connections: who may connect, how the handshake of both ends fails, and what is encrypted."""

import contextlib
import hashlib
import os
import socket
import ssl
import subprocess
import sys
import threading
import time

import pytest

from connections import CHANNEL, LIMIT, SECRET, Served, Squatter, ended, served, until
from left_over import Since
from unison.errors import FailedPreconditionError, InvalidArgumentError, UnauthenticatedError
from unison.net import handshake, proof, tls
from unison.net.certificate import new_key_pair
from unison.net.connecting import connect
from unison.net.handshake import server_handshake
from unison.net.listening import listen, listen_locally

openssl = pytest.mark.skipif(
    subprocess.run(["which", "openssl"], capture_output=True, check=False).returncode != 0,
    reason="there is no openssl command",
)


@pytest.fixture(params=["off", "always"])
def encryption(request, monkeypatch):
    monkeypatch.setenv(tls.TLS_VARIABLE, request.param)
    return request.param


def said(one, other, data):
    """What arrives of some bytes that are sent over a connection."""
    for end in (one, other):
        end.settimeout(LIMIT)
    sending = threading.Thread(target=one.sendall, args=(data,))
    sending.start()
    received = b""
    while len(received) < len(data):
        received += other.recv(1 << 16)
    sending.join(LIMIT)
    return received


def test_what_one_end_sends_the_other_receives(encryption):
    with served() as server:
        client = server.connect(about=b"me")
        accepted = server.next()
        assert (accepted.channel, accepted.about) == (CHANNEL, b"me")
        assert isinstance(client, tls.TlsStream) == (encryption == "always")
        data = os.urandom(3_000_000)
        assert said(client, accepted.stream, data) == data
        assert said(accepted.stream, client, data) == data
        client.close()
        assert accepted.stream.recv(1) == b""
        accepted.stream.close()


def test_nothing_after_the_handshake_is_taken_for_a_part_of_it(encryption):
    with served() as server, contextlib.ExitStack() as ends:
        client = ends.enter_context(contextlib.closing(server.connect()))
        client.settimeout(LIMIT)
        client.sendall(b"at once")
        stream = server.next().stream
        ends.callback(stream.close)
        stream.settimeout(LIMIT)
        assert stream.recv(100) == b"at once"


def test_one_thread_receives_while_another_one_sends(encryption):
    with served() as server, contextlib.ExitStack() as ends:
        client = ends.enter_context(contextlib.closing(server.connect()))
        stream = server.next().stream
        ends.callback(stream.close)
        client.settimeout(LIMIT)
        stream.settimeout(LIMIT)
        received = []
        waiting = threading.Thread(target=lambda: received.append(client.recv(100)), daemon=True)
        waiting.start()
        assert said(client, stream, b"question") == b"question"  # while the other thread waits
        stream.sendall(b"answer")
        waiting.join(LIMIT)
        assert received == [b"answer"]


def test_a_connection_that_is_shut_down_ends_the_waiting_of_another_thread(encryption):
    with served() as server:
        client = server.connect()
        client.settimeout(LIMIT)
        received = []
        waiting = threading.Thread(target=lambda: received.append(client.recv(100)), daemon=True)
        waiting.start()
        client.shutdown(socket.SHUT_RDWR)
        waiting.join(LIMIT)
        assert received == [b""]
        client.close()


def test_a_client_with_another_secret_is_refused_and_hears_why(encryption):
    with served() as server:
        with pytest.raises(UnauthenticatedError, match=r"another key.*UNISON_KEY"):
            server.connect(secret=b"other" * 6)
        assert server.accepted == []


def test_a_client_of_another_protocol_is_refused(encryption):
    with served() as server:
        with pytest.raises(ConnectionError, match="wrong channel"):
            server.connect(channel=b"another")
        assert server.accepted == []


def test_what_is_not_expected_is_closed_without_a_proof(encryption):
    def only_view_3(own):
        return server_handshake(own, SECRET, [CHANNEL], expects=lambda about: about == b"view 3")

    with served(handshake=only_view_3) as server:
        with pytest.raises(ConnectionError, match="closed during the handshake"):
            server.connect(about=b"view 2")
        server.connect(about=b"view 3").close()


def test_the_client_waits_for_so_long_and_no_longer():
    with listen("127.0.0.1", 0) as silent, pytest.raises(TimeoutError):
        connect(silent.getsockname(), SECRET, CHANNEL, seconds=0.2)


def test_the_client_stops_to_wait_when_it_is_not_wanted_any_more():
    def stop():
        raise KeyError("the view is over")

    with listen("127.0.0.1", 0) as silent, pytest.raises(KeyError):
        connect(silent.getsockname(), SECRET, CHANNEL, seconds=LIMIT, look=stop)


def test_a_server_that_does_not_know_the_secret_is_left():
    def impostor(own):
        checked = proof.ServerProof(b"other" * 6)
        own.setblocking(False)
        hello = yield from handshake.received(own, proof.HELLO_BYTES)
        yield from handshake.sent(own, checked.challenge(hello))
        yield from handshake.received(own, proof.ANSWER_HEAD_BYTES + proof.PROOF_BYTES)
        yield from handshake.sent(own, bytes(proof.PROOF_BYTES))
        own.close()
        raise proof.RefusedError("done")

    with served(handshake=impostor) as server, pytest.raises(UnauthenticatedError):
        server.connect()


# -- encryption --------------------------------------------------------------------------------


def test_connections_within_a_machine_are_not_encrypted_by_default():
    with served() as server:
        assert not isinstance(server.connect(), tls.TlsStream)


def test_connections_from_another_machine_are_refused_in_plain_text(monkeypatch):
    with served() as server:
        monkeypatch.setattr(tls, "is_same_machine", lambda connection: False)
        monkeypatch.setenv(tls.TLS_VARIABLE, "on")
        with pytest.raises(ConnectionError, match="TLS required"):
            complete_in_plain_text(server.address)
        assert isinstance(server.connect(), tls.TlsStream)


def complete_in_plain_text(address):
    connection = socket.create_connection(address)
    steps = handshake.client_handshake(connection, SECRET, CHANNEL, b"", is_encrypted=False)
    return handshake.completed(steps, connection.fileno(), time.monotonic() + LIMIT)


def test_a_client_that_takes_the_server_for_its_own_machine_encrypts_when_asked_to(monkeypatch):
    """As where there is a proxy in between: only the server sees another machine."""
    views = {}

    def is_same_machine(connection):
        return views.get(threading.current_thread() is threading.main_thread(), False)

    monkeypatch.setattr(tls, "is_same_machine", is_same_machine)
    views[True] = True
    with served() as server:
        assert isinstance(server.connect(), tls.TlsStream)


def test_a_client_that_may_not_encrypt_hears_what_to_set(monkeypatch):
    monkeypatch.setattr(tls, "is_same_machine", lambda connection: False)
    encrypts = threading.local()
    monkeypatch.setattr(
        tls,
        "encryption",
        lambda: tls.Encryption.OFF if hasattr(encrypts, "is_off") else tls.Encryption.ON,
    )
    encrypts.is_off = True
    with served() as server, pytest.raises(FailedPreconditionError, match="Set UNISON_TLS"):
        server.connect()


def test_who_is_in_between_and_ends_tls_there_is_found(monkeypatch):
    monkeypatch.setenv(tls.TLS_VARIABLE, "always")
    pair = new_key_pair()
    with served() as server, listen("127.0.0.1", 0) as between:
        passing = threading.Thread(target=_pass_on_once, args=(between, server, pair), daemon=True)
        passing.start()
        with pytest.raises((UnauthenticatedError, ConnectionError)):
            connect(between.getsockname(), SECRET, CHANNEL, seconds=LIMIT)
        passing.join(LIMIT)
        assert server.accepted == []


def _pass_on_once(between, server, pair):
    """Ends the client's TLS with a certificate of its own, and begins another one to the server."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    file = os.memfd_create("certificate")
    os.write(file, pair.pem)
    context.load_cert_chain(f"/proc/self/fd/{file}")
    os.close(file)
    onwards = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    onwards.check_hostname, onwards.verify_mode = False, ssl.CERT_NONE
    with (
        context.wrap_socket(between.accept()[0], server_side=True) as client,
        onwards.wrap_socket(socket.create_connection(server.address)) as other,
    ):
        other.sendall(client.recv(proof.HELLO_BYTES))
        client.sendall(other.recv(proof.CHALLENGE_BYTES))
        other.sendall(client.recv(proof.ANSWER_HEAD_BYTES + proof.PROOF_BYTES))
        client.sendall(other.recv(proof.PROOF_BYTES))


def test_encryption_that_is_none_is_named(monkeypatch):
    monkeypatch.setenv(tls.TLS_VARIABLE, "yes")
    with pytest.raises(InvalidArgumentError, match=r"UNISON_TLS to be on, always or off.*'yes'"):
        listen("127.0.0.1", 0)


def test_encrypted_connections_are_of_the_latest_version(monkeypatch):
    monkeypatch.setenv(tls.TLS_VARIABLE, "always")
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with (
        served() as server,
        socket.create_connection(server.address) as connection,
        pytest.raises(ssl.SSLError, match="PROTOCOL_VERSION"),
    ):
        old.wrap_socket(connection)


# -- certificates ------------------------------------------------------------------------------


@openssl
def test_a_processs_own_certificate_is_well_formed_and_signed(tmp_path):
    path = tmp_path / "pair.pem"
    path.write_bytes(new_key_pair().pem)
    for command in (
        ["verify", "-check_ss_sig", "-CAfile", path, path],
        ["ec", "-check", "-in", path],
    ):
        done = subprocess.run(["openssl", *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_each_process_has_a_certificate_of_its_own():
    program = (
        "import hashlib; from unison.net.tls import server_identity; "
        "print(server_identity().binding.hex())"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
        ).stdout
        for _ in range(2)
    }
    assert len(outputs) == 2


def test_the_private_key_is_in_no_file(monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    tls._server_identity.cache_clear()
    before = set(os.listdir("/proc/self/fd"))
    tls.server_identity()
    assert list(tmp_path.iterdir()) == []
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    """An authority's certificate, and the certificates and keys that it and another one signed."""
    folder = tmp_path_factory.mktemp("certificates")
    for name in ("authority", "other"):
        _openssl(folder, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
                 "-nodes", "-keyout", f"{name}.key", "-out", f"{name}.pem", "-days", "2",
                 "-subj", f"/CN={name}")  # fmt: skip
        _openssl(folder, "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
                 "-keyout", f"worker-{name}.key", "-out", "request", "-subj", "/CN=w")  # fmt: skip
        _openssl(folder, "x509", "-req", "-in", "request", "-CA", f"{name}.pem", "-CAkey",
                 f"{name}.key", "-CAcreateserial", "-days", "2", "-out",
                 f"worker-{name}.pem")  # fmt: skip
    return folder


def _openssl(folder, *arguments):
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=60)


def use(monkeypatch, folder, name, authority="authority"):
    monkeypatch.setenv(tls.TLS_VARIABLE, "always")
    monkeypatch.setenv(tls.CERTIFICATE_VARIABLE, str(folder / f"worker-{name}.pem"))
    monkeypatch.setenv(tls.PRIVATE_KEY_VARIABLE, str(folder / f"worker-{name}.key"))
    monkeypatch.setenv(tls.AUTHORITY_VARIABLE, str(folder / f"{authority}.pem"))


@openssl
def test_the_users_own_certificates_are_used(authority, monkeypatch):
    use(monkeypatch, authority, "authority")
    with served() as server:
        client = server.connect()
        shown = ssl.PEM_cert_to_DER_cert((authority / "worker-authority.pem").read_text())
        assert client.server_binding == hashlib.sha256(shown).digest()


@openssl
@pytest.mark.parametrize("impostor", ["client", "server"])
def test_who_has_a_certificate_of_another_authority_is_refused(authority, monkeypatch, impostor):
    use(monkeypatch, authority, "authority")
    right = tls._files()
    use(monkeypatch, authority, "other", "other")
    wrong = tls._files()
    files = threading.local()
    of_server, of_client = (wrong, right) if impostor == "server" else (right, wrong)
    monkeypatch.setattr(tls, "_files", lambda: getattr(files, "own", of_server))
    files.own = of_client
    with served() as server:
        with pytest.raises((FailedPreconditionError, ConnectionError)):
            server.connect()
        assert server.accepted == []


@openssl
def test_files_that_are_missing_are_named(authority, monkeypatch):
    use(monkeypatch, authority, "authority")
    monkeypatch.delenv(tls.AUTHORITY_VARIABLE)
    with pytest.raises(InvalidArgumentError, match=r"Received: UNISON_TLS_CA=\."):
        listen("127.0.0.1", 0)


# -- local sockets -----------------------------------------------------------------------------


@pytest.fixture
def local_name():
    return f"\0unison-test-{os.urandom(8).hex()}"


def test_a_local_socket_is_taken_where_there_is_one(local_name):
    with served(listeners=[listen("127.0.0.1", 0), listen_locally(local_name)]) as server:
        client = server.connect(local_name=local_name)
        assert client.family == socket.AF_UNIX
        assert server.next().stream.family == socket.AF_UNIX


def test_without_a_local_socket_the_network_is_used(local_name):
    with served() as server:
        assert server.connect(local_name=local_name).family == socket.AF_INET


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_a_local_socket_that_another_user_has_taken_is_left_alone(local_name):
    squatter = Squatter(local_name)
    with contextlib.closing(squatter), served() as server:
        client = server.connect(local_name=local_name)
        assert client.family == socket.AF_INET
        assert squatter.received() == b""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_a_client_of_another_user_is_refused_at_a_local_socket(local_name):
    with served(listeners=[listen("127.0.0.1", 0), listen_locally(local_name)]) as server:
        done = subprocess.run(
            [sys.executable, "-c", INTRUDER, local_name[1:]],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert done.stdout.strip() == "closed"
        assert server.accepted == []


INTRUDER = """
import os, socket, sys
os.setuid(65534)
connection = socket.socket(socket.AF_UNIX)
connection.connect("\\0" + sys.argv[1])
connection.settimeout(20)
print("closed" if not connection.recv(100) else "open")
"""


def test_a_local_socket_of_another_user_is_known_by_its_user(monkeypatch):
    one, other = socket.socketpair()
    with one, other:
        assert handshake.peer_of(one)[:2] == (os.getpid(), os.getuid())
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        with pytest.raises(proof.RefusedError, match="another user"):
            handshake.check_user(one)


# -- what is left ------------------------------------------------------------------------------


def test_connections_that_fail_leave_nothing_open(encryption):
    def attempts(server):
        for secret, channel in ((b"other" * 6, CHANNEL), (SECRET, b"another")):
            with contextlib.suppress(OSError, UnauthenticatedError):
                server.connect(secret=secret, channel=channel)
        for noise in (b"", b"\x16\x03\x01", b"GET / HTTP/1.1\r\n\r\n" * 10):
            with socket.create_connection(server.address) as stranger:
                with contextlib.suppress(OSError):  # it may have been refused already
                    stranger.sendall(noise)
                    stranger.shutdown(socket.SHUT_WR)
                assert ended(stranger)

    with served() as server:
        attempts(server)  # what is made once is made by now
        until(lambda: server.acceptor.pending == 0)
        since = Since()
        attempts(server)
        until(lambda: server.acceptor.pending == 0)
        assert (since.descriptors(), since.threads()) == ([], [])


def test_a_server_is_closed_with_those_that_have_proved_nothing():
    server = Served()
    with socket.create_connection(server.address) as stranger:
        until(lambda: server.acceptor.pending == 1)
        server.close()
        assert ended(stranger)
