"""What a fact is, and how a program states one."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

#: The answers are equal if they differ by no more than this, relatively: XLA and TensorFlow sum in
#: different orders and approximate `exp`, `log` and `tanh` differently, in 24 bits of precision.
ROUND_OFF = 2e-5


@dataclasses.dataclass(frozen=True)
class Fact:
    """A program that gives the same answer under TensorFlow and under Unison.

    Attributes:
        topic: The file that it is in.
        program: Called with what its parameters name: `tf`, the strategies `one`, `two` and `four`
            (by number of replicas), and `folder`, an empty directory.
        tolerance: How much numbers may differ, relatively.
        ours: What Unison answers instead, where it differs on purpose (else `SAME`).
        because: Why it differs, or why `tolerance` is not `ROUND_OFF`.
        alone: TensorFlow runs it in a process of its own: its collectives do not work again in a
            process where one of them failed.
    """

    topic: str
    name: str
    program: Callable[..., Any]
    tolerance: float
    ours: Any
    because: str
    alone: bool

    @property
    def sentence(self) -> str:
        return self.name.replace("_", " ")

    @property
    def differs(self) -> bool:
        return self.ours is not SAME

    @property
    def process(self) -> str:
        """Which process it runs in under TensorFlow, where a group of devices has one size."""
        if self.alone:
            return f"{self.topic}::{self.name}"
        uses = inspect.signature(self.program).parameters
        return "four replicas" if "four" in uses and "two" not in uses else "others"


SAME = object()
_facts: dict[str, list[Fact]] = {}


def fact(
    program: Callable[..., Any] | None = None,
    *,
    name: str = "",
    tolerance: float = ROUND_OFF,
    ours: Any = SAME,
    because: str = "",
    alone: bool = False,
) -> Any:
    """Makes a program a fact; its name is the sentence that it states."""
    if program is None:
        return lambda program: fact(
            program, name=name, tolerance=tolerance, ours=ours, because=because, alone=alone
        )
    if (ours is not SAME or tolerance != ROUND_OFF) and not because:
        raise ValueError(f"say why {program.__name__} differs, or why it is compared loosely")
    topic = program.__module__.rpartition(".")[2]
    stated = Fact(topic, name or program.__name__, program, tolerance, ours, because, alone)
    of_topic = _facts.setdefault(topic, [])
    if any(other.name == stated.name for other in of_topic):
        raise ValueError(f"two facts of {topic} are called {stated.name}")
    of_topic.append(stated)
    return program


def attempt(action: Callable[[], Any]) -> Any:
    """Returns what `action` returns, or what it raises as part of the answer."""
    try:
        return action()
    except Exception as error:
        return Raised(error)


@dataclasses.dataclass(frozen=True)
class Raised:
    """An error as an answer; two of one family are equal, whatever they say."""

    error: Exception


def raises(family: str) -> dict[str, str]:
    """The answer of a program that raises; for `ours`."""
    return {"raises": family}


def topics() -> list[str]:
    """The topics, by name."""
    from parity import programs

    return sorted(module.name for module in pkgutil.iter_modules(programs.__path__))


def facts(*only: str) -> Iterator[Fact]:
    """All facts, topic by topic; only those of some topics, if any are named."""
    for topic in only or topics():
        importlib.import_module(f"parity.programs.{topic}")
        yield from _facts[topic]
