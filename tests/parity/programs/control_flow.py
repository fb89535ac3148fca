"""Python's control flow over tensors, in functions and in replicas."""

from __future__ import annotations

from parity.facts import attempt, fact


def on_both(tf, body, *inputs):
    """The answers of a compiled function for each input."""
    function = tf.function(body)
    return [function(tf.constant(each)) for each in inputs]


@fact
def branches_and_early_returns(tf):
    def body(x):
        if x > 3.0:
            return x * 2.0
        elif x > 1.0:
            y = x + 0.5
        else:
            y = -x
        return y

    return on_both(tf, body, 4.0, 2.0, -1.0)


@fact
def while_with_break_and_continue(tf):
    def body(x):
        i, total = tf.constant(0), tf.constant(0.0)
        while i < 10:
            i += 1
            if i % 3 == 0:
                continue
            if x * tf.cast(i, tf.float32) > 8.0:
                break
            total += x
        return total, i

    return on_both(tf, body, 1.5, 0.5, 9.0)


@fact
def for_over_a_computed_range(tf):
    def body(n):
        total = 0
        for i in tf.range(n):
            if i % 2 == 1:
                total += i
        return total

    return on_both(tf, body, 7, 0)


@fact
def for_over_the_rows_of_a_tensor(tf):
    def body(x):
        longest = 0.0
        for row in x:
            size = tf.reduce_sum(row)
            if size > longest:
                longest = size
        return longest

    return on_both(tf, body, [[1.0, 2.0], [5.0, -1.0], [0.0, 0.5]])


@fact
def logic_and_comparison_chains(tf):
    def body(x):
        a = x > 0.0 and not x > 2.0
        b = x < -1.0 or 3.0 < x < 5.0
        return a, b, 1 if a or b else 2

    return on_both(tf, body, 1.0, 4.0, -2.0, 2.5)


@fact
def tensor_arrays_in_loops(tf):
    def body(x):
        array = tf.TensorArray(tf.float32, size=3)
        for i in tf.range(3):
            if i == 1:
                array = array.write(i, x)
            else:
                array = array.write(i, -x)
        return array.stack()

    return on_both(tf, body, 2.0)


@fact
def gradients_through_branches_and_loops(tf):
    def body(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = x
            for _ in tf.range(3):
                if y < 5.0:
                    y = y * x
                else:
                    y = y + x
        return tape.gradient(y, x)

    return on_both(tf, body, 2.0, 3.0)


@fact
def a_variable_that_is_undefined_in_a_branch(tf, two):
    def replica(x):
        if x > 0.0:
            y = x
        return y

    @tf.function
    def step(x):
        return two.run(replica, args=(x,))

    return attempt(lambda: two.experimental_local_results(step(tf.constant(1.0))))


@fact
def variables_in_branches_of_replicas(tf, two):
    with two.scope():
        count = tf.Variable(
            0,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )
    values = two.experimental_distribute_values_from_function(
        lambda context: tf.constant(float(context.replica_id_in_sync_group))
    )

    def replica(x):
        if x > 0.0:
            count.assign_add(5)
        for i in tf.range(4):
            if tf.cast(i, tf.float32) > x:
                count.assign_add(1)

    @tf.function
    def step(values):
        two.run(replica, args=(values,))

    step(values)
    return count.read_value()
