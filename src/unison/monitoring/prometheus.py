"""The state of a job in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

#: The content type of the format.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class _Metric(NamedTuple):
    name: str
    kind: str
    help: str
    of_worker: str


#: The metrics of each worker, and their keys in the worker's state.
_OF_WORKERS = (
    _Metric("unison_worker_steps_total", "counter", "Training steps.", "step"),
    _Metric(
        "unison_worker_memory_bytes", "gauge", "Memory of the process (resident).", "memory_bytes"
    ),
    _Metric(
        "unison_worker_device_memory_bytes", "gauge", "Memory in use on devices.", "device_bytes"
    ),
    _Metric(
        "unison_worker_mfu",
        "gauge",
        "Model FLOPs utilization: products computed, of those that the devices could at most.",
        "mfu",
    ),
    _Metric(
        "unison_worker_sent_bytes_total", "counter", "Bytes sent over the network.", "sent_bytes"
    ),
    _Metric("unison_worker_loss", "gauge", "The latest loss that is a number.", "loss"),
    _Metric(
        "unison_worker_loss_is_finite",
        "gauge",
        "Whether the latest loss is a number, neither NaN nor infinite.",
        "loss_is_finite",
    ),
)


def exposition(state: Mapping[str, Any]) -> str:
    r"""Returns the metrics of a job.

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

    def add(name: str, kind: str, help: str, samples: Iterable[tuple[str, Any]]) -> None:
        known = [(labels, value) for labels, value in samples if value is not None]
        if known:
            lines.append(f"# HELP {name} {help}")
            lines.append(f"# TYPE {name} {kind}")
            lines.extend(f"{name}{labels} {+value}" for labels, value in known)

    workers = state["workers"]
    about = _labels(program=state["program"], kind=state["kind"])
    add("unison_job_info", "gauge", "The job: its program and kind.", [(about, 1)])
    add("unison_steps_total", "counter", "Training steps of the job.", [("", state["step"])])
    add(
        "unison_examples_per_second",
        "gauge",
        "Examples a second, of all replicas.",
        [("", state["examples_per_second"])],
    )
    add("unison_loss", "gauge", "The latest loss.", [("", state["loss"])])
    add(
        "unison_recoveries_total",
        "counter",
        "How often the workers have formed a group again.",
        [("", state["recoveries"])],
    )
    add(
        "unison_last_recovery_seconds",
        "gauge",
        "How long it took the last time.",
        [("", state["last_recovery_seconds"])],
    )
    add(
        "unison_restarts_total",
        "counter",
        "How often workers, or all of them together, were started again.",
        [("", state["restarts"])],
    )
    add(
        "unison_worker_up",
        "gauge",
        "Whether a worker runs.",
        [(_labels(worker=w["name"]), int(w["state"] == "running")) for w in workers],
    )
    add(
        "unison_worker_straggles",
        "gauge",
        "Whether a worker keeps the others waiting.",
        [(_labels(worker=w["name"]), int(w["straggles"] is not None)) for w in workers],
    )
    for metric in _OF_WORKERS:
        samples = [(_labels(worker=w["name"]), w[metric.of_worker]) for w in workers]
        add(metric.name, metric.kind, metric.help, samples)
    add(
        "unison_worker_step_seconds",
        "gauge",
        "What a part of the latest steps' times does not exceed.",
        [
            (_labels(worker=w["name"], quantile=f"{int(name[1:]) / 100:g}"), seconds)
            for w in workers
            for name, seconds in (w["step_seconds"] or {}).items()
        ],
    )
    add(
        "unison_worker_time_share",
        "gauge",
        "The part of the time that a worker spends in a phase.",
        [
            (_labels(worker=w["name"], phase=phase), share)
            for w in workers
            for phase, share in (w["phases"] or {}).items()
        ],
    )
    return "\n".join(lines) + "\n"


def _labels(**values: str) -> str:
    r"""Returns labels in the form that follows a metric's name.

    Examples:
        >>> print(_labels(worker='a "b"'))
        {worker="a \"b\""}
    """
    shown = ",".join(f'{name}="{_escaped(value)}"' for name, value in values.items())
    return f"{{{shown}}}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
