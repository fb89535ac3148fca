"""Several hosts on one Linux machine: network namespaces at a switch, with shaped links.

A host has an address, a name, a `/dev/shm` and System V memory of its own, so that programs in
different hosts reach each other by the network only. The switch is a bridge in a namespace too:
this machine's own network stays as it is. Needs root, and `ip`, `tc` and `unshare`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator

#: The name of the interface that a host has to the switch.
INTERFACE = "eth0"
_PREFIX = "bench"
#: Where a host's command, `ip netns exec NAMESPACE`, has its namespace.
_NAMESPACE = 3
_SECONDS = 20

# gloo binds to the address that the host's name has.
_ENTER = (
    'hostname "$0" && mount -t tmpfs tmpfs /dev/shm && mount --bind "$1" /etc/hosts && shift && '
    'exec "$@"'
)

#: How long a link may send at full speed; what is shorter than a packet is lost.
_BURST_SECONDS = 0.0005
_LEAST_BURST = 15_000
_QUEUE_SECONDS = 0.5


@dataclasses.dataclass(frozen=True)
class Link:
    """The way of a host to the switch.

    Attributes:
        megabits: What it sends in a second, in 10^6 bits; None for all that it can.
        delay: Milliseconds that a packet takes.
    """

    megabits: int | None = None
    delay: float = 0.0

    def __str__(self) -> str:
        rate = "unshaped" if self.megabits is None else f"{self.megabits} Mbit/s"
        return f"{rate}, {self.delay:g} ms" if self.delay else rate


@dataclasses.dataclass(frozen=True)
class Host:
    """A place where programs run.

    Attributes:
        address: Its IP address.
        command: What stands before a command to run it there.
        interface: The interface that has the address; None for any.
    """

    address: str
    command: tuple[str, ...] = ()
    interface: str | None = None

    def environment(self) -> dict[str, str]:
        """Returns what tells gloo in PyTorch where to listen."""
        return {"GLOO_SOCKET_IFNAME": self.interface} if self.interface else {}

    def cut_off(self) -> None:
        """Takes it from the network for good, as when its power is lost: nobody is told."""
        assert self.interface is not None
        _run("ip", "-n", self.command[_NAMESPACE], "link", "set", self.interface, "down")


#: A link that limits nothing.
UNLIMITED = Link()

#: This machine, as its own processes reach it.
THIS_MACHINE = Host("127.0.0.1")


@functools.cache
def what_is_missing(link: Link = UNLIMITED) -> str | None:
    """Returns why no hosts with such links can be made here; None if they can."""
    programs = [name for name in ("ip", "tc", "unshare") if not shutil.which(name)]
    if programs:
        return f"there is no program {', '.join(programs)} (packages iproute2 and util-linux)"
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    try:
        with hosts(1, link):
            return None
    except RuntimeError as error:
        return str(error)


@contextlib.contextmanager
def hosts(count: int, link: Link = UNLIMITED) -> Iterator[list[Host]]:
    """Makes hosts that reach each other, and nothing else.

    In the end all that runs in them is killed, and they are removed. Those that a killed process
    has left behind are removed before.

    Args:
        count: How many.
        link: The way of each to the switch.

    Raises:
        RuntimeError: The system refuses; the message has its words.
    """
    _remove_abandoned()
    names = [f"{_PREFIX}-{os.getpid()}-{index}" for index in range(count)]
    switch = f"{_PREFIX}-{os.getpid()}-switch"
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="unison-hosts-"))
        _add(switch, stack)
        _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge", "up")
        made = []
        for index, name in enumerate(names):
            address = f"10.0.0.{index + 1}"
            _add(name, stack)
            _connect(name, address, switch, f"port{index}")
            _shape(name, link)
            file = pathlib.Path(folder, name)
            file.write_text(f"127.0.0.1 localhost\n{address} {name}\n")
            enter = ("unshare", "--uts", "--ipc", "sh", "-c", _ENTER, name, str(file))
            made.append(Host(address, ("ip", "netns", "exec", name, *enter), INTERFACE))
        yield made


def _add(name: str, stack: contextlib.ExitStack) -> None:
    _run("ip", "netns", "add", name)
    stack.callback(_remove, name)
    _run("ip", "-n", name, "link", "set", "lo", "up")


def _connect(name: str, address: str, switch: str, port: str) -> None:
    other_end = ("peer", "name", port, "netns", switch)
    _run("ip", "-n", name, "link", "add", INTERFACE, "type", "veth", *other_end)
    _run("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
    _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", INTERFACE)
    _run("ip", "-n", name, "link", "set", INTERFACE, "up")


def _shape(name: str, link: Link) -> None:
    add = ("tc", "-n", name, "qdisc", "add", "dev", INTERFACE)
    place: tuple[str, ...] = ("root",)
    if link.delay:
        _run(*add, *place, "handle", "1:", "netem", "delay", f"{link.delay}ms", "limit", "100000")
        place = ("parent", "1:1")
    if link.megabits is not None:
        bytes_a_second = link.megabits * 1e6 / 8
        burst = max(_LEAST_BURST, int(bytes_a_second * _BURST_SECONDS))
        limit = int(bytes_a_second * _QUEUE_SECONDS)
        rate = ("rate", f"{link.megabits}mbit", "burst", f"{burst}b", "limit", f"{limit}b")
        _run(*add, *place, "handle", "2:", "tbf", *rate)


def _remove_abandoned() -> None:
    for line in _run("ip", "netns", "list").splitlines():
        name = line.split()[0]
        prefix, _, rest = name.partition("-")
        maker = rest.partition("-")[0]
        if prefix == _PREFIX and maker.isdecimal() and not pathlib.Path("/proc", maker).exists():
            _remove(name)


def _remove(name: str) -> None:
    for process in _run("ip", "netns", "pids", name).split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(process), signal.SIGKILL)
    _run("ip", "netns", "delete", name)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    if done.returncode:
        said = done.stderr.strip() or f"status {done.returncode}"
        raise RuntimeError(f"`{' '.join(command)}` failed: {said}")
    return done.stdout
