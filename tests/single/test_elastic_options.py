"""`unison run --min-workers`: which options go together."""

import pytest

from unison.cli import main

PROGRAM = __file__  # it is there, and is not started


def complaint(arguments: list[str], capsys: pytest.CaptureFixture) -> str:
    """The one line in which `unison run` ends."""
    try:
        status = main(["run", *arguments, PROGRAM])
    except SystemExit as end:
        status = end.code
    assert status == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--min-workers 3 --max-workers 2", "--min-workers. Received: 2 and 3"),
        ("--min-workers 0", "Expected at least 1 for --min-workers. Received: 0"),
        ("--max-workers 0", "Received: 0 and 1"),
        ("--min-workers 1 --max-workers 2 --workers 3", "for --max-workers. Received: 3 and 2"),
        ("--min-workers 1 --workers -1", "Expected at least 0 for -n. Received: -1"),
        ("--min-workers 1 --restarts -1", "Expected at least 0 for --restarts. Received: -1"),
        ("--min-workers 1 --heartbeat-timeout 0", "at least 0.5 for --heartbeat-timeout"),
        ("--min-workers 1 --wait -2", "Expected at least 0 for --wait. Received: -2.0"),
        ("--min-workers 1 --wait inf", "Expected a number with an end for --wait. Received: inf"),
        ("--min-workers 1 --wait nan", "Expected at least 0 for --wait. Received: nan"),
        ("--min-workers 1 --grace -2", "Expected at least 0 for --grace. Received: -2.0"),
        ("--min-workers 1 --env slurm", "more workers on others with --join"),
        ("--min-workers 1 --address auto -n 0", "Expected at least 1 for -n. Received: 0"),
        ("--min-workers 1 --listen 0.0.0.0", "the address at which others reach this machine"),
        ("--min-workers 1 --listen 127.0.0.1:x", "Expected HOST or HOST:PORT for --listen"),
        ("--min-workers 1 --listen 127.0.0.1:70000", "Expected HOST or HOST:PORT for --listen"),
        ("--min-workers 1 --listen 203.0.113.1", "Cannot listen on 203.0.113.1:0"),
        (f"--min-workers 1 --folder {PROGRAM}", "Expected a folder for --folder"),
        ("--restarts -1", "Expected at least 0 for --restarts. Received: -1"),
        ("--ps 1 --restarts -1", "Expected at least 0 for --restarts. Received: -1"),
        ("--ps 1 --wait 3", "--wait is for elastic jobs. Give --min-workers"),
        ("--folder x", "--folder is for elastic jobs"),
        ("--restarts-on-error", "--restarts-on-error needs --restarts R, how often at most."),
        ("--ps 1 --restarts-on-error", "--restarts-on-error is for other jobs: leave it out"),
    ],
)
def test_what_cannot_be_had_is_refused_in_one_line(arguments, said, capsys):
    assert said in complaint(arguments.split(), capsys)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--min-workers 2", "--min-workers is for the command that starts the job"),
        ("--folder x", "--folder is for the command that starts the job"),
        ("--listen 127.0.0.1", "--listen is for the command that starts the job"),
        ("--address auto", "--address is for the command that starts the job"),
        ("--workers 0", "Expected at least 1 for -n. Received: 0"),
        ("--env slurm", "--env starts a fixed number of workers"),
        ("", "Nobody listens at 127.0.0.1:1"),
    ],
)
def test_workers_that_join_have_few_options(arguments, said, capsys, monkeypatch):
    monkeypatch.setenv("UNISON_ELASTIC_TOKEN", "secret")
    assert said in complaint(["--join", "127.0.0.1:1", *arguments.split()], capsys)


@pytest.mark.parametrize("address", ["somewhere", "host:port", ":1", "host:0", "host:70000"])
def test_an_address_to_join_is_a_host_and_a_port(address, capsys, monkeypatch):
    monkeypatch.setenv("UNISON_ELASTIC_TOKEN", "secret")
    assert "Expected HOST:PORT for --join" in complaint(["--join", address], capsys)


def test_a_worker_joins_with_the_jobs_secret_only(capsys, monkeypatch):
    monkeypatch.delenv("UNISON_ELASTIC_TOKEN", raising=False)
    said = complaint(["--join", "127.0.0.1:1"], capsys)
    assert "in the environment variable UNISON_ELASTIC_TOKEN" in said
