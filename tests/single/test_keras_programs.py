"""Compiled steps of Keras models: which are kept."""

import gc
import weakref

import keras
import numpy as np

from unison.keras import step as compiled_steps


def test_fit_keeps_the_programs_of_the_sizes_of_batches_used_last(monkeypatch, two_replicas):
    monkeypatch.setattr(compiled_steps, "MOST_PROGRAMS", 2)
    made = []
    compile_replicas = compiled_steps.compile_replicas

    def remembered(*args, **kwargs):
        program = compile_replicas(*args, **kwargs)
        made.append(weakref.ref(program))
        return program

    monkeypatch.setattr(compiled_steps, "compile_replicas", remembered)
    with two_replicas.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    for size in range(2, 20, 2):
        examples = np.ones((size, 3), np.float32), np.ones((size, 1), np.float32)
        model.fit(*examples, batch_size=size, verbose=0)
    gc.collect()
    assert len(made) == 9
    assert sum(program() is not None for program in made) <= 4
