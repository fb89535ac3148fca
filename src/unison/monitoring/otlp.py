"""A job's metrics for OpenTelemetry: its SDK sends them to a collector (OTLP over HTTP)."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import logging
import math
import os
import platform
import threading
from collections.abc import Iterable, Mapping
from typing import Any, Final, Self

from unison.monitoring.job import WatchedJob
from unison.monitoring.metrics import Metric, metrics

logger = logging.getLogger("unison")

#: The variable by which it is asked for: 0 or 1.
VARIABLE: Final = "UNISON_OPENTELEMETRY"

#: The SDK's own variable for the milliseconds between two exports, and its default.
_INTERVAL: Final = "OTEL_METRIC_EXPORT_INTERVAL"
_DEFAULT_INTERVAL = 60_000.0

#: Seconds that the last export may delay the end of a job.
_LAST_WORD = 5.0


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
        ValueError: One of its variables is malformed.
    """

    def __init__(self, job: WatchedJob):
        try:
            from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
            from opentelemetry.sdk.metrics import MeterProvider
            from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
            from opentelemetry.sdk.resources import Resource
        except ImportError as error:
            raise ImportError(
                f"OpenTelemetry's SDK is needed to send metrics. Received: {error}. Install it: "
                "pip install 'unison[otel]'"
            ) from error
        self._job = job
        #: Those of the state that is being sent, by name: the SDK asks for one after the other.
        self._metrics: Mapping[str, Metric] = {}
        self._interval = _interval()
        # A thread of the SDK's would start again in every child that is forked.
        self._reader = PeriodicExportingMetricReader(OTLPMetricExporter(), math.inf)
        resource = Resource.create(_about_this_process())
        self._provider = MeterProvider([self._reader], resource, shutdown_on_exit=False)
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="unison-otlp", daemon=True)

    def __enter__(self) -> Self:
        meter = self._provider.get_meter("unison", importlib.metadata.version("unison"))
        for metric in metrics(self._job.as_dict()):
            is_counter = metric.kind == "counter"
            make = meter.create_observable_counter if is_counter else meter.create_observable_gauge
            make(
                metric.name.removesuffix("_total"),  # collectors for Prometheus add it
                callbacks=[functools.partial(self._observed, metric.name)],
                description=metric.help,
            )
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ends.set()
        self._thread.join(_LAST_WORD)
        with contextlib.suppress(Exception):  # an export that it ends was being tried again
            self._provider.shutdown(timeout_millis=1000 * _LAST_WORD)

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._ends.wait(self._interval)
            try:
                self._metrics = {metric.name: metric for metric in metrics(self._job.as_dict())}
                self._reader.collect()
            except Exception as error:  # the job goes on
                logger.warning("OpenTelemetry's SDK could not send metrics: %s", error)

    def _observed(self, name: str, options: Any) -> Iterable[Any]:
        from opentelemetry.metrics import Observation

        return [
            Observation(sample.value, dict(sample.labels)) for sample in self._metrics[name].samples
        ]


def _interval() -> float:
    """Returns the seconds between two exports.

    Raises:
        ValueError: The variable is no positive number.
    """
    said = os.environ.get(_INTERVAL) or _DEFAULT_INTERVAL
    try:
        milliseconds = float(said)
    except ValueError:
        milliseconds = math.nan
    if not 0 < milliseconds < math.inf:
        raise ValueError(f"Expected milliseconds in {_INTERVAL}. Received: {said!r}")
    return milliseconds / 1000


def _about_this_process() -> dict[str, Any]:
    """Returns what tells this job from others, without what the user's variables say."""
    about = {
        "service.name": "unison",
        "service.instance.id": f"{platform.node()}-{os.getpid()}",
        "host.name": platform.node(),
    }
    given = os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "").split(",")
    names = {pair.partition("=")[0].strip() for pair in given}
    if os.environ.get("OTEL_SERVICE_NAME"):
        names.add("service.name")
    return {name: value for name, value in about.items() if name not in names}
