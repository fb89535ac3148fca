"""A job's metrics for OpenTelemetry, received as a collector receives them."""

import contextlib
import http.server
import os
import sys
import threading
import time

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)

from monitoring_reports import told, watched
from unison.cli import main
from unison.monitoring import first_worker, otlp
from unison.monitoring.launcher import Monitored
from unison.monitoring.otlp import OpenTelemetryExport


@pytest.fixture(autouse=True)
def nothing_is_said(monkeypatch):
    """Removes what the developer's environment says."""
    for name in list(os.environ):
        if name.startswith("OTEL_") or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)


@pytest.fixture
def collector(monkeypatch):
    """What a collector of OpenTelemetry has received."""
    received = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.append((self.path, ExportMetricsServiceRequest.FromString(body)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *about):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        address = f"http://127.0.0.1:{server.server_address[1]}"
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
        monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "100")
        yield received
        server.shutdown()
        thread.join(20)


def values_in(request):
    """The values by name and labels, and which names are those of counters."""
    values, counters = {}, set()
    for of_resource in request.resource_metrics:
        for of_scope in of_resource.scope_metrics:
            for metric in of_scope.metrics:
                data = getattr(metric, metric.WhichOneof("data"))
                if metric.HasField("sum") and metric.sum.is_monotonic:
                    counters.add(metric.name)
                for point in data.data_points:
                    labels = {each.key: each.value.string_value for each in point.attributes}
                    value = getattr(point, point.WhichOneof("value"))
                    values[metric.name, *sorted(labels.items())] = value
    return values, counters


def about(request):
    (of_resource,) = request.resource_metrics
    return {each.key: each.value.string_value for each in of_resource.resource.attributes}


def test_a_collector_gets_metrics_while_a_job_runs_and_at_its_end(collector):
    job = watched(told(steps=7, memory=1000, checkpoint=[1, 3, 0.01], utilization=0.5))
    with OpenTelemetryExport(job):
        deadline = time.monotonic() + 20
        while len(collector) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        job.hear(told(steps=9))
    path, request = collector[0]
    assert path == "/v1/metrics"
    assert about(request)["service.name"] == "unison"
    assert about(request)["service.instance.id"].endswith(f"-{os.getpid()}")
    values, counters = values_in(request)
    of_worker = ("worker", "worker 0")
    assert values["unison_steps",] == 7
    assert values["unison_worker_memory_bytes", of_worker] == 1000
    assert values["unison_worker_checkpoint_interval_steps", of_worker] == 3
    assert values["unison_worker_device_utilization", of_worker] == 0.5
    assert ("unison_loss",) not in values
    assert {"unison_steps", "unison_restarts", "unison_worker_steps"} <= counters
    assert "unison_worker_up" not in counters
    last, _ = values_in(collector[-1][1])
    assert last["unison_steps",] == 9


def test_the_name_of_the_service_is_the_users(collector, monkeypatch):
    monkeypatch.setenv("OTEL_SERVICE_NAME", "training")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.instance.id=7,team=vision")
    with OpenTelemetryExport(watched(told())):
        pass
    found = about(collector[-1][1])
    assert found["service.name"] == "training"
    assert found["service.instance.id"] == "7"
    assert found["team"] == "vision"


def test_a_forked_child_sends_nothing(collector):
    with OpenTelemetryExport(watched(told())):
        child = os.fork()
        if not child:
            time.sleep(0.5)
            os._exit(threading.active_count() - 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("value", ["0", "a minute"])
def test_a_malformed_interval_ends_the_command(value, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", value)
    program = tmp_path / "train.py"
    program.write_text("")
    assert main(["run", "--opentelemetry", str(program)]) == 2
    assert value in capsys.readouterr().err


def test_the_first_worker_sends_what_it_can(collector, monkeypatch, caplog):
    monkeypatch.setenv("UNISON_OPENTELEMETRY", "1")
    monkeypatch.setenv("UNISON_METRICS_ADDRESS", "nowhere")
    job = first_worker._entered(["worker 0"], "workers")
    job.hear("worker 0", told(steps=3))
    job.__exit__()
    assert values_in(collector[-1][1])[0]["unison_steps",] == 3
    assert caplog.text.count("Expected HOST:PORT") == 1


def test_where_nobody_listens_the_job_goes_on(monkeypatch, caplog):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(otlp, "_LAST_WORD", 0.2)
    with OpenTelemetryExport(watched(told())) as export:
        pass
    export._thread.join(20)
    assert not export._thread.is_alive()
    assert "metrics" in caplog.text


def test_without_the_sdk_the_error_names_the_extra(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.metrics.export", None)
    program = tmp_path / "train.py"
    program.write_text("")
    assert main(["run", "--opentelemetry", str(program)]) == 2
    assert "pip install 'unison[otel]'" in capsys.readouterr().err


def test_the_environment_asks_for_it(monkeypatch):
    assert not otlp.is_asked()
    monkeypatch.setenv(otlp.VARIABLE, "1")
    assert otlp.is_asked()
    monkeypatch.setenv(otlp.VARIABLE, "yes")
    with pytest.raises(ValueError, match="Expected 0 or 1 for the variable UNISON_OPENTELEMETRY"):
        otlp.is_asked()


def test_a_job_of_which_only_opentelemetry_is_told_has_its_workers_report(collector):
    monitored = Monitored("train.py", "workers", ["worker 0"], is_wanted=False, is_exported=True)
    with contextlib.closing(contextlib.ExitStack()) as ending:
        ending.enter_context(monitored)
        assert monitored.is_watched
