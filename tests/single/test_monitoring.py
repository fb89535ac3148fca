"""`unison.monitoring`: what is counted in a worker, what is made of it, and who may see it."""

import atexit
import base64
import contextlib
import fcntl
import hashlib
import http.client
import json
import logging
import math
import os
import queue
import re
import socket
import stat
import textwrap
import time
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import unison
from connections import ended, is_closed, until
from left_over import Since
from monitoring_reports import state_of_the_job, state_when, told, watched
from unison.monitoring import first_worker, page, reporting, running_jobs
from unison.monitoring import meter as meters
from unison.monitoring.collector import Collector
from unison.monitoring.job import Curve
from unison.monitoring.launcher import Monitored
from unison.monitoring.meter import Meter
from unison.monitoring.process import SentBytes
from unison.monitoring.prometheus import exposition
from unison.monitoring.reporting import Reporter
from unison.net.lines import Line
from unison.net.runtime_folder import runtime_folder
from unison.runtime import liveness
from unison.runtime.elastic.membership import Membership
from unison.runtime.elastic.register import Register
from unison.runtime.launching import Job, Program
from unison.runtime.launching.workers import REPORTS_VARIABLE
from unison.runtime.liveness.star import Star
from unison.storage.locks import lock
from unison.strategies import observing
from unison.strategies.default import DefaultStrategy


@pytest.fixture
def meter(monkeypatch):
    """A meter that looks at the steps of this process, and writes all of them down."""
    monkeypatch.setattr(meters, "_MARK_EVERY", 0.0)
    monkeypatch.setattr(meters, "_LOSS_EVERY", 0.0)
    made = Meter()
    monkeypatch.setattr(observing, "step_observer", made)
    return made


@pytest.fixture
def strategy():
    return unison.MirroredStrategy(["CPU:0", "CPU:1"])


@pytest.fixture(autouse=True)
def own_folder(monkeypatch, tmp_path):
    """The jobs of this test, and no others."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def worker_in(job, name):
    known = job.job if isinstance(job, Monitored) else job
    return next(worker for worker in known.as_dict()["workers"] if worker["name"] == name)


# -- in the worker -----------------------------------------------------------------------------


def test_the_steps_and_examples_of_a_loop_of_the_users_own_are_counted(meter, strategy):
    def train(x):
        return x.sum()

    def evaluate(x):
        return x.mean()

    for batch in strategy.experimental_distribute_dataset([np.ones(6, np.float32)] * 5):
        strategy.run(train, args=(batch,))
    strategy.run(evaluate, args=(batch,))
    assert (meter.steps, meter.examples) == (5, 18)  # two steps before it was known to be the loop


def test_steps_that_the_program_counts_itself_never_go_back(meter, strategy):
    def train():
        return jnp.ones(())

    for step in range(1001, 1006):
        strategy.run(train)
        meter.count_to(step)
    assert meter.steps == 1005
    assert [step for step, *_ in meter.marks] == [1000, 1001, 1002, 1003, 1004]


def test_the_pace_is_not_that_of_what_runs_between_the_steps(meter, strategy):
    def train():
        return jnp.ones(())

    def evaluate():
        return jnp.zeros(())

    for _ in range(4):
        strategy.run(train)
    strategy.run(evaluate)
    strategy.run(train)
    assert [has_paused for *_, has_paused in meter.marks][1:] == [False, True]


def loss_when_ready(meter):
    """The loss of a step that has been dispatched."""
    last = time.monotonic() + 60
    while (loss := meter.loss()) is None and time.monotonic() < last:
        time.sleep(0.01)
    return loss


def test_the_steps_examples_and_loss_of_fit_are_counted(meter, strategy):
    import keras

    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    losses = []
    looking = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: losses.append(loss_when_ready(meter))
    )
    x = np.arange(60, dtype=np.float32).reshape(20, 3) / 30
    fit = {"batch_size": 10, "epochs": 2, "shuffle": False, "verbose": 0, "callbacks": [looking]}
    history = model.fit(x, x[:, :1], **fit)
    model.evaluate(x, x[:, :1], batch_size=5, verbose=0)
    assert (meter.steps, meter.examples) == (4, 40)
    assert [step for step, _ in losses] == [1, 2, 3, 4]
    means = np.reshape([loss for _, loss in losses], (2, 2)).mean(1)
    np.testing.assert_allclose(means, history.history["loss"], rtol=1e-5)
    assert meter.loss() is None


def test_a_loss_is_that_of_the_examples_since_the_last_look(meter):
    meter._loss = (4, [np.float32(12.0), np.float32(4.0)], "first")
    assert meter.loss() == (4, 3.0)
    meter._loss = (8, [np.float32(16.0), np.float32(8.0)], "first")
    assert meter.loss() == (8, 1.0)
    meter._loss = (9, [np.float32(0.5), np.float32(1.0)], "next")
    assert meter.loss() == (9, 0.5)


def test_a_loss_is_that_of_its_epoch_if_the_one_before_was_left_earlier(meter, strategy):
    import keras

    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, trainable=False)])
        model.compile("sgd", "mse")
    losses = []

    class Looking(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            # In the first epoch after the first step, in the second one after the third.
            if (self.params["epoch"], batch) in [(0, 0), (1, 2)]:
                losses.append(loss_when_ready(meter))
            else:
                meter._loss = None
                meter._next_loss = 0.0

        def on_epoch_begin(self, epoch, logs=None):
            self.params["epoch"] = epoch

    x = np.zeros((6, 1), np.float32)
    y = np.float32([[9], [9], [1], [1], [2], [2]])
    model.fit(x, y, batch_size=2, epochs=2, shuffle=False, verbose=0, callbacks=[Looking()])
    assert losses == [(1, 81.0), (6, pytest.approx((81 + 1 + 4) / 3))]


def test_a_report_of_an_older_version_lacks_what_may_be_unknown():
    report = told(steps=3)
    for name in ("utilization", "checkpoint", "peak_operations"):
        del report[name]
    worker = watched(report).as_dict()["workers"][0]
    assert worker["step"] == 3
    assert worker["utilization"] is worker["checkpoint_age"] is None


def test_a_loss_is_that_of_its_model(meter, strategy):
    import keras

    losses = []
    looking = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: losses.append(loss_when_ready(meter))
    )
    x = np.zeros((4, 1), np.float32)
    for target in (10.0, 1.0):
        with strategy.scope():
            model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
            model.compile(keras.optimizers.SGD(0.0), "mse")
        model.fit(x, x + target, batch_size=2, shuffle=False, verbose=0, callbacks=[looking])
    assert [loss for _, loss in losses] == [100.0, 100.0, 1.0, 1.0]


def test_a_loss_that_is_not_computed_or_deleted_is_not_read(meter):
    value = jnp.ones(())
    meter.note_loss(value)
    value.delete()
    assert meter.loss() is None
    meter.note_loss("a word")
    assert meter.loss() is None


def test_a_step_costs_microseconds():
    """No assertion on time: what it must not do is to wait for a device or to send."""
    meter = Meter()
    since = Since()
    for _ in range(10_000):
        meter._begin()
    assert meter.steps == 10_000
    assert len(meter.marks) < 1000
    assert since.threads() == []


def test_what_a_program_reports_itself_is_told(monkeypatch, meter):
    reporter = Reporter(send=lambda told: None)
    monkeypatch.setattr(reporting, "_reporter", reporter)
    unison.monitoring.report(jnp.float32(0.25), step=7, examples=70)
    gathered = reporter.gathered()
    assert {name: gathered[name] for name in ("steps", "examples", "loss")} == {
        "steps": 7,
        "examples": 70,
        "loss": (7, 0.25),
    }
    assert gathered["memory"] > 2**20


def test_without_somebody_who_watches_a_report_does_nothing():
    unison.monitoring.report(loss=jnp.ones(()))


@pytest.fixture
def pipe(monkeypatch):
    """A pipe to which this process has been told to report, and which nobody does yet."""
    monkeypatch.setattr(reporting, "_reporter", None)
    monkeypatch.setattr(observing, "step_observer", None)
    reading, writing = os.pipe()
    monkeypatch.setenv(REPORTS_VARIABLE, f"{writing}:{os.fstat(writing).st_ino}")
    with open(reading, "rb") as lines:
        yield lines
        if reporting._reporter is not None:
            reporting._reporter.end()
            atexit.unregister(reporting._reporter.end)
        with contextlib.suppress(OSError):
            os.close(writing)


def test_importing_starts_nothing_and_the_first_strategy_does():
    program = """
        import os, threading
        own = lambda: {name: os.environ[name] for name in os.environ if "UNISON" in name}
        named = lambda: [t.name for t in threading.enumerate() if "unison" in t.name]
        before = own()
        import unison, unison.keras, unison.monitoring
        print(named(), own() == before, unison.strategies.observing.step_observer)
        unison.OneDeviceStrategy("CPU:0")
        print(named(), unison.strategies.observing.step_observer is not None)
    """
    lines, reports = [], []
    started = Program(
        ["-c", textwrap.dedent(program)], {}, on_report=lambda line, ahead: reports.append(line)
    )
    with Job([started], lambda _, line: lines.append(line)) as job:
        assert job.wait(100) is None
    assert lines == ["[] True None", "['unison-monitor'] True"]
    assert [json.loads(report)["has_ended"] for report in reports][-1] is True


def test_reports_go_to_the_pipe_and_no_other_process_is_told_of_it(pipe, monkeypatch, meter):
    monkeypatch.setattr(reporting, "EVERY", 0.01)
    unison.OneDeviceStrategy("CPU:0")
    assert observing.step_observer is meter  # who looks at the steps already is not replaced
    assert REPORTS_VARIABLE not in os.environ
    first, second = (json.loads(pipe.readline()) for _ in range(2))
    assert first["process"] == os.getpid()
    assert first["now"] < second["now"]


def test_in_a_group_that_changes_reports_go_to_its_register(monkeypatch):
    monkeypatch.setattr(reporting, "_reporter", None)
    monkeypatch.setattr(reporting, "EVERY", 0.01)
    monkeypatch.setenv(reporting.ELASTIC_VARIABLE, "1")
    told = queue.Queue()
    reporting.start_if_asked()  # with no strategy that has a group
    assert reporting._reporter is None
    strategy = types.SimpleNamespace(group=types.SimpleNamespace(report=told.put))
    reporting.start_if_asked(strategy)
    try:
        assert told.get(timeout=20)["process"] == os.getpid()
    finally:
        reporting._reporter.end()
        atexit.unregister(reporting._reporter.end)


def test_the_register_passes_reports_on_with_the_names_that_it_knows():
    told = queue.Queue()
    waits = {"heartbeat_timeout": 20.0, "wait": 20.0}
    about = {"name": "worker 0", "host": "here", "replicas": 1, "slot": 0, "software": {}}
    with Register(
        1,
        1,
        token="secret",
        start_timeout=20.0,
        on_event=lambda event: None,
        on_report=lambda *said: told.put(said),
        **waits,
    ) as register:
        worker = Membership(register.address, "secret", about, "127.0.0.1:5000", **waits)
        worker.enter()
        worker.report({"worker": "another", "steps": 7})
        assert told.get(timeout=20) == ("worker 0", {"worker": "another", "steps": 7})
        worker.regroup(step=None)
        worker.confirm()  # nothing else has changed
        worker.done()
        worker.close()


@pytest.fixture
def by_itself(monkeypatch):
    """This process is to let others watch its job, and does not do so yet."""
    monkeypatch.setattr(reporting, "_reporter", None)
    monkeypatch.setattr(reporting, "EVERY", 0.01)
    monkeypatch.setattr(observing, "step_observer", None)
    monkeypatch.setenv(first_worker.VARIABLE, "1")
    yield
    if reporting._reporter is not None:
        reporting._reporter.end()
        atexit.unregister(reporting._reporter.end)
    first_worker.close()
    atexit.unregister(first_worker.close)


#: A job that goes on for as long as a test waits.
ENDLESS = types.SimpleNamespace(poll=lambda: None)


def test_a_process_that_something_else_has_started_serves_what_it_does(by_itself, own_folder):
    reporting.start_if_asked()  # before it is known who the workers are
    assert state_of_the_job() is None
    unison.OneDeviceStrategy("CPU:0")
    unison.monitoring.report(0.5, step=3)
    state = state_when(lambda state: state["loss"] == 0.5, ENDLESS)
    assert [(worker["name"], worker["step"]) for worker in state["workers"]] == [("worker 0", 3)]
    assert state["workers"][0]["process"] == os.getpid()
    assert first_worker.VARIABLE not in os.environ  # for its children, which are no workers
    first_worker.close()
    assert list(own_folder.rglob("*.json")) == []


@pytest.mark.parametrize("said", ["", "0"])
def test_a_process_serves_nothing_unless_it_is_asked(by_itself, monkeypatch, said):
    monkeypatch.setenv(first_worker.VARIABLE, said)
    unison.OneDeviceStrategy("CPU:0")
    assert reporting._reporter is None
    assert running_jobs.running_jobs() == []


def test_who_reports_to_a_launcher_serves_nothing_itself(pipe, by_itself):
    unison.OneDeviceStrategy("CPU:0")
    assert json.loads(pipe.readline())["process"] == os.getpid()
    assert first_worker.VARIABLE not in os.environ
    assert running_jobs.running_jobs() == []


@pytest.fixture
def second_worker(monkeypatch):
    """The second of two workers, the first of which is this process."""
    here, there = socket.socketpair()
    liveness.start(["worker 0 (a:1)", "worker 1 (b:1)"], 0, {1: Line(here)}, 100.0)
    other = Star(1, {0: Line(there)})
    yield other
    other.say({"is": "left", "count": 0, "mark": ""})
    other.close()
    liveness.stop()


def test_the_first_worker_serves_what_all_report(by_itself, second_worker):
    unison.OneDeviceStrategy("CPU:0")
    ahead = 5.0  # the other one's clock
    for strange in ({}, {"told": 7}, {"told": "{"}, {"told": "[]"}, {"told": "{}"}):
        second_worker.say({"is": "report"} | strange)
    for now, steps in ((0.0, 0), (10.0, 100)):
        report = told("another", now=time.time() + ahead + now, steps=steps)
        second_worker.say({"is": "report", "told": json.dumps(report)})
        second_worker.hear(0.01)
    state = state_when(
        lambda s: s["workers"][0]["process"] and s["workers"][1]["step"] == 100, ENDLESS
    )
    assert [worker["name"] for worker in state["workers"]] == ["worker 0", "worker 1"]
    assert state["workers"][0]["process"] == os.getpid()
    assert liveness.failure() is None


def test_the_servers_of_another_job_are_not_shown(by_itself):
    unison.OneDeviceStrategy("CPU:0")
    assert first_worker.serves("worker 0")
    assert not first_worker.serves("ps 0")
    first_worker.hear("ps 0", told("ps 0", now=time.time()))
    first_worker.hear("worker 0", told("worker 0", now=time.time(), steps=7))
    state = state_when(lambda s: s["workers"][0]["step"] == 7, ENDLESS)
    assert [worker["name"] for worker in state["workers"]] == ["worker 0"]


def test_another_worker_reports_to_the_first(by_itself):
    here, there = socket.socketpair()
    first = Star(0, {1: Line(there)})
    liveness.start(["worker 0 (a:1)", "worker 1 (b:1)"], 1, {0: Line(here)}, 100.0)
    try:
        unison.OneDeviceStrategy("CPU:0")
        assert running_jobs.running_jobs() == []
        last = time.monotonic() + 20
        heard = []
        while not any(message["is"] == "report" for message in heard):
            assert time.monotonic() < last
            heard += [message for _, message in first.hear(0.1)]
        report = next(message for message in heard if message["is"] == "report")
        assert json.loads(report["told"])["process"] == os.getpid()
    finally:
        first.say({"is": "left", "count": 0, "mark": ""})
        first.close()
        liveness.stop()


def test_a_coordinator_serves_what_its_workers_and_servers_answer(by_itself, started):
    started(workers=2, servers=1)
    state = state_when(lambda s: all(worker["process"] for worker in s["workers"]), ENDLESS)
    assert state["kind"] == "parameter servers"
    assert [(worker["name"], worker["state"]) for worker in state["workers"]] == [
        ("chief", "starting"),  # it has not run a step
        ("worker 0", "running"),
        ("worker 1", "running"),
        ("ps 0", "running"),
    ]


def test_the_default_strategy_says_nothing_of_the_other_workers(by_itself):
    DefaultStrategy(jax.local_devices()[:1])
    assert running_jobs.running_jobs() == []
    assert first_worker.VARIABLE in os.environ


def test_the_clock_of_another_worker_is_compared_by_its_fastest_reports(monkeypatch):
    clock = first_worker._Clock()
    heard_at = iter([100.5, 101.002, 102.3])
    own_clock = types.SimpleNamespace(time=lambda: next(heard_at))
    monkeypatch.setattr(first_worker, "time", own_clock)
    aheads = [clock.ahead(said_at + 5.0) for said_at in (100.0, 101.0, 102.0)]
    assert aheads == pytest.approx([4.5, 4.998, 4.998])


def test_a_child_leaves_the_serving_to_its_parent(by_itself):
    unison.OneDeviceStrategy("CPU:0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX has threads
        child = os.fork()
    if not child:
        try:
            first_worker.close()
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert len(running_jobs.running_jobs()) == 1


@pytest.mark.parametrize("said", ["", "7", "x:y", "9999:1", "{}:1"])
def test_a_variable_that_names_no_pipe_does_not_end_a_program(monkeypatch, said, tmp_path):
    monkeypatch.setattr(reporting, "_reporter", None)
    with (tmp_path / "file").open("w") as other:  # now a file has the number that the pipe had
        monkeypatch.setenv(REPORTS_VARIABLE, said.format(other.fileno()))
        reporting.start_if_asked()
    assert reporting._reporter is None
    assert (tmp_path / "file").read_text() == ""


def test_a_worker_does_not_notice_that_nobody_hears_it(pipe, monkeypatch):
    monkeypatch.setattr(reporting, "EVERY", 0.01)
    pipe.close()
    reporting.start_if_asked()
    reporter = reporting._reporter
    reporter._thread.join(20)
    assert not reporter._thread.is_alive()  # it has given up
    reporter.end()


def test_a_launcher_that_is_stopped_does_not_keep_a_program_from_ending(pipe, monkeypatch):
    monkeypatch.setattr(reporting, "EVERY", 0.0)
    monkeypatch.setattr(reporting, "_LAST_WORD", 0.01)
    writing = int(os.environ[REPORTS_VARIABLE].partition(":")[0])
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, bytes(1000))
    os.set_blocking(writing, True)
    reporting.start_if_asked()
    reporting._reporter.end()
    assert reporting._reporter._thread.is_alive()  # it waits for somebody to read


def test_a_value_that_cannot_be_read_now_is_no_end_of_the_reports(monkeypatch):
    monkeypatch.setattr(reporting, "EVERY", 0.01)
    told = queue.Queue()
    reporter = Reporter(told.put)
    answers = iter([RuntimeError("deleted"), None])
    monkeypatch.setattr(reporter.meter, "loss", lambda: raised(next(answers, None)))
    reporter.start()
    assert told.get(timeout=20)["loss"] is None
    reporter.end()


def raised(error):
    if error is not None:
        raise error


def test_the_last_report_comes_when_the_program_ends(monkeypatch):
    monkeypatch.setattr(reporting, "_LAST_WORD", 20.0)
    monitored = Monitored("train.py", "workers", ["worker 0"])
    reporter = Reporter(lambda told: monitored.hear("worker 0", told))
    reporter.start()
    reporter.meter.count_to(5)
    reporter.end()
    assert worker_in(monitored, "worker 0")["state"] == "ended"
    assert worker_in(monitored, "worker 0")["step"] == 5


def test_the_bytes_that_connections_have_sent_are_counted_also_of_closed_ones():
    sent = SentBytes()
    before = sent.count()
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as sender:
            receiver, _ = server.accept()
            with receiver:
                sender.sendall(bytes(1000))
                assert receiver.recv(1000, socket.MSG_WAITALL)
                first = sent.count()
        second = sent.count()
    assert 1000 <= first - before < 1100
    assert second >= first


# -- what is made of it ------------------------------------------------------------------------


def test_rates_and_percentiles_are_those_of_the_latest_reports():
    job = watched(
        told(now=1000.0, steps=0, examples=0, sent=100, waited=0.0),
        told(now=1004.0, steps=40, examples=1280, sent=500, waited=1.0),
        workers=["worker 0"],
    )
    state = job.as_dict()
    assert state["step"] == 40
    assert state["examples_per_second"] == pytest.approx(320.0)
    assert state["step_seconds"] == pytest.approx({"p50": 0.1, "p90": 0.1, "p99": 0.1})
    (worker,) = state["workers"]
    assert worker["phases"] == pytest.approx({"input": 0.25, "others": None, "computing": 0.75})
    assert worker["sent_bytes_per_second"] == pytest.approx(100.0)


def test_a_pause_between_steps_is_no_step():
    marks = [[0, 10.0, False], [1, 10.1, False], [2, 60.0, True], [3, 60.1, False]]
    job = watched(told(steps=4, marks=marks), workers=["worker 0"])
    assert job.as_dict()["step_seconds"]["p99"] == pytest.approx(0.1)


def test_the_worker_that_begins_steps_last_because_of_its_input_is_the_straggler():
    late = [[step, 990.06 + step / 10, False] for step in range(100)]
    job = watched(
        told("worker 0", now=990.0, steps=0),
        told("worker 1", now=990.0, steps=0, marks=[]),
        told("worker 0", now=1000.0, steps=100),
        told("worker 1", now=1000.0, steps=100, marks=late, waited=6.0),
    )
    state = job.as_dict()
    assert state["stragglers"] == [
        "worker 1 keeps the others waiting: it begins a step 60 ms after them, and waits for its "
        "input for 60% of its time"
    ]
    assert worker_in(job, "worker 0")["phases"]["others"] == pytest.approx(0.6)
    assert worker_in(job, "worker 1")["phases"]["others"] == 0.0


def test_a_worker_that_does_not_come_to_the_step_of_the_others_is_the_straggler():
    job = watched(
        told("worker 0", now=1000.0, steps=101),
        told("worker 1", now=1000.0, steps=100),
        told("worker 0", now=1020.0, steps=101, marks=[]),
        told("worker 1", now=1020.0, steps=100, marks=[]),
    )
    assert job.as_dict()["stragglers"] == ["worker 1 has kept the others waiting for 20 s"]


def test_a_hang_in_a_step_that_began_between_two_marks_has_its_straggler(monkeypatch):
    monkeypatch.setattr(meters, "_MARK_EVERY", 3600.0)
    others = Reporter(lambda told: None)
    others.meter.count_to(96)  # a mark: 95 had begun before
    for _ in range(5):
        others.meter._begin()
    first, second = others.gathered(), others.gathered()
    assert [step for step, *_ in first["marks"]] == [95, 100]
    assert second["marks"] == []  # it is told once
    now = first["now"]
    job = watched(
        {**first, "worker": "worker 0"},
        told("worker 1", now=now, steps=100, marks=[]),
        {**second, "worker": "worker 0", "now": now + 20},
        told("worker 1", now=now + 20, steps=100, marks=[]),
    )
    (straggler,) = job.as_dict()["stragglers"]
    assert straggler.startswith("worker 1 has kept the others waiting for")


def test_workers_that_run_alike_are_no_stragglers():
    reports = [
        told(f"worker {w}", now=now, steps=s) for now, s in ((990, 0), (1000, 100)) for w in (0, 1)
    ]
    assert watched(*reports).as_dict()["stragglers"] == []


def test_a_worker_that_is_started_again_counts_anew():
    job = watched(
        told(steps=500, examples=5000, now=1000.0),
        told(steps=10, examples=100, now=1010.0, process=2),
        told(steps=20, examples=200, now=1011.0, process=2),
        workers=["worker 0"],
    )
    assert job.as_dict()["examples_per_second"] == pytest.approx(100.0)


def test_in_a_group_that_changes_the_step_is_that_of_all():
    job = watched(told(steps=10, position=400), kind="elastic")
    assert job.as_dict()["step"] == 400


def test_a_recovery_is_from_the_interruption_to_the_next_start():
    job = watched(told(), kind="elastic")
    job.happened({"event": "started"}, "the job runs")
    job.happened({"event": "process lost", "worker": 1}, "worker 1 was lost")
    job.happened({"event": "interrupted"})
    assert worker_in(job, "worker 1")["state"] == "lost"
    time.sleep(0.01)
    job.happened({"event": "started"}, "regrouped")
    job.happened({"event": "late", "worker": "worker 0"}, "worker 0 is late\nIts stack:\nstep()")
    state = job.as_dict()
    assert state["recoveries"] == 1
    assert state["last_recovery_seconds"] >= 0.01
    assert [event["text"] for event in state["events"]] == [
        "the job runs",
        "worker 1 was lost",
        "regrouped",
        "worker 0 is late",  # the stack is in the log
    ]


@pytest.mark.parametrize("end", ["goes on", "interrupted"])
def test_in_an_elastic_job_a_worker_straggles_by_the_word_of_the_register(end):
    job = watched(told("worker 0"), told("worker 1"), kind="elastic")
    job.happened({"event": "late", "worker": "worker 1"}, "worker 1 is late")
    assert job.as_dict()["stragglers"] == ["worker 1 has kept the others waiting"]
    job.happened({"event": end, "worker": "worker 1"})
    assert job.as_dict()["stragglers"] == []


def test_servers_and_their_workers_run_without_steps_of_their_own():
    job = watched(told("ps 0", steps=0), kind="parameter servers", workers=["chief", "ps 0"])
    assert worker_in(job, "ps 0")["state"] == "running"
    assert worker_in(job, "chief")["state"] == "starting"


def test_a_silent_worker_is_shown_as_such(monkeypatch):
    job = watched(told(), workers=["worker 0"])
    assert worker_in(job, "worker 0")["state"] == "running"
    later = time.monotonic() + 6
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert worker_in(job, "worker 0")["state"] == "silent"


def test_the_history_is_bounded():
    job = watched(workers=["worker 0"])
    for step in range(1, 3000):
        job.hear(told(steps=step, loss=[step, 1 / step], marks=[[step, float(step), False]]))
        job.happened({"event": "benched"}, "a line")
    state = job.as_dict()
    assert len(state["losses"]) <= 512
    assert state["losses"][0] == (1, 1.0)
    assert len(state["events"]) == 50
    curve = Curve(10)
    for x in range(100_000):
        curve.add(x, x)
    assert len(curve.points) <= 10


@pytest.mark.parametrize(
    "wrong",
    [
        {"steps": "many"},
        {"now": math.nan},
        {"marks": [[1]]},
        {"marks": [[0, math.inf, False]]},
        {"loss": [1]},
        {"worker": 3},
        {"memory": "all"},
    ],
)
def test_what_is_no_report_is_refused(wrong):
    with pytest.raises((KeyError, TypeError, ValueError)):
        watched(told(**wrong))


def test_a_loss_that_is_not_finite_is_no_point_of_the_curve():
    assert watched(told(loss=[1, math.nan])).as_dict()["losses"] == []


def test_prometheus_gets_what_is_known_and_nothing_else():
    text = exposition(watched(told('a "worker"', steps=3, sent=12)).as_dict())
    assert 'unison_worker_sent_bytes_total{worker="a \\"worker\\""} 12' in text.splitlines()
    assert "None" not in text
    sample = re.compile(r'^[a-z_]+(\{([a-z]+="([^"\\]|\\.)*",?)+\})? -?[\d.e+-]+$')
    assert all(line.startswith("# ") or sample.match(line) for line in text.splitlines())


# -- who may see it ----------------------------------------------------------------------------


@pytest.fixture
def collector():
    with Collector(watched(told())) as made:
        yield made


def ask(collector, path, *, token=None, method="GET", body=None, **headers):
    connection = http.client.HTTPConnection(collector.address, timeout=20)
    with contextlib.closing(connection):
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), answer.headers


@pytest.mark.parametrize("path", ["/", "/state.json", "/metrics", "/nowhere"])
@pytest.mark.parametrize("token", [None, "wrong", ""])
def test_nobody_sees_a_job_without_its_token(collector, path, token):
    status, said, _ = ask(collector, path, token=token)
    assert status == 403
    assert "token" in said
    assert "worker 0" not in said


def test_the_token_is_taken_from_the_header_or_from_the_url(collector):
    assert ask(collector, "/state.json", token=collector.token)[0] == 200
    assert ask(collector, f"/state.json?token={collector.token}")[0] == 200


def test_a_page_of_the_web_cannot_ask_under_a_name_of_its_own(collector):
    for host in ("evil.example", "evil.example:80", f"evil.example:{collector.address[-5:]}", ""):
        status, said, _ = ask(collector, "/state.json", token=collector.token, Host=host)
        assert (status, "worker" in said) == (403, False)
    port = collector.address.rpartition(":")[2]
    status, _, _ = ask(collector, "/state.json", token=collector.token, Host=f"localhost:{port}")
    assert status == 200


def test_connections_that_ask_for_nothing_are_few_and_keep_nobody_from_looking(collector):
    host, port = collector.address.split(":")
    since = Since()
    with contextlib.ExitStack() as flood:
        idle = [
            flood.enter_context(socket.create_connection((host, int(port)))) for _ in range(200)
        ]
        assert ask(collector, "/state.json", token=collector.token)[0] == 200
        until(lambda: sum(map(is_closed, idle)) >= 160)
        assert since.threads() == []


def test_who_asks_without_the_token_or_does_not_read_gets_no_thread(collector):
    host, port = collector.address.split(":")
    since = Since()
    with contextlib.ExitStack() as flood:
        for _ in range(20):
            connection = flood.enter_context(socket.create_connection((host, int(port))))
            connection.sendall(b"GET /state.json HTTP/1.1\r\nHost: x\r\n\r\n")
        assert ask(collector, "/state.json", token=collector.token)[0] == 200
        assert since.threads() == []


@pytest.mark.parametrize(
    "request_",
    [
        b"\r\n\r\n",
        b"GET /\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET http://[ HTTP/1.1\r\n\r\n",
        b"GET /?" + b"a=b&" * 1000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 200 + b"\r\n",
        b"\xff\xfe \x00 HTTP/1.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
    ids=lambda request_: repr(request_[:20]),
)
def test_what_is_no_request_is_answered_as_such(collector, request_, caplog):
    host, port = collector.address.split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(request_)
        assert connection.recv(100).startswith((b"HTTP/1.1 400", b"HTTP/1.1 501"))
    # That the client closed it with more to read is of interest for debugging only.
    assert [each for each in caplog.records if each.levelno > logging.DEBUG] == []


def test_a_request_without_an_end_is_not_kept(collector):
    host, port = collector.address.split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        with contextlib.suppress(OSError):
            connection.sendall(b"GET / HTTP/1.1\r\n" + b"x" * 1_000_000)
        assert ended(connection)


def test_a_token_that_is_not_text_is_wrong(collector):
    assert ask(collector, "/state.json?token=%ff%fe")[0] == 403
    assert ask(collector, "/state.json", token="\xff\xfe")[0] == 403


def test_nobody_reports_over_the_network(collector):
    body = json.dumps(told(steps=77))
    status, _, _ = ask(collector, "/report", token=collector.token, method="POST", body=body)
    assert status == 501
    assert worker_in(collector.job, "worker 0")["step"] == 10


def test_times_of_another_machine_are_those_of_this_ones_clock():
    with Monitored("train.py", "workers", ["worker 0", "worker 1"]) as monitored:
        here, there = monitored.programs([Program(["train.py"], {})] * 2)
        for now, steps in ((1000.0, 0), (1010.0, 100)):
            here.on_report(json.dumps(told(now=now, steps=steps)).encode(), 0.0)
            there.on_report(json.dumps(told(now=now + 5.0, steps=steps)).encode(), 5.0)
    assert monitored.job.as_dict()["stragglers"] == []
    assert worker_in(monitored, "worker 0")["phases"]["others"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("line", [b"{", b"[]", b"7", b"[" * 100_000, b"{}", b"\xff"])
def test_what_cannot_be_read_changes_nothing(own_folder, line):
    with Monitored("train.py", "workers", ["worker 0"]) as monitored:
        (program,) = monitored.programs([Program(["train.py"], {})])
        program.on_report(json.dumps(told("another", steps=3)).encode(), 0.0)
        program.on_report(line, 0.0)
    assert worker_in(monitored, "worker 0")["step"] == 3  # a name is what the launcher says


def test_there_are_metrics_for_prometheus(collector):
    status, text, headers = ask(collector, "/metrics", token=collector.token)
    assert status == 200
    assert headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert "unison_steps_total 10" in text.splitlines()


def test_the_page_needs_nothing_from_elsewhere_and_runs_its_own_script_only(collector):
    status, html, headers = ask(collector, f"/?token={collector.token}")
    assert status == 200
    assert re.findall(r'(?:src|href)="(?!data:)', html) == []
    (script,) = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = headers["Content-Security-Policy"]
    assert f"script-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert headers["Referrer-Policy"] == "no-referrer"  # the token is in the URL
    assert "innerHTML" not in page.html()


# -- the launcher ------------------------------------------------------------------------------


def test_a_job_is_found_while_it_runs_by_its_user_only(own_folder):
    with Monitored("train.py --epochs 3", "workers", ["worker 0"]):
        (job,) = running_jobs.running_jobs()
        assert (job.process, job.program) == (os.getpid(), "train.py --epochs 3")
        (path,) = runtime_folder().iterdir()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert running_jobs.running_jobs() == []


def test_what_a_killed_launcher_has_left_behind_is_removed():
    left = runtime_folder() / "1-2.json"
    left.write_text(json.dumps(running_jobs.RunningJob(1, "x.py", "127.0.0.1:2", "t")._asdict()))
    assert running_jobs.running_jobs() == []
    assert not left.exists()


def test_who_looks_for_jobs_while_one_is_being_published_does_not_hide_it(own_folder, monkeypatch):
    flock = fcntl.flock
    found = []

    def after_a_look(file, how):
        if how & fcntl.LOCK_EX:
            found.append(running_jobs.running_jobs())
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", after_a_look)
    with Monitored("train.py", "workers", ["worker 0"]):
        assert found == [[]]
        (job,) = running_jobs.running_jobs()
        assert job.program == "train.py"
    assert list(runtime_folder().iterdir()) == []


@pytest.mark.parametrize(
    "change",
    [
        {"process": 1e999},
        {"address": "127.0.0.1:80/@evil"},
        {"address": 7},
        {"token": None},
        {"program": ["x"]},
    ],
    ids=str,
)
def test_a_file_that_is_none_of_a_job_is_passed_over(own_folder, change):
    told = running_jobs.RunningJob(1, "x.py", "127.0.0.1:2", "t")._asdict() | change
    path = runtime_folder() / "1-2.json"
    path.write_text(json.dumps(told))
    with path.open("rb") as file:
        assert lock(file)
        assert running_jobs.running_jobs() == []
    path.write_text("[" * 100_000)
    with path.open("rb") as file:
        assert lock(file)
        assert running_jobs.running_jobs() == []


def test_a_folder_that_others_can_enter_is_not_used(own_folder):
    (own_folder / "unison").mkdir(mode=0o755)
    (own_folder / "unison").chmod(0o755)
    with pytest.raises(PermissionError, match="only its owner"):
        running_jobs.running_jobs()
    program = Program(["train.py"], {})
    with Monitored("train.py", "workers", ["worker 0"]) as monitored:  # it runs all the same
        assert monitored.programs([program]) == [program]


def test_a_job_that_is_not_to_be_watched_is_not():
    program = Program(["train.py"], {})
    with Monitored("train.py", "workers", ["worker 0"], is_wanted=False) as monitored:
        assert monitored.programs([program]) == [program]
        assert running_jobs.running_jobs() == []
        monitored.ended(0)
