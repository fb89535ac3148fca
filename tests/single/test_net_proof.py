"""The proof of a shared secret: both ends know it, and nobody learns it or passes it on."""

import stat
from pathlib import Path

import pytest

from unison.errors import InvalidArgumentError, PermissionDeniedError, UnauthenticatedError
from unison.net import proof
from unison.net.proof import ClientProof, RefusedError, ServerProof
from unison.net.secret import key, new_key

SECRET = b"s" * 32


def exchanged(client, server):
    """What both have sent, when all is done; the client has checked the server's proof."""
    challenge = server.challenge(client.hello)
    answer = client.answer(challenge)
    own = server.verify(answer)
    client.check(own)
    return client.hello + challenge + answer + own


def test_both_ends_know_what_the_connection_is_for():
    client, server = ClientProof(SECRET, b"channel", b"view 3"), ServerProof(SECRET)
    exchanged(client, server)
    assert (server.channel, server.about) == (b"channel", b"view 3")


def test_the_secret_is_not_sent():
    sent = exchanged(ClientProof(SECRET, b"channel"), ServerProof(SECRET))
    assert SECRET not in sent
    assert SECRET.hex().encode() not in sent


def test_a_client_with_another_secret_gets_no_proof():
    client, server = ClientProof(b"other" * 6, b"channel"), ServerProof(SECRET)
    assert server.verify(client.answer(server.challenge(client.hello))) is None


def test_a_server_with_another_secret_is_not_believed():
    client, server = ClientProof(SECRET, b"channel"), ServerProof(SECRET)
    client.answer(server.challenge(client.hello))
    with pytest.raises(UnauthenticatedError, match="does not know the key"):
        client.check(bytes(proof.PROOF_BYTES))


def test_a_clients_own_proof_sent_back_to_it_is_not_one_of_the_server():
    client, server = ClientProof(SECRET, b"channel"), ServerProof(SECRET)
    answer = client.answer(server.challenge(client.hello))
    with pytest.raises(UnauthenticatedError):
        client.check(answer[-proof.PROOF_BYTES :])


def test_an_answer_counts_for_one_challenge_only():
    client, server, later = ClientProof(SECRET, b"a"), ServerProof(SECRET), ServerProof(SECRET)
    answer = client.answer(server.challenge(client.hello))
    later.challenge(client.hello)
    assert server.verify(answer) is not None
    assert later.verify(answer) is None


@pytest.mark.parametrize("place", ["channel", "about", "binding"])
def test_an_answer_counts_for_what_the_client_has_said_only(place):
    """Somebody in between changes the channel, what the client says, or the certificate."""
    binding = b"b" * 32
    client = ClientProof(SECRET, b"a", b"view 3", binding)
    server = ServerProof(SECRET, b"c" * 32 if place == "binding" else binding)
    hello = client.hello.replace(b"a\0", b"b\0", 1) if place == "channel" else client.hello
    answer = client.answer(server.challenge(hello))
    if place == "about":
        answer = answer.replace(b"view 3", b"view 4")
    assert server.verify(answer) is None


def test_other_protocols_are_refused():
    with pytest.raises(RefusedError, match="does not speak Unison's protocol"):
        ServerProof(SECRET).challenge(b"GET / HTTP/1.1\r\n".ljust(proof.HELLO_BYTES))
    with pytest.raises(RefusedError, match="does not speak Unison's protocol"):
        ClientProof(SECRET, b"a").answer(b"HTTP/1.1 400".ljust(proof.CHALLENGE_BYTES))


def test_a_client_hears_why_it_is_refused():
    client = ClientProof(SECRET, b"a")
    with pytest.raises(RefusedError, match="TLS required") as refused:
        client.answer(proof.refusal(proof.TLS_REQUIRED, proof.CHALLENGE_BYTES))
    assert refused.value.reason == proof.TLS_REQUIRED


def test_no_hello_begins_as_tls_does():
    assert ClientProof(SECRET, b"a").hello[0] != 0x16


def test_what_is_signed_comes_back_and_nothing_else():
    signed = proof.sign(SECRET, b"payload")
    assert proof.verified(SECRET, signed) == b"payload"
    for wrong in (signed + b"!", b"!" + signed, signed[:10], b"", proof.sign(b"other", b"payload")):
        with pytest.raises(UnauthenticatedError, match="Signature mismatch"):
            proof.verified(SECRET, wrong)


def test_texts_are_compared_whatever_they_hold():
    assert proof.is_equal("token", "token")
    assert not proof.is_equal("\udcff", "token")
    assert not proof.is_equal("", "token")


# -- where the secret comes from ---------------------------------------------------------------


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.delenv("UNISON_KEY", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def test_a_users_key_is_made_once_and_is_the_users_alone(home):
    assert key() == key()
    (path,) = (home / "config" / "unison").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("content", [b"", b"ab", b"\xff" * 64, b"x" * 64])
def test_a_file_without_a_key_is_refused(home, content):
    key()
    (home / "config" / "unison" / "key").write_bytes(content)
    with pytest.raises(InvalidArgumentError, match=r"Expected .*key to hold"):
        key()


def test_a_key_that_others_can_read_is_not_used(home):
    key()
    (home / "config" / "unison" / "key").chmod(0o644)
    with pytest.raises(PermissionDeniedError, match="chmod 600"):
        key()


def test_without_a_home_the_key_is_in_the_folder_of_what_runs(home, monkeypatch):
    (home / "a file").write_text("")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / "a file"))
    assert key() == key() == bytes.fromhex(Path(home / "unison" / "key").read_text())


def test_the_environments_key_goes_first(home, monkeypatch):
    monkeypatch.setenv("UNISON_KEY", given := new_key())
    assert key() == bytes.fromhex(given)


@pytest.mark.parametrize("given", ["secret", "ab" * 15])
def test_a_key_that_could_be_guessed_is_refused(home, monkeypatch, given):
    monkeypatch.setenv("UNISON_KEY", given)
    with pytest.raises(InvalidArgumentError, match="UNISON_KEY to hold at least 32 hexadecimal"):
        key()
