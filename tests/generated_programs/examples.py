"""The examples of a random program."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from generated_programs.choices import Output, Program
from generated_programs.models import CLASSES, FEATURES, STEPS, TOKENS

#: Weights of the classes.
CLASS_WEIGHTS = {0: 0.5, 1: 2.0, 2: 1.25}


@dataclasses.dataclass(frozen=True)
class Examples:
    """Inputs, targets and weights, in the structure of the model's; weights may be None."""

    x: Any
    y: Any
    weights: Any

    def parts(self) -> tuple[Any, ...]:
        return (self.x, self.y) if self.weights is None else (self.x, self.y, self.weights)

    def rows(self, rows: slice) -> Examples:
        return Examples(*(_rows(part, rows) for part in (self.x, self.y, self.weights)))


def make_examples(program: Program, number: int | None = None, salt: int = 0) -> Examples:
    """Draws the examples of a program.

    Args:
        program: The program.
        number: How many; None: as many as the program has.
        salt: Another one gives other examples.
    """
    rng = np.random.default_rng([program.seed, salt])
    n = program.examples if number is None else number
    inputs = {f"in_{i}": _input(each.kind, n, rng) for i, each in enumerate(program.inputs)}
    targets = {f"out_{i}": _target(output, n, rng) for i, output in enumerate(program.outputs)}
    drawn = {f"out_{i}": _weights(output, n, rng) for i, output in enumerate(program.outputs)}
    weighted = any(weight is not None for weight in drawn.values())
    weights = {
        f"out_{i}": np.ones(_shape_of_weights(output, n), "float32")
        if (weight := drawn[f"out_{i}"]) is None
        else weight
        for i, output in enumerate(program.outputs)
    }
    if not program.named:
        return Examples(
            _unwrapped(inputs), _unwrapped(targets), _unwrapped(weights) if weighted else None
        )
    return Examples(inputs, targets, weights if weighted else None)


def _unwrapped(named: dict[str, Any]) -> Any:
    values = tuple(named.values())
    return values if len(values) > 1 else values[0]


def _rows(tree: Any, rows: slice) -> Any:
    if isinstance(tree, dict):
        return {name: part[rows] for name, part in tree.items()}
    if isinstance(tree, tuple):
        return tuple(part[rows] for part in tree)
    return None if tree is None else tree[rows]


def _input(kind: str, n: int, rng: np.random.Generator) -> np.ndarray:
    if kind == "tokens":
        return _padded(rng.integers(1, TOKENS, (n, STEPS)), rng).astype("int32")
    values = rng.normal(size=(n, *FEATURES[kind])).astype("float32")
    return _padded(values, rng) if kind == "steps" else values


def _padded(sequences: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Ends sequences with zeros: masks leave at least the first step."""
    lengths = rng.integers(1, STEPS + 1, len(sequences))
    is_kept = np.arange(STEPS) < lengths[:, None]
    return sequences * is_kept.reshape(is_kept.shape + (1,) * (sequences.ndim - 2))


def _target(output: Output, n: int, rng: np.random.Generator) -> np.ndarray:
    if output.kind == "binary":
        return rng.integers(0, 2, (n, 1)).astype("float32")
    if output.kind == "classes":
        return rng.integers(0, CLASSES, n).astype("int32")
    if output.kind == "one_hot":
        return np.eye(CLASSES, dtype="float32")[rng.integers(0, CLASSES, n)]
    return rng.normal(size=(n, STEPS, 1) if output.kind == "steps" else (n, 1)).astype("float32")


def _weights(output: Output, n: int, rng: np.random.Generator) -> np.ndarray | None:
    if output.weights is None:
        return None
    weights = rng.uniform(0.3, 2.0, _shape_of_weights(output, n))
    if output.weights == "zeros":
        weights[rng.random(n) < 0.5] = 0
    return weights.astype("float32")


def _shape_of_weights(output: Output, n: int) -> tuple[int, ...]:
    return (n, STEPS) if output.kind == "steps" else (n,)


def batches_of(program: Program, examples: Examples) -> Iterator[Examples]:
    """Yields the batches of an epoch, in order."""
    begin = 0
    for size in program.batches():
        yield examples.rows(slice(begin, begin + size))
        begin += size
