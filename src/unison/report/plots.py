"""Plots as SVG that a page holds inline: lines over numbers, and stacked bars.

The colours are CSS variables of the page (`page.py`), so they follow the reader's light or dark
mode. Tooltips show the values.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from xml.etree import ElementTree

_WIDTH, _HEIGHT = 640, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 64, 48
#: About how wide a letter of the legend is.
_LETTER = 6.6


def short_number(value: float) -> str:
    """Returns a number as an axis shows it.

    Examples:
        >>> [short_number(value) for value in (0, 0.25, 12, 1500, 2_000_000)]
        ['0', '0.25', '12', '1.5k', '2M']
    """
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


@dataclasses.dataclass(frozen=True)
class Axis:
    """An axis of a plot.

    Attributes:
        label: What it shows, with its unit.
        is_log: Whether equal factors are equally far; then the values must be positive.
        number: How its numbers are written.
    """

    label: str
    is_log: bool = False
    number: Callable[[float], str] = short_number


@dataclasses.dataclass(frozen=True)
class Series:
    """A line of a plot.

    Attributes:
        name: What the legend calls it.
        x: Where its points are.
        y: Their values, as many.
        spread: For every point, the lower and the upper end of its error bar; none if empty.
        is_dashed: For what was not measured: an ideal, a limit.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    spread: Sequence[tuple[float, float]] = ()
    is_dashed: bool = False


def line_plot(title: str, x: Axis, y: Axis, series: Sequence[Series]) -> str:
    """Returns a plot of lines.

    Args:
        title: What it shows.
        x: The horizontal axis; its numbers stand where points are.
        y: The vertical axis; unless it is logarithmic, it begins at 0.
        series: The lines, each with at least one point.

    Examples:
        >>> svg = line_plot("Speed", Axis("devices", is_log=True), Axis("images/s"),
        ...                 [Series("measured", [1, 2, 4], [100, 190, 350])])
        >>> svg.startswith("<svg"), svg.count("<circle")
        (True, 3)
    """
    points = sorted({float(value) for line in series for value in line.x})
    values = [float(v) for line in series for v in [*line.y, *sum(line.spread, ())]]
    across = _Scale.over(points[0], points[-1], _LEFT + 20, _WIDTH - _RIGHT - 20, x.is_log)
    ticks = _log_ticks(values) if y.is_log else _ticks(max(values))
    up = _Scale(ticks[0], ticks[-1], _HEIGHT - _BOTTOM, _TOP, y.is_log)
    drawing = _Drawing(title, [(line.name, line.is_dashed) for line in series])
    drawing.vertical_axis(y, ticks, up)
    shown = points if len(points) <= 9 else points[:: math.ceil(len(points) / 9)]
    drawing.horizontal_axis(x.label, [(across(value), x.number(value)) for value in shown])
    for number, line in enumerate(series):
        drawing.line(number, line, [*map(across, line.x)], [*map(up, line.y)])
        for at, (low, high) in zip(line.x, line.spread, strict=False):
            drawing.error_bar(number, across(at), up(low), up(high))
        for at, value in zip(line.x, line.y, strict=True):
            words = f"{line.name}: {y.number(value)} at {x.number(at)}"
            if not line.is_dashed:
                drawing.point(number, across(at), up(value), words)
    return drawing.text()


def bar_plot(
    title: str,
    y: Axis,
    bars: Sequence[str],
    parts: Mapping[str, Sequence[float]],
    label: str = "",
    limit: tuple[str, float] | None = None,
) -> str:
    """Returns a stacked bar chart.

    Args:
        title: What it shows.
        y: The vertical axis; it begins at 0.
        bars: The names of the bars, from the left.
        parts: For every part, from the bottom, its size in each bar.
        label: What the bars are.
        limit: The name and the height of a line across all bars.

    Examples:
        >>> svg = bar_plot("Memory", Axis("GB"), ["1", "2"],
        ...                {"weights": [1, 1], "batch": [2, 1]}, "devices", ("there is", 4))
        >>> svg.count("<rect")  # four parts, and two in the legend
        6
    """
    heights = [sum(sizes) for sizes in zip(*parts.values(), strict=True)]
    ticks = _ticks(max([*heights, *([limit[1]] if limit else [])]))
    up = _Scale(ticks[0], ticks[-1], _HEIGHT - _BOTTOM, _TOP, False)
    names = [(name, False) for name in parts] + ([(limit[0], True)] if limit else [])
    drawing = _Drawing(title, names, are_areas=True)
    drawing.vertical_axis(y, ticks, up)
    step = (_WIDTH - _RIGHT - _LEFT) / len(bars)
    middles = [_LEFT + step * (index + 0.5) for index in range(len(bars))]
    drawing.horizontal_axis(label, [*zip(middles, bars, strict=True)])
    width = min(0.6 * step, 72)
    for index, (middle, bar) in enumerate(zip(middles, bars, strict=True)):
        ground = 0.0
        for number, (name, sizes) in enumerate(parts.items()):
            low, high = up(ground), up(ground + sizes[index])
            words = f"{bar}: {name} {y.number(sizes[index])}"
            drawing.area(number, middle - width / 2, high, width, low - high, words)
            ground += sizes[index]
    if limit:
        drawing.limit(len(parts), up(limit[1]))
    return drawing.text()


@dataclasses.dataclass(frozen=True)
class _Scale:
    """Maps the numbers of an axis to the places of a drawing."""

    low: float
    high: float
    begin: float
    end: float
    is_log: bool

    @classmethod
    def over(cls, low: float, high: float, begin: float, end: float, is_log: bool) -> _Scale:
        """Returns a scale; a single value lies in the middle."""
        if low == high:
            begin = end = (begin + end) / 2
            high = 2 * low or 1.0
        return cls(low, high, begin, end, is_log)

    def __call__(self, value: float) -> float:
        if self.is_log:
            part = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            part = (value - self.low) / (self.high - self.low)
        return round(self.begin + part * (self.end - self.begin), 1)


def _ticks(highest: float) -> list[float]:
    """Returns round numbers from 0 to at least `highest`."""
    if highest <= 0:
        return [0.0, 1.0]
    power = 10.0 ** math.floor(math.log10(highest / 4))
    step = next(power * size for size in (1, 2, 2.5, 5, 10) if power * size * 5 >= highest)
    return [step * index for index in range(math.ceil(highest / step - 1e-9) + 1)]


def _log_ticks(values: Sequence[float]) -> list[float]:
    """Returns powers of two, or of ten for a wide range, around positive values."""
    base = 2 if max(values) / min(values) <= 64 else 10
    low = math.floor(math.log(min(values), base) + 1e-9)
    high = math.ceil(math.log(max(values), base) - 1e-9)
    return [float(base) ** power for power in range(low, max(high, low + 1) + 1)]


class _Drawing:
    """An SVG that grows: title, legend and axes, then what lies in them."""

    def __init__(self, title: str, names: Sequence[tuple[str, bool]], are_areas: bool = False):
        self._root = ElementTree.Element(
            "svg",
            {
                "viewBox": f"0 0 {_WIDTH} {_HEIGHT}",
                "role": "img",
                "aria-label": title,
                "font-family": "system-ui, sans-serif",
                "font-size": "12",
            },
        )
        self._text(_LEFT, 20, title, fill="var(--text)", **{"font-weight": "600"})
        at = float(_LEFT)
        for number, (name, is_dashed) in enumerate(names):
            if are_areas and not is_dashed:
                self._add("rect", x=at, y=34, width=12, height=12, rx=2, fill=_colour(number))
            else:
                self._stroke(number, f"M{at} 40h14", is_dashed)
            self._text(at + 18, 44, name)
            at += 18 + _LETTER * len(name) + 16

    def vertical_axis(self, axis: Axis, ticks: Sequence[float], up: _Scale) -> None:
        for value in ticks:
            line = f"M{_LEFT} {up(value)}H{_WIDTH - _RIGHT}"
            self._add("path", d=line, stroke="var(--line)", fill="none")
            self._text(_LEFT - 8, up(value) + 4, axis.number(value), anchor="end")
        middle = (_TOP + _HEIGHT - _BOTTOM) / 2
        turned = {"transform": f"rotate(-90 14 {middle})"}
        self._text(14, middle, axis.label, anchor="middle", **turned)

    def horizontal_axis(self, label: str, ticks: Sequence[tuple[float, str]]) -> None:
        for at, words in ticks:
            self._text(at, _HEIGHT - _BOTTOM + 18, words, anchor="middle")
        self._text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 10, label, anchor="middle")

    def line(self, number: int, line: Series, x: list[float], y: list[float]) -> None:
        path = "M" + "L".join(f"{at} {value}" for at, value in zip(x, y, strict=True))
        self._stroke(number, path, line.is_dashed)

    def error_bar(self, number: int, x: float, low: float, high: float) -> None:
        path = f"M{x - 4} {low}h8M{x} {low}V{high}M{x - 4} {high}h8"
        self._add("path", d=path, stroke=_colour(number), fill="none")

    def point(self, number: int, x: float, y: float, words: str) -> None:
        self._tell(self._add("circle", cx=x, cy=y, r=4, fill=_colour(number)), words)

    def area(
        self, number: int, x: float, y: float, width: float, height: float, words: str
    ) -> None:
        place = {"x": round(x, 1), "y": y, "width": round(width, 1), "height": round(height, 1)}
        self._tell(self._add("rect", fill=_colour(number), **place), words)

    def limit(self, number: int, y: float) -> None:
        self._stroke(number, f"M{_LEFT} {y}H{_WIDTH - _RIGHT}", is_dashed=True)

    def text(self) -> str:
        return ElementTree.tostring(self._root, encoding="unicode")

    def _add(self, tag: str, **attributes: object) -> ElementTree.Element:
        texts = {name: str(value) for name, value in attributes.items()}
        return ElementTree.SubElement(self._root, tag, texts)

    def _stroke(self, number: int, path: str, is_dashed: bool) -> None:
        drawn = self._add("path", d=path, stroke=_colour(number), fill="none")
        drawn.set("stroke-width", "2")
        if is_dashed:
            drawn.set("stroke-dasharray", "5 4")

    def _text(
        self, x: float, y: float, words: str, anchor: str = "start", **attributes: str
    ) -> None:
        given = {"fill": "var(--faint)", "text-anchor": anchor, **attributes}
        self._add("text", x=x, y=y, **given).text = words

    @staticmethod
    def _tell(element: ElementTree.Element, words: str) -> None:
        ElementTree.SubElement(element, "title").text = words


def _colour(number: int) -> str:
    return f"var(--series-{number % 8})"
