"""The table of variables: synchronization x aggregation x where it is written and read."""

from __future__ import annotations

from parity.facts import attempt, fact, raises

AGGREGATIONS = ("NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA")


def made(tf, strategy, synchronization, aggregation, value=1.0, **options):
    with strategy.scope():
        return tf.Variable(
            value,
            synchronization=getattr(tf.VariableSynchronization, synchronization),
            aggregation=getattr(tf.VariableAggregation, aggregation),
            **options,
        )


def replica_number(tf):
    """1.0 on the first replica, 2.0 on the second."""
    index = tf.distribute.get_replica_context().replica_id_in_sync_group
    return tf.cast(index, tf.float32) + 1.0


def local_copies(strategy, variable):
    """What each replica reads."""
    return strategy.experimental_local_results(strategy.run(lambda: variable.read_value() + 0))


def in_replicas(method):
    def write(tf, strategy, variable):
        def update():
            getattr(variable, method)(replica_number(tf))

        strategy.run(update)

    return write


def outside(method, value):
    def write(tf, strategy, variable):
        getattr(variable, method)(value)

    return write


WRITES = {
    "initially": lambda tf, strategy, variable: None,
    "after_assign_in_replicas": in_replicas("assign"),
    "after_assign_add_in_replicas": in_replicas("assign_add"),
    "after_assign_sub_in_replicas": in_replicas("assign_sub"),
    "after_assign_outside": outside("assign", 8.0),
    "after_assign_add_outside": outside("assign_add", 2.0),
    "after_assign_sub_outside": outside("assign_sub", 2.0),
}


def cell(synchronization, aggregation, write):
    def program(tf, two):
        variable = made(tf, two, synchronization, aggregation)
        return {
            "refused": attempt(lambda: write(tf, two, variable)),
            "copies": local_copies(two, variable),
            "read outside": attempt(lambda: variable.read_value()),
        }

    return program


for _synchronization in ("ON_WRITE", "ON_READ"):
    for _aggregation in AGGREGATIONS:
        for _when, _write in WRITES.items():
            fact(
                cell(_synchronization, _aggregation, _write),
                name=f"{_synchronization}_{_aggregation}_{_when}",
            )


@fact
def auto_under_a_mirrored_strategy_is_on_write(tf, two):
    variable = made(tf, two, "AUTO", "SUM")
    in_replicas("assign")(tf, two, variable)
    return local_copies(two, variable)


@fact
def a_variable_says_its_synchronization_and_aggregation(tf, two):
    said = []
    for synchronization in ("AUTO", "ON_WRITE", "ON_READ"):
        variable = made(tf, two, synchronization, "MEAN")
        said.append([variable.synchronization.name, variable.aggregation.name])
    return said


@fact
def synchronization_none_is_refused_under_a_mirrored_strategy(tf, two):
    return attempt(lambda: made(tf, two, "NONE", "NONE"))


@fact
def only_first_tower_is_the_old_name_of_only_first_replica(tf):
    return tf.VariableAggregation.ONLY_FIRST_REPLICA.name


@fact
def on_read_variables_are_not_trainable_unless_asked(tf, two):
    return [
        made(tf, two, "ON_READ", "SUM").trainable,
        made(tf, two, "ON_WRITE", "SUM").trainable,
        made(tf, two, "ON_WRITE", "SUM", trainable=False).trainable,
    ]


@fact
def mean_of_an_integer_variable_is_refused_when_it_is_made(tf, two):
    return attempt(lambda: made(tf, two, "ON_WRITE", "MEAN", value=1).read_value())


@fact
def a_plain_number_under_mean_is_each_replicas_value(tf, two):
    variable = made(tf, two, "ON_WRITE", "MEAN")

    def update():
        variable.assign_add(3.0)

    two.run(update)
    return variable.read_value()


@fact
def a_plain_number_under_only_first_replica_counts_once(tf, two):
    variable = made(tf, two, "ON_WRITE", "ONLY_FIRST_REPLICA", value=0)

    def update():
        variable.assign_add(3)

    two.run(update)
    return variable.read_value()


@fact(
    ours={"dtype": "float32", "shape": [], "values": 7.0},
    because="a plain number is each replica's value, so it is summed; TensorFlow refuses it "
    "because it cannot tell whether the program meant it once per replica",
)
def a_plain_number_under_sum(tf, two):
    variable = made(tf, two, "ON_WRITE", "SUM")

    def update():
        variable.assign_add(3.0)

    def added():
        two.run(update)
        return variable.read_value()

    return attempt(added)


@fact
def a_tensor_made_in_two_replicas_counts_twice_under_sum(tf, two):
    variable = made(tf, two, "ON_WRITE", "SUM")

    def update():
        variable.assign_add(tf.constant(3.0))

    two.run(update)
    return variable.read_value()


@fact
def an_on_read_sum_of_integers_divides_with_remainder(tf, two):
    variable = made(tf, two, "ON_READ", "SUM", value=0)
    variable.assign(7)
    return {"copies": local_copies(two, variable), "read outside": variable.read_value()}


@fact
def an_on_read_sum_on_four_replicas_starts_at_four_times_the_value(tf, four):
    return made(tf, four, "ON_READ", "SUM").read_value()


@fact
def assigning_an_on_read_sum_on_four_replicas_divides_by_four(tf, four):
    variable = made(tf, four, "ON_READ", "SUM")
    variable.assign(8.0)
    return {"copies": local_copies(four, variable), "read outside": variable.read_value()}


@fact
def on_read_copies_can_be_reduced_by_hand(tf, two):
    variable = made(tf, two, "ON_READ", "NONE")
    in_replicas("assign")(tf, two, variable)
    return [two.reduce("SUM", variable, axis=None), two.reduce("MEAN", variable, axis=None)]


@fact
def one_device_makes_ordinary_variables(tf, one):
    variable = made(tf, one, "ON_READ", "SUM")
    in_replicas("assign_add")(tf, one, variable)
    variable.assign_add(2.0)
    return variable.read_value()


@fact
def a_write_in_a_replica_returns_the_new_value(tf, two):
    variable = made(tf, two, "ON_WRITE", "SUM")
    return two.experimental_local_results(
        two.run(lambda: variable.assign_add(replica_number(tf)) + 0)
    )


@fact
def a_replica_reads_what_it_has_written(tf, two):
    variable = made(tf, two, "ON_READ", "SUM")

    def write_and_read():
        variable.assign_add(replica_number(tf))
        return variable * 10.0

    return two.experimental_local_results(two.run(write_and_read))


@fact
def an_on_write_variable_is_read_after_its_write_is_combined(tf, two):
    variable = made(tf, two, "ON_WRITE", "MEAN")

    def write_and_read():
        variable.assign(replica_number(tf))
        return variable * 10.0

    return two.experimental_local_results(two.run(write_and_read))


@fact
def two_writes_in_one_step_are_both_combined(tf, two):
    variable = made(tf, two, "ON_WRITE", "SUM", value=0.0)

    def write():
        variable.assign_add(replica_number(tf))
        variable.assign_add(10.0 * replica_number(tf))

    two.run(write)
    return variable.read_value()


@fact
def variables_are_written_in_a_tf_function(tf, two):
    variable = made(tf, two, "ON_WRITE", "SUM", value=0.0)

    @tf.function
    def step():
        def write():
            variable.assign_add(replica_number(tf))

        two.run(write)

    step()
    step()
    return variable.read_value()


@fact
def the_copies_of_a_variable_are_its_values(tf, two):
    variable = made(tf, two, "ON_READ", "NONE")
    in_replicas("assign")(tf, two, variable)
    return [copy.numpy() for copy in variable.values]


@fact
def a_callable_initial_value_is_called_once_and_mirrored(tf, two):
    calls = []

    def initial_value():
        calls.append(1)
        return tf.constant(float(len(calls)))

    variable = made(tf, two, "ON_WRITE", "SUM", value=initial_value)
    return local_copies(two, variable)


@fact(
    ours=raises("ValueError"),
    because="what `run` calls is one compiled program, as a `tf.function` is; TensorFlow refuses "
    "it there",
)
def a_variable_made_in_every_call_of_run(tf, two):
    def called():
        return two.experimental_local_results(two.run(lambda: tf.Variable(1.0) + 1.0))

    return attempt(called)


@fact
def a_variable_made_inside_run_is_mirrored(tf, two):
    made_there = []

    def step():
        if not made_there:
            made_there.append(
                tf.Variable(1.0, aggregation=tf.VariableAggregation.SUM, name="inside")
            )
        made_there[0].assign_add(replica_number(tf))
        return made_there[0].read_value()

    return attempt(lambda: two.experimental_local_results(two.run(step)))


@fact
def merge_call_updates_a_variable_once(tf, two):
    variable = made(tf, two, "ON_WRITE", "SUM", value=0.0)

    def update(strategy, value):
        total = strategy.extended.reduce_to(tf.distribute.ReduceOp.SUM, value, variable)
        strategy.extended.update(variable, lambda copy, amount: copy.assign_add(amount), (total,))

    def step():
        tf.distribute.get_replica_context().merge_call(update, args=(replica_number(tf),))

    two.run(step)
    return variable.read_value()


@fact
def the_copies_of_a_variable_are_variables(tf, two):
    mirrored = made(tf, two, "AUTO", "NONE", [1.0, 2.0], name="m")
    total = made(tf, two, "ON_READ", "SUM", name="total")
    copies = two.experimental_local_results(mirrored)
    for index, copy in enumerate(total.values):
        copy.assign_add(float(index))
    mirrored.values[1].assign([5.0, 6.0])
    with tf.GradientTape() as tape:
        loss = mirrored.values[1] * mirrored.values[1]
    return {
        "names": [copy.name for copy in copies],
        "are variables": [isinstance(copy, tf.Variable) for copy in copies],
        "values": [copy.numpy() for copy in copies],
        "sums": [tf.reduce_sum(copy) for copy in copies],
        "first": mirrored.numpy(),
        "total": [total.read_value(), *(copy.numpy() for copy in total.values)],
        "in replicas": local_copies(two, total),
        "gradient": tape.gradient(loss, mirrored.values[1]),
        "of one device": [type(x).__name__ == "tuple" for x in [two.unwrap(tf.Variable(1.0))]],
    }


@fact
def slices_of_a_variable_are_assigned(tf):
    v = tf.Variable([[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    v[0].assign([1.0, 2.0, 3.0])
    v[:, 1].assign([7.0, 8.0])
    v[..., -1:].assign([[3.0], [4.0]])
    assigned = v[1, 0].assign(5.0)
    first = v.numpy()
    v[::2, ::-1].assign([[1, 2, 3]])
    tf.function(lambda: v[1].assign(v[1] * 2.0))()
    v[0, 1:].assign(9.0)
    return [
        first,
        isinstance(assigned, tf.Variable),
        v.numpy(),
        attempt(lambda: v[5].assign(1.0)),
        attempt(lambda: tf.constant([1.0])[0].assign(1.0)),
    ]


@fact
def slices_of_a_variable_are_assigned_by_the_replicas(tf, two):
    v = made(tf, two, "AUTO", "NONE", [1.0, 2.0, 3.0, 4.0])

    @tf.function
    def step():
        two.run(lambda: v[1:3].assign([replica_number(tf), 9.0]))

    step()
    return [copy.numpy() for copy in v.values]
