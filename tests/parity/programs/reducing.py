"""Reducing and gathering over replicas, and the gradients of both."""

from __future__ import annotations

import numpy as np

from parity.answers import plain
from parity.facts import attempt, fact


def per_replica(tf, strategy, values):
    return strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(values[context.replica_id_in_sync_group])
    )


def reductions(name, values, axis):
    """A fact for SUM and MEAN of `values`, one per replica, along `axis`."""

    @fact(name=name)
    def program(tf, two):
        distributed = per_replica(tf, two, values)
        return [
            attempt(lambda: two.reduce(tf.distribute.ReduceOp.SUM, distributed, axis=axis)),
            attempt(lambda: two.reduce(tf.distribute.ReduceOp.MEAN, distributed, axis=axis)),
        ]


reductions("scalars", [1.0, 10.0], None)
reductions("integers", [3, 4], None)
reductions("vectors_without_an_axis", [[1.0, 2.0], [10.0, 20.0]], None)
reductions("vectors_along_their_axis", [[1.0, 2.0], [10.0, 20.0]], 0)
reductions("vectors_of_different_lengths", [[1.0, 2.0, 3.0], [10.0]], 0)
reductions("integer_vectors_of_different_lengths", [[1, 2, 3], [10]], 0)
reductions("an_empty_replica", [[1.0, 2.0], np.zeros(0, np.float32)], 0)
reductions("matrices_along_the_first_axis", [[[1.0, 2.0]], [[3.0, 4.0]]], 0)
reductions("matrices_along_the_last_axis", [[[1.0, 2.0]], [[3.0, 4.0]]], -1)
reductions("matrices_of_different_lengths", [[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0]]], 0)
reductions("double_precision", [np.float64(1.0), np.float64(3.0)], None)
reductions("large_integers", [np.int64(2**40), np.int64(3)], None)
reductions("half_precision", [np.float16(1.5), np.float16(2.0)], None)


@fact
def the_operation_can_be_named_by_text(tf, two):
    values = per_replica(tf, two, [1.0, 10.0])
    return [two.reduce("SUM", values, axis=None), two.reduce("mean", values, axis=None)]


@fact(
    ours=plain(np.float32(10.0)),
    because="maxima and minima are reductions here; TensorFlow has sums and means",
)
def a_maximum_over_the_replicas(tf, two):
    return attempt(lambda: two.reduce("MAX", per_replica(tf, two, [1.0, 10.0]), axis=None))


@fact
def an_unknown_operation_is_refused(tf, two):
    return attempt(lambda: two.reduce("MEDIAN", per_replica(tf, two, [1.0, 10.0]), axis=None))


@fact(
    ours=plain(np.int32(1)),
    because="truth values are counted, as tf.reduce_sum of a cast would; TensorFlow refuses them",
)
def a_sum_of_truth_values(tf, two):
    return attempt(lambda: two.reduce("SUM", per_replica(tf, two, [True, False]), axis=None))


@fact
def structures_are_reduced_leaf_by_leaf(tf, two):
    values = per_replica(tf, two, [1.0, 10.0])
    return two.reduce("SUM", {"a": values, "b": [values, values]}, axis=None)


@fact
def the_default_strategy_reduces_a_number_to_itself(tf):
    return tf.distribute.get_strategy().reduce("SUM", 1.0, axis=None)


@fact
def one_device_reduces_a_number_to_itself(tf, one):
    return one.reduce("SUM", 1.0, axis=None)


@fact
def one_device_reduces_along_an_axis(tf, one):
    return [
        one.reduce("SUM", tf.constant([1.0, 2.0]), axis=0),
        one.reduce("MEAN", tf.constant([1.0, 2.0]), axis=0),
    ]


@fact
def the_sum_of_a_plain_tensor_over_two_replicas_is_refused(tf, two):
    return attempt(lambda: two.reduce("SUM", tf.constant(1.0), axis=None))


@fact
def the_sum_of_a_python_number_over_two_replicas(tf, two):
    return attempt(lambda: two.reduce("SUM", 1.0, axis=None))


@fact
def the_mean_of_a_plain_tensor_is_itself(tf, two):
    return two.reduce("MEAN", tf.constant(3.0), axis=None)


@fact
def the_mean_of_a_mirrored_variable_is_its_value(tf, two):
    with two.scope():
        variable = tf.Variable(3.0)
    return two.reduce("MEAN", variable, axis=None)


@fact
def gathering_puts_the_batches_together(tf, two):
    values = per_replica(tf, two, [[[1, 2]], [[3, 4]]])
    return [two.gather(values, axis=0), two.gather(values, axis=1)]


@fact
def gathering_batches_of_different_lengths(tf, two):
    return two.gather(per_replica(tf, two, [[1.0, 2.0], [3.0]]), axis=0)


@fact
def gathering_scalars_is_refused(tf, two):
    return attempt(lambda: two.gather(per_replica(tf, two, [1.0, 2.0]), axis=0))


@fact
def all_reduce_gives_every_replica_the_sum_and_the_mean(tf, two):
    values = per_replica(tf, two, [1.0, 10.0])

    def replica(x):
        context = tf.distribute.get_replica_context()
        return context.all_reduce("SUM", x), context.all_reduce("MEAN", x)

    total, mean = two.run(replica, args=(values,))
    return [two.experimental_local_results(total), two.experimental_local_results(mean)]


@fact
def all_reduce_takes_structures(tf, two):
    values = per_replica(tf, two, [1.0, 10.0])

    def replica(x):
        context = tf.distribute.get_replica_context()
        return context.all_reduce(tf.distribute.ReduceOp.SUM, {"a": x, "b": [x * 2, x * 3]})

    result = two.run(replica, args=(values,))
    return [two.experimental_local_results(leaf) for leaf in tf.nest.flatten(result)]


@fact
def all_reduce_in_the_default_strategy_changes_nothing(tf):
    context = tf.distribute.get_replica_context()
    return context.all_reduce("SUM", tf.constant([1.0, 2.0]))


@fact
def all_gather_puts_the_replicas_together(tf, two):
    values = per_replica(tf, two, [[[1.0, 2.0]], [[3.0, 4.0]]])

    def replica(x):
        context = tf.distribute.get_replica_context()
        return context.all_gather(x, axis=0), context.all_gather(x, axis=1)

    rows, columns = two.run(replica, args=(values,))
    return [two.experimental_local_results(rows), two.experimental_local_results(columns)]


@fact
def all_gather_of_different_lengths(tf, two):
    values = per_replica(tf, two, [[1.0, 2.0], [3.0]])

    def replica(x):
        return tf.distribute.get_replica_context().all_gather(x, axis=0)

    return two.experimental_local_results(two.run(replica, args=(values,)))


def gradient_through(collective):
    def program(tf, two):
        values = per_replica(tf, two, [[1.0, 2.0], [3.0, 4.0]])

        def replica(x):
            context = tf.distribute.get_replica_context()
            weight = tf.cast(context.replica_id_in_sync_group, tf.float32) + 1.0
            with tf.GradientTape() as tape:
                tape.watch(x)
                combined = collective(context, x)
                loss = weight * tf.reduce_sum(combined * combined)
            return tape.gradient(loss, x)

        return two.experimental_local_results(two.run(replica, args=(values,)))

    return program


fact(
    gradient_through(lambda context, x: context.all_reduce("SUM", x)),
    name="the_gradient_through_an_all_reduced_sum",
)
fact(
    gradient_through(lambda context, x: context.all_reduce("MEAN", x)),
    name="the_gradient_through_an_all_reduced_mean",
)
fact(
    gradient_through(lambda context, x: context.all_gather(x, axis=0)),
    name="the_gradient_through_an_all_gather",
)


@fact
def reducing_what_run_gives(tf, four):
    def replica():
        index = tf.distribute.get_replica_context().replica_id_in_sync_group
        return tf.cast(index, tf.float32)

    values = four.run(replica)
    return [four.reduce("SUM", values, axis=None), four.reduce("MEAN", values, axis=None)]


@fact
def compute_average_loss_divides_by_the_global_batch(tf, two):
    def replica():
        return tf.nn.compute_average_loss(tf.constant([1.0, 2.0, 3.0]))

    return two.experimental_local_results(two.run(replica))


@fact
def compute_average_loss_takes_weights_and_a_batch_size(tf):
    loss = tf.constant([1.0, 2.0, 3.0])
    return [
        tf.nn.compute_average_loss(loss),
        tf.nn.compute_average_loss(loss, global_batch_size=2),
        tf.nn.compute_average_loss(loss, sample_weight=[1.0, 0.0, 2.0]),
        tf.nn.compute_average_loss(loss, sample_weight=0.5, global_batch_size=4),
        tf.nn.compute_average_loss(tf.constant([[1.0, 2.0], [3.0, 4.0]])),
    ]


@fact
def compute_average_loss_of_a_scalar_is_refused(tf):
    return attempt(lambda: tf.nn.compute_average_loss(tf.constant(1.0)))


@fact
def compute_average_loss_across_replicas_is_refused(tf, two):
    def average():
        with two.scope():
            return tf.nn.compute_average_loss(tf.constant([1.0]))

    return attempt(average)


@fact
def regularization_is_divided_by_the_number_of_replicas(tf, two):
    def replica():
        return tf.nn.scale_regularization_loss(tf.constant([2.0, 4.0]))

    return [
        two.experimental_local_results(two.run(replica)),
        tf.nn.scale_regularization_loss(tf.constant(3.0)),
    ]


@fact
def cross_device_operations_give_the_same_sum(tf):
    strategy = tf.distribute.MirroredStrategy(
        ["CPU:0", "CPU:1"], cross_device_ops=tf.distribute.ReductionToOneDevice()
    )
    values = per_replica(tf, strategy, [1.0, 10.0])
    return strategy.reduce("SUM", values, axis=None)
