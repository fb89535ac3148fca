"""`unison top`: which job it finds, what it shows, and what it says where it cannot."""

import json
import threading
import time

import pytest

from monitoring_reports import told, watched
from unison.cli import main, top
from unison.monitoring.collector import Collector
from unison.monitoring.launcher import Monitored


@pytest.fixture(autouse=True)
def own_folder(monkeypatch, tmp_path):
    """The jobs of this test, and no others."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@pytest.fixture
def run_top(capsys):
    """Returns `run(*arguments)`: the exit status of `unison top arguments`, and what it printed."""

    def run(*arguments):
        return main(["top", *arguments]), *capsys.readouterr()

    return run


@pytest.fixture
def collector():
    reports = [
        told("worker 0", now=990.0, steps=0, examples=0, loss=[1, 2.0]),
        told("worker 0", steps=100, examples=6400, loss=[90, 0.5], memory=3 * 2**20),
    ]
    with Collector(watched(*reports)) as made:
        yield made


def url(collector):
    return f"http://{collector.address}/?token={collector.token}"


def test_without_a_job_it_says_so(run_top):
    status, _, said = run_top("--once")
    assert status == 2
    assert "No job of this user can be watched here" in said


def test_it_finds_the_only_job(run_top):
    with Monitored("train.py --epochs 3", "workers", ["worker 0", "worker 1"]):
        status, printed, _ = run_top("--once")
    assert status == 0
    assert "train.py --epochs 3" in printed
    assert "0 of 2 workers run" in printed


def test_of_several_jobs_one_has_to_be_named(run_top):
    with Monitored("a.py", "workers", []), Monitored("b.py", "workers", []):
        status, _, said = run_top("--once")
    assert status == 2
    assert "Several jobs run: pass the number of one" in said
    assert "(a.py)" in said
    assert "(b.py)" in said


def test_a_number_of_no_job_is_refused(run_top):
    with Monitored("a.py", "workers", []):
        status, _, said = run_top("1", "--once")
    assert status == 2
    assert "There is no job '1'" in said


def test_it_shows_what_is_known(run_top, collector):
    status, printed, _ = run_top(url(collector), "--once")
    assert status == 0
    assert "640 examples/s" in printed
    assert "loss 0.5" in printed
    row = next(line for line in printed.splitlines() if line.startswith("worker 0"))
    assert row.split()[:4] == ["worker", "0", "running", "100"]
    assert "3.0 MiB" in row


def test_it_prints_json_and_the_address_of_the_page(run_top, collector):
    status, printed, _ = run_top(url(collector), "--json")
    assert status == 0
    assert json.loads(printed)["step"] == 100
    status, printed, _ = run_top(url(collector), "--web")
    assert (status, printed.strip()) == (0, url(collector))


@pytest.mark.parametrize("how", ["--once", "--json", "--web"])
def test_a_wrong_token_is_refused(run_top, collector, how):
    status, _, said = run_top(f"http://{collector.address}/?token=wrong", how)
    assert status == 2
    assert "does not let this token see it" in said


@pytest.mark.parametrize("job", ["https://127.0.0.1:1/?token=x", "http://127.0.0.1:1/", "ftp://x"])
def test_what_is_no_url_of_a_job_is_refused(run_top, job):
    status, _, said = run_top(job, "--once")
    assert status == 2
    assert "Expected a URL as `unison top --web` prints it" in said


def test_an_address_where_nobody_answers_is_named(run_top, collector):
    with Collector(watched()) as over:
        gone = url(over)
    status, _, said = run_top(gone, "--once")
    assert status == 2
    assert f"Nobody answers at {over.address}" in said
    assert "has ended, or runs on another machine" in said


def test_it_watches_until_the_job_ends_and_says_how(run_top, collector, monkeypatch):
    monkeypatch.setattr(top, "_EVERY", 0.05)
    ending = threading.Timer(0.5, lambda: collector.end("exit code 137 (SIGKILL)"))
    ending.start()
    status, printed, _ = run_top(url(collector))
    ending.join()
    assert status == 0
    assert "The job has ended: exit code 137 (SIGKILL)" in printed


def test_a_launcher_that_goes_without_a_word_ends_the_watching(run_top, monkeypatch):
    monkeypatch.setattr(top, "_EVERY", 0.05)
    with Collector(watched()) as collector:
        ending = threading.Timer(0.5, lambda: collector.__exit__(None))
        ending.start()
        status, printed, _ = run_top(url(collector))
        ending.join()
    assert status == 0
    assert "The job has ended: nothing reports about it any more" in printed


def test_the_end_waits_for_those_who_watch_and_for_nobody_else():
    with Collector(watched()) as alone:
        before = time.monotonic()
        alone.end("the job is done")
        unwatched = time.monotonic() - before
    assert unwatched < 1.0  # a wait would take three
