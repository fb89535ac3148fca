"""`tf.function`: when it traces, what it takes and gives, and control flow in it."""

from __future__ import annotations

import numpy as np

from parity.facts import attempt, fact


def counting(tf, body=lambda x: x, **options):
    """A tf.function and the list that grows with every trace."""
    traces = []

    @tf.function(**options)
    def function(x):
        traces.append(1)
        return body(x)

    return function, traces


def traces_of(name, calls, **options):
    @fact(name=name)
    def program(tf):
        function, traces = counting(tf, **options)
        for argument in calls(tf):
            function(argument)
        return len(traces)


traces_of(
    "tensors_of_one_shape_and_dtype_are_traced_once",
    lambda tf: [tf.constant(1.0), tf.constant(2.0), tf.constant(3.0)],
)
traces_of(
    "another_dtype_is_traced_again",
    lambda tf: [tf.constant(1.0), tf.constant(1), tf.constant(2.0)],
)
traces_of(
    "another_shape_is_traced_again",
    lambda tf: [tf.constant([1.0]), tf.constant([1.0, 2.0]), tf.constant([3.0])],
)
traces_of("python_numbers_are_traced_by_value", lambda tf: [1, 2, 1, 2])


@fact(
    ours=4,
    because="a function that returns text is tried once, and then runs in Python in every call",
)
def text_is_traced_by_value(tf):
    function, traces = counting(tf)
    for argument in ["a", "b", "a"]:
        function(argument)
    return len(traces)


traces_of("none_is_a_value", lambda tf: [None, None, tf.constant(1.0)])
traces_of(
    "numpy_arrays_are_tensors",
    lambda tf: [np.ones(2, np.float32), np.zeros(2, np.float32), np.ones(3, np.float32)],
)
traces_of(
    "structures_are_traced_by_their_form",
    lambda tf: [
        {"a": tf.constant(1.0)},
        {"a": tf.constant(2.0)},
        {"b": tf.constant(1.0)},
        (tf.constant(1.0),),
        [tf.constant(1.0)],
    ],
)


@fact
def a_function_with_an_input_signature_takes_what_fits(tf):
    function, _ = counting(tf, tf.reduce_sum, input_signature=[tf.TensorSpec([None], tf.float32)])
    return [function(tf.constant([1.0])), function([1.0, 2.0]), function(np.ones(3, np.float32))]


@fact(
    ours=3,
    because="XLA's programs have static shapes, so a size that a signature leaves open is traced "
    "and compiled for every size that occurs",
)
def traces_of_a_signature_with_an_open_size(tf):
    function, traces = counting(
        tf, tf.reduce_sum, input_signature=[tf.TensorSpec([None], tf.float32)]
    )
    for size in (1, 2, 3, 2):
        function(tf.ones(size))
    return len(traces)


@fact
def what_the_signature_does_not_take_is_refused(tf):
    function, _ = counting(tf, input_signature=[tf.TensorSpec([None], tf.float32)])
    return [
        attempt(lambda: function(tf.constant([1]))),
        attempt(lambda: function(tf.constant(1.0))),
        attempt(lambda: function(tf.constant([1.0]), tf.constant([1.0]))),
    ]


@fact
def a_signature_converts_numbers(tf):
    function, _ = counting(tf, lambda x: x + 1, input_signature=[tf.TensorSpec([], tf.float32)])
    return [function(1), function(2.5)]


@fact
def side_effects_happen_while_tracing_only(tf):
    seen = []

    @tf.function
    def function(x):
        seen.append("traced")
        return x

    for _ in range(3):
        function(tf.constant(1.0))
    return seen


@fact
def variables_change_in_order(tf):
    v = tf.Variable(1.0)

    @tf.function
    def step():
        v.assign_add(1.0)
        doubled = v * 2.0
        v.assign(doubled)
        return doubled

    return [step(), step(), v.read_value()]


@fact
def variables_are_made_in_the_first_call_only(tf):
    made = []

    @tf.function
    def function(x):
        if not made:
            made.append(tf.Variable(2.0))
        return made[0] * x

    return [function(tf.constant(3.0)), function(tf.constant(4.0))]


@fact
def making_a_variable_in_every_call_is_refused(tf):
    @tf.function
    def function(x):
        return tf.Variable(1.0) * x

    def call_twice():
        function(tf.constant(1.0))
        function(tf.constant(1.0))

    return attempt(call_twice)


@fact
def methods_are_functions_of_their_object(tf):
    class Scale:
        def __init__(self, factor):
            self.factor = factor

        @tf.function
        def apply(self, x):
            return self.factor * x

    a, b = Scale(2.0), Scale(3.0)
    return [a.apply(tf.constant(1.0)), b.apply(tf.constant(1.0))]


@fact
def functions_give_structures(tf):
    @tf.function
    def function(x):
        return {"a": x, "b": (x + 1, [x + 2, None])}, 7

    result, number = function(tf.constant(1.0))
    return [result, int(number), type(result["b"]).__name__]


@fact
def functions_call_functions(tf):
    @tf.function
    def inner(x):
        return x * x

    @tf.function
    def outer(x):
        return inner(x) + inner(x + 1)

    return outer(tf.constant(2.0))


@fact
def keyword_arguments_and_defaults(tf):
    @tf.function
    def function(x, scale=2.0, *, offset=0.0):
        return x * scale + offset

    x = tf.constant(1.0)
    return [function(x), function(x, 3.0), function(x=x, offset=tf.constant(10.0))]


@fact
def a_concrete_function_takes_one_signature(tf):
    @tf.function
    def square(x):
        return x * x

    concrete = square.get_concrete_function(tf.TensorSpec([None], tf.float32))
    return [concrete(tf.constant([1.0, 2.0])), concrete(tf.constant([3.0]))]


@fact
def functions_run_eagerly_when_told_so(tf):
    function, traces = counting(tf)
    tf.config.run_functions_eagerly(True)
    try:
        for _ in range(3):
            function(tf.constant(1.0))
        eagerly = tf.config.functions_run_eagerly()
    finally:
        tf.config.run_functions_eagerly(False)
    return [len(traces), eagerly, tf.config.functions_run_eagerly()]


@fact
def executing_eagerly_outside_and_not_inside(tf):
    @tf.function
    def inside():
        seen.append(tf.executing_eagerly())
        return tf.constant(0)

    seen = [tf.executing_eagerly()]
    inside()
    return seen


@fact
def compiled_functions_agree(tf):
    @tf.function(jit_compile=True)
    def function(x):
        return tf.reduce_sum(tf.tanh(x) ** 2)

    return function(tf.constant([0.5, 1.0, -2.0]))


@fact
def cond_takes_one_branch(tf):
    @tf.function
    def function(x):
        return tf.cond(x > 0, lambda: x * 2.0, lambda: x - 1.0)

    return [function(tf.constant(3.0)), function(tf.constant(-3.0))]


@fact
def case_takes_the_first_that_holds(tf):
    @tf.function
    def function(x):
        return tf.case(
            [(x < 0, lambda: -1.0), (x < 10, lambda: 1.0)], default=lambda: tf.constant(100.0)
        )

    return [function(tf.constant(v)) for v in (-5.0, 5.0, 50.0)]


@fact
def switch_case_takes_a_branch_by_number(tf):
    @tf.function
    def function(i):
        return tf.switch_case(i, [lambda: 1.0, lambda: 2.0], default=lambda: -1.0)

    return [function(tf.constant(i)) for i in (0, 1, 7)]


@fact
def while_loops_carry_structures(tf):
    @tf.function
    def powers(n):
        return tf.while_loop(
            lambda i, total: i < n,
            lambda i, total: (i + 1, total * 2.0),
            (tf.constant(0), tf.constant(1.0)),
        )

    return [powers(tf.constant(5)), powers(tf.constant(0))]


@fact
def a_while_loop_ends_after_its_maximum(tf):
    return tf.while_loop(
        lambda i: True, lambda i: (i + 1,), (tf.constant(0),), maximum_iterations=3
    )


@fact
def if_on_a_tensor_in_a_function(tf):
    @tf.function
    def function(x):
        if x > 0:
            return x * 2.0
        return x - 1.0

    return [function(tf.constant(3.0)), function(tf.constant(-3.0))]


@fact
def if_on_a_tensor_in_a_replica(tf, two):
    values = two.experimental_distribute_values_from_function(
        lambda context: tf.constant(float(context.replica_id_in_sync_group))
    )

    def replica(x):
        if x > 0:
            return x * 10.0
        return x - 1.0

    @tf.function
    def step(x):
        return two.run(replica, args=(x,))

    return attempt(lambda: two.experimental_local_results(step(values)))


@fact
def if_on_the_number_of_the_replica(tf, two):
    def replica():
        context = tf.distribute.get_replica_context()
        if context.replica_id_in_sync_group == 0:
            return tf.constant(10.0)
        return tf.constant(20.0)

    return two.experimental_local_results(two.run(replica))


@fact
def while_on_a_tensor_in_a_function(tf):
    @tf.function
    def halvings(x):
        count = tf.constant(0)
        while x > 1.0:
            x = x / 2.0
            count += 1
        return count

    return halvings(tf.constant(20.0))


@fact
def for_over_a_range_in_a_function(tf):
    @tf.function
    def factorial(n):
        result = tf.constant(1)
        for i in tf.range(1, n + 1):
            result *= i
        return result

    return factorial(tf.constant(5))


@fact
def for_over_a_tensor_in_a_function(tf):
    @tf.function
    def horner(coefficients, x):
        result = tf.constant(0.0)
        for c in coefficients:
            result = result * x + c
        return result

    return horner(tf.constant([1.0, 2.0, 3.0]), tf.constant(2.0))


@fact
def scans_maps_and_folds(tf):
    x = tf.constant([1.0, 2.0, 3.0])
    return [
        tf.map_fn(lambda v: v * v, x),
        tf.vectorized_map(lambda v: v + 1.0, x),
        tf.scan(lambda total, v: total + v, x),
        tf.foldl(lambda total, v: total * 10.0 + v, x),
        tf.foldr(lambda total, v: total * 10.0 + v, x),
    ]


@fact
def an_assertion_in_a_function(tf):
    @tf.function
    def function(x):
        tf.debugging.assert_positive(x)
        return x

    return [function(tf.constant(1.0)), attempt(lambda: function(tf.constant(-1.0)))]


@fact
def a_plain_function_can_be_reached(tf):
    @tf.function
    def function(x):
        return x + 1

    return [function.python_function(1), function.__name__]


@fact
def run_over_steps_in_a_function(tf, two):
    with two.scope():
        v = tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM)

    @tf.function
    def several(steps):
        def replica():
            v.assign_add(tf.constant(1.0))

        for _ in tf.range(steps):
            two.run(replica)

    several(tf.constant(3))
    return v.read_value()
