"""The record as a page of HTML, and as a part of `benchmarks/RESULTS.md`."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.gpu.findings import Row, Value
from benchmarks.gpu.record import Outcome, Record
from unison.report import heading, page, paragraph, table

_TITLE = "Checks on {}"


def html(record: Record) -> str:
    """Returns a page that needs no other file."""
    parts = [paragraph(about(record)), table(*_overview(record))]
    wrong = [text for outcome in record.outcomes for text in outcome.wrong]
    if wrong:
        parts += [heading("What is wrong"), *map(paragraph, wrong)]
    for outcome in record.outcomes:
        if not outcome.findings:
            continue
        parts.append(heading(outcome.title))
        for title, rows in outcome.tables().items():
            parts += [paragraph(title), table(*cells_of(rows))]
        parts += map(paragraph, outcome.notes)
    return page(_title(record), parts)


def markdown(record: Record) -> str:
    """Returns the same as a section of Markdown."""
    lines = [f"## {_title(record)}", "", about(record), "", *_lines(*_overview(record)), ""]
    for outcome in record.outcomes:
        for text in outcome.wrong:
            lines += [f"- **Wrong** ({outcome.title}): {_one_line(text)}"]
    for outcome in record.outcomes:
        for title, rows in outcome.tables().items():
            lines += ["", f"**{title}**", "", *_lines(*cells_of(rows))]
        lines += ["", *(f"{_one_line(note)}\n" for note in outcome.notes)]
    return "\n".join(lines).rstrip() + "\n"


def about(record: Record) -> str:
    """Returns the machine and what became of the run, in words."""
    machine = record.machine
    gpus = f"{machine['gpus']}; " if machine["gpus"] and record.device == "gpu" else ""
    whole = "" if record.is_complete else " The run did not come to its end."
    return (
        f"{gpus}{machine['cpu']}, {machine['cores']} cores, {machine['system']}, Python "
        f"{machine['python']}; {machine['day']}.{whole}"
    )


def cells_of(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Returns the header and the cells of a table; rows may lack columns of others."""
    names = list(dict.fromkeys(name for row in rows for name in row.cells))
    return names, [[shown(row.cells.get(name)) for name in names] for row in rows]


def shown(value: Value) -> str:
    """Returns a value as a cell.

    >>> [shown(value) for value in (None, True, 3, 1234567.8, 0.000012345, "text")]
    ['', 'yes', '3', '1,234,568', '1.23e-05', 'text']
    """
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if 100 <= abs(value) < 1e8 else f"{value:.3g}"
    return str(value)


def _title(record: Record) -> str:
    return _TITLE.format("GPUs" if record.device == "gpu" else "logical CPU devices")


def _overview(record: Record) -> tuple[list[str], list[list[str]]]:
    def row(outcome: Outcome) -> list[str]:
        reason = _one_line(outcome.reason)[:200]
        return [outcome.title, outcome.state, f"{outcome.seconds:.0f}", reason]

    return ["check", "result", "s", "why"], list(map(row, record.outcomes))


def _lines(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"

    return [line(header), line(["---"] * len(header)), *map(line, rows)]


def _one_line(text: str) -> str:
    return " ".join(text.split())
