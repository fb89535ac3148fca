"""A training loop of one's own with a Keras model, optimizer and metrics.

    UNISON_CPU_DEVICES=2 python examples/custom_loop.py

The last batch of an epoch may be smaller and need not divide by the number of replicas: every
example counts once, because the loss is divided by the size of the global batch.
"""

import argparse
import os

import images
import jax

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras

import unison


def build():
    return keras.Sequential(
        [
            keras.Input((images.PIXELS,)),
            keras.layers.Dense(256, activation="relu"),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(images.CLASSES),
        ]
    )


def main():
    parser = argparse.ArgumentParser(description="strategy.run in a loop of one's own.")
    parser.add_argument("--data", metavar="PATH.npz", help="MNIST (default: made-up images)")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=64, help="the global batch")
    options = parser.parse_args()
    training, test = images.load(options.data)

    strategy = unison.MirroredStrategy()
    print("replicas:", strategy.num_replicas_in_sync)

    with strategy.scope():
        model = build()
        optimizer = keras.optimizers.Adam()
        optimizer.build(model.trainable_variables)
        mean_loss = keras.metrics.Mean()
        accuracy = keras.metrics.SparseCategoricalAccuracy()
        loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

    def train_step(batch):
        x, y = batch
        # How many examples the replicas have together.
        global_batch = unison.get_replica_context().all_reduce("SUM", float(len(x)))

        def local_loss(trainable, non_trainable):
            logits, non_trainable = model.stateless_call(trainable, non_trainable, x, training=True)
            losses = loss_of(y, logits)
            # The optimizer sums the gradients of the replicas.
            return losses.sum() / global_batch, (losses, logits, non_trainable)

        trainable = [variable.value for variable in model.trainable_variables]
        non_trainable = [variable.value for variable in model.non_trainable_variables]
        gradient = jax.grad(local_loss, has_aux=True)
        gradients, (losses, logits, non_trainable) = gradient(trainable, non_trainable)
        optimizer.apply(gradients, model.trainable_variables)
        for variable, value in zip(model.non_trainable_variables, non_trainable, strict=True):
            variable.assign(value)
        mean_loss.update_state(losses)
        accuracy.update_state(y, logits)

    def test_step(batch):
        x, y = batch
        accuracy.update_state(y, model(x, training=False))

    for epoch in range(options.epochs):
        mean_loss.reset_state()
        accuracy.reset_state()
        epoch_batches = images.batches(*training, options.batch, seed=epoch)
        for batch in strategy.experimental_distribute_dataset(epoch_batches):
            strategy.run(train_step, args=(batch,))
        print(
            f"epoch {epoch + 1}: loss {float(mean_loss.result()):.3f}, "
            f"accuracy {float(accuracy.result()):.3f}"
        )

    accuracy.reset_state()
    test_batches = images.batches(*test, options.batch, seed=0)
    for batch in strategy.experimental_distribute_dataset(test_batches):
        strategy.run(test_step, args=(batch,))
    print(f"test accuracy: {float(accuracy.result()):.3f}")


if __name__ == "__main__":
    main()
