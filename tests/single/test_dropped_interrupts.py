"""What a signal handler raises comes out of code that goes on after any other error."""

import signal
import types

import jax
import numpy as np
import pytest

import unison.tf as tf
from elastic_placements import placement_of
from unison import conversion
from unison.autograph import calls
from unison.data import Dataset
from unison.program.arguments import Arguments, describe
from unison.program.cache import ProgramCache
from unison.storage import patience
from unison.storage.patience import attempted


class AlarmError(Exception):
    """Raised by the handler."""


@pytest.fixture
def alarm():
    """Returns a function that a signal interrupts, the first time that it is called."""

    def raising(number, frame):
        raise AlarmError

    before = signal.signal(signal.SIGUSR1, raising)
    arrived = []

    def interrupted():
        arrived.append(None)
        if len(arrived) == 1:
            signal.raise_signal(signal.SIGUSR1)

    yield interrupted
    signal.signal(signal.SIGUSR1, before)


def test_a_program_that_is_traced_ahead_for_a_smaller_group(alarm):
    placement = placement_of(6)
    cache = ProgramCache(placement)

    def function(values):
        alarm()
        return values + 1

    arguments = Arguments.of((np.zeros(4, np.float32),), {}, placement, describe)
    with pytest.raises(AlarmError):
        cache._prepare_for_fewer(function, arguments, placement)
    assert placement.num_replicas == 6


def test_a_function_whose_control_flow_is_converted(alarm, monkeypatch):
    def converting(function):
        alarm()
        return function

    transpiler = types.SimpleNamespace(convert=converting)
    monkeypatch.setattr(calls, "_transpiler", lambda: transpiler)
    with pytest.raises(AlarmError):
        calls._converted(placement_of)
    assert placement_of.__code__ not in conversion.refused  # it is converted the next time
    assert calls._converted(placement_of) is placement_of


def test_an_operation_without_a_derivative(alarm):
    from jax.extend.core import Primitive

    primitive = Primitive("without_derivative")
    primitive.def_abstract_eval(lambda aval: aval)
    primitive.def_impl(lambda value: (alarm(), value)[1])
    value = tf.constant(3.0)
    with tf.GradientTape() as tape:
        tape.watch(value)
        with pytest.raises(AlarmError):
            primitive.bind(jax.numpy.asarray(value))


def test_elements_with_errors_are_left_out(alarm):
    def mapped(value):
        alarm()
        return value

    with pytest.raises(AlarmError):
        list(Dataset.range(8).map(mapped).ignore_errors())
    assert [int(value) for value in Dataset.range(8).map(mapped).ignore_errors()] == [*range(8)]


def test_rows_that_are_computed_ahead(alarm):
    def mapped(values):
        if len(values) > 1:
            alarm()
        return values

    rows = Dataset.range(8).map(mapped, vectorized=True)
    with pytest.raises(AlarmError):
        list(rows)
    assert [int(value) for value in rows] == [*range(8)]


def test_a_function_of_a_dataset_is_traced(alarm):
    calls = []

    def mapped(value):
        calls.append(value)
        alarm()
        return value * 2

    dataset = tf.data.Dataset.range(8).map(mapped)
    with pytest.raises(AlarmError):
        list(dataset)
    before = len(calls)
    assert [int(value) for value in dataset] == [*range(0, 16, 2)]
    assert len(calls) - before < 8  # it is compiled, and not called for each element


def test_a_read_that_is_tried_again(alarm, monkeypatch):
    class LateError(TimeoutError):
        """Raised by a handler, as Python's own example for alarms does."""

    def raising(number, frame):
        raise LateError

    signal.signal(signal.SIGUSR1, raising)
    monkeypatch.setattr(patience, "_in_time", lambda path, operation: operation())
    with pytest.raises(LateError):
        attempted("file", alarm)
