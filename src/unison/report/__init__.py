"""Self-contained HTML pages, with inline CSS, and plots as inline SVG.

`unison plan` and `unison bench` write them. Nothing here knows of training.
"""

from unison.report.page import heading, page, paragraph, table
from unison.report.plots import Axis, Series, bar_plot, line_plot

__all__ = ["Axis", "Series", "bar_plot", "heading", "line_plot", "page", "paragraph", "table"]
