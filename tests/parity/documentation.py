"""Writes the pages about what was compared.

`docs/parity.md` says how many facts there are, and each that differs, with the reason;
`docs/whole-programs.md` lists the programs, and how each is compared.
"""

from __future__ import annotations

import json
import pathlib
import statistics
from typing import Any

from parity.facts import facts, topics
from parity.recorded_answers import RECORDED, recorded
from parity.recorded_programs import versions
from parity.whole_programs import GROWN_ROUND_OFF, Program, load, names

_DOCS = pathlib.Path(__file__).parents[2] / "docs"
PAGE = _DOCS / "parity.md"
PAGE_OF_PROGRAMS = _DOCS / "whole-programs.md"
_LONGEST = 60

#: What `python -m benchmarks.whole_programs` has measured.
SPEEDS = _DOCS.parent / "benchmarks" / "whole_programs.json"

_HEAD = """\
# Parity with TensorFlow

The same short programs run under TensorFlow and under `unison.tf`, and their results are compared:
values, dtypes, shapes, numbers of traces, and the families of errors. `tests/parity/programs` holds
the programs, one file per topic; `tests/parity/recorded` holds the results of TensorFlow {version}
with Keras {keras} as plain JSON, so that the comparison needs no TensorFlow. If TensorFlow is
installed,

```bash
cd tests && python -m parity record --tf-python PATH
```

records its results again.

Whole numbers, text, dtypes, shapes and errors must be equal. Numbers with a fraction may differ by
2e-5 of their size, because XLA and TensorFlow sum in different orders; facts that compare more
loosely say why. Errors are compared by the family of their class, so that a `ValueError` and a
`TypeError` are equal: TensorFlow raises the one or the other depending on how deep inside it a
value is checked.

{counts}

## Where the answers differ

Each difference is a fact too: the tests require Unison to give the result on the right.

{differences}
"""


_PROGRAMS = """\
# Whole programs

{count} programs in the manner of Keras' examples and of TensorFlow's tutorials and guides train
under `MirroredStrategy` on two replicas, and give the numbers that TensorFlow {version} with Keras
{keras} gives on one device. They are in `tests/programs`, one file each, in our own words, with
tiny data; under TensorFlow they are the same files, with `tensorflow` where they import
`unison.tf`. Each trains by `fit`, by a step of its own or by its own loop, from weights and data
that NumPy draws, and returns losses, metrics, weights or predictions. Numbers may differ by
{tolerance:g} of their size, or by the tolerance in the table: round-off grows over the steps of a
training. Where numbers are drawn by chance in the program, properties are compared: that the loss
falls, what shapes have.

```bash
cd tests && python -m parity record-programs --tf-python PATH
```

records TensorFlow's numbers again (`tests/parity/recorded/whole_programs.json`), and
`tests/single/test_whole_programs.py` compares.

{programs}

## Speed

An epoch on one CPU device, the median of {epochs} or more of a training, and the whole training,
with imports done and everything else to do: tracing, compiling, {epochs} epochs, what is evaluated
and drawn. The data are tiny, so an epoch is mostly what a framework does around a step; a whole
training is often mostly compilation, of which XLA does more. {machine}; the contestants took turns.

```bash
python -m benchmarks.whole_programs --tf-python PATH --json benchmarks/whole_programs.json
```

{speeds}

Slower are:

{slower}
"""

#: The reason for which an epoch of a program takes longer than under TensorFlow.
SLOWER = {
    "deep_dream": "a function that loops over a tensor outside of a strategy runs step by step in "
    "Python, so that its effects on Python's objects happen, and a warning says so; with "
    "`tf.function(autograph=True)`, one program, an epoch takes 1.2 ms",
    "gated_residual_network": "the function of `map` parses and reshapes each of 16 lines by "
    "operations that are called one by one, 2 ms a line; TensorFlow compiles it",
}


def write_pages() -> None:
    """Writes both pages."""
    PAGE.write_text(page())
    PAGE_OF_PROGRAMS.write_text(page_of_programs())


def page_of_programs() -> str:
    """The text of `docs/whole-programs.md`."""
    programs = sorted(map(load, names()), key=lambda program: (program.task, program.name))
    rows = [[each.task, f"`{each.name}`", each.title, _comparison(each)] for each in programs]
    return _PROGRAMS.format(
        count=len(programs),
        version=versions()["tensorflow"],
        keras=versions()["keras"],
        tolerance=GROWN_ROUND_OFF,
        programs=_table(["task", "program", "what it does", "compared"], rows),
        **_speeds(),
    )


def speed_ratios() -> dict[str, float]:
    """How many times as fast as under TensorFlow an epoch of each program was."""
    return {
        name: statistics.median(
            their["epoch"][0] / our["epoch"][0]
            for our, their in zip(found["unison"], found["tensorflow"], strict=True)
        )
        for name, found in _measured()["programs"].items()
    }


def _speeds() -> dict[str, Any]:
    """What the page says of speeds."""
    measured, ratios = _measured(), speed_ratios()

    def median(name: str, contestant: str, part: str) -> float:
        return statistics.median(each[part][0] for each in measured["programs"][name][contestant])

    head = ["program", "ms an epoch", "TensorFlow", "times as fast", "whole, s", "TensorFlow"]
    rows = [
        [
            f"`{name}`",
            f"{1e3 * median(name, 'unison', 'epoch'):.1f}",
            f"{1e3 * median(name, 'tensorflow', 'epoch'):.1f}",
            f"{ratio:.2g}",
            f"{median(name, 'unison', 'whole'):.1f}",
            f"{median(name, 'tensorflow', 'whole'):.1f}",
        ]
        for name, ratio in sorted(ratios.items(), key=lambda item: (-item[1], item[0]))
    ]
    machine = measured["machine"]
    return {
        "epochs": measured["more"],
        "machine": f"{machine['cores']} cores of an {machine['cpu']}, {machine['day']}",
        "speeds": _table(head, rows),
        "slower": "\n".join(f"- `{name}`: {reason}" for name, reason in sorted(SLOWER.items())),
    }


def _measured() -> dict[str, Any]:
    return json.loads(SPEEDS.read_text())


def _comparison(program: Program) -> str:
    if program.chance:
        return f"by properties: {program.chance}"
    how = [
        "with one device" if program.replicas == 1 else "with two replicas of TensorFlow",
        f"to {program.tolerance:g}" * (program.tolerance != GROWN_ROUND_OFF),
    ]
    said = ", ".join(filter(None, how))
    return f"{said}: {program.because}" if program.because else said


def page() -> str:
    """The text of `docs/parity.md`."""
    stated = list(facts())
    counted = [
        [f"`{topic}`", str(sum(fact.topic == topic for fact in stated))] for topic in topics()
    ]
    theirs = recorded()
    differing = [
        [
            f"{fact.sentence} (`{fact.topic}`)",
            _short(theirs[fact.topic][fact.name]),
            _short(fact.ours),
            fact.because,
        ]
        for fact in stated
        if fact.differs
    ]
    versions = json.loads((RECORDED / f"{topics()[0]}.json").read_text())["versions"]
    return _HEAD.format(
        version=versions["tensorflow"],
        keras=versions["keras"],
        counts=_table(["topic", "facts"], [*counted, ["all", str(len(stated))]]),
        differences=_table(["program", "TensorFlow", "Unison", "why"], differing),
    )


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _short(answer: Any) -> str:
    """An answer as a table's cell."""
    text = _said(answer)
    return f"`{text}`" if len(text) <= _LONGEST else "numbers of its own"


def _said(answer: Any) -> str:
    if isinstance(answer, list):
        return f"[{', '.join(map(_said, answer))}]"
    if not isinstance(answer, dict):
        return json.dumps(answer)
    if answer.keys() == {"raises"}:
        return answer["raises"]
    if answer.keys() == {"dtype", "shape", "values"}:
        return f"{answer['dtype']} {answer['values']}"
    return f"{{{', '.join(f'{key}: {_said(item)}' for key, item in answer.items())}}}"
