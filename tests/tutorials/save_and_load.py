"""What the tutorial "Save and load a model using a distribution strategy" shows."""

import os
import sys

import sample

import unison.tf as tf

folder = sys.argv[1]
mirrored_strategy = tf.distribute.MirroredStrategy()


def get_data():
    (train_images, train_labels), (test_images, test_labels) = sample.load_data()
    BATCH_SIZE = 32 * mirrored_strategy.num_replicas_in_sync

    def scale(image, label):
        image = tf.cast(image, tf.float32)
        image /= 255
        return image, label

    train = tf.data.Dataset.from_tensor_slices((train_images[..., None], train_labels))
    test = tf.data.Dataset.from_tensor_slices((test_images[..., None], test_labels))
    train_dataset = train.map(scale).cache().shuffle(10000).batch(BATCH_SIZE)
    eval_dataset = test.map(scale).batch(BATCH_SIZE)
    return train_dataset, eval_dataset


def get_model():
    with mirrored_strategy.scope():
        model = tf.keras.Sequential(
            [
                tf.keras.layers.Conv2D(8, 3, activation="relu", input_shape=(28, 28, 1)),
                tf.keras.layers.MaxPooling2D(),
                tf.keras.layers.Flatten(),
                tf.keras.layers.Dense(64, activation="relu"),
                tf.keras.layers.Dense(10),
            ]
        )
        model.compile(
            loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            optimizer=tf.keras.optimizers.Adam(),
            metrics=[tf.metrics.SparseCategoricalAccuracy()],
        )
        return model


model = get_model()
train_dataset, eval_dataset = get_data()
model.fit(train_dataset, epochs=2, verbose=0)

# -- Keras' own ----------------------------------------------------------------------------

keras_model_path = os.path.join(folder, "keras_save.keras")
model.save(keras_model_path)

restored_keras_model = tf.keras.models.load_model(keras_model_path)
restored_keras_model.fit(train_dataset, epochs=1, verbose=0)
print("restored:", restored_keras_model.evaluate(eval_dataset, verbose=0)[1])

another_strategy = tf.distribute.OneDeviceStrategy("/cpu:0")
with another_strategy.scope():
    restored_keras_model_ds = tf.keras.models.load_model(keras_model_path)
    restored_keras_model_ds.fit(train_dataset, epochs=1, verbose=0)
print("restored on one device:", restored_keras_model_ds.evaluate(eval_dataset, verbose=0)[1])

# -- tf.saved_model ------------------------------------------------------------------------

saved_model_path = os.path.join(folder, "tf_save")
tf.saved_model.save(model, saved_model_path)

DEFAULT_FUNCTION_KEY = "serving_default"
loaded = tf.saved_model.load(saved_model_path)
inference_func = loaded.signatures[DEFAULT_FUNCTION_KEY]

predict_dataset = eval_dataset.map(lambda image, label: image)
for batch in predict_dataset.take(1):
    outputs = inference_func(batch)
(name,) = outputs
print("output:", name, outputs[name].shape)
difference = tf.reduce_max(tf.abs(outputs[name] - model(batch)))
print("as the model says:", bool(difference < 1e-4))

another_strategy = tf.distribute.MirroredStrategy()
with another_strategy.scope():
    loaded = tf.saved_model.load(saved_model_path)
    inference_func = loaded.signatures[DEFAULT_FUNCTION_KEY]
    dist_predict_dataset = another_strategy.experimental_distribute_dataset(predict_dataset)
    examples = 0
    for batch in dist_predict_dataset:
        result = another_strategy.run(inference_func, args=(batch,))
        examples += sum(map(len, another_strategy.experimental_local_results(result[name])))
print("predicted by replicas:", examples)

# -- one written, the other read -----------------------------------------------------------

model = get_model()
directory = os.path.join(folder, "keras_save")
model.save(directory)
with tf.distribute.MirroredStrategy().scope():
    loaded = tf.saved_model.load(directory)
print("signatures:", sorted(loaded.signatures))

save_options = tf.saved_model.SaveOptions(experimental_io_device="/job:localhost")
model.save(directory, options=save_options)
with tf.distribute.MirroredStrategy().scope():
    load_options = tf.saved_model.LoadOptions(experimental_io_device="/job:localhost")
    loaded = tf.keras.models.load_model(directory, options=load_options)
print("loaded from a directory:", type(loaded).__name__)


class SubclassedModel(tf.keras.Model):
    """A model whose inputs are known once it has been called."""

    output_name = "output_layer"

    def __init__(self):
        super().__init__()
        self._dense_layer = tf.keras.layers.Dense(5, dtype=tf.dtypes.float32, name=self.output_name)

    def call(self, inputs):
        return self._dense_layer(inputs)


my_model = SubclassedModel()
tf.saved_model.save(my_model, saved_model_path)
print(
    "signatures of a model that was never called:",
    list(tf.saved_model.load(saved_model_path).signatures),
)
