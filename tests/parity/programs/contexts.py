"""Where a program is: in a replica, across replicas, in a scope; and `strategy.extended`."""

from __future__ import annotations

from parity.facts import attempt, fact, raises


@fact
def outside_everything_there_is_the_default_strategy(tf):
    context = tf.distribute.get_replica_context()
    return [
        tf.distribute.has_strategy(),
        tf.distribute.in_cross_replica_context(),
        tf.distribute.get_strategy().num_replicas_in_sync,
        context.num_replicas_in_sync,
        int(context.replica_id_in_sync_group),
    ]


@fact
def in_a_scope_the_program_is_across_replicas(tf, two):
    with two.scope():
        return [
            tf.distribute.has_strategy(),
            tf.distribute.in_cross_replica_context(),
            tf.distribute.get_replica_context() is None,
            tf.distribute.get_strategy() is two,
            tf.distribute.get_strategy().num_replicas_in_sync,
        ]


@fact
def in_run_the_program_is_in_a_replica(tf, two):
    seen = []

    def replica():
        context = tf.distribute.get_replica_context()
        seen.append(
            [
                tf.distribute.has_strategy(),
                tf.distribute.in_cross_replica_context(),
                context.num_replicas_in_sync,
                tf.distribute.get_strategy() is two,
                context.strategy is two,
            ]
        )

    two.run(replica)
    return seen[0]


@fact
def replicas_are_numbered(tf, four):
    def index():
        context = tf.distribute.get_replica_context()
        return tf.convert_to_tensor(context.replica_id_in_sync_group)

    return four.experimental_local_results(four.run(index))


@fact
def scope_gives_the_strategy_to_nobody_afterwards(tf, two):
    with two.scope():
        pass
    return tf.distribute.has_strategy()


@fact
def a_scope_in_the_same_scope_is_allowed(tf, two):
    with two.scope(), two.scope():
        return tf.distribute.get_strategy() is two


@fact
def another_strategys_scope_in_a_scope_is_refused(tf, two, four):
    def enter():
        with two.scope(), four.scope():
            pass

    return attempt(enter)


def refused_in_a_replica(name, action):
    @fact(name=name)
    def program(tf, two):
        def replica():
            action(tf, two)

        return attempt(lambda: two.run(replica))


refused_in_a_replica("run_in_a_replica_is_refused", lambda tf, two: two.run(lambda: 1.0))
refused_in_a_replica(
    "reduce_in_a_replica_is_refused", lambda tf, two: two.reduce("SUM", tf.constant(1.0), axis=None)
)
refused_in_a_replica(
    "gather_in_a_replica_is_refused", lambda tf, two: two.gather(tf.constant([1.0]), axis=0)
)
refused_in_a_replica(
    "reduce_to_in_a_replica_is_refused",
    lambda tf, two: two.extended.reduce_to("SUM", tf.constant(1.0), "CPU:0"),
)


@fact
def scope_in_a_replica_is_refused_for_another_strategy(tf, two, four):
    def replica():
        with four.scope():
            pass

    return attempt(lambda: two.run(replica))


@fact
def merge_call_sees_all_replicas(tf, two):
    seen = []

    def merge(strategy, value):
        seen.append([tf.distribute.in_cross_replica_context(), strategy is two])
        return strategy.reduce("SUM", value, axis=None)

    def replica(value):
        return tf.distribute.get_replica_context().merge_call(merge, args=(value,))

    values = per_replica(tf, two, [1.0, 10.0])
    total = two.run(replica, args=(values,))
    return [seen[0], two.reduce("MEAN", total, axis=None)]


@fact
def merge_call_takes_keyword_arguments(tf, two):
    def merge(strategy, value, scale):
        return strategy.reduce("SUM", value, axis=None) * scale

    def replica(value):
        context = tf.distribute.get_replica_context()
        return context.merge_call(merge, args=(value,), kwargs={"scale": 3.0})

    values = per_replica(tf, two, [1.0, 10.0])
    return two.reduce("MEAN", two.run(replica, args=(values,)), axis=None)


@fact
def merge_call_in_the_default_strategy_calls_the_function(tf):
    context = tf.distribute.get_replica_context()
    return context.merge_call(
        lambda strategy, x: [strategy.num_replicas_in_sync, x + 1], args=(tf.constant(1.0),)
    )


def per_replica(tf, strategy, values):
    return strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(values[context.replica_id_in_sync_group])
    )


@fact
def values_from_a_function_are_one_per_replica(tf, four):
    values = four.experimental_distribute_values_from_function(
        lambda context: tf.constant(context.replica_id_in_sync_group * 10)
    )
    return four.experimental_local_results(values)


@fact
def a_value_context_says_how_many_replicas_there_are(tf, four):
    values = four.experimental_distribute_values_from_function(
        lambda context: tf.constant(context.num_replicas_in_sync)
    )
    return four.experimental_local_results(values)[0]


@fact
def local_results_of_a_plain_value_is_a_tuple_of_one(tf, two):
    return two.experimental_local_results(tf.constant(3.0))


@fact
def run_passes_plain_arguments_to_every_replica(tf, two):
    result = two.run(lambda x, y: x * y, args=(tf.constant(3.0),), kwargs={"y": 2.0})
    return two.experimental_local_results(result)


@fact
def run_takes_structures_and_gives_structures(tf, two):
    values = per_replica(tf, two, [1.0, 10.0])
    result = two.run(
        lambda pair: {"sum": pair["a"] + pair["b"], "both": (pair["a"], pair["b"])},
        args=({"a": values, "b": tf.constant(5.0)},),
    )
    return [
        two.experimental_local_results(result["sum"]),
        two.experimental_local_results(result["both"][0]),
        isinstance(result["both"], tuple),
    ]


@fact
def run_of_a_function_without_result_is_none(tf, two):
    return two.run(lambda: None) is None


@fact
def run_in_the_default_strategy_calls_the_function(tf):
    return tf.distribute.get_strategy().run(lambda x: x + 1, args=(tf.constant(1.0),))


@fact
def run_on_one_device_gives_the_value_itself(tf, one):
    return one.run(lambda x: x + 1, args=(tf.constant(1.0),))


@fact
def an_error_in_a_replica_reaches_the_caller(tf, two):
    def replica():
        raise KeyError("missing")

    return attempt(lambda: two.run(replica))


@fact
def two_replicas_have_two_worker_devices(tf, two):
    return [len(two.extended.worker_devices), len(two.extended.parameter_devices)]


@fact
def reduce_to_gives_a_mirrored_sum(tf, two):
    values = per_replica(tf, two, [1.0, 10.0])
    with two.scope():
        total = two.extended.reduce_to(tf.distribute.ReduceOp.SUM, values, values)
        mean = two.extended.reduce_to(tf.distribute.ReduceOp.MEAN, values, "CPU:0")
    return [two.experimental_local_results(total)[0], two.experimental_local_results(mean)[0]]


@fact
def what_reduce_to_several_devices_gives(tf, two):
    values = per_replica(tf, two, [1.0, 10.0])
    with two.scope():
        variable = tf.Variable(1.0)
        results = [
            two.extended.reduce_to("SUM", values, values),
            two.extended.reduce_to("MEAN", values, variable),
            two.extended.reduce_to("SUM", values, "CPU:0"),
            *two.extended.batch_reduce_to("SUM", [(values, variable), (values, "CPU:1")]),
        ]
    counts = [len(two.experimental_local_results(result)) for result in results]
    return [counts, [result + 1.0 for result in results], tf.add(results[0], 1.0)]


@fact
def batch_reduce_to_reduces_each_value(tf, two):
    a, b = per_replica(tf, two, [1.0, 10.0]), per_replica(tf, two, [2.0, 20.0])
    with two.scope():
        sums = two.extended.batch_reduce_to(tf.distribute.ReduceOp.SUM, [(a, a), (b, b)])
    return [two.experimental_local_results(total)[0] for total in sums]


@fact
def update_runs_on_every_copy(tf, two):
    with two.scope():
        variable = tf.Variable(1.0)
        two.extended.update(variable, lambda copy, x: copy.assign_add(x), args=(2.0,))
    return two.experimental_local_results(two.run(lambda: variable.read_value() + 0))


@fact
def update_ungrouped_gives_a_result_per_copy(tf, two):
    with two.scope():
        variable = tf.Variable(1.0)
        results = two.extended.update(
            variable, lambda copy, x: copy.assign_add(x), args=(2.0,), group=False
        )
    return [float(result) for result in results]


@fact
def a_variable_knows_its_container_and_its_strategy(tf, two):
    with two.scope():
        variable = tf.Variable(1.0)
    outside = tf.Variable(1.0)
    return [
        two.extended.variable_created_in_scope(variable),
        two.extended.variable_created_in_scope(outside),
        two.extended.value_container(variable) is variable,
    ]


@fact
def colocated_variables_are_mirrored_too(tf, two):
    with two.scope():
        first = tf.Variable(1.0)
        with two.extended.colocate_vars_with(first):
            second = tf.Variable(2.0)
    return two.extended.variable_created_in_scope(second)


@fact
def setting_a_strategy_for_good_and_taking_it_away(tf, two):
    tf.distribute.experimental_set_strategy(two)
    try:
        inside = [tf.distribute.has_strategy(), tf.distribute.get_strategy() is two]
    finally:
        tf.distribute.experimental_set_strategy(None)
    return [inside, tf.distribute.has_strategy()]


@fact
def the_number_of_replicas_of_each_strategy(tf, one, two, four):
    return [strategy.num_replicas_in_sync for strategy in (one, two, four)]


@fact
def a_tf_function_in_run_is_called_through(tf, two):
    @tf.function
    def double(x):
        return 2 * x

    values = per_replica(tf, two, [1.0, 10.0])
    return two.experimental_local_results(two.run(double, args=(values,)))


@fact
def run_in_a_tf_function(tf, two):
    values = per_replica(tf, two, [1.0, 10.0])

    @tf.function
    def step(x):
        return two.reduce("SUM", two.run(lambda v: v * v, args=(x,)), axis=None)

    return step(values)


@fact
def run_options_are_accepted(tf, two):
    options = tf.distribute.RunOptions(experimental_enable_dynamic_batch_size=True)
    return two.experimental_local_results(two.run(lambda: tf.constant(1.0), options=options))


@fact(
    ours=raises("RuntimeError"),
    because="what `merge_call` calls is a part of the program that `run` compiles, and no other "
    "program runs inside it",
)
def run_inside_merge_call(tf, two):
    def merged(strategy):
        return strategy.reduce("SUM", strategy.run(lambda: tf.constant(2.0)), axis=None)

    def step():
        return tf.distribute.get_replica_context().merge_call(merged)

    return attempt(lambda: two.experimental_local_results(two.run(step)))


@fact
def the_context_of_a_replica_is_one_object(tf, two):
    are_one = []

    def step():
        context = tf.distribute.get_replica_context
        are_one.append(context() is context())
        return tf.constant(0.0)

    two.run(step)
    return all(are_one)
