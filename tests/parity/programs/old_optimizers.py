"""`tf.compat.v1.train`: optimizers, their defaults and where they sum gradients."""

from __future__ import annotations

import numpy as np

from parity.facts import attempt, fact

OPTIMIZERS = {
    "GradientDescentOptimizer": lambda train: train.GradientDescentOptimizer(0.1),
    "MomentumOptimizer": lambda train: train.MomentumOptimizer(0.1, 0.9),
    "MomentumOptimizer with Nesterov": lambda train: train.MomentumOptimizer(
        0.1, 0.9, use_nesterov=True
    ),
    "AdamOptimizer": lambda train: train.AdamOptimizer(0.1),
    "RMSPropOptimizer": lambda train: train.RMSPropOptimizer(0.01),
    "RMSPropOptimizer, centered": lambda train: train.RMSPropOptimizer(
        0.01, momentum=0.5, centered=True
    ),
    "AdagradOptimizer": lambda train: train.AdagradOptimizer(0.1),
    "AdadeltaOptimizer": lambda train: train.AdadeltaOptimizer(1.0),
    "FtrlOptimizer": lambda train: train.FtrlOptimizer(
        0.1, l1_regularization_strength=0.01, l2_regularization_strength=0.01
    ),
}


def steps_of(tf, make, steps=4):
    """The weights after some steps on a parabola."""
    weights = tf.Variable([1.0, -2.0, 0.5])
    optimizer = make(tf.compat.v1.train)

    def loss():
        return tf.reduce_sum(weights * weights * tf.constant([1.0, 0.5, 2.0]))

    for _ in range(steps):
        optimizer.minimize(loss, var_list=[weights])
    return weights.numpy()


def minimized(make):
    return lambda tf: steps_of(tf, make)


for _name, _make in OPTIMIZERS.items():
    fact(minimized(_make), name=f"four_steps_of_{_name.replace(' ', '_')}")


@fact
def gradients_are_computed_and_applied(tf):
    weights = tf.Variable([1.0, 2.0])
    optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.5)
    pairs = optimizer.compute_gradients(lambda: tf.reduce_sum(weights**2), [weights])
    optimizer.apply_gradients(pairs)
    return [pairs[0][0], pairs[0][1] is weights, weights.numpy()]


@fact
def a_global_step_is_counted(tf):
    weights, step = tf.Variable(1.0), tf.Variable(0, dtype=tf.int64, trainable=False)
    optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.5)
    for _ in range(3):
        optimizer.minimize(lambda: weights * weights, global_step=step, var_list=[weights])
    return [step.numpy(), weights.numpy()]


@fact
def a_variable_without_gradient_is_left_alone(tf):
    used, unused = tf.Variable(1.0), tf.Variable(5.0)
    optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.5)
    pairs = optimizer.compute_gradients(lambda: used * used, [used, unused])
    optimizer.apply_gradients(pairs)
    return [pairs[1][0], used.numpy(), unused.numpy()]


@fact
def no_gradients_at_all_is_refused(tf):
    optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.5)
    return attempt(lambda: optimizer.apply_gradients([(None, tf.Variable(1.0))]))


def on_two_replicas(make):
    def program(tf, two):
        with two.scope():
            weights = tf.Variable([1.0, -2.0])
            optimizer = make(tf.compat.v1.train)
        values = two.experimental_distribute_values_from_function(
            lambda context: tf.constant([1.0, 3.0][context.replica_id_in_sync_group])
        )

        def step(x):
            optimizer.minimize(lambda: tf.reduce_sum(weights * weights) * x, var_list=[weights])

        @tf.function
        def train():
            two.run(step, args=(values,))

        for _ in range(3):
            train()
        return weights.numpy()

    return program


for _name in ("GradientDescentOptimizer", "MomentumOptimizer", "AdamOptimizer"):
    fact(on_two_replicas(OPTIMIZERS[_name]), name=f"gradients_are_summed_by_{_name}")


@fact
def slots_are_named(tf):
    weights = tf.Variable([1.0, 2.0])
    optimizer = tf.compat.v1.train.MomentumOptimizer(0.1, 0.9)
    optimizer.minimize(lambda: tf.reduce_sum(weights**2), var_list=[weights])
    return [optimizer.get_slot_names(), optimizer.get_slot(weights, "momentum").numpy()]


@fact
def the_aggregation_method_changes_no_result(tf):
    found = []
    for name in ("ADD_N", "DEFAULT", "EXPERIMENTAL_TREE", "EXPERIMENTAL_ACCUMULATE_N"):
        weights = tf.Variable([1.0, 2.0])
        optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.1)
        optimizer.minimize(
            lambda: tf.reduce_sum(weights**2),  # noqa: B023
            var_list=[weights],
            aggregation_method=getattr(tf.AggregationMethod, name),
        )
        found.append(weights.numpy())
    return found


@fact(
    ours=False,
    because="DEFAULT chooses by sizes and devices; ADD_N is always one reduction of everything",
)
def add_n_is_the_default(tf):
    return tf.AggregationMethod.ADD_N == tf.AggregationMethod.DEFAULT


@fact
def gradients_of_a_loss_that_is_no_callable_are_refused(tf):
    weights = tf.Variable([1.0, 2.0])
    optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.1)
    return attempt(lambda: optimizer.compute_gradients(tf.reduce_sum(weights**2), [weights]))


@fact
def keras_optimizers_apply_the_same_rules(tf):
    found = []
    for make in (
        lambda: tf.keras.optimizers.SGD(0.1, momentum=0.9),
        lambda: tf.keras.optimizers.Adam(0.1),
        lambda: tf.keras.optimizers.Adagrad(0.1),
        lambda: tf.keras.optimizers.Ftrl(0.1),
    ):
        weights = tf.Variable(np.array([1.0, -2.0], np.float32))
        optimizer = make()
        for _ in range(3):
            optimizer.apply_gradients([(2.0 * weights.read_value(), weights)])
        found.append(weights.numpy())
    return found
