"""The page around the plots."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

#: Follows the light or dark mode of the reader's system; the plots use these colours.
_STYLE = """
:root {
  color-scheme: light dark;
  --text: #1c2024; --faint: #60646c; --line: #d9d9e0; --ground: #fcfcfd; --raised: #ffffff;
  --series-0: #3a5bc7; --series-1: #c2500f; --series-2: #2b8a6e; --series-3: #8347b9;
  --series-4: #b02a6b; --series-5: #6b6f1d; --series-6: #0c7792; --series-7: #7d6652;
}
@media (prefers-color-scheme: dark) {
  :root {
    --text: #edeef0; --faint: #a6abb5; --line: #393a40; --ground: #111113; --raised: #18191b;
    --series-0: #8da4ef; --series-1: #f5a277; --series-2: #5bc8a5; --series-3: #c59ce6;
    --series-4: #f08fb8; --series-5: #c9cd6b; --series-6: #5fc4dd; --series-7: #cbb49f;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 72rem;
  font: 15px/1.55 system-ui, sans-serif; color: var(--text); background: var(--ground);
}
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .5rem; }
h2 { font-size: 1.15rem; margin: 2.25rem 0 .5rem; }
p { margin: .5rem 0; max-width: 46rem; }
.plots { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 28rem), 1fr)); }
.plots svg, .table {
  background: var(--raised); border: 1px solid var(--line); border-radius: 8px;
}
.plots svg { width: 100%; height: auto; padding: .5rem; }
.table { overflow-x: auto; margin: .75rem 0; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .4rem .8rem; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
th { font-weight: 600; color: var(--faint); }
tr + tr td, thead + tbody td { border-top: 1px solid var(--line); }
"""  # noqa: E501


def page(title: str, parts: Iterable[str]) -> str:
    """Returns a page as HTML.

    Args:
        title: Its title, as text.
        parts: What it holds, as HTML: plots, and what the other functions return. Plots that
            follow each other lie side by side where there is room.

    Examples:
        >>> page("A < B", [paragraph("So it is.")]).splitlines()[3]
        '<title>A &lt; B</title>'
    """
    body: list[str] = []
    in_plots = False
    for part in parts:
        is_plot = part.startswith("<svg")
        if is_plot != in_plots:
            body.append('<div class="plots">' if is_plot else "</div>")
            in_plots = is_plot
        body.append(part)
    if in_plots:
        body.append("</div>")
    lines = [
        "<!doctype html>",
        '<html lang="en">',
        '<meta charset="utf-8">',
        f"<title>{html.escape(title)}</title>",
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<style>{_STYLE}</style>",
        f"<h1>{html.escape(title)}</h1>",
        *body,
        "</html>",
    ]
    return "\n".join(lines) + "\n"


def heading(text: str) -> str:
    """Returns the heading of a part of the page."""
    return f"<h2>{html.escape(text)}</h2>"


def paragraph(text: str) -> str:
    """Returns a paragraph.

    Examples:
        >>> paragraph("2 < 3")
        '<p>2 &lt; 3</p>'
    """
    return f"<p>{html.escape(text)}</p>"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table; its first column is flush left, the others are flush right."""

    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"

    lines = "\n".join(row(cells, "td") for cells in rows)
    return (
        f'<div class="table"><table>\n<thead>{row(header, "th")}</thead>\n'
        f"<tbody>\n{lines}\n</tbody></table></div>"
    )
