"""What was measured, as a page: `python -m benchmarks.results FOLDER` writes RESULTS.md.

It reads what `python -m benchmarks WHAT --json FOLDER/WHAT.json` has written, one file a contest.
The page lies beside the folder; into it comes a plot for each contest: how many times as fast as
the peers Unison was. The file that `python -m benchmarks.gpu` writes may be there, too.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.gpu import page as gpu_page
from benchmarks.gpu.record import Record
from benchmarks.tables import OURS

_BEGINNING = """# Results

Written by `make bench`; do not edit. Every table is of one run in which the contestants took turns:
medians of the rounds, the range in brackets, and how many times as fast as the contestant Unison
was (the median of the rounds' ratios). Figures of different tables may be of different hours.
"""

_NEUTRAL = "#8a8f98"
_FASTER, _SLOWER = "#2f7d5b", "#b4552d"


@dataclasses.dataclass(frozen=True)
class Measured:
    """A workload as it was measured.

    Attributes:
        name: Its name.
        unit: In what its values are.
        higher_is_better: Whether larger values are.
        values: For every contestant, the values of its rounds.
        failures: For every contestant that did not finish, why.
    """

    name: str
    unit: str
    higher_is_better: bool
    values: dict[str, list[float]]
    failures: dict[str, str]

    @classmethod
    def of(cls, written: Mapping[str, Any]) -> Measured:
        """Reads what `tables.to_dictionary` has made of a workload."""
        values = {
            name: [done["value"] for done in rounds] for name, rounds in written["rounds"].items()
        }
        about = (written[field] for field in ("name", "unit", "higher_is_better"))
        return cls(*about, values, written["failures"])

    def ratios(self, name: str) -> list[float]:
        """Returns how many times as fast as a contestant Unison was, by round; [] if unknown."""
        if name == OURS or OURS not in self.values:
            return []
        pairs = zip(self.values[OURS], self.values[name], strict=False)
        if self.higher_is_better:
            return [our / their for our, their in pairs]
        return [their / our for our, their in pairs]


def section(title: str, written: Mapping[str, Any], plot: pathlib.Path | None) -> str:
    """Returns the Markdown of a contest.

    Args:
        title: Its name.
        written: What `--json` wrote of it.
        plot: The file of its plot, in a folder beside the page.
    """
    lines = [f"## {title}", "", _about(written), ""]
    if plot is not None:
        source = f"{plot.resolve().parent.name}/{plot.name}"
        lines += [f"![How many times as fast Unison is]({source})", ""]
    for each in map(Measured.of, written["workloads"]):
        lines += [f"**{each.name}**, {each.unit}", ""]
        lines += [
            "| | median | range | Unison is so many times as fast |",
            "| --- | --- | --- | --- |",
        ]
        for name, values in each.values.items():
            if not values:
                continue
            ratios = each.ratios(name)
            span = f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else ""
            times = f"{statistics.median(ratios):.2f} ({span})" if ratios else ""
            between = f"{_number(min(values))} to {_number(max(values))}"
            lines.append(f"| {name} | {_number(statistics.median(values))} | {between} | {times} |")
        lines += [f"| {name} | no result | | |" for name in each.failures]
        lines.append("")
    return "\n".join(lines)


def draw(written: Mapping[str, Any], path: pathlib.Path) -> bool:
    """Draws how many times as fast as the peers Unison was; returns whether there was anything."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullLocator

    bars = [
        (f"{each.name}\nbeside {name}", each.ratios(name))
        for each in map(Measured.of, written["workloads"])
        for name in each.values
        if each.ratios(name) and name.split()[0] != OURS
    ]
    if not bars:
        return False
    medians = [statistics.median(ratios) for _, ratios in bars]
    figure = Figure(figsize=(8, 0.8 + 0.45 * len(bars)), layout="constrained")
    axes = figure.subplots()
    places = range(len(bars))
    colours = [_FASTER if median >= 1 else _SLOWER for median in medians]
    axes.set_xscale("log")  # half as fast is as far from equal as twice as fast
    axes.barh(places, [m - 1 for m in medians], left=1, color=colours, height=0.6)
    axes.hlines(places, *zip(*((min(r), max(r)) for _, r in bars), strict=True), color=_NEUTRAL)
    axes.axvline(1, color=_NEUTRAL, linewidth=1)
    axes.set_yticks(places, [name for name, _ in bars])
    axes.invert_yaxis()
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter("{x:g}")
    axes.margins(x=0.15)
    figure.supxlabel("times as fast (bar: median of the rounds, line: their range)", fontsize=9)
    for place, median, (_, ratios) in zip(places, medians, bars, strict=True):
        end = max(1, *ratios)
        axes.annotate(
            f"{median:.2f}", (end, place), (4, 0), textcoords="offset points", va="center"
        )
    axes.spines[["top", "right"]].set_visible(False)
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None})  # the same file of the same numbers
    return True


def _about(written: Mapping[str, Any]) -> str:
    machine = written["machine"]
    versions: dict[str, str] = {}
    for workload in written["workloads"]:
        for of_contestant in workload["versions"].values():
            versions |= of_contestant
    libraries = ", ".join(f"{name} {versions[name]}" for name in sorted(versions))
    on_gpus = any(each["work"].get("device") == "gpu" for each in written["workloads"])
    gpus = f"{machine['gpus']}; " if on_gpus else ""
    return (
        f"{gpus}{machine['cpu']}, {machine['cores']} cores, {machine['system']}, Python "
        f"{machine['python']}; {machine['day']}; {libraries}."
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def write(folder: pathlib.Path) -> list[pathlib.Path]:
    """Writes the page of all contests in a folder beside it; returns it, and the plots.

    Raises:
        FileNotFoundError: There is no contest.
    """
    files = sorted(folder.glob("*.json"))
    if not files:
        raise FileNotFoundError(
            f"Expected files like {folder / 'fit.json'}, as --json writes them. Received: none."
        )
    sections, plots = [], []
    for file in files:
        written = json.loads(file.read_text())
        if "checks" in written:
            sections.append(gpu_page.markdown(Record.from_json(written)))
            continue
        plot = file.with_suffix(".svg")
        is_drawn = draw(written, plot)
        sections.append(section(file.stem, written, plot if is_drawn else None))
        plots += [plot] if is_drawn else []
    page = folder.resolve().parent / "RESULTS.md"
    page.write_text("\n".join([_BEGINNING, *sections]))
    return [page, *plots]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.results", description=__doc__)
    parser.add_argument("folder", type=pathlib.Path, help="where the contests' JSON files are")
    try:
        print(*write(parser.parse_args(arguments).folder), sep="\n")
    except FileNotFoundError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
