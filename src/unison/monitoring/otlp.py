"""A job's metrics for OpenTelemetry: its SDK sends them to a collector (OTLP over HTTP)."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import time
from collections.abc import Iterable, Mapping
from typing import Any, Final, Self

from unison.monitoring.job import WatchedJob
from unison.monitoring.metrics import Metric, metrics

#: The variable by which it is asked for: 0 or 1.
VARIABLE: Final = "UNISON_OPENTELEMETRY"

#: Seconds for which a state answers the SDK, which asks for one metric after the other.
_FRESH = 0.5

#: Milliseconds for the last metrics, at the end of a job.
_LAST = 5_000


def is_asked(option: bool = False) -> bool:
    """Returns whether metrics are to be sent, by an option or the environment.

    Raises:
        ValueError: The variable is neither 0 nor 1.
    """
    said = os.environ.get(VARIABLE) or "0"
    if said not in ("0", "1"):
        raise ValueError(f"Expected 0 or 1 for the variable {VARIABLE}. Received: {said!r}")
    return option or said == "1"


class OpenTelemetryExport:
    """Sends the metrics of a job while the context is entered, and once more at its end.

    Where to, how often and with which headers is what OpenTelemetry's own variables say
    (`OTEL_EXPORTER_OTLP_ENDPOINT`, `OTEL_METRIC_EXPORT_INTERVAL`, ...). If nobody listens there,
    the SDK logs it, and goes on.

    Args:
        job: The job.

    Raises:
        ImportError: The SDK is not installed.
    """

    def __init__(self, job: WatchedJob):
        try:
            import opentelemetry.exporter.otlp.proto.http.metric_exporter
            import opentelemetry.sdk.metrics.export  # noqa: F401
        except ImportError as error:
            raise ImportError(
                f"OpenTelemetry's SDK is needed to send metrics. Received: {error}. Install it: "
                "pip install 'unison[otel]'"
            ) from error
        self._job = job
        self._metrics: Mapping[str, Metric] = {}
        self._until = 0.0
        self._provider: Any = None

    def __enter__(self) -> Self:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import Resource

        self._provider = MeterProvider(
            [PeriodicExportingMetricReader(OTLPMetricExporter())],
            Resource.create({} if _has_name() else {"service.name": "unison"}),
            shutdown_on_exit=False,
        )
        meter = self._provider.get_meter("unison", importlib.metadata.version("unison"))
        for metric in metrics(self._job.as_dict()):
            is_counter = metric.kind == "counter"
            create = (
                meter.create_observable_counter if is_counter else meter.create_observable_gauge
            )
            # Collectors add the suffix of counters where their names get it.
            create(
                metric.name.removesuffix("_total"),
                callbacks=[functools.partial(self._observed, metric.name)],
                description=metric.help,
            )
        return self

    def __exit__(self, *error: object) -> None:
        self._until = 0.0
        self._provider.shutdown(timeout_millis=_LAST)

    def _observed(self, name: str, options: Any) -> Iterable[Any]:
        from opentelemetry.metrics import Observation

        if time.monotonic() > self._until:
            self._metrics = {metric.name: metric for metric in metrics(self._job.as_dict())}
            self._until = time.monotonic() + _FRESH
        return [
            Observation(sample.value, dict(sample.labels)) for sample in self._metrics[name].samples
        ]


def _has_name() -> bool:
    """Returns whether the user has named the service, which a given name would replace."""
    attributes = os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    return "OTEL_SERVICE_NAME" in os.environ or "service.name=" in attributes
