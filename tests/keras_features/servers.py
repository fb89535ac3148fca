"""Features of parameter servers; `running` says which of the others they have, too."""

from __future__ import annotations

from keras_features.program import BATCH, X, Y, feature, fitted
from unison.data import Dataset


@feature
def datasets_that_a_creator_makes(program):
    model = program.compiled(metrics=["mae"])
    yield

    def make(context):
        size = context.get_per_replica_batch_size(BATCH)
        return Dataset.from_tensor_slices((X, Y)).repeat().batch(size)

    if program.strategy is None:
        data = Dataset.from_tensor_slices((X, Y)).repeat().batch(BATCH)
    else:
        import unison.tf as tf

        data = tf.keras.utils.experimental.DatasetCreator(make)
    result = fitted(model, data, None, batch_size=None, steps_per_epoch=3)
    result["evaluated"] = [*map(float, model.evaluate(data, steps=3, verbose=0))]
    return result


@feature
def class_weights_of_a_dataset(program):
    model = program.compiled()
    yield
    labels = (X[:, :1] > 0).astype("int32")
    data = Dataset.from_tensor_slices((X, labels)).batch(BATCH).repeat()
    weights = {0: 0.5, 1: 3.0}
    return fitted(model, data, None, batch_size=None, steps_per_epoch=2, class_weight=weights)


@feature
def averages_that_replace_the_weights(program):
    model = program.dense()
    optimizer = program.keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9)
    model.compile(optimizer, "mse")
    yield
    return fitted(model)
