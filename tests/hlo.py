"""What a replica program became: the text of the compiled programs."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import pytest


def compiled_programs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns a list to which every replica program that is executed from now on adds its HLO."""
    texts: list[str] = []
    jit = jax.jit

    def recording_jit(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        compiled = jit(function, **options)

        def execute(*args: Any) -> Any:
            texts.append(compiled.lower(*args).compile().as_text())
            return compiled(*args)

        return execute

    # `compile_replicas` looks its `jax.jit` up in the module, other code of JAX does not.
    monkeypatch.setattr("unison.program.compiling.jax.jit", recording_jit)
    return texts


def all_reduces(text: str) -> list[str]:
    """The types of what the all-reduces of a program return; several tensors show as a tuple."""
    return re.findall(r"= (\S+|\([^=]*\)) all-reduce(?:-start)?\(", text)


def count_all_reduces(text: str) -> int:
    return len(all_reduces(text))
