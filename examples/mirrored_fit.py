"""A TensorFlow program with one line changed: Keras' `fit` under a MirroredStrategy.

    UNISON_CPU_DEVICES=2 python examples/mirrored_fit.py

Without the variable it trains on all accelerators, or on one CPU device.
"""

import argparse

import images

import unison.tf as tf


def build():
    model = tf.keras.Sequential(
        [
            tf.keras.Input((images.PIXELS,)),
            tf.keras.layers.Dense(512, activation="relu"),
            tf.keras.layers.Dropout(0.2),
            tf.keras.layers.Dense(images.CLASSES, activation="softmax"),
        ]
    )
    model.compile(
        optimizer=tf.keras.optimizers.Adam(),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    return model


def main():
    parser = argparse.ArgumentParser(description="Keras' fit on all devices.")
    parser.add_argument("--data", metavar="PATH.npz", help="MNIST (default: made-up images)")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=64, help="the global batch")
    options = parser.parse_args()
    (x_train, y_train), (x_test, y_test) = images.load(options.data)

    strategy = tf.distribute.MirroredStrategy()
    print("replicas:", strategy.num_replicas_in_sync)

    with strategy.scope():
        model = build()

    model.fit(x_train, y_train, batch_size=options.batch, epochs=options.epochs, verbose=2)
    _, accuracy = model.evaluate(x_test, y_test, verbose=0)
    print(f"test accuracy: {accuracy:.3f}")


if __name__ == "__main__":
    main()
