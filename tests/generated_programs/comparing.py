"""Runs a program twice, and says how what was seen differs."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np

from generated_programs.choices import Program
from generated_programs.drawing import LOSS_SCALES
from generated_programs.models import IMITATING, RANDOM
from generated_programs.running import Seen, in_double_precision, mirrored, run_alone, run_under

#: Relative and absolute. Replicas add the same numbers in another order than one device, so a sum
#: differs by a few units in the last place of float32 (1.2e-7), of bfloat16 (8e-3) or float16
#: (1e-3), and training for some steps multiplies that.
TOLERANCES = {
    "float32": (2e-4, 2e-5),
    "mixed_float16": (3e-2, 1e-2),
    "mixed_bfloat16": (6e-2, 3e-2),
}

#: What differs by more in float32 is round-off only if it vanishes with the round-off: in float64
#: the difference must be at most this. Weights and masks are float32 data there, too.
IN_DOUBLE_PRECISION = (1e-5, 1e-6)


#: What is off by more than this multiple of one device's largest round-off in 16 bits is wrong.
ROUND_OFFS = 3


@dataclasses.dataclass(frozen=True)
class Complaint:
    """What is wrong with a program.

    Attributes:
        kind: "different", "raised", or "invalid": it does not run on one device either.
        text: What differs, or the traceback.
    """

    kind: str
    text: str


def complaint_about(program: Program) -> Complaint | None:
    """Compares a program on several replicas with one device; None: no difference."""
    complaint = compare(
        program, lambda folder: run_under(program, mirrored(program.replicas), folder)
    )
    if complaint is None or not _may_overflow(program):
        return complaint
    # Gradients about as large as float16's largest number may overflow on one device alone, or on
    # the replicas alone (see docs/keras.md). Scaled by less, nothing does.
    small = dataclasses.replace(program.optimizer, loss_scale=LOSS_SCALES[0], growth=2000)
    return complaint_about(dataclasses.replace(program, optimizer=small))


def _may_overflow(program: Program) -> bool:
    """Whether gradients of float16 may overflow in some steps: others always do, or never."""
    scale, growth = program.optimizer.loss_scale, program.optimizer.growth
    return program.policy == "mixed_float16" and (growth == 1 or scale in (None, LOSS_SCALES[1]))


def compare(program: Program, run: Callable[[pathlib.Path], Seen]) -> Complaint | None:
    """Compares what `run` sees of a program with what is documented.

    Programs with random layers draw other masks on several replicas than on one device. They are
    compared with a second run on as many replicas, which draws the same.
    """
    try:
        expected = _expected(_as_reference(program), False)
    except Exception:
        return Complaint("invalid", traceback.format_exc())
    try:
        seen = in_folder(run)
    except Exception:
        return Complaint("raised", traceback.format_exc())
    text = difference(seen, expected, TOLERANCES[program.policy], program)
    if text is None:
        return None
    if program.policy == "float32":
        with in_double_precision():
            expected = _expected(_as_reference(program), True)
            seen = in_folder(run)
        in_double = difference(seen, expected, IN_DOUBLE_PRECISION, program)
        return None if in_double is None else Complaint("different", in_double)
    if program.policy in ("mixed_bfloat16", "mixed_float16") and not is_random(program):
        in_float32 = _as_reference(dataclasses.replace(program, policy="float32"))
        seen = _without_round_off(seen, expected, _expected(in_float32, False))
        text = difference(seen, expected, TOLERANCES[program.policy], program)
    return None if text is None else Complaint("different", text)


def in_folder(run: Callable[[pathlib.Path], Seen]) -> Seen:
    """Calls `run` with an empty folder."""
    with tempfile.TemporaryDirectory(prefix="unison-programs-") as folder:
        return run(pathlib.Path(folder))


def is_random(program: Program) -> bool:
    """Whether a program draws random numbers while it trains."""
    return program.has_layer(*RANDOM)


def _as_reference(program: Program) -> Program:
    """Returns the program of which the reference is that of `program`."""
    if is_random(program) or program.has_layer(*IMITATING):
        return program
    return dataclasses.replace(program, replicas=1)


@functools.lru_cache(maxsize=2)  # all numbers of replicas and workers are compared with it
def _expected(program: Program, is_double: bool) -> Seen:
    """Returns what is to be seen of a program; the precision is what is set."""
    return in_folder(lambda folder: reference(program, folder))


def reference(program: Program, folder: pathlib.Path) -> Seen:
    """Returns what is to be seen of a program."""
    if is_random(program):
        return run_under(program, mirrored(program.replicas), folder)
    return run_alone(program, folder)


def _without_round_off(seen: Seen, expected: Seen, in_float32: Seen) -> Seen:
    """Returns what was seen, with values as expected that float32 shows to be as good as those.

    A sum of many values of 16 bits may be off by several per cent, on one device as well: one on
    replicas that is not much farther from float32's is no worse. Both have the round-off of a
    different order of sums; of a few values, one's largest is easily twice the other's.
    """

    def is_as_good(name: str) -> bool:
        ours, theirs, exact = (
            np.asarray(each[name]).astype("float64") for each in (seen, expected, in_float32)
        )
        if not ours.shape == theirs.shape == exact.shape:
            return False
        relative, absolute = TOLERANCES["float32"]
        absolute += ROUND_OFFS * np.max(np.abs(theirs - exact), initial=0.0)
        return np.allclose(ours, exact, relative, absolute)

    as_good = {
        name for name in seen.keys() & expected.keys() & in_float32.keys() if is_as_good(name)
    }
    return {name: expected[name] if name in as_good else value for name, value in seen.items()}


def difference(
    seen: Seen, expected: Seen, tolerance: tuple[float, float], program: Program
) -> str | None:
    """Says where two runs differ first, and in how many values; None: nowhere."""
    if list(seen) != list(expected):
        return f"other values are seen: {sorted({*seen} ^ {*expected})}"
    relative, absolute = tolerance
    differing = []
    for name, value in expected.items():
        ours, theirs = np.asarray(seen[name]), np.asarray(value)
        if ours.shape != theirs.shape:
            differing.append(f"{name}: shape {ours.shape}, expected {theirs.shape}")
        elif np.issubdtype(theirs.dtype, np.integer):
            if not np.array_equal(ours, theirs):
                differing.append(f"{name}: {_shown(ours)}, expected {_shown(theirs)}")
        else:
            ours, theirs = ours.astype("float64"), theirs.astype("float64")
            if _is_undefined(name, theirs):
                continue
            if not np.allclose(ours, theirs, relative, absolute, equal_nan=True):
                worst = np.nanmax(np.abs(ours - theirs)) if ours.size else 0.0
                differing.append(
                    f"{name}: {_shown(ours)}, expected {_shown(theirs)} (largest difference "
                    f"{worst:.3g})"
                )
    if not differing:
        return None
    rest = f"\n  and {len(differing) - 4} further values" if len(differing) > 4 else ""
    return "\n  ".join(differing[:4]) + rest


def _is_undefined(name: str, score: np.ndarray) -> bool:
    """Returns whether a value is an R2 score of equal targets.

    It is a quotient by their variance: what round-off leaves of that, or Keras' 0 if nothing is.
    """
    return name.endswith("r2") and not score.any()


def _shown(array: Any) -> str:
    flat = np.asarray(array).ravel()
    shown = np.array2string(flat[:4], precision=7, separator=", ")
    return shown if flat.size <= 4 else f"{shown[:-1]}, ...]"
