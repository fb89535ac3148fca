"""Pages with plots inside."""

from xml.etree import ElementTree

import pytest

from unison.report import Axis, Series, bar_plot, line_plot, page, paragraph, table


def elements(svg, tag):
    return ElementTree.fromstring(svg).findall(tag)


def test_points_lie_where_their_values_are():
    plot = line_plot("t", Axis("x"), Axis("y"), [Series("a", [0, 1, 2], [0, 50, 100])])
    first, second, third = elements(plot, "circle")
    middle = (float(first.get("cx")) + float(third.get("cx"))) / 2
    assert float(second.get("cx")) == pytest.approx(middle, abs=0.1)
    assert float(first.get("cy")) > float(second.get("cy")) > float(third.get("cy"))


def test_equal_factors_are_equally_far_on_a_logarithmic_axis():
    plot = line_plot("t", Axis("x", is_log=True), Axis("y"), [Series("a", [1, 2, 4], [1, 1, 1])])
    x = [float(point.get("cx")) for point in elements(plot, "circle")]
    assert x[1] - x[0] == pytest.approx(x[2] - x[1], abs=0.2)


def test_what_was_not_measured_has_no_points():
    line = Series("ideal", [1, 2], [1, 2], is_dashed=True)
    plot = line_plot("t", Axis("x"), Axis("y"), [line])
    assert not elements(plot, "circle")
    assert any(path.get("stroke-dasharray") for path in elements(plot, "path"))


def test_a_single_point_is_drawn():
    plot = line_plot("t", Axis("x", is_log=True), Axis("y"), [Series("a", [3], [0])])
    assert len(elements(plot, "circle")) == 1


def test_parts_of_a_bar_lie_on_each_other():
    plot = bar_plot("t", Axis("y"), ["one"], {"low": [1], "high": [3]})
    *_, low, high = elements(plot, "rect")
    assert float(high.get("y")) + float(high.get("height")) == pytest.approx(float(low.get("y")))
    assert float(high.get("height")) == pytest.approx(3 * float(low.get("height")), abs=0.5)


def test_a_limit_is_a_line_across():
    plot = bar_plot("t", Axis("y"), ["one"], {"a": [1]}, limit=("there is", 2))
    assert "there is" in plot
    assert any(path.get("stroke-dasharray") for path in elements(plot, "path"))


def test_what_is_text_stays_text():
    plot = line_plot("<t>", Axis("x & y"), Axis("y"), [Series("<a>", [1], [1])])
    html = page("<b>", [paragraph("<p>"), plot, table(["<h>"], [["<c>"]])])
    for text in ("<t>", "<a>", "<b>", "<h>", "<c>"):
        assert text not in html
    assert "x &amp; y" in html
