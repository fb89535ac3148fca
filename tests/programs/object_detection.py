"""Objects located and classified: two heads, with a loss and metrics each."""

import numpy as np

import unison.tf as tf
from parity.starting_weights import start
from unison.tf import keras
from unison.tf.keras import layers

TASK = "vision"


def bounding_box_iou(boxes_true, boxes_pred):
    top_left = tf.maximum(boxes_true[..., :2], boxes_pred[..., :2])
    bottom_right = tf.minimum(boxes_true[..., 2:], boxes_pred[..., 2:])
    sides = tf.maximum(bottom_right - top_left, 0.0)
    intersection = tf.reduce_prod(sides, axis=-1)

    def area(boxes):
        return tf.reduce_prod(tf.maximum(boxes[..., 2:] - boxes[..., :2], 0.0), axis=-1)

    union = area(boxes_true) + area(boxes_pred) - intersection
    return tf.math.divide_no_nan(intersection, union)


class MeanBoxIoU(keras.metrics.Metric):
    def __init__(self, name="iou", **kwargs):
        super().__init__(name=name, **kwargs)
        self.total = self.add_weight(name="total", initializer="zeros")
        self.count = self.add_weight(name="count", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        iou = bounding_box_iou(y_true, y_pred)
        self.total.assign_add(tf.reduce_sum(iou))
        self.count.assign_add(tf.cast(tf.size(iou), tf.float32))

    def result(self):
        return self.total / self.count


def train(strategy, epochs=2):
    rng = np.random.default_rng(8)
    boxes = np.sort(rng.integers(0, 12, (16, 2, 2)), axis=1).reshape(16, 4)
    images = rng.normal(size=(16, 12, 12, 1)).astype("float32")
    for image, (left, top, right, bottom) in zip(images, boxes):
        image[top : bottom + 1, left : right + 1] += 2
    kinds = (boxes[:, 2] > boxes[:, 3]).astype("int64")
    targets = {"kind": kinds, "box": boxes.astype("float32") / 12}
    with strategy.scope():
        inputs = keras.Input((12, 12, 1))
        x = layers.Conv2D(6, 3, strides=2, activation="relu")(inputs)
        x = layers.Dense(16, activation="relu")(layers.Flatten()(x))
        outputs = {
            "kind": layers.Dense(2, activation="softmax", name="kind")(x),
            "box": layers.Dense(4, activation="sigmoid", name="box")(x),
        }
        model = start(keras.Model(inputs, outputs))
        model.compile(
            optimizer=keras.optimizers.RMSprop(0.01),
            loss={"kind": "sparse_categorical_crossentropy", "box": keras.losses.Huber()},
            loss_weights={"kind": 1.0, "box": 5.0},
            metrics={"kind": ["accuracy"], "box": [MeanBoxIoU()]},
        )
    dataset = tf.data.Dataset.from_tensor_slices((images, targets)).batch(8)
    return model.fit(dataset, epochs=epochs, verbose=0).history
