"""A Ray cluster of two nodes, at two loopback addresses of this machine, and programs for it."""

import contextlib
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

#: What tests of a cluster are marked with; whether Ray is there is seen without importing it.
with_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed (the extra `ray`)"
)

NODES = ("127.0.0.2", "127.0.0.3")

#: The bytes of a node's object store.
_MEMORY = 80 << 20

PROGRAM = """
import json, os, sys, time
import beside
task = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
print("here", beside.WORD, sys.argv[1:], flush=True)
if sys.argv[1] == "raise" and task == 1:
    raise ValueError("worker one is unwell")
if sys.argv[1] == "much":
    print("x" * 1000, *range(30_000), sep="\\n")
    raise SystemExit(5)
time.sleep(600)
"""


@contextlib.contextmanager
def ray_cluster():
    """The cluster; `for_clients` is its address for those outside."""
    from ray.cluster_utils import Cluster

    with socket.socket() as free:
        free.bind((NODES[0], 0))
        for_clients = free.getsockname()[1]
    head = {"node_ip_address": NODES[0], "ray_client_server_port": for_clients}
    # What nobody looks at here, and processes before there is work for them.
    without = {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
    with mock.patch.dict(os.environ, RAY_prestart_worker_first_driver="0"):
        cluster = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 2, "object_store_memory": _MEMORY, **head, **without},
        )
    cluster.folders = []
    cluster.for_clients = f"ray://{NODES[0]}:{for_clients}"
    try:
        cluster.add_node(num_cpus=2, object_store_memory=_MEMORY, node_ip_address=NODES[1])
        yield cluster
    finally:
        cluster.shutdown()
        for folder in cluster.folders:
            shutil.rmtree(folder, ignore_errors=True)


def add_node(cluster, address: str):
    """Adds a node with two CPUs, and returns it.

    It has a folder of its own, as on another machine: to receive a program's folder, a node removes
    the one that is there, in which workers of other nodes may be starting. And commands join the
    cluster by a node of the common folder.
    """
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # short: the names of sockets are, too
    cluster.folders.append(folder)
    given = {"object_store_memory": _MEMORY, "node_ip_address": address, "temp_dir": folder}
    return cluster.add_node(num_cpus=2, **given)


def lose_node(cluster, node) -> None:
    """Kills a node's processes, as if its machine was lost."""
    cluster.remove_node(node, allow_graceful=False)


def written_program(folder: Path) -> Path:
    (folder / "beside.py").write_text("WORD = 'sent'")
    path = folder / "program.py"
    path.write_text(PROGRAM)
    return path


def command(address, *arguments: object) -> list[str]:
    return [sys.executable, "-m", "unison", "run", "--address", address, *map(str, arguments)]


def run(address, *arguments: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        command(address, *arguments),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**os.environ, "UNISON_OF_THE_TEST": "yes"},
    )


def processes_of(program: Path) -> list[int]:
    """Those of the workers: they run in the folder that was sent, with the test's own word."""
    word = program.parent.name.encode()
    found = []
    for folder in Path("/proc").iterdir():
        try:
            command = (folder / "cmdline").read_bytes() if folder.name.isdecimal() else b""
        except OSError:
            continue
        if b"program.py" in command and word in command and b"--address" not in command:
            found.append(int(folder.name))
    return found


def ends_within(program: Path, seconds: float) -> bool:
    last = time.monotonic() + seconds
    while processes_of(program) and time.monotonic() < last:
        time.sleep(0.1)
    return not processes_of(program)


@contextlib.contextmanager
def started(address, program: Path) -> Iterator[subprocess.Popen]:
    """`unison run` of two workers that both have said that they are here."""
    process = subprocess.Popen(
        command(address, program, "wait", program.parent.name),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        for _ in range(2):
            assert "here sent" in process.stdout.readline()
        assert len(processes_of(program)) == 2
        yield process
    finally:
        process.kill()
        process.communicate()
