"""Facts about the surface: expressions, and what TensorFlow answers.

`surface_facts.txt` holds them as plain data, so that the tests need no TensorFlow. To record its
answers anew, run this file in an environment that has it: `python surface_facts.py tensorflow`.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

FACTS = Path(__file__).with_suffix(".txt")
ARROW = "    = "


def facts() -> Iterator[tuple[str, Any]]:
    """Every expression with the answer that was recorded."""
    return recorded(FACTS)


def recorded(path: Path) -> Iterator[tuple[str, Any]]:
    """Every expression of a file with the answer below it."""
    lines = [line for line in path.read_text("utf-8").splitlines() if not line.startswith("#")]
    lines = [line for line in lines if line]
    for expression, answer in zip(lines[::2], lines[1::2], strict=True):
        assert answer.startswith(ARROW), expression
        yield expression, eval(answer.removeprefix(ARROW), {"inf": math.inf, "nan": math.nan})


def answer_of(expression: str, tf: Any) -> Any:
    """What `expression` gives: plain Python values, or the name of the error raised."""
    try:
        return plain(eval(expression, {"tf": tf, "np": np}))
    except Exception as error:
        return {"raises": type(error).__name__}


def plain(value: Any) -> Any:
    """Tensors become `(dtype, nested list)`, shapes and dtypes their names."""
    if isinstance(value, str | bytes | bool | int | float | complex | None):
        return value
    if isinstance(value, np.generic):
        return (np.dtype(type(value)).name, value.item())
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if type(value).__name__ == "TensorShape":
        return None if value.rank is None else value.as_list()
    if type(value).__name__ == "DType" or isinstance(value, np.dtype):
        return f"DType({value.name})"
    if hasattr(value, "numpy") or isinstance(value, np.ndarray):
        array = np.asarray(value.numpy() if hasattr(value, "numpy") else value)
        kind = "string" if array.dtype.kind in "OSU" else array.dtype.name
        if array.dtype.name == "bfloat16":
            array = array.astype(np.float32)
        return (kind, array.tolist())
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return type(value).__name__


def agree(one: Any, two: Any) -> bool:
    """Whether two answers are the same, numbers up to round-off."""
    if isinstance(one, list | tuple) and isinstance(two, list | tuple):
        return len(one) == len(two) and all(map(agree, one, two))
    if isinstance(one, dict) and isinstance(two, dict):
        return one.keys() == two.keys() and all(agree(one[key], two[key]) for key in one)
    if isinstance(one, float) and isinstance(two, float):
        return math.isclose(one, two, rel_tol=2e-5, abs_tol=1e-6) or (one != one and two != two)
    return one == two and type(one) is type(two)


def record(module: str) -> None:
    """Writes the answers of `module` into the file of facts."""
    tf = importlib.import_module(module)
    lines = []
    for line in FACTS.read_text("utf-8").splitlines():
        if line.startswith(ARROW):
            continue
        lines.append(line)
        if line and not line.startswith("#"):
            lines.append(f"{ARROW}{answer_of(line, tf)!r}")
    FACTS.write_text("\n".join(lines) + "\n", "utf-8")


if __name__ == "__main__":
    record(sys.argv[1])
