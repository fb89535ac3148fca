"""Plain JAX and Optax on several devices, without variables: the state goes in and comes out.

    UNISON_CPU_DEVICES=2 python examples/pure_jax.py

Arrays that are passed to `strategy.run` are the same on every replica, `PerReplica` values differ;
replicas meet where the step says so, in `all_reduce`.
"""

import argparse

import images
import jax
import jax.numpy as jnp
import optax

import unison

HIDDEN = 256
optimizer = optax.adam(1e-3)


def initial_parameters(key):
    first, second = jax.random.split(key)
    return {
        "hidden": {
            "kernel": jax.random.normal(first, (images.PIXELS, HIDDEN)) / images.PIXELS**0.5,
            "bias": jnp.zeros(HIDDEN),
        },
        "output": {
            "kernel": jax.random.normal(second, (HIDDEN, images.CLASSES)) / HIDDEN**0.5,
            "bias": jnp.zeros(images.CLASSES),
        },
    }


def logits_of(parameters, x):
    hidden = jax.nn.relu(x @ parameters["hidden"]["kernel"] + parameters["hidden"]["bias"])
    return hidden @ parameters["output"]["kernel"] + parameters["output"]["bias"]


def total_loss(parameters, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(logits_of(parameters, x), y).sum()


def train_step(state, batch):
    parameters, optimizer_state = state
    x, y = batch
    loss, gradients = jax.value_and_grad(total_loss)(parameters, x, y)
    # Sums and the number of examples travel together: the mean is over the global batch, however
    # many examples each replica has.
    replica = unison.get_replica_context()
    loss, gradients, count = replica.all_reduce("SUM", (loss, gradients, jnp.float32(len(x))))
    gradients = jax.tree.map(lambda gradient: gradient / count, gradients)
    updates, optimizer_state = optimizer.update(gradients, optimizer_state, parameters)
    return (optax.apply_updates(parameters, updates), optimizer_state), loss / count


def main():
    parser = argparse.ArgumentParser(description="strategy.run with a state that is a pytree.")
    parser.add_argument("--data", metavar="PATH.npz", help="MNIST (default: made-up images)")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=64, help="the global batch")
    options = parser.parse_args()
    training, (x_test, y_test) = images.load(options.data)

    strategy = unison.MirroredStrategy()
    print("replicas:", strategy.num_replicas_in_sync)

    parameters = initial_parameters(jax.random.key(0))
    state = parameters, optimizer.init(parameters)
    for epoch in range(options.epochs):
        epoch_batches = images.batches(*training, options.batch, seed=epoch)
        for batch in strategy.experimental_distribute_dataset(epoch_batches):
            state, loss = strategy.run(train_step, args=(state, batch))
        print(f"epoch {epoch + 1}: loss of the last batch {float(first_copy(strategy, loss)):.3f}")

    parameters = jax.tree.map(
        lambda leaf: first_copy(strategy, leaf), state[0], is_leaf=is_per_replica
    )
    accuracy = jnp.mean(jnp.argmax(logits_of(parameters, x_test), axis=-1) == y_test)
    print(f"test accuracy: {float(accuracy):.3f}")


def first_copy(strategy, value):
    return strategy.experimental_local_results(value)[0]


def is_per_replica(value):
    return isinstance(value, unison.PerReplica)


if __name__ == "__main__":
    main()
