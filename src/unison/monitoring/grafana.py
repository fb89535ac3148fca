"""A Grafana dashboard of jobs' metrics, and Prometheus' rules for alerts about them."""

from __future__ import annotations

from typing import Any, NamedTuple

#: The label by which Prometheus tells jobs apart; a job may have any number of instances.
_OF_JOB = 'job=~"$job", instance=~"$instance"'


class _Query(NamedTuple):
    """A query of a panel: PromQL, in which `{}` stands for the selection, and a legend."""

    expression: str
    legend: str


class _Panel(NamedTuple):
    title: str
    unit: str
    kind: str
    width: int
    queries: tuple[_Query, ...]


_PANELS = (
    _Panel("Steps", "none", "stat", 4, (_Query("unison_steps_total{}", ""),)),
    _Panel("Examples a second", "short", "stat", 4, (_Query("unison_examples_per_second{}", ""),)),
    _Panel("Loss", "none", "stat", 4, (_Query("unison_loss{}", ""),)),
    _Panel("Workers that run", "none", "stat", 4, (_Query("sum(unison_worker_up{})", ""),)),
    _Panel("Restarts", "none", "stat", 4, (_Query("unison_restarts_total{}", ""),)),
    _Panel("Recoveries", "none", "stat", 4, (_Query("unison_recoveries_total{}", ""),)),
    _Panel(
        "Examples a second",
        "short",
        "timeseries",
        12,
        (_Query("unison_examples_per_second{}", "{{instance}}"),),
    ),
    _Panel("Loss", "none", "timeseries", 12, (_Query("unison_worker_loss{}", "{{worker}}"),)),
    _Panel(
        "Seconds a step",
        "s",
        "timeseries",
        12,
        (_Query("unison_worker_step_seconds{}", "{{worker}}, {{quantile}}"),),
    ),
    _Panel(
        "What workers spend their time on",
        "percentunit",
        "timeseries",
        12,
        (_Query("unison_worker_time_share{}", "{{worker}}, {{phase}}"),),
    ),
    _Panel(
        "Workers that keep the others waiting",
        "none",
        "timeseries",
        12,
        (_Query("unison_worker_straggles{}", "{{worker}}"),),
    ),
    _Panel(
        "Model FLOPs utilization",
        "percentunit",
        "timeseries",
        12,
        (_Query("unison_worker_mfu{}", "{{worker}}"),),
    ),
    _Panel(
        "Utilization of devices",
        "percentunit",
        "timeseries",
        12,
        (_Query("unison_worker_device_utilization{}", "{{worker}}"),),
    ),
    _Panel(
        "Time for in-memory checkpoints",
        "percentunit",
        "timeseries",
        12,
        (_Query("unison_worker_checkpoint_share{}", "{{worker}}"),),
    ),
    _Panel(
        "Steps since the latest in-memory checkpoint",
        "none",
        "timeseries",
        12,
        (_Query("unison_worker_checkpoint_age_steps{}", "{{worker}}"),),
    ),
    _Panel(
        "Bytes sent a second",
        "Bps",
        "timeseries",
        12,
        (_Query("rate(unison_worker_sent_bytes_total{}[1m])", "{{worker}}"),),
    ),
    _Panel(
        "Memory of processes",
        "bytes",
        "timeseries",
        12,
        (_Query("unison_worker_memory_bytes{}", "{{worker}}"),),
    ),
    _Panel(
        "Memory of devices",
        "bytes",
        "timeseries",
        12,
        (_Query("unison_worker_device_memory_bytes{}", "{{worker}}"),),
    ),
)

_HEIGHTS = {"stat": 4, "timeseries": 8}

#: The width of a dashboard, in Grafana's columns.
_COLUMNS = 24

_DATA_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def dashboard() -> dict[str, Any]:
    """Returns the dashboard, as Grafana imports it.

    Examples:
        >>> [panel["title"] for panel in dashboard()["panels"]][:2]
        ['Steps', 'Examples a second']
    """
    panels = []
    left = top = 0
    for number, panel in enumerate(_PANELS, 1):
        height = _HEIGHTS[panel.kind]
        if left + panel.width > _COLUMNS:
            left, top = 0, top + _HEIGHTS[_PANELS[number - 2].kind]
        panels.append(
            {
                "id": number,
                "title": panel.title,
                "type": panel.kind,
                "datasource": _DATA_SOURCE,
                "gridPos": {"x": left, "y": top, "w": panel.width, "h": height},
                "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
                "targets": [
                    {
                        "refId": chr(ord("A") + place),
                        "datasource": _DATA_SOURCE,
                        "expr": query.expression.replace("{}", f"{{{_OF_JOB}}}"),
                        "legendFormat": query.legend,
                    }
                    for place, query in enumerate(panel.queries)
                ],
            }
        )
        left += panel.width
    return {
        "uid": "unison-jobs",
        "title": "Unison",
        "tags": ["unison"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "10s",
        "templating": {
            "list": [
                {
                    "name": "datasource",
                    "label": "Data source",
                    "type": "datasource",
                    "query": "prometheus",
                },
                _variable("job", "label_values(unison_job_info, job)"),
                _variable("instance", 'label_values(unison_job_info{job=~"$job"}, instance)'),
            ]
        },
        "panels": panels,
    }


def _variable(name: str, query: str) -> dict[str, Any]:
    """Returns a variable of the dashboard, which the user chooses."""
    return {
        "name": name,
        "label": name.capitalize(),
        "type": "query",
        "datasource": _DATA_SOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
    }


#: Rules for `rule_files` of Prometheus. How long a state lasts before it is told is a minute or
#: more: a job that starts, or forms a group again, is no alert.
ALERTS = """\
groups:
  - name: unison
    rules:
      - alert: UnisonWorkerDown
        expr: >-
          unison_worker_up == 0 and on (job, instance)
          (unison_steps_total > 0 or unison_restarts_total > 0)
        for: 2m
        labels: {severity: critical}
        annotations:
          summary: "{{ $labels.worker }} of {{ $labels.instance }} does not run"
      - alert: UnisonNoSteps
        expr: >-
          rate(unison_steps_total[5m]) == 0
          and (unison_steps_total > 0 or unison_restarts_total > 0)
        for: 5m
        labels: {severity: critical}
        annotations:
          summary: "The job at {{ $labels.instance }} has made no step for ten minutes"
      - alert: UnisonStraggler
        expr: avg_over_time(unison_worker_straggles[10m]) > 0.5
        for: 5m
        labels: {severity: warning}
        annotations:
          summary: "{{ $labels.worker }} of {{ $labels.instance }} keeps the others waiting"
      - alert: UnisonWaitsForInput
        expr: avg_over_time(unison_worker_time_share{phase="input"}[10m]) > 0.2
        for: 10m
        labels: {severity: warning}
        annotations:
          summary: "{{ $labels.worker }} of {{ $labels.instance }} waits for its input"
      - alert: UnisonRestarts
        expr: increase(unison_restarts_total[1h]) > 3
        labels: {severity: warning}
        annotations:
          summary: "The job at {{ $labels.instance }} was started again more than three times"
      - alert: UnisonLossIsNotANumber
        expr: unison_worker_loss_is_finite == 0
        for: 1m
        labels: {severity: critical}
        annotations:
          summary: "The loss of {{ $labels.worker }} of {{ $labels.instance }} is not a number"
"""
