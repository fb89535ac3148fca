"""Results as text and as JSON."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.contestants import PEERS
from benchmarks.driver import Result
from benchmarks.protocol import Round
from benchmarks.workloads import TrainingWork, Work, to_json

#: The contestant that the others are compared with.
OURS = "unison"

_MEBIBYTE = 2**20


def table(result: Result) -> str:
    """Returns medians and ranges, a row a contestant, and below them the ratios."""
    work = result.work
    count = max((len(rounds) for rounds in result.rounds.values()), default=0)
    header = ["", work.unit, "min", "max", "CPU", "RSS MiB", "peak", *_fact_names(result)]
    rows = [_row(name, rounds, result) for name, rounds in result.rounds.items() if rounds]
    lines = [f"{work.name}: {work.unit}, {count} rounds"]
    lines += _aligned([header, *rows]) if rows else []
    lines += [f"  {name}: no result" for name in result.failures]
    lines += [
        f"  unison is {_ratio_text(ratios)} x as fast as {name}"
        for name, ratios in speed_ratios(result).items()
    ]
    lines += _bests(result)
    return "\n".join(lines)


def by_link(results: Iterable[Result]) -> str:
    """Returns the milliseconds of a step over every link, a block a model and batch; "" if none."""
    blocks: dict[str, list[Result]] = {}
    for result in results:
        if isinstance(result.work, TrainingWork) and result.work.link and result.rounds:
            blocks.setdefault(f"{result.work.model}, batch {result.work.batch}", []).append(result)
    lines: list[str] = []
    for title, of_block in blocks.items():
        names = list(dict.fromkeys(name for result in of_block for name in result.rounds))
        rows = [
            [result.work.link, *(_milliseconds(result.rounds.get(name)) for name in names)]
            for result in of_block
        ]
        lines += [f"{title}: ms/step", *_aligned([["", *names], *rows])]
    return "\n".join(lines)


def _milliseconds(rounds: Sequence[Round] | None) -> str:
    return f"{1e3 / statistics.median(done.value for done in rounds):,.2f}" if rounds else ""


def speed_ratios(result: Result) -> dict[str, list[float]]:
    """Returns, for every other contestant, how many times as fast as it Unison was, by round."""
    names = [name for name in result.rounds if name != OURS]
    ratios = {name: _ratios(result, OURS, name) for name in names}
    return {name: found for name, found in ratios.items() if found}


def to_dictionary(results: Iterable[Result], machine: dict[str, Any]) -> dict[str, Any]:
    """Returns everything that was measured, for JSON."""
    return {"machine": machine, "workloads": [_workload(result) for result in results]}


def _workload(result: Result) -> dict[str, Any]:
    medians = {name: statistics.median(r) for name, r in speed_ratios(result).items()}
    work = result.work
    return {
        "name": work.name,
        "unit": work.unit,
        "higher_is_better": work.higher_is_better,
        "work": to_json(work),
        "rounds": {
            name: [dataclasses.asdict(done) for done in rounds]
            for name, rounds in result.rounds.items()
        },
        "versions": result.versions,
        # Their further lines are the contestant's errors, which name files of this machine.
        "failures": {name: why.partition("\n")[0] for name, why in result.failures.items()},
        "unison_times_as_fast_as": medians,
    }


def _bests(result: Result) -> list[str]:
    """Says how the fastest of several programs of ours does beside the fastest of the peers."""
    ours = [name for name in result.rounds if _family(name) == OURS]
    theirs = [name for name in result.rounds if _family(name) in PEERS]
    if len(ours) < 2 or not theirs:
        return []
    our, their = _fastest(result, ours), _fastest(result, theirs)
    ratios = _ratio_text(_ratios(result, our, their))
    return [f"  the fastest, {our}, is {ratios} x as fast as the fastest peer, {their}"]


def _fastest(result: Result, names: Iterable[str]) -> str:
    def median(name: str) -> float:
        return statistics.median(done.value for done in result.rounds[name])

    best = max if result.work.higher_is_better else min
    return best((name for name in names if result.rounds[name]), key=median)


def _ratios(result: Result, our: str, their: str) -> list[float]:
    ours, theirs = result.rounds.get(our), result.rounds.get(their)
    if not ours or not theirs:
        return []
    pairs = zip(ours, theirs, strict=True)
    return [_speed_ratio(result.work, one, other) for one, other in pairs]


def _speed_ratio(work: Work, our: Round, their: Round) -> float:
    return our.value / their.value if work.higher_is_better else their.value / our.value


def _row(name: str, rounds: Sequence[Round], result: Result) -> list[str]:
    values = [done.value for done in rounds]
    numbers = [statistics.median(values), min(values), max(values)]
    last = rounds[-1]
    return [
        name,
        *(f"{number:,.{0 if number >= 100 else 1}f}" for number in numbers),
        f"{statistics.median(done.cpu for done in rounds):.2f}",
        _mebibytes(last.rss),
        _mebibytes(last.peak_rss),
        *(_fact(fact, last.facts.get(fact)) for fact in _fact_names(result)),
    ]


def _fact_names(result: Result) -> list[str]:
    names = [name for rounds in result.rounds.values() for done in rounds for name in done.facts]
    return list(dict.fromkeys(names))


def _fact(name: str, value: float | None) -> str:
    if value is None:
        return ""
    return f"{value / _MEBIBYTE:.1f}" if name.endswith("_bytes") else f"{value:.3f}"


def _family(name: str) -> str:
    """Returns the family of a contestant of several programs: how its name begins."""
    return name.split()[0].split(".")[0]


def _mebibytes(value: int | None) -> str:
    return "" if value is None else f"{value / _MEBIBYTE:,.0f}"


def _ratio_text(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    names = [cell.replace("_bytes", " MiB") for cell in rows[0]]
    rows = [names, *rows[1:]]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join([first.ljust(widths[0]), *map(str.rjust, others, widths[1:])])
        for first, *others in rows
    ]
