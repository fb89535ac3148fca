"""Keras' callback `OrbaxCheckpoint` on several workers: what it does in one process.

The programs are in `orbax_callback_programs.py`.
"""

import functools
import json

import keras
import numpy as np
import pytest

import unison
from keras_forms import IMPORTED, forms
from parallel import orbax_callback_programs as programs
from parallel.orbax_callback_programs import X, build, state_of
from subprocess_program import run_program
from unison import train
from warm_workers import launch

SECONDS = 100

# Which the fixtures are.
pytestmark = pytest.mark.slow

#: What Keras does with a directory, without Unison.
LOADED = """
import json, sys
sys.path.insert(0, sys.argv[2])
import keras, numpy as np
model = keras.saving.load_model(sys.argv[1])
loaded = keras.models.clone_model(model)
model.optimizer.build(model.trainable_variables)
loaded.compile(keras.optimizers.Adam(0.01, name="adam"), "mse", metrics=["mae"])
loaded.optimizer.build(loaded.trainable_variables)
loaded.load_weights(sys.argv[1])
print(json.dumps([
    [np.asarray(variable).tolist() for variable in [*each.weights, *each.optimizer.variables]]
    for each in (model, loaded)
]))
"""


def on_workers(name, *args, form="keras", function=programs.on_workers):
    """What every worker's program returns, in a form in which Keras comes to it."""
    named = [name] if function is programs.on_workers else []
    return launch(
        function,
        2,
        args=(*named, *map(str, args), form),
        imported=IMPORTED[form],
        devices_per_worker=1,
        timeout=SECONDS,
        on_line=lambda worker, line: None,
    )


@functools.cache
def two_replicas():
    return unison.MirroredStrategy(["CPU:0", "CPU:1"])


def same(state, other):
    assert len(state) == len(other)
    for own, of_other in zip(state, other, strict=True):
        np.testing.assert_array_equal(own, of_other)


@forms("tf", soaked=["keras"])
def test_every_option_has_the_meaning_that_it_has_in_one_process(tmp_path, form):
    expected = programs.saved_as_asked(two_replicas(), str(tmp_path / "alone"))
    for result in on_workers("saved_as_asked", tmp_path / "workers", form=form):
        assert result.keys() == expected.keys()
        for name, found in result.items():
            assert found["steps"] == expected[name]["steps"], name
            np.testing.assert_allclose(found["loss"], expected[name]["loss"], rtol=1e-4)
    # Not the same for another reason.
    assert expected["the best"]["steps"] == [0, 1]
    assert expected["better than"]["steps"] == []
    assert len(expected["by batches"]["steps"]) == 3


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A directory that one process has written, and what it has saved."""
    directory = tmp_path_factory.mktemp("alone") / "orbax"
    with two_replicas().scope():
        model = build(keras, seed=5)
    callback = keras.callbacks.OrbaxCheckpoint(str(directory))
    model.fit(X, programs.Y, epochs=2, callbacks=[callback], **programs.FIT)
    return directory, state_of(model)


@pytest.fixture(scope="module", params=["mirrored-keras", "mirrored-tf", "zero-tf"])
def saved(request, alone, tmp_path_factory):
    """A directory that two workers have written, and what each of them returns."""
    strategy, form = request.param.split("-")
    directory = tmp_path_factory.mktemp("workers") / "orbax"
    function = programs.zero_on_workers if strategy == "zero" else programs.on_workers
    results = on_workers("saved_and_loaded", directory, alone[0], form=form, function=function)
    return directory, results


def test_each_worker_loads_what_all_have_saved(saved, alone):
    _, results = saved
    for result in results:
        same(result["saved"], results[0]["saved"])
        for name in ("loaded", "rebuilt"):
            same(result[name], result["saved"])
        same(result["loaded from alone"], alone[1])
    same(results[1]["loaded by one"], results[0]["saved"])


def test_keras_alone_loads_what_workers_have_saved(saved):
    directory, results = saved
    done = run_program(LOADED, directory, "", imported=("keras",))
    assert done.returncode == 0, done.stderr
    for loaded in json.loads(done.stdout.splitlines()[-1]):
        same(loaded, results[0]["saved"])


def test_one_process_loads_what_workers_have_saved(saved):
    directory, results = saved
    with two_replicas().scope():
        model = build(keras, seed=7)
    model.load_weights(directory)
    same(state_of(model), results[0]["saved"])
    np.testing.assert_allclose(
        model.predict(X, verbose=0), results[0]["predictions"], rtol=1e-5, atol=1e-6
    )
    kernel = train.load_checkpoint(directory / "1").get_tensor(
        "pytree/trainable_variables/hidden/kernel"
    )
    np.testing.assert_array_equal(kernel, results[0]["saved"][0])


def test_the_first_worker_saves_without_the_others(tmp_path):
    results = on_workers("saved_by_the_first_alone", tmp_path / "orbax")
    assert results == [["1", "2"], []]


def test_callback_serves_one_fit_after_another(tmp_path):
    first, second = on_workers("saved_in_two_fits", tmp_path / "orbax")
    assert first[:3] == second[:3] == [["0", "1"], ["2", "3"], ["2", "3"]]
    assert len(first) == len(second) == 5
    for own, of_other in zip(first[3:], second[3:], strict=True):
        assert own.startswith("StepAlreadyExistsError: Step 3 already exists in")
        assert "The first worker could not write" in of_other
        assert "Step 3 already exists" in of_other


@forms("tf", soaked=["keras"])
def test_all_workers_learn_that_the_first_cannot_write(tmp_path, form):
    first, second = on_workers("failing", tmp_path, form=form)
    assert len(first) == len(second) == 2
    for own, of_other in zip(first, second, strict=True):
        assert own.startswith("OSError")
        assert "The first worker could not write" in of_other
        for error in (own, of_other):
            assert "No space left on device" in error


def test_models_of_each_workers_own_are_refused(tmp_path):
    for error in on_workers("of_each_workers_own", tmp_path / "orbax"):
        assert "Received: model 'net'" in error
        assert "ModelCheckpoint" in error
