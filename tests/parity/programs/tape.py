"""`tf.GradientTape`."""

from __future__ import annotations

import numpy as np

from parity.facts import attempt, fact


@fact
def the_gradient_of_a_variable(tf):
    v = tf.Variable(3.0)
    with tf.GradientTape() as tape:
        y = v * v
    return [y, tape.gradient(y, v)]


@fact
def a_watched_tensor(tf):
    x = tf.constant([1.0, 2.0])
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.reduce_sum(x**3)
    return tape.gradient(y, x)


@fact
def a_tensor_that_is_not_watched_has_no_gradient(tf):
    x = tf.constant(1.0)
    with tf.GradientTape() as tape:
        y = x * x
    return tape.gradient(y, x)


@fact
def variables_are_not_watched_if_the_tape_is_told_so(tf):
    a, b = tf.Variable(2.0), tf.Variable(3.0)
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(a)
        y = a * b
    return tape.gradient(y, [a, b])


@fact
def variables_that_are_not_trainable_are_not_watched(tf):
    v = tf.Variable(2.0, trainable=False)
    with tf.GradientTape() as tape:
        y = v * v
    return tape.gradient(y, v)


@fact
def a_tape_is_used_once(tf):
    v = tf.Variable(2.0)
    with tf.GradientTape() as tape:
        y = v * v
    tape.gradient(y, v)
    return attempt(lambda: tape.gradient(y, v))


@fact
def a_persistent_tape_is_used_often(tf):
    v = tf.Variable(2.0)
    with tf.GradientTape(persistent=True) as tape:
        y = v * v
        z = y * y
    return [tape.gradient(y, v), tape.gradient(z, v), tape.gradient(z, y)]


@fact
def structures_of_sources_give_structures(tf):
    a, b = tf.Variable(2.0), tf.Variable([1.0, 2.0])
    with tf.GradientTape() as tape:
        y = a * tf.reduce_sum(b)
    return tape.gradient(y, {"a": a, "rest": [b, (a,)]})


@fact
def several_targets_are_summed(tf):
    v = tf.Variable(2.0)
    with tf.GradientTape() as tape:
        targets = [v * v, 3.0 * v]
    return tape.gradient(targets, v)


@fact
def the_gradient_of_a_vector_is_that_of_its_sum(tf):
    v = tf.Variable([1.0, 2.0])
    with tf.GradientTape() as tape:
        y = v * v
    return tape.gradient(y, v)


@fact
def output_gradients_weight_the_target(tf):
    v = tf.Variable([1.0, 2.0])
    with tf.GradientTape() as tape:
        y = v * v
    return tape.gradient(y, v, output_gradients=tf.constant([10.0, 100.0]))


@fact
def unconnected_gradients_can_be_zero(tf):
    a, b = tf.Variable(2.0), tf.Variable([1.0, 2.0])
    with tf.GradientTape(persistent=True) as tape:
        y = a * a
    return [
        tape.gradient(y, b),
        tape.gradient(y, b, unconnected_gradients=tf.UnconnectedGradients.ZERO),
        tape.gradient(y, [a, b], unconnected_gradients="zero"),
    ]


@fact
def integers_have_no_gradient(tf):
    x = tf.constant(3)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = x * x
    return attempt(lambda: tape.gradient(y, x))


@fact
def nested_tapes_give_second_derivatives(tf):
    v = tf.Variable(2.0)
    with tf.GradientTape() as outer:
        with tf.GradientTape() as inner:
            y = v**3
        first = inner.gradient(y, v)
    return [first, outer.gradient(first, v)]


@fact
def third_derivatives(tf):
    x = tf.constant(2.0)
    with tf.GradientTape() as a:
        a.watch(x)
        with tf.GradientTape() as b:
            b.watch(x)
            with tf.GradientTape() as c:
                c.watch(x)
                y = x**4
            first = c.gradient(y, x)
        second = b.gradient(first, x)
    return a.gradient(second, x)


@fact
def jacobians(tf):
    x = tf.constant([1.0, 2.0])
    matrix = tf.constant([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.linalg.matvec(matrix, x * x)
    return tape.jacobian(y, x)


@fact
def jacobians_of_several_sources(tf):
    a, b = tf.Variable([1.0, 2.0]), tf.Variable(3.0)
    with tf.GradientTape() as tape:
        y = a * b
    return tape.jacobian(y, [a, b])


@fact
def batch_jacobians(tf):
    x = tf.constant([[1.0, 2.0], [3.0, 4.0]])
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = x * x
    return tape.batch_jacobian(y, x)


@fact
def recording_is_stopped(tf):
    v = tf.Variable(2.0)
    with tf.GradientTape() as tape:
        y = v * v
        with tape.stop_recording():
            factor = v * 10.0
        z = y * factor
    return tape.gradient(z, v)


@fact
def a_tape_is_reset(tf):
    v = tf.Variable(2.0)
    with tf.GradientTape() as tape:
        y = v * v
        tape.reset()
        z = 3.0 * v
    return tape.gradient([y, z], v)


@fact
def stop_gradient_is_a_constant(tf):
    v = tf.Variable(2.0)
    with tf.GradientTape() as tape:
        y = v * tf.stop_gradient(v)
    return tape.gradient(y, v)


@fact
def a_tape_lists_the_variables_it_watched(tf):
    a, b = tf.Variable(1.0, name="a"), tf.Variable(1.0, name="b")
    with tf.GradientTape() as tape:
        _ = b * a
    return sorted(variable.name for variable in tape.watched_variables())


@fact
def values_can_be_used_after_the_block(tf):
    v = tf.Variable(2.0)
    with tf.GradientTape() as tape:
        y = v * v
    return [float(y), y + 1, tape.gradient(y, v), y * 2]


@fact
def what_happens_after_the_block_has_no_gradient(tf):
    v = tf.Variable(2.0)
    with tf.GradientTape() as tape:
        y = v * v
    z = y * y
    return tape.gradient(z, v)


@fact
def a_gradient_taken_inside_the_block(tf):
    v = tf.Variable(2.0)
    with tf.GradientTape() as tape:
        y = v * v
        return tape.gradient(y, v)


@fact
def a_tape_in_a_tf_function(tf):
    v = tf.Variable(2.0)

    @tf.function
    def gradient(x):
        with tf.GradientTape() as tape:
            y = tf.sin(v * x)
        return tape.gradient(y, v)

    return [gradient(tf.constant(1.0)), gradient(tf.constant(2.0))]


@fact
def a_tape_around_a_tf_function(tf):
    v = tf.Variable(2.0)

    @tf.function
    def square(x):
        return v * x * x

    x = tf.constant(3.0)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = square(x)
    return tape.gradient(y, [x, v])


@fact
def custom_gradients(tf):
    @tf.custom_gradient
    def clipped(x):
        def gradient(upstream):
            return tf.clip_by_value(upstream, -0.5, 0.5)

        return tf.identity(x), gradient

    v = tf.Variable([1.0, 2.0])
    with tf.GradientTape() as tape:
        y = tf.reduce_sum(clipped(v) * tf.constant([0.1, 10.0]))
    return tape.gradient(y, v)


@fact
def the_gradient_of_gather_sums_repeated_rows(tf):
    table = tf.Variable([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    with tf.GradientTape() as tape:
        y = tf.reduce_sum(tf.gather(table, [0, 2, 2]) ** 2)
    return tf.convert_to_tensor(tape.gradient(y, table))


@fact
def gradients_through_shape_and_selection(tf):
    v = tf.Variable([[1.0, -2.0], [3.0, -4.0]])
    with tf.GradientTape() as tape:
        y = tf.reshape(tf.where(v > 0, v * v, -v), [-1])
        z = tf.reduce_sum(tf.concat([y, tf.transpose(v)[0]], axis=0)[1:])
    return tape.gradient(z, v)


@fact
def the_gradients_of_common_functions(tf):
    v = tf.Variable([0.3, 0.7])
    functions = [
        tf.exp,
        tf.math.log,
        tf.tanh,
        tf.sigmoid,
        tf.nn.relu,
        tf.nn.softmax,
        tf.sqrt,
        tf.abs,
        tf.cos,
    ]
    gradients = []
    for function in functions:
        with tf.GradientTape() as tape:
            y = tf.reduce_sum(function(v) * tf.constant([1.0, 2.0]))
        gradients.append(tape.gradient(y, v))
    return gradients


@fact
def the_gradient_of_a_cross_entropy(tf):
    logits = tf.Variable([[1.0, 2.0, 0.5], [0.1, 0.2, 0.3]])
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(
            tf.nn.sparse_softmax_cross_entropy_with_logits(labels=[1, 2], logits=logits)
        )
    return [loss, tape.gradient(loss, logits)]


@fact
def a_variable_assigned_in_the_block_keeps_the_value_it_had(tf):
    v = tf.Variable(2.0)
    with tf.GradientTape() as tape:
        y = v * v
        v.assign(10.0)
    return [tape.gradient(y, v), v.read_value()]


@fact
def gradients_in_replicas_are_local(tf, two):
    with two.scope():
        v = tf.Variable(2.0)
    values = two.experimental_distribute_values_from_function(
        lambda context: tf.constant([1.0, 10.0][context.replica_id_in_sync_group])
    )

    def replica(x):
        with tf.GradientTape() as tape:
            y = v * v * x
        return tape.gradient(y, v)

    return two.experimental_local_results(two.run(replica, args=(values,)))


@fact
def a_mirrored_variable_outside_replicas_has_a_gradient(tf, two):
    with two.scope():
        v = tf.Variable(2.0)
    with tf.GradientTape() as tape:
        y = v * v
    return attempt(lambda: tape.gradient(y, v))


@fact
def tf_gradients_outside_a_function_is_refused(tf):
    v = tf.Variable(2.0)
    return attempt(lambda: tf.gradients(v * v, v))


@fact
def the_hessian_by_a_jacobian_of_a_gradient(tf):
    x = tf.Variable([1.0, 2.0])
    with tf.GradientTape() as outer:
        with tf.GradientTape() as inner:
            y = tf.reduce_sum(x**3) + x[0] * x[1]
        gradient = inner.gradient(y, x)
    return outer.jacobian(gradient, x)


@fact
def watching_what_is_no_number_is_refused(tf):
    def watch():
        with tf.GradientTape() as tape:
            tape.watch("text")

    return attempt(watch)


@fact
def numpy_arrays_take_part_as_constants(tf):
    v = tf.Variable([1.0, 2.0])
    with tf.GradientTape() as tape:
        y = tf.reduce_sum(v * np.array([3.0, 4.0], np.float32))
    return tape.gradient(y, v)
