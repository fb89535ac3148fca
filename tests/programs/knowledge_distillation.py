"""A student learns from a teacher: `compute_loss` of its own, with temperatures."""

import numpy as np

import unison.tf as tf
from parity.starting_weights import start
from unison.tf import keras

TASK = "vision"


class Distiller(keras.Model):
    def __init__(self, student, teacher):
        super().__init__()
        self.teacher = teacher
        self.student = student

    def compile(
        self, optimizer, metrics, student_loss_fn, distillation_loss_fn, alpha, temperature
    ):
        super().compile(optimizer=optimizer, metrics=metrics)
        self.student_loss_fn = student_loss_fn
        self.distillation_loss_fn = distillation_loss_fn
        self.alpha = alpha
        self.temperature = temperature

    def train_step(self, data):
        x, y = data
        teacher_predictions = self.teacher(x, training=False)
        with tf.GradientTape() as tape:
            predictions = self.student(x, training=True)
            student_loss = self.student_loss_fn(y, predictions)
            distillation_loss = self.distillation_loss_fn(
                tf.nn.softmax(teacher_predictions / self.temperature, axis=1),
                tf.nn.softmax(predictions / self.temperature, axis=1),
            )
            distillation_loss *= self.temperature**2
            loss = self.alpha * student_loss + (1 - self.alpha) * distillation_loss
        variables = self.student.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        for metric in self.metrics:
            if metric.name != "loss":
                metric.update_state(y, predictions)
        return {metric.name: metric.result() for metric in self.metrics if metric.name != "loss"}

    def call(self, x):
        return self.student(x)


def network(filters):
    return keras.Sequential(
        [
            keras.Input(shape=(8, 8, 1)),
            keras.layers.Conv2D(filters, (3, 3), strides=(2, 2), padding="same"),
            keras.layers.LeakyReLU(negative_slope=0.2),
            keras.layers.Flatten(),
            keras.layers.Dense(3),
        ]
    )


def train(strategy, epochs=2):
    rng = np.random.default_rng(10)
    y = rng.integers(0, 3, 16)
    x = rng.normal(size=(16, 8, 8, 1)).astype("float32") + y[:, None, None, None]
    with strategy.scope():
        teacher, student = start(network(8), 1), start(network(4), 2)
        teacher.compile(
            optimizer=keras.optimizers.Adam(0.01),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        distiller = Distiller(student=student, teacher=teacher)
        distiller.compile(
            optimizer=keras.optimizers.Adam(0.01),
            metrics=[keras.metrics.SparseCategoricalAccuracy()],
            student_loss_fn=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            distillation_loss_fn=keras.losses.KLDivergence(),
            alpha=0.1,
            temperature=10,
        )
    teacher.fit(x, y, batch_size=8, epochs=1, shuffle=False, verbose=0)
    distiller.fit(x, y, batch_size=8, epochs=epochs, shuffle=False, verbose=0)
    return {"student": student.predict(x[:4], verbose=0), "teacher": teacher.get_weights()[-1]}
