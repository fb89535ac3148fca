"""What `UNISON_LOG` shows."""

import contextlib
import gc
import io
import logging
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import unison
from subprocess_program import run_program
from unison.cli import main
from unison.runtime import logs


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    logger = logging.getLogger("unison")
    level, filtering = logger.level, jax.config.values["jax_traceback_filtering"]
    before = logger.propagate, list(logger.handlers)
    monkeypatch.setattr(logs, "_name", "")
    yield
    logger.setLevel(level)
    logger.propagate, logger.handlers[:] = before
    jax.config.update("jax_traceback_filtering", filtering)


def lines(capsys):
    return capsys.readouterr().err.splitlines()


def test_nothing_is_changed_without_the_variable(monkeypatch):
    monkeypatch.delenv("UNISON_LOG", raising=False)
    before = list(logging.getLogger("unison").handlers)
    unison.OneDeviceStrategy("CPU:0")
    assert logging.getLogger("unison").handlers == before


def test_the_first_line_is_shown_and_no_other_library_notices():
    program = """
        import logging
        import jax
        loggers = [logging.getLogger(name) for name in (None, "jax", "absl")]
        others = lambda: [(each.level, each.handlers[:], each.propagate) for each in loggers]
        before = others()
        import unison
        print(others() == before)
        logging.getLogger("unison").info("the first line")
        logging.getLogger("jax").info("of another library")
    """
    done = run_program(textwrap.dedent(program), env={"UNISON_LOG": "info"})
    assert done.stdout == "True\n", done.stderr
    assert [line.partition(" ")[2] for line in done.stderr.splitlines()] == [
        "unison the first line"
    ]


def test_messages_go_where_errors_go_at_present(monkeypatch):
    monkeypatch.setenv("UNISON_LOG", "info")
    logs.show_what_is_asked_for()
    with contextlib.redirect_stderr(io.StringIO()) as now:
        logging.getLogger("unison").info("joined")
    assert now.getvalue().endswith(" unison joined\n")


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


def test_a_command_says_in_one_line_that_there_is_no_such_level(monkeypatch, capsys):
    monkeypatch.setenv("UNISON_LOG", "loud")
    assert main(["top", "--once"]) == 2
    (line,) = lines(capsys)
    assert line.startswith("unison top: UNISON_LOG must be one of")


def test_a_checkpoint_that_is_written_and_restored_is_an_event(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("UNISON_LOG", "info")
    with unison.OneDeviceStrategy("CPU:0").scope():
        checkpoint = unison.train.Checkpoint(weight=unison.Variable(1.0))
    path = checkpoint.save(tmp_path / "ckpt")
    checkpoint.restore(path)
    saved, restored = lines(capsys)
    assert f"checkpoint {path} is written: 2 variables" in saved
    assert f"checkpoint {path} is restored" in restored


def test_who_says_its_name_shows_what_is_asked_for(monkeypatch, capsys):
    monkeypatch.setenv("UNISON_LOG", "info")
    logs.say_who("worker 2 (index 1)")  # before there is a strategy
    logging.getLogger("unison").info("View 3")
    (line,) = lines(capsys)
    assert line.endswith(" unison worker 2 (index 1): View 3")


def train(strategy):
    """What happens in any training, and matters to nobody."""
    import keras

    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x = np.ones((8, 2), np.float32)
    model.fit(x, x[:, :1], batch_size=4, verbose=0)
    model.predict(x, verbose=0)

    for _ in range(3):
        strategy.run(unison.aggregate, args=(unison.PerReplica([1.0, 2.0]),))


def trace_again_and_again(strategy):
    for size in range(1, 12):
        strategy.run(lambda x: x + 1, args=(np.ones(size, np.float32),))


def fall_back(strategy):
    @unison.Function
    def positive(x):
        return x if x > 0 else -x

    for _ in range(3):
        positive(jnp.float32(-1))


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (train, None),
        (trace_again_and_again, "has been traced and compiled 8 times"),
        (fall_back, "is not compiled. It runs step by step"),
    ],
)
@pytest.mark.parametrize("level", ["warning", "info"])
def test_an_event_is_one_line_and_nothing_else_is_said(what, said, level, monkeypatch, capsys):
    gc.collect()  # a restoration that an earlier test has left logs what it did not restore
    capsys.readouterr()
    monkeypatch.setenv("UNISON_LOG", level)
    what(unison.MirroredStrategy(["CPU:0", "CPU:1"]))
    found = [line for line in lines(capsys) if " unison " in line]
    assert [said in line for line in found] == ([] if said is None else [True])


def test_debug_says_more(monkeypatch, capsys):
    monkeypatch.setenv("UNISON_LOG", "debug")
    train(unison.MirroredStrategy(["CPU:0", "CPU:1"]))
    assert any(" unison debug: A SUM of " in line for line in lines(capsys))
