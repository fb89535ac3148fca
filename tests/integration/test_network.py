"""Workers on several hosts: network namespaces, joined by links of limited speed."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import in_memory_training
import unison
from in_memory_training import Machine, end_well, report, resumed_steps, train_until
from parallel import programs
from subprocess_program import environment_of_program, kill_group
from unison.net.secret import KEY_VARIABLE, new_key

ROOT = Path(__file__).parents[2]
SECONDS = 100
MEBIBYTE = 2**20

PROGRAM = """
import json
import jax, jax.numpy as jnp
from parallel import programs

report = programs.on_workers("custom_loop")
strategy = programs.multi_worker_strategy()
ones = strategy.experimental_distribute_values_from_function(lambda context: jnp.ones(2**18))
total = strategy.run(lambda x: jax.lax.psum(x, "replica"), (ones,))
report["total"] = float(strategy.experimental_local_results(total)[0].mean())
print("REPORT", json.dumps(report), flush=True)
"""


@pytest.fixture(scope="module")
def namespaces():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        from benchmarks import namespaces
    if reason := namespaces.what_is_missing(namespaces.Link(megabits=200)):
        pytest.skip(f"No hosts can be made here: {reason}.")
    return namespaces


@pytest.fixture
def slow_hosts(namespaces):
    with namespaces.hosts(2, namespaces.Link(megabits=200)) as hosts:
        yield hosts


def reports_of_workers(hosts, **environment):
    """Runs `PROGRAM` as a worker on each host."""
    cluster = {"worker": [f"{host.address}:2222" for host in hosts]}
    workers = []
    try:
        for index, host in enumerate(hosts):
            task = {"type": "worker", "index": index}
            config = json.dumps({"cluster": cluster, "task": task})
            own = {"TF_CONFIG": config, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}"}
            workers.append(
                subprocess.Popen(
                    [*host.command, sys.executable, "-c", PROGRAM],
                    env=environment_of_program({"NPROC": "1", **own, **environment}),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    start_new_session=True,
                )
            )
        deadline = time.monotonic() + SECONDS
        outputs = [worker.communicate(timeout=deadline - time.monotonic()) for worker in workers]
    finally:
        for worker in workers:
            kill_group(worker.pid)
            worker.wait()
    return [reported(*output) for output in outputs]


def reported(stdout, stderr):
    lines = [line for line in stdout.splitlines() if line.startswith("REPORT ")]
    assert len(lines) == 1, f"Expected one report. Received: {stdout}\n{stderr}"
    return json.loads(lines[0].removeprefix("REPORT "))


def bytes_sent(host):
    counter = "/sys/class/net/eth0/statistics/tx_bytes"
    return int(output_on(host, "cat", counter))


def output_on(host, *command):
    done = subprocess.run(
        [*host.command, *command], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.strip()


def test_workers_on_two_hosts_train_as_one_process_does_and_sum_over_the_network(slow_hosts):
    alone = programs.custom_loop(unison.MirroredStrategy(["CPU:0", "CPU:1"]))
    for own in reports_of_workers(slow_hosts):
        assert own["late"] == alone["late"]
        assert own["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        assert own["total"] == 2
    # Each host has sent at least its half of the sum, and the sum of the other half.
    assert all(bytes_sent(host) > MEBIBYTE for host in slow_hosts)


#: Writes what passes an interface to a file, until it is ended.
SNIFFER = """
import socket, sys
packets = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.ntohs(3))
SO_RCVBUFFORCE = 33
packets.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 1 << 26)
with open(sys.argv[1], "wb", buffering=0) as file:
    print("listens", flush=True)
    while True:
        file.write(packets.recv(1 << 16))
"""

#: Of what workers say to the first one, and JAX to its coordination service.
WORDS = (b'"is": "beat"', b'"complaint"', b"cpu:gloo")


def seen_on_the_network(hosts, path, **environment):
    """What passes the network of one host while the workers of `reports_of_workers` train."""
    sniffer = subprocess.Popen(
        [*hosts[1].command, sys.executable, "-c", SNIFFER, str(path)], stdout=subprocess.PIPE
    )
    try:
        assert sniffer.stdout.readline() == b"listens\n"
        reports_of_workers(hosts, **environment)
    finally:
        sniffer.kill()
        sniffer.wait()
        sniffer.stdout.close()
    return path.read_bytes()


def test_what_workers_say_to_the_first_one_cannot_be_read_on_the_network(slow_hosts, tmp_path):
    seen = seen_on_the_network(slow_hosts, tmp_path / "packets")
    assert b"\x16\x03\x01" in seen  # a TLS handshake
    assert [word for word in WORDS if word in seen] == []


@pytest.mark.soak
def test_without_encryption_it_can_be(slow_hosts, tmp_path):
    seen = seen_on_the_network(slow_hosts, tmp_path / "packets", UNISON_TLS="off")
    assert [word for word in WORDS if word in seen] == list(WORDS)


def in_memory_job(hosts, spare, folder):
    """Trains on hosts; if one is cut off, on the spare one in its place. Returns the output."""
    given = ("loop", "slow=0.05", "epochs=6", "timeout=20")
    rendezvous = f"{hosts[0].address}:29400"
    folder.mkdir()
    with contextlib.ExitStack() as ending:

        def start(host):
            machine = Machine(
                host.address, len(hosts), rendezvous, folder, given, inside=host.command
            )
            ending.callback(machine.lose)
            return machine

        machines = [start(host) for host in hosts]
        if spare is not None:
            train_until(50, folder, machines)
            hosts[-1].cut_off()
            machines[-1].lose()
            machines[-1] = start(spare)
        return end_well(machines)


@pytest.mark.soak
@pytest.mark.timeout(2 * in_memory_training.LIMIT + 60)  # two jobs, each with a limit of its own
def test_a_host_that_is_cut_off_is_replaced_and_its_state_is_with_its_neighbour(
    namespaces, tmp_path, monkeypatch
):
    monkeypatch.setenv(KEY_VARIABLE, new_key())
    with namespaces.hosts(4) as [*hosts, spare]:
        undisturbed = report(in_memory_job(hosts, None, tmp_path / "undisturbed"))
        output = in_memory_job(hosts, spare, tmp_path / "lost")
    assert report(output) == undisturbed
    (resumed,) = resumed_steps(output)
    assert resumed >= 20
    assert "fetched the state at step" in output


def test_hosts_have_names_memory_and_limits_of_their_own(slow_hosts):
    names = [output_on(host, "hostname") for host in slow_hosts]
    assert len(set(names)) == 2
    for host, name in zip(slow_hosts, names, strict=True):
        assert output_on(host, "getent", "hosts", name).split()[0] == host.address
        assert "rate 200Mbit" in output_on(host, "tc", "qdisc", "show", "dev", "eth0")
        assert output_on(host, "ls", "/dev/shm") == ""


def test_hosts_reach_each_other_and_nothing_else(slow_hosts):
    one, other = slow_hosts
    routes = output_on(one, "ip", "route")
    assert "10.0.0.0/24 dev eth0" in routes
    assert "default" not in routes
    connect = (
        "import socket, sys; socket.create_connection((sys.argv[1], 5000), timeout=60).close()"
    )
    listen = (
        "import socket; s = socket.create_server(('', 5000)); print('', flush=True); s.accept()"
    )
    listener = subprocess.Popen(
        [*other.command, sys.executable, "-c", listen], stdout=subprocess.PIPE
    )
    try:
        listener.stdout.readline()
        output_on(one, sys.executable, "-c", connect, other.address)
        assert listener.wait(60) == 0
    finally:
        listener.kill()
        listener.wait()
        listener.stdout.close()


def test_nothing_is_left_when_hosts_are_removed_not_even_after_an_error(namespaces):
    started = []

    def fail_on_a_host():
        with namespaces.hosts(1) as [host]:
            stay = ["sh", "-c", "hostname; exec sleep 100"]
            started.append(subprocess.Popen([*host.command, *stay], stdout=subprocess.PIPE))
            started.append(started[0].stdout.readline().decode().strip())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_on_a_host()
    process, name = started
    assert process.wait(60) == -signal.SIGKILL
    process.stdout.close()
    assert name == f"bench-{os.getpid()}-0"
    assert name not in network_namespaces()


def test_hosts_of_a_killed_process_are_removed_by_the_next(namespaces):
    make = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n" + (
        "import os, signal\n"
        "from benchmarks import namespaces\n"
        "with namespaces.hosts(1):\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.Popen([sys.executable, "-c", make])
    assert killed.wait(60) == -signal.SIGKILL
    assert f"bench-{killed.pid}-0" in network_namespaces()
    with namespaces.hosts(1):
        assert f"bench-{killed.pid}-0" not in network_namespaces()
        assert f"bench-{os.getpid()}-0" in network_namespaces()


def test_what_the_kernel_cannot_do_is_said(namespaces):
    reason = namespaces.what_is_missing(namespaces.Link(megabits=-5))
    assert "tbf" in reason
    assert not [name for name in network_namespaces() if f"-{os.getpid()}-" in name]


def network_namespaces():
    listed = subprocess.run(
        ["ip", "netns", "list"], capture_output=True, text=True, timeout=60, check=True
    )
    return [line.split()[0] for line in listed.stdout.splitlines()]
