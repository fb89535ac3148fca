"""The rates of devices and links: `hardware.toml`, with the source of each number."""

from __future__ import annotations

import difflib
import functools
import importlib.resources
import math
import re
import tomllib
from typing import Any, NamedTuple

import numpy as np


class Device(NamedTuple):
    """A device, which computes a replica.

    Attributes:
        name: As in `hardware.toml`.
        memory: Its bytes of memory.
        memory_rate: Bytes per second to and from it.
        flops: 16-bit floating-point operations per second, at most.
        flops_32: The same of 32-bit numbers, as XLA multiplies them by default.
        reached: Which part of these rates training steps reach.
        is_measured: Whether the rates are those of products and of copies alone, which a step does
            one after the other; else of whole steps, in which one hides the other.
        cache_rates: What a measured core reads and writes per second of so many bytes in use, of
            which its caches hold the more the fewer they are: pairs of bytes and rate, by bytes.
    """

    name: str
    memory: float
    memory_rate: float
    flops: float
    flops_32: float
    reached: float
    is_measured: bool = False
    cache_rates: tuple[tuple[float, float], ...] = ()
    kernel_seconds: float = 0.0

    def compute_seconds(
        self,
        flops: float,
        bytes_accessed: float,
        is_16_bit: bool = False,
        bytes_in_use: float = math.inf,
    ) -> float:
        """Returns the time of a step by the roofline: the longer of arithmetic and memory, or both.

        Source: Williams, Waterman, Patterson: Roofline, 2009 (doi:10.1145/1498765.1498785); the
        arithmetic at the rate that is reached.

        Args:
            flops: Floating-point operations.
            bytes_accessed: Bytes read and written.
            is_16_bit: Whether most products are of 16-bit numbers.
            bytes_in_use: The bytes that those are of, each counted once.
        """
        rate = (self.flops if is_16_bit else self.flops_32) * self.reached
        arithmetic, memory = flops / rate, bytes_accessed / self._rate_of(bytes_in_use)
        return arithmetic + memory if self.is_measured else max(arithmetic, memory)

    def _rate_of(self, bytes_in_use: float) -> float:
        """Returns the rate between those that were measured for fewer and for more bytes."""
        if not self.cache_rates:
            return self.memory_rate
        sizes, rates = zip(*self.cache_rates, strict=True)
        return float(np.interp(math.log(bytes_in_use), np.log(sizes), rates))


class Link(NamedTuple):
    """A link between devices of a machine, or between machines.

    Attributes:
        name: As in `hardware.toml`.
        rate: Bytes per second that one of them sends.
        latency: Seconds that a message takes.
    """

    name: str
    rate: float
    latency: float


class UnknownHardwareError(ValueError):
    """The device, link or cluster is unknown."""


def device_named(name: str) -> Device:
    """Returns the rates of a device; for a chip that is several devices, those of its part.

    Raises:
        UnknownHardwareError: The device is unknown.

    Examples:
        >>> device_named("v5e").flops
        197000000000000.0
    """
    stated = _stated("devices", name)
    parts = stated.get("parts", 1)
    return Device(
        name,
        stated["memory"] / parts,
        stated["memory_rate"] / parts,
        stated["flops"] / parts,
        stated["flops_32"] / parts,
        stated["reached"],
        kernel_seconds=stated["kernel_seconds"],
    )


#: The names in `hardware.toml` of devices by JAX's names of their kinds.
_KINDS = (
    (r"\b([PVAHB]\d00)\b", lambda found: found[1].lower()),
    (r"TPU v(\d)(?: lite|e)$", lambda found: f"v{found[1]}e"),
    (r"TPU v5p?$", lambda found: "v5p"),
    (r"TPU (v3|7x)$", lambda found: {"v3": "v3", "7x": "tpu7x"}[found[1]]),
)


def device_of_kind(kind: str) -> Device | None:
    """Returns the rates of a device by JAX's name of its kind; None if they are not known.

    Examples:
        >>> [device_of_kind(kind).name for kind in ("NVIDIA H100 80GB HBM3", "TPU v5 lite")]
        ['h100', 'v5e']
        >>> device_of_kind("cpu")
    """
    for pattern, name_of in _KINDS:
        found = re.search(pattern, kind)
        if found and name_of(found) in names("devices"):
            return device_named(name_of(found))
    return None


def link_named(name: str) -> Link:
    """Returns the rates of a link, for data.

    Raises:
        UnknownHardwareError: The link is unknown.
    """
    stated = _stated("links", name)
    return Link(name, stated["rate"] * stated["payload"], stated["latency"])


def links_between(generation: str) -> Link:
    """Returns the bandwidth of the links of a TPU's device, one way, all of them together."""
    stated, link = _stated("devices", generation), _stated("links", "ici")
    rate = stated["link_rate"] / 2 / stated["parts"] * link["payload"]
    return Link("ici", rate, link["latency"])


def machine_of(device: str) -> tuple[int, str, str]:
    """Returns the devices of a machine, their link and the machine's network, as most are built."""
    stated = _stated("devices", device)
    return stated["per_machine"], stated["inside"], stated["network"]


def compiler_facts(device: str) -> dict[str, Any]:
    """Returns what XLA's GPU compiler asks of a GPU: the table `compiler` of the device."""
    return _stated("devices", device)["compiler"]


def names(table: str, kind: str | None = None) -> list[str]:
    """Returns the names of the `"devices"` of a kind, or of the `"links"`."""
    return [
        name
        for name, stated in _tables()[table].items()
        if kind is None or stated.get("kind") == kind
    ]


def _stated(table: str, name: str) -> dict[str, Any]:
    known = _tables()[table]
    if name not in known:
        close = difflib.get_close_matches(str(name), known, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise UnknownHardwareError(
            f"Expected one of the {table} {', '.join(known)}. Received: {name!r}.{hint}"
        )
    return known[name]


@functools.cache
def _tables() -> dict[str, dict[str, dict[str, Any]]]:
    text = importlib.resources.files("unison.planning").joinpath("hardware.toml").read_text("utf-8")
    return tomllib.loads(text)
