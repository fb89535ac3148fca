"""Metrics that leave the machine: an address, a token, a dashboard, and alerts."""

import contextlib
import http.client
import json
import math
import re
import socket
import ssl
from argparse import Namespace

import jax.numpy as jnp
import keras
import numpy as np
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

import unison
from monitoring_reports import told, watched
from unison.cli import hosts, main
from unison.errors import UnavailableError
from unison.monitoring import first_worker
from unison.monitoring import meter as meters
from unison.monitoring.launcher import Monitored
from unison.monitoring.meter import Meter
from unison.monitoring.metrics_endpoint import MetricsEndpoint, MetricsPlace, place_of
from unison.monitoring.prometheus import exposition
from unison.strategies import observing

TOKEN = "the-token-of-this-test"


@pytest.fixture
def port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def ask(port, path="/metrics", token=TOKEN, method="GET", host="train.example"):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    with contextlib.closing(connection):
        headers = {"Host": host} | ({"Authorization": f"Bearer {token}"} if token else {})
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def metrics_of(text):
    """The values of a text in Prometheus' format, as its own client reads it."""
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_who_has_the_token_gets_metrics_under_any_name_of_the_machine(port):
    with MetricsEndpoint(watched(told(steps=7)), MetricsPlace("127.0.0.1", port, TOKEN)):
        status, text = ask(port)
        assert status == 200
        assert metrics_of(text)["unison_steps_total",] == 7
        assert ask(port, "/")[0] == ask(port, "/state.json")[0] == 404
        assert ask(port, method="POST")[0] == 501


@pytest.mark.parametrize("token", [None, "wrong", TOKEN[:-1]])
def test_nobody_gets_metrics_without_the_token(port, token):
    with MetricsEndpoint(watched(told()), MetricsPlace("127.0.0.1", port, TOKEN)):
        for path in ("/metrics", f"/metrics?token={TOKEN}", "/"):
            status, said = ask(port, path, token=token)
            assert status == 403
            assert "worker" not in said


def ask_by_https(port):
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=20, context=context)
    with contextlib.closing(connection):
        connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {TOKEN}"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def test_other_machines_have_to_ask_by_https(port, monkeypatch):
    with MetricsEndpoint(watched(told(steps=7)), MetricsPlace("127.0.0.1", port, TOKEN)):
        assert ask_by_https(port)[0] == ask(port)[0] == 200  # on this machine, either
        monkeypatch.setenv("UNISON_TLS", "always")
        status, said = ask(port)
        assert (status, said) == (403, "Ask by HTTPS: UNISON_TLS is on.\n")
        status, text = ask_by_https(port)
        assert status == 200
        assert metrics_of(text)["unison_steps_total",] == 7


@pytest.mark.parametrize(
    ("address", "token", "said"),
    [
        ("9400", TOKEN, r"Expected HOST:PORT as the address of metrics.* Received: '9400'"),
        ("host:0", TOKEN, "Expected HOST:PORT"),
        ("0.0.0.0:9400", None, r"need a token of at least 16 characters in UNISON_METRICS_TOKEN"),
        ("127.0.0.1:9400", "short", "Received: 5 characters"),
    ],
)
def test_an_address_that_cannot_be_served_is_refused(monkeypatch, address, token, said):
    monkeypatch.delenv("UNISON_METRICS_TOKEN", raising=False)
    if token is not None:
        monkeypatch.setenv("UNISON_METRICS_TOKEN", token)
    with pytest.raises(ValueError, match=said):
        place_of(address)


def test_the_option_comes_before_the_variable(monkeypatch):
    monkeypatch.setenv("UNISON_METRICS_TOKEN", TOKEN)
    assert place_of(None) is None
    monkeypatch.setenv("UNISON_METRICS_ADDRESS", "[::1]:9400")
    assert place_of(None) == ("::1", 9400, TOKEN)
    assert place_of("10.0.0.1:9401") == ("10.0.0.1", 9401, TOKEN)


def test_a_job_says_if_its_metrics_cannot_be_served(port):
    place = MetricsPlace("127.0.0.1", port, TOKEN)
    second = Monitored("train.py", "workers", ["worker 0"], metrics=place)
    with (
        MetricsEndpoint(watched(told()), place),
        pytest.raises(UnavailableError, match=f"Cannot serve metrics at 127.0.0.1:{port}"),
    ):
        second.__enter__()


def test_a_job_that_unison_top_may_not_watch_can_have_metrics(port):
    place = MetricsPlace("127.0.0.1", port, TOKEN)
    with Monitored("train.py", "workers", ["worker 0"], False, place) as monitored:
        assert monitored.is_watched
        monitored.hear("worker 0", told(steps=5))
        assert metrics_of(ask(port)[1])["unison_worker_steps_total", ("worker", "worker 0")] == 5


def test_the_first_worker_of_other_launchers_serves_metrics(port, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("UNISON_METRICS_TOKEN", TOKEN)
    monkeypatch.setenv("UNISON_METRICS_ADDRESS", f"127.0.0.1:{port}")
    send = first_worker.tell_first_worker(None)
    try:
        send(told(steps=3))
        assert metrics_of(ask(port)[1])["unison_steps_total",] == 3
    finally:
        first_worker.close()


def test_a_wrong_address_does_not_end_a_program(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("UNISON_METRICS_ADDRESS", "nowhere")
    try:
        assert first_worker.tell_first_worker(None) is not None
    finally:
        first_worker.close()
    assert "This job's metrics are not served: Expected HOST:PORT" in caplog.text


def test_restarts_are_counted_and_what_was_before_is_forgotten():
    with Monitored("train.py", "workers", ["worker 0", "worker 1"], False) as monitored:
        for worker in ("worker 0", "worker 1"):
            monitored.hear(worker, told(worker, steps=9, process=1, loss=[9, math.nan]))
        monitored.starts_again(["worker 2", "worker 1"], "all workers are started again")
        state = monitored.job.as_dict()
        assert [worker["name"] for worker in state["workers"]] == ["worker 1", "worker 2"]
        assert {worker["state"] for worker in state["workers"]} == {"starting"}
        assert state["restarts"] == 1
        assert state["workers"][0]["loss_is_finite"] is None  # of the process before
        assert state["events"][-1]["text"] == "all workers are started again"
        lost = {"event": "process lost", "worker": 1, "why": "SIGKILL"}
        monitored.happened({**lost, "again_in": 0.0, "restart": 2}, None)
        monitored.happened({**lost, "given_up": "all are used"}, None)
        assert metrics_of(exposition(monitored.job.as_dict()))["unison_restarts_total",] == 2


def test_a_loss_that_is_no_number_is_told_as_such():
    job = watched(told(loss=[1, 0.5]))
    finite = ("unison_worker_loss_is_finite", ("worker", "worker 0"))
    assert metrics_of(exposition(job.as_dict()))[finite] == 1
    job.hear(told(loss=None))
    assert metrics_of(exposition(job.as_dict()))[finite] == 1
    job.hear(told(loss=[2, math.nan]))
    found = metrics_of(exposition(job.as_dict()))
    assert found[finite] == 0
    assert found["unison_worker_loss", ("worker", "worker 0")] == 0.5


@pytest.mark.parametrize(("replicas", "cores"), [(2, 1), (1, 2)])
def test_the_products_of_fit_are_counted(monkeypatch, replicas, cores):
    monkeypatch.setattr(meters, "_MARK_EVERY", 0.0)
    meter = Meter()
    monkeypatch.setattr(observing, "step_observer", meter)
    devices = [f"CPU:{index}" for index in range(2)]
    strategy = unison.MirroredStrategy(devices)
    if cores == 2:
        strategy = unison.ModelParallelStrategy(devices, mesh={"batch": 1, "model": 2})
    with strategy.scope():
        model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(32)])
        model.compile("sgd", "mse")
    model.fit(np.ones((40, 16)), np.ones((40, 32)), batch_size=8, epochs=2, verbose=0)
    forward = 2 * 8 * 16 * 32  # and as many for the gradient of the weights; the input has none
    assert meter.operations == 10 * 2 * forward
    assert (len(meter.devices), meter.cores_per_replica) == (replicas, cores)


def test_the_products_of_a_loop_are_counted(monkeypatch):
    meter = Meter()
    monkeypatch.setattr(observing, "step_observer", meter)
    strategy = unison.MirroredStrategy(["CPU:0", "CPU:1"])
    for _ in range(7):
        strategy.run(lambda x: x @ x, args=(jnp.ones((4, 4)),))
    # The first two calls could have been of anything.
    assert meter.operations == (7 - 2) * 2 * (2 * 4 * 4 * 4)


def test_utilization_is_the_part_of_what_the_devices_could_compute():
    about = {"peak_operations": 1000, "now": 10.0, "operations": 0}
    job = watched(
        told(steps=1, **about), told(steps=2, **about | {"now": 14.0, "operations": 1600})
    )
    of_worker = ("unison_worker_mfu", ("worker", "worker 0"))
    assert metrics_of(exposition(job.as_dict()))[of_worker] == pytest.approx(0.4)
    assert of_worker not in metrics_of(exposition(watched(told(), told(now=1001.0)).as_dict()))


@pytest.mark.parametrize("asked", ["--metrics-address=127.0.0.1:9400", "--opentelemetry"])
@pytest.mark.parametrize("option", ["--hosts=a,b", "--env=slurm"])
def test_metrics_are_of_workers_that_this_command_starts(option, asked, tmp_path, capsys):
    program = tmp_path / "train.py"
    program.touch()
    assert main(["run", option, asked, str(program)]) == 2
    assert asked.partition("=")[0] in capsys.readouterr().err


def test_the_token_is_on_no_command_line(monkeypatch, tmp_path):
    monkeypatch.setenv("UNISON_METRICS_TOKEN", TOKEN)
    monkeypatch.setenv("UNISON_METRICS_ADDRESS", "10.0.0.1:9400")
    options = Namespace(
        hosts="127.0.0.1,other",
        workers=None,
        rendezvous="127.0.0.1:9",
        rendezvous_timeout=None,
        devices_per_worker=None,
        no_monitor=False,
        module=False,
        script="train.py",
        arguments=[],
    )
    made, _ = hosts.programs(options)
    assert not any("METRICS" in argument for each in made for argument in each.arguments)
    assert not any("METRICS" in name for each in made for name in each.environment)


# -- Grafana and alerts -------------------------------------------------------------------------


def names_in(text):
    return set(re.findall(r"\bunison_[a-z_]+", text))


@pytest.fixture
def known():
    """The names of all metrics."""
    about = {"loss": [1, 0.5], "memory": 1, "device_memory": 1, "sent": 1, "peak_operations": 1}
    about |= {"utilization": 0.5, "checkpoint": [1, 3, 0.01]}
    job = watched(told(steps=9, now=10.0, **about), told(steps=19, now=11.0, **about))
    state = job.as_dict()
    state["examples_per_second"] = state["last_recovery_seconds"] = 1.0
    state["workers"][0]["phases"] = {"input": 0.1}
    return names_in(exposition(state))


def test_the_dashboard_shows_metrics_that_there_are(capsys, known):
    assert main(["top", "--grafana"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert names_in(json.dumps(shown)) <= known
    assert len({panel["id"] for panel in shown["panels"]}) == len(shown["panels"]) > 10
    taken = set()
    for panel in shown["panels"]:
        place = panel["gridPos"]
        cells = {
            (place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])
        }
        assert not cells & taken
        assert max(x for x, _ in cells) < 24
        taken |= cells
    variables = {variable["name"] for variable in shown["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(shown["panels"])))
    assert used <= variables


def test_the_alerts_are_about_metrics_that_there_are(capsys, known):
    assert main(["top", "--alerts"]) == 0
    text = capsys.readouterr().out
    [group] = yaml.safe_load(text)["groups"]
    assert len(group["rules"]) == 6
    for rule in group["rules"]:
        assert names_in(rule["expr"]) <= known
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"]
