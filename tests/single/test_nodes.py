"""The machines of a job meet at an address of one of them; here they are threads."""

import concurrent.futures
import contextlib
import os
import socket

import pytest

from unison.cli import main
from unison.errors import UnauthenticatedError, UnavailableError
from unison.net.lines import Line
from unison.net.proof import derived_key, new_nonce
from unison.net.secret import KEY_VARIABLE, new_key
from unison.runtime.launching.environments import worker_environments
from unison.runtime.launching.nodes import about_program, meet_nodes

ABOUT = {"program": "train.py"}


@pytest.fixture
def address(monkeypatch):
    """A free address of this machine, where machines with the same new key meet."""
    monkeypatch.setenv(KEY_VARIABLE, new_key())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return f"127.0.0.1:{port}"


def meeting(address, *machines, timeout=20.0):
    """What the machines learn, or their errors; each is given by what differs from the usual."""
    usual = {"nodes": len(machines), "workers": 1, "about": ABOUT}
    with concurrent.futures.ThreadPoolExecutor(len(machines)) as threads:
        meet = [
            threads.submit(meet_nodes, rendezvous=address, timeout=timeout, **usual | machine)
            for machine in machines
        ]
        return [each.exception(60) or each.result() for each in meet]


def test_each_machine_gets_a_rank_and_all_workers(address):
    found = meeting(address, {"workers": 2}, {"workers": 1, "host": "127.0.0.2"}, {"workers": 2})
    assert sorted(node.rank for node in found) == [0, 1, 2]
    first = found[0]
    assert all((node.cluster, node.key) == (first.cluster, first.key) for node in found)
    of_workers = first.cluster.job_tasks("worker")
    assert len(set(of_workers)) == 5
    owners = sorted(zip((node.first_worker for node in found), (2, 1, 2), strict=True))
    assert [start + count for start, count in owners] == [*(start for start, _ in owners[1:]), 5]
    assert of_workers[found[1].first_worker].startswith("127.0.0.2:")


def test_a_machine_may_be_the_only_one(address):
    (node,) = meeting(address, {"workers": 2})
    assert (node.rank, node.first_worker, node.cluster.num_tasks("worker")) == (0, 0, 2)


def test_the_key_of_a_job_is_new(address):
    first, second = (meeting(address, {}, {})[0].key for _ in range(2))
    assert first != second
    assert len(bytes.fromhex(first)) == 32


def test_the_key_of_a_job_is_not_sent(address, monkeypatch):
    sent = []
    send = Line.send_encoded

    def recorded(line, data):
        sent.append(data)
        send(line, data)

    monkeypatch.setattr(Line, "send_encoded", recorded)
    found = meeting(address, {}, {}, {})
    (of_job,) = {node.key for node in found}
    everything = b"".join(sent)
    assert found[0].cluster.job_tasks("worker")[0].encode() in everything
    assert of_job.encode() not in everything
    assert os.environ[KEY_VARIABLE].encode() not in everything


def test_who_has_heard_all_but_has_another_key_does_not_derive_the_jobs():
    nonce = new_nonce()
    assert derived_key(b"a" * 32, nonce) != derived_key(b"b" * 32, nonce)
    assert derived_key(b"a" * 32, nonce) != derived_key(b"a" * 32, new_nonce())


@pytest.mark.parametrize(
    ("machine", "difference"),
    [
        (
            {"about": {"program": "other.py"}},
            r"program '(train|other)\.py' and '(other|train)\.py'",
        ),
        ({"nodes": 3}, r"nnodes '[23]' and '[23]'"),
    ],
)
def test_all_machines_say_what_differs(address, machine, difference):
    for error in meeting(address, {}, machine):
        assert isinstance(error, UnavailableError)
        with pytest.raises(UnavailableError, match=f"The machines of the job differ: {difference}"):
            raise error


def test_machines_that_do_not_come_are_counted(address):
    errors = meeting(address, {"nodes": 3}, {"nodes": 3}, timeout=1.0)
    assert any("Timed out waiting for 1 of 3 machines" in str(error) for error in errors)
    assert all(isinstance(error, UnavailableError) for error in errors)


def wait_until_it_listens(machine, address):
    host, port = address.split(":")
    listens = False
    while not listens and not machine.done():
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 1):
            listens = True


def test_a_machine_that_has_gone_can_come_again(address):
    with concurrent.futures.ThreadPoolExecutor(3) as threads:

        def meet(timeout):
            return threads.submit(meet_nodes, 3, address, 1, ABOUT, timeout)

        first = meet(30.0)
        wait_until_it_listens(first, address)  # the machine that goes is not the one that listens
        gone = meet(0.5)
        with pytest.raises(UnavailableError):
            gone.result(30)
        others = [meet(30.0) for _ in range(2)]
        assert sorted(each.result(60).rank for each in (first, *others)) == [0, 1, 2]


def test_a_machine_with_another_key_is_refused(address, monkeypatch):
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        first = threads.submit(meet_nodes, 2, address, 1, ABOUT, 3.0)
        wait_until_it_listens(first, address)
        monkeypatch.setenv(KEY_VARIABLE, new_key())
        with pytest.raises(UnauthenticatedError, match=f"same {KEY_VARIABLE}"):
            meet_nodes(2, address, 1, ABOUT, 20.0)
        with pytest.raises(UnavailableError, match="The latest connection that failed"):
            first.result(60)


def test_another_program_at_the_address_is_not_waited_for_for_ever(address):
    host, port = address.split(":")
    with (
        socket.create_server((host, int(port))),
        pytest.raises(UnavailableError, match=r"Could not reach the rendezvous.*within 1 s"),
    ):
        meet_nodes(2, address, 1, ABOUT, 1.0)


@pytest.mark.parametrize("wrong", ["here", "here:", ":4000", "here:0", "here:70000", "here:http"])
def test_a_rendezvous_is_a_host_and_a_port(wrong):
    with pytest.raises(ValueError, match="Expected the rendezvous to be HOST:PORT"):
        meet_nodes(2, wrong, 1, ABOUT, 1.0)


def test_programs_are_compared_by_name_and_content(tmp_path):
    paths = [tmp_path / place / "train.py" for place in ("a", "b")]
    for path in paths:
        path.parent.mkdir()
        path.write_text("print(1)")
    assert about_program(str(paths[0]), False) == about_program(str(paths[1]), False)
    paths[1].write_text("print(2)")
    assert about_program(str(paths[0]), False) != about_program(str(paths[1]), False)
    assert about_program("package.train", True) == {"program": "-m package.train"}


def test_the_workers_of_a_machine_share_its_cores_only(address, monkeypatch):
    monkeypatch.delenv("NPROC", raising=False)
    (node,) = meeting(address, {"workers": 4})
    alone = worker_environments(node.cluster, own=[2])
    of_all = worker_environments(node.cluster)
    assert len(alone) == 1
    assert alone[0]["TF_CONFIG"] == of_all[2]["TF_CONFIG"]
    assert int(alone[0]["NPROC"]) >= int(of_all[2]["NPROC"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--nnodes", "2"], "--nnodes needs --rendezvous HOST:PORT"),
        (["--nnodes", "0", "--rendezvous", "a:1"], "Expected at least 1 for --nnodes. Received: 0"),
        (["--rendezvous", "a:1"], "--rendezvous is for jobs of several machines. Give --nnodes"),
        (["--rendezvous-timeout", "5"], "--rendezvous-timeout is for jobs of several machines"),
        (
            ["--nnodes", "2", "--rendezvous", "a:1", "--address", "auto"],
            "--nnodes and --address are for different jobs",
        ),
        (
            ["--nnodes", "2", "--rendezvous", "a:1", "--env", "slurm"],
            "--nnodes and --env are for different jobs",
        ),
        (
            ["--nnodes", "2", "--rendezvous", "a:1", "--ps", "1"],
            "--nnodes and --ps are for different jobs",
        ),
        (
            ["--nnodes", "2", "--rendezvous", "a:1", "--min-workers", "1"],
            "--nnodes and the options of elastic jobs are for different jobs",
        ),
        (["--nnodes", "2", "--rendezvous", "a"], "Expected the rendezvous to be HOST:PORT"),
        (
            ["--nnodes", "2", "--rendezvous", "127.0.0.1:9", "--host", "192.0.2.1"],
            "Cannot assign requested address",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message, tmp_path, capsys):
    (tmp_path / "train.py").write_text("")
    assert main(["run", *options, str(tmp_path / "train.py")]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--hosts", "a,,b"], "Expected --hosts to be names or addresses such as a,b:2"),
        (["--hosts", "a:0"], "Expected --hosts to be names or addresses such as a,b:2"),
        (["--hosts", "a,root@a"], "Expected each of --hosts once. Received: a,root@a"),
        (["--hosts", "localhost,a.invalid"], "The other machines cannot reach 'localhost'"),
        (["--hosts", "a", "--nnodes", "2"], "--hosts and --nnodes are for different jobs"),
        (["--hosts", "a", "--address", "auto"], "--hosts and --address are for different jobs"),
        (["--hosts", "a", "--host", "b"], "--hosts and --host are for different jobs"),
    ],
)
def test_hosts_that_do_not_fit_are_refused(options, message, tmp_path, capsys):
    (tmp_path / "train.py").write_text("")
    assert main(["run", *options, str(tmp_path / "train.py")]) == 2
    assert message in capsys.readouterr().err
