"""What a replica program became: the text of the compiled programs."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import pytest

from unison.runtime.shared_memory.library import Kind


def compiled_programs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns a list to which every replica program that is executed from now on adds its HLO."""
    texts: list[str] = []
    jit = jax.jit

    def recording_jit(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        compiled = jit(function, **options)

        def execute(*args: Any) -> Any:
            texts.append(in_xlas_words(compiled.lower(*args).compile().as_text()))
            return compiled(*args)

        execute.lower = compiled.lower
        return execute

    # `compile_replicas` looks its `jax.jit` up in the module, other code of JAX does not.
    monkeypatch.setattr("unison.program.compiling.jax.jit", recording_jit)
    return texts


_EXCHANGE = re.compile(
    r"= \(u32\[1,5\]\{1,0\}(?:, (.*))?\) custom-call"
    r"(\(.*\), custom_call_target=\"unison_exchange_in_process\".*\bkind = (\d+) : i64.*)"
)
_WORDS = {
    Kind.SUM: "all-reduce",
    Kind.MAX: "all-reduce",
    Kind.MIN: "all-reduce",
    Kind.GATHER: "all-gather",
    Kind.SUM_AND_SCATTER: "reduce-scatter",
    Kind.PERMUTE: "collective-permute",
    Kind.ALL_TO_ALL: "all-to-all",
}


def in_xlas_words(text: str) -> str:
    """Returns a program's text with XLA's names of what its replicas exchange between buffers."""

    def named(found: re.Match[str]) -> str:
        types, rest, kind = found.groups()
        if int(kind) not in _WORDS:
            return found.group()
        is_one = types.count("[") == 1
        return f"= {types if is_one else f'({types})'} {_WORDS[Kind(int(kind))]}{rest}"

    return _EXCHANGE.sub(named, re.sub(r"/\*index=\d+\*/", "", text))


def all_reduces(text: str) -> list[str]:
    """The types of what the all-reduces of a program return; several tensors show as a tuple."""
    return re.findall(r"= (\S+|\([^=]*\)) all-reduce(?:-start)?\(", text)


def count_all_reduces(text: str) -> int:
    return len(all_reduces(text))
