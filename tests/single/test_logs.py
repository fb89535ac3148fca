"""What `UNISON_LOG` shows."""

import logging

import pytest

import unison
from unison.runtime import logs


@pytest.fixture(autouse=True)
def as_before():
    logger = logging.getLogger("unison")
    before = logger.level, logger.propagate, list(logger.handlers)
    yield
    logger.level, logger.propagate, logger.handlers[:] = before
    logs.say_who("")


def lines(capsys):
    return capsys.readouterr().err.splitlines()


def test_nothing_is_changed_without_the_variable(monkeypatch):
    monkeypatch.delenv("UNISON_LOG", raising=False)
    before = list(logging.getLogger("unison").handlers)
    unison.OneDeviceStrategy("CPU:0")
    assert logging.getLogger("unison").handlers == before


def test_messages_have_time_worker_and_level_and_come_once(monkeypatch, capsys):
    monkeypatch.setenv("UNISON_LOG", "Info")
    for _ in range(2):
        unison.OneDeviceStrategy("CPU:0")
    logger = logging.getLogger("unison")
    logger.debug("compiled")
    logger.info("joined %s", "in")
    logs.say_who("worker 1")
    logger.warning("slow")
    joined, slow = lines(capsys)
    time_of_day, _, said = joined.partition(" ")
    assert [len(part) for part in time_of_day.split(":")] == [2, 2, 6]
    assert said == "unison joined in"
    assert slow.endswith(" unison worker 1: warning: slow")


def test_a_level_that_is_none_is_refused(monkeypatch):
    monkeypatch.setenv("UNISON_LOG", "loud")
    with pytest.raises(ValueError, match=r"debug, info, warning, error\. Received: 'loud'"):
        unison.OneDeviceStrategy("CPU:0")


def test_a_checkpoint_that_is_written_and_restored_is_an_event(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("UNISON_LOG", "info")
    with unison.OneDeviceStrategy("CPU:0").scope():
        checkpoint = unison.train.Checkpoint(weight=unison.Variable(1.0))
    path = checkpoint.save(tmp_path / "ckpt")
    checkpoint.restore(path)
    saved, restored = lines(capsys)
    assert f"checkpoint {path} is written: 2 variables" in saved
    assert f"checkpoint {path} is restored" in restored
