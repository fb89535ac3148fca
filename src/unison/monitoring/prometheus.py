"""A job's metrics in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unison.monitoring.metrics import metrics

#: The content type of the format.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def exposition(state: Mapping[str, Any]) -> str:
    r"""Returns the metrics of a job as text.

    Args:
        state: The result of `WatchedJob.as_dict`.

    Examples:
        >>> from unison.monitoring.job import WatchedJob
        >>> text = exposition(WatchedJob("train.py", "workers", ["worker 0"]).as_dict())
        >>> print(*text.splitlines()[3:6], sep="\n")
        # HELP unison_steps_total Training steps of the job.
        # TYPE unison_steps_total counter
        unison_steps_total 0
    """
    lines: list[str] = []
    for metric in metrics(state):
        if metric.samples:
            lines.append(f"# HELP {metric.name} {metric.help}")
            lines.append(f"# TYPE {metric.name} {metric.kind}")
            lines.extend(
                f"{metric.name}{_shown(sample.labels)} {+sample.value}" for sample in metric.samples
            )
    return "\n".join(lines) + "\n"


def _shown(labels: Mapping[str, str]) -> str:
    r"""Returns labels in the form that follows a metric's name.

    Examples:
        >>> print(_shown({"worker": 'a "b"'}))
        {worker="a \"b\""}
    """
    if not labels:
        return ""
    shown = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
    return f"{{{shown}}}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
