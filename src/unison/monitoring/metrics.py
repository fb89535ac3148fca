"""The metrics of a job, from its state: their names, and their values now."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class Sample(NamedTuple):
    """A value of a metric, and its labels."""

    labels: Mapping[str, str]
    value: float


class Metric(NamedTuple):
    """A metric.

    Attributes:
        name: Its name, as Prometheus has it: that of a counter ends with `_total`.
        kind: "counter" or "gauge".
        help: What it is, in one sentence.
        samples: Its values that are known.
    """

    name: str
    kind: str
    help: str
    samples: list[Sample]


#: The metrics of each worker: name, kind, help, and the key in the worker's state.
_OF_WORKERS = (
    ("unison_worker_steps_total", "counter", "Training steps.", "step"),
    (
        "unison_worker_memory_bytes",
        "gauge",
        "Memory of the process (resident).",
        "memory_bytes",
    ),
    ("unison_worker_device_memory_bytes", "gauge", "Memory in use on devices.", "device_bytes"),
    (
        "unison_worker_device_utilization",
        "gauge",
        "The part of the time in which its replicas' GPUs compute, as NVIDIA's driver measures it.",
        "utilization",
    ),
    (
        "unison_worker_mfu",
        "gauge",
        "Model FLOPs utilization: products computed, of those that the devices could at most.",
        "mfu",
    ),
    ("unison_worker_sent_bytes_total", "counter", "Bytes sent over the network.", "sent_bytes"),
    ("unison_worker_loss", "gauge", "The latest loss that is a number.", "loss"),
    (
        "unison_worker_loss_is_finite",
        "gauge",
        "Whether the latest loss is a number, neither NaN nor infinite.",
        "loss_is_finite",
    ),
    (
        "unison_worker_checkpoint_age_steps",
        "gauge",
        "Steps since the latest in-memory checkpoint.",
        "checkpoint_age",
    ),
    (
        "unison_worker_checkpoint_interval_steps",
        "gauge",
        "Steps from one in-memory checkpoint to the next.",
        "checkpoint_interval",
    ),
    (
        "unison_worker_checkpoint_share",
        "gauge",
        "The part of the time that this worker's in-memory checkpoints take.",
        "checkpoint_share",
    ),
)


def metrics(state: Mapping[str, Any]) -> list[Metric]:
    """Returns the metrics of a job.

    Args:
        state: The result of `WatchedJob.as_dict`.
    """
    found: list[Metric] = []

    def add(name: str, kind: str, help: str, samples: Iterable[tuple[dict[str, str], Any]]) -> None:
        known = [Sample(labels, value) for labels, value in samples if value is not None]
        found.append(Metric(name, kind, help, known))

    workers = state["workers"]
    about = {"program": state["program"], "kind": state["kind"]}
    add("unison_job_info", "gauge", "The job: its program and kind.", [(about, 1)])
    add("unison_steps_total", "counter", "Training steps of the job.", [({}, state["step"])])
    add(
        "unison_examples_per_second",
        "gauge",
        "Examples a second, of all replicas.",
        [({}, state["examples_per_second"])],
    )
    add("unison_loss", "gauge", "The latest loss.", [({}, state["loss"])])
    add(
        "unison_recoveries_total",
        "counter",
        "How often the workers have formed a group again.",
        [({}, state["recoveries"])],
    )
    add(
        "unison_last_recovery_seconds",
        "gauge",
        "How long it took the last time.",
        [({}, state["last_recovery_seconds"])],
    )
    add(
        "unison_restarts_total",
        "counter",
        "How often workers, or all of them together, were started again.",
        [({}, state["restarts"])],
    )
    add(
        "unison_worker_up",
        "gauge",
        "Whether a worker runs.",
        [({"worker": w["name"]}, int(w["state"] == "running")) for w in workers],
    )
    add(
        "unison_worker_straggles",
        "gauge",
        "Whether a worker keeps the others waiting.",
        [({"worker": w["name"]}, int(w["straggles"] is not None)) for w in workers],
    )
    for name, kind, help, key in _OF_WORKERS:
        add(name, kind, help, [({"worker": w["name"]}, w[key]) for w in workers])
    add(
        "unison_worker_step_seconds",
        "gauge",
        "What a part of the latest steps' times does not exceed.",
        [
            ({"worker": w["name"], "quantile": f"{int(name[1:]) / 100:g}"}, seconds)
            for w in workers
            for name, seconds in (w["step_seconds"] or {}).items()
        ],
    )
    add(
        "unison_worker_time_share",
        "gauge",
        "The part of the time that a worker spends in a phase.",
        [
            ({"worker": w["name"], "phase": phase}, share)
            for w in workers
            for phase, share in (w["phases"] or {}).items()
        ],
    )
    return found
