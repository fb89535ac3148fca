"""A step that has not begun, since it is traced again, counts for nobody who follows `fit`."""

import types
from unittest import mock

import pytest

from unison.captured import StateCapturedError
from unison.monitoring.meter import Meter
from unison.train.keras_elastic import ElasticLoops
from unison.train.keras_in_memory import _Loops

STEP = types.SimpleNamespace(trains=True, operations=0)


def trainer():
    """A trainer whose steps use state that they do not take, and whose `fit` only calls one."""
    made = mock.MagicMock(callbacks=[])
    made.run_step = made.run_once = mock.Mock(side_effect=StateCapturedError(["seed"]))
    made.model = types.SimpleNamespace(fit=None, steps_per_execution=1)
    return made


def position():
    return types.SimpleNamespace(batch=7)


def test_elastic_job():
    made = trainer()
    with mock.patch.object(ElasticLoops, "_look_at_metrics"):
        loops = ElasticLoops(made, mock.MagicMock())
        loops._place = place = position()
        with pytest.raises(StateCapturedError):
            made.run_step(STEP, None, False)
    assert place.batch == 7


def test_state_in_memory():
    made, checkpoints = trainer(), types.SimpleNamespace(is_due=False, steps=7)
    loops = _Loops(made, checkpoints)
    loops._position = place = position()
    with pytest.raises(StateCapturedError):
        made.run_step(STEP, None, False)
    assert (place.batch, checkpoints.steps) == (7, 7)


def test_monitor():
    meter = Meter()
    with pytest.raises(StateCapturedError):
        meter.training(trainer(), trains=True)(STEP, None, False)
    assert meter.steps == 0
