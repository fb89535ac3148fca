"""The plots of the results, on a page or in a PNG file."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from unison.benching import scaling, showing
from unison.benching.results import Results
from unison.benching.scaling import Line, Summary
from unison.report import Axis, Series, bar_plot, heading, line_plot, page, paragraph, table


@dataclasses.dataclass(frozen=True)
class Lines:
    """A plot of lines; see `report.line_plot`."""

    title: str
    x: Axis
    y: Axis
    series: Sequence[Series]

    def as_svg(self) -> str:
        return line_plot(self.title, self.x, self.y, self.series)

    def draw(self, axes: Any) -> None:
        """Draws it into an `Axes` of matplotlib."""
        for line in self.series:
            style = {"linestyle": "--", "color": "0.6"} if line.is_dashed else {"marker": "o"}
            errors = [
                [value - low for value, (low, _) in zip(line.y, line.spread, strict=False)],
                [high - value for value, (_, high) in zip(line.y, line.spread, strict=False)],
            ]
            bars = errors if line.spread else None
            axes.errorbar(line.x, line.y, yerr=bars, label=line.name, capsize=3, **style)
        ticks = sorted({value for line in self.series for value in line.x})
        if self.x.is_log:
            axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [self.x.number(value) for value in ticks])
        axes.minorticks_off()
        axes.set_xlabel(self.x.label)
        _finish(axes, self.title, self.y)


@dataclasses.dataclass(frozen=True)
class Bars:
    """A plot of bars; see `report.bar_plot`."""

    title: str
    y: Axis
    bars: Sequence[str]
    parts: Mapping[str, Sequence[float]]
    label: str

    def as_svg(self) -> str:
        return bar_plot(self.title, self.y, self.bars, self.parts, self.label)

    def draw(self, axes: Any) -> None:
        """Draws it into an `Axes` of matplotlib."""
        ground = [0.0] * len(self.bars)
        for name, sizes in self.parts.items():
            axes.bar(self.bars, sizes, bottom=ground, label=name, width=0.6)
            ground = [low + size for low, size in zip(ground, sizes, strict=True)]
        axes.set_xlabel(self.label)
        _finish(axes, self.title, self.y)


def _finish(axes: Any, title: str, y: Axis) -> None:
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold")
    axes.set_ylabel(y.label)
    axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
    axes.yaxis.set_major_formatter(lambda value, place: y.number(value))
    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize=8, frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=3)


def plots(summaries: Sequence[Summary]) -> list[Lines | Bars]:
    """Returns the plots that the points have something for."""
    strong, weak = scaling.strong(summaries), scaling.weak(summaries)
    unit = summaries[0].unit
    of_replicas = Axis("replicas", is_log=True)
    rate = Axis(f"{unit} a second")
    found: list[Lines | Bars] = []
    if strong or weak:
        found += [
            Lines(f"Strong scaling: {unit} a second", of_replicas, rate, _rates(strong)),
            Lines(f"Weak scaling: {unit} a second", of_replicas, rate, _rates(weak)),
            Lines(
                "Efficiency",
                of_replicas,
                Axis("of the first point's", number=_as_percent),
                _efficiencies("strong", strong) + _efficiencies("weak", weak),
            ),
        ]
    of_batch = Axis("global batch", is_log=True)
    of_data = Axis("examples in the data", is_log=True)
    found += [
        Lines("Batch size", of_batch, rate, _grown(scaling.by_batch(summaries), _batch)),
        Lines("Data size", of_data, rate, _grown(scaling.by_examples(summaries), _examples)),
    ]
    names, label = showing.short_names([summary.point for summary in summaries])
    found += [
        Bars(
            "Where a step's time goes",
            Axis("of a step", number=_as_percent),
            names,
            _parts_of_time(summaries),
            label,
        ),
        _times(summaries, names, label),
        Bars(
            "Peak memory of a worker",
            Axis("MiB"),
            names,
            _memory(summaries),
            label,
        ),
    ]
    return [plot for plot in found if isinstance(plot, Bars) or plot.series]


def html(results: Results) -> str:
    """Returns a page that needs no other file."""
    summaries = showing.summaries_of(results)
    drawn = [plot.as_svg() for plot in plots(summaries)]
    return page(
        f"unison bench: {results.target}",
        [
            paragraph(showing.about(results)),
            *map(paragraph, results.notes),
            *drawn,
            heading("Numbers"),
            table(*showing.numbers(summaries)),
            heading("What they mean"),
            *map(paragraph, showing.MEANINGS),
        ],
    )


def write_png(results: Results, path: Path) -> None:
    """Draws the plots into a file.

    Raises:
        ImportError: Matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("The picture needs matplotlib: pip install 'unison[bench]'.") from error
    drawn = plots(showing.summaries_of(results))
    columns = 2 if len(drawn) > 1 else 1
    rows = math.ceil(len(drawn) / columns)
    figure = Figure(figsize=(6.4 * columns, 3.8 * rows), layout="constrained")
    figure.suptitle(f"unison bench: {results.target}")
    for place, plot in enumerate(drawn, start=1):
        plot.draw(figure.add_subplot(rows, columns, place))
    figure.savefig(path, dpi=110)


def _rates(lines: Sequence[Line]) -> list[Series]:
    series = _grown(lines, _replicas)
    for line in lines:
        first = line.members[0]
        replicas = [_replicas(s) for s in line.members]
        ideal = [first.rate * count / first.point.replicas for count in replicas]
        series.append(Series(f"ideal ({line.name})", replicas, ideal, is_dashed=True))
    return series


def _grown(lines: Sequence[Line], size: Callable[[Summary], float]) -> list[Series]:
    return [
        Series(
            line.name,
            [size(summary) for summary in line.members],
            [summary.rate for summary in line.members],
            [summary.spread for summary in line.members],
        )
        for line in lines
    ]


def _efficiencies(kind: str, lines: Sequence[Line]) -> list[Series]:
    return [
        Series(
            f"{kind}, {line.name}",
            [_replicas(summary) for summary in line.members],
            [line.efficiency(summary) for summary in line.members],
        )
        for line in lines
    ]


def _times(summaries: Sequence[Summary], names: Sequence[str], label: str) -> Bars:
    """Returns the percentiles of the steps' times, each on the one below."""
    milliseconds = [[1e3 * p for p in summary.percentiles] for summary in summaries]
    return Bars(
        "Time of a step",
        Axis("ms"),
        names,
        {
            "50 % within": [p50 for p50, _, _ in milliseconds],
            "90 % within": [p90 - p50 for p50, p90, _ in milliseconds],
            "99 % within": [p99 - p90 for _, p90, p99 in milliseconds],
        },
        label,
    )


def _parts_of_time(summaries: Sequence[Summary]) -> dict[str, list[float]]:
    """Returns the parts of a step's time, which make up the whole."""
    communication = [summary.communication or 0.0 for summary in summaries]
    left = [1 - s.computing - c for s, c in zip(summaries, communication, strict=True)]
    waiting = [min(s.waiting, rest) for s, rest in zip(summaries, left, strict=True)]
    return {
        "computing": [summary.computing for summary in summaries],
        "communication": communication,
        "waiting for input": waiting,
        "other": [rest - wait for rest, wait in zip(left, waiting, strict=True)],
    }


def _memory(summaries: Sequence[Summary]) -> dict[str, list[float]]:
    """Returns the memory of processes, and of devices that report it, in MiB."""
    parts = {
        "process": [(summary.memory or 0) / 2**20 for summary in summaries],
        "a device": [(summary.device_memory or 0) / 2**20 for summary in summaries],
    }
    return {name: sizes for name, sizes in parts.items() if any(sizes)}


def _replicas(summary: Summary) -> float:
    return summary.point.replicas


def _batch(summary: Summary) -> float:
    return summary.point.batch or 0


def _examples(summary: Summary) -> float:
    return summary.point.examples or 0


def _as_percent(value: float) -> str:
    return f"{value:.0%}"
