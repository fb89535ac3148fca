"""`strategy.run`: what a replica program gets and returns, and when it is traced again."""

import functools
import gc
import logging
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import unison
from unison import PerReplica, VariableAggregation, get_replica_context
from unison.program import ProgramCache
from unison.runtime.private_jax import shard_map


@pytest.fixture
def alone():
    return unison.OneDeviceStrategy("CPU:0")


def traces(strategy, *calls):
    """How many programs are traced for the calls."""
    before = strategy.trace_count
    for call in calls:
        call()
    return strategy.trace_count - before


def numbers(value: PerReplica) -> list:
    return [component.tolist() for component in value.values]


# -- arguments -----------------------------------------------------------------------------


def test_a_plain_array_is_given_whole_to_every_replica(two_replicas):
    assert numbers(two_replicas.run(lambda x: x.sum(), args=(np.arange(4.0),))) == [6.0, 6.0]


def test_every_replica_gets_its_component_of_a_per_replica_value(two_replicas):
    x = PerReplica([np.array([1.0, 2.0]), np.array([3.0, 4.0])])
    assert numbers(two_replicas.run(lambda x: 2 * x, args=(x,))) == [[2.0, 4.0], [6.0, 8.0]]


@pytest.mark.parametrize("make", [np.float32, jnp.float32, float], ids=["numpy", "jax", "python"])
def test_scalars_are_components(two_replicas, make):
    result = two_replicas.run(lambda x: x + 1, args=(PerReplica([make(1), make(2)]),))
    assert numbers(result) == [2.0, 3.0]
    assert result.values[0].dtype == jnp.float32


def test_a_mirrored_value_is_given_whole(two_replicas):
    assert numbers(two_replicas.run(lambda x: x, args=(unison.Mirrored([5, 5]),))) == [5, 5]


def test_an_array_without_elements_is_an_argument_like_others(two_replicas):
    """The compiler of jaxlib 0.11.2 ends the process here: see `private_jax.shard_map`."""
    none, some = np.zeros((0, 5)), np.ones(3)
    doubled, added = two_replicas.run(lambda none, some: (none * 2, some + 1), args=(none, some))
    assert [component.shape for component in doubled.values] == [(0, 5)] * 2
    assert numbers(added) == [[2.0] * 3] * 2


def test_an_argument_without_elements_is_divided_as_its_specs_say(two_replicas):
    mesh = two_replicas.placement.mesh
    divided = shard_map(
        lambda none, some: (none, jnp.sum(none) + some),
        mesh=mesh,
        in_specs=(PartitionSpec(None, *mesh.axis_names), PartitionSpec()),
        out_specs=(PartitionSpec(None, *mesh.axis_names), PartitionSpec()),
        check_vma=False,
    )
    none, some = jax.jit(divided)(jnp.zeros((0, 6), jnp.int32), jnp.ones(3))
    assert (none.shape, none.dtype) == ((0, 6), jnp.int32)
    np.testing.assert_array_equal(some, np.ones(3))


def test_variables_without_elements_are_lifted(two_replicas):
    with two_replicas.scope():
        none, count = unison.Variable(jnp.zeros((0, 4))), unison.Variable(0.0, aggregation="sum")

    def step(rows):
        none.assign(none + jnp.sum(rows))
        count.assign_add(jnp.sum(rows))

    two_replicas.run(step, args=(np.ones((2, 3), "float32"),))
    assert none.numpy().shape == (0, 4)
    assert count.numpy() == 12.0


def test_arguments_are_trees(two_replicas):
    def fn(batch, *, scale):
        return {"y": batch["x"][0] * scale, "none": batch["none"]}

    batch = {"x": [PerReplica([1.0, 2.0])], "none": None}
    result = two_replicas.run(fn, args=(batch,), kwargs={"scale": 10.0})
    assert numbers(result["y"]) == [10.0, 20.0]
    assert result["none"] is None


def test_python_numbers_are_weakly_typed(two_replicas):
    def scale(x, factor):
        return x * factor

    (half, _) = two_replicas.run(scale, args=(jnp.ones((), jnp.bfloat16), 2.0)).values
    assert half.dtype == jnp.bfloat16


def test_truth_values_and_strings_are_python_in_the_program(two_replicas):
    def fn(x, training, mode):
        return x + 1 if training and mode == "add" else x

    assert numbers(two_replicas.run(fn, args=(1, True, "add"))) == [2, 2]
    assert numbers(two_replicas.run(fn, args=(1, False, "add"))) == [1, 1]
    assert numbers(two_replicas.run(fn, args=(1, True, "none"))) == [1, 1]


def test_an_integer_is_no_truth_value(two_replicas):
    kinds = []
    for flag in (True, 1):
        two_replicas.run(lambda flag: kinds.append(isinstance(flag, bool)), args=(flag,))
    assert kinds == [True, False]


def test_a_variable_is_given_as_it_is(two_replicas):
    with two_replicas.scope():
        variable = unison.Variable(1.0, aggregation=VariableAggregation.SUM)
        other = unison.Variable(5.0, aggregation=VariableAggregation.SUM)

    def double(v):
        return v * 2

    assert numbers(two_replicas.run(double, args=(variable,))) == [2.0, 2.0]
    assert numbers(two_replicas.run(double, args=(other,))) == [10.0, 10.0]


@pytest.mark.parametrize(
    "array",
    [np.arange(3), np.arange(3, dtype="uint8"), np.array(True), np.ones(2, "float64")],
    ids=lambda array: str(array.dtype),
)
def test_arrays_of_numpy_arrive_in_the_dtype_of_jax(two_replicas, array, recwarn):
    (result, _) = two_replicas.run(lambda x: x, args=(array,)).values
    assert result.dtype == jnp.asarray(array).dtype
    assert result.tolist() == array.tolist()
    assert [str(warning.message) for warning in recwarn] == []


def test_bfloat16_is_a_dtype_like_others(two_replicas):
    x = PerReplica([np.ones(2, jnp.bfloat16), np.zeros(2, jnp.bfloat16)])
    result = two_replicas.run(lambda x: x + 1, args=(x,))
    assert result.values[0].dtype == jnp.bfloat16
    assert numbers(result) == [[2.0, 2.0], [1.0, 1.0]]


def test_random_keys_are_arguments_like_others(two_replicas):
    def draw(mirrored, own):
        return jax.random.uniform(mirrored), jax.random.uniform(own)

    keys = [jax.random.key(1), jax.random.key(2)]
    mirrored, own = two_replicas.run(draw, args=(jax.random.key(0), PerReplica(keys)))
    assert numbers(mirrored) == [float(jax.random.uniform(jax.random.key(0)))] * 2
    assert numbers(own) == [float(jax.random.uniform(key)) for key in keys]


def test_an_array_on_another_device_is_brought_to_the_replicas(two_replicas):
    elsewhere = jax.device_put(jnp.arange(3.0), jax.devices()[3])
    assert numbers(two_replicas.run(lambda x: x + 1, args=(elsewhere,))) == [[1.0, 2.0, 3.0]] * 2


def test_components_on_other_devices_are_brought_to_their_replicas(two_replicas):
    devices = jax.devices()
    x = PerReplica([jax.device_put(1.0, devices[3]), jax.device_put(2.0, devices[0])])
    assert numbers(two_replicas.run(lambda x: x + 1, args=(x,))) == [2.0, 3.0]


def test_a_result_goes_into_the_next_call_without_a_copy(two_replicas):
    first = two_replicas.run(lambda x: x + 1, args=(PerReplica([1.0, 2.0]),))
    assert first.stacked(two_replicas.placement).sharding == two_replicas.placement.per_replica
    assert numbers(two_replicas.run(lambda x: x + 1, args=(first,))) == [3.0, 4.0]


@pytest.mark.parametrize(
    "argument",
    [object(), np.array(["a"]), {1, 2}, np.array([None])],
    ids=lambda a: type(a).__name__,
)
def test_what_is_no_array_is_a_type_error_that_shows_it(two_replicas, argument):
    with pytest.raises(TypeError, match=r"run\(\) takes arrays, numbers, strings.*Received: "):
        two_replicas.run(lambda x: 1, args=(argument,))


def test_components_that_are_no_numbers_are_a_type_error(two_replicas):
    with pytest.raises(TypeError, match=r"must be arrays or numbers. Received: 'a'"):
        two_replicas.run(lambda x: 1, args=(PerReplica(["a", "long"]),))


def test_components_of_different_ranks_are_a_type_error(two_replicas):
    x = PerReplica([np.zeros(2, "float32"), np.zeros((2, 2), "float32")])
    with pytest.raises(TypeError, match=r"one rank and one dtype. Received: .*float32\[2, 2\]"):
        two_replicas.run(lambda x: x, args=(x,))


def test_another_number_of_components_than_replicas_is_an_error(two_replicas):
    with pytest.raises(ValueError, match=r"each of the 2 replicas. Received: 3 components"):
        two_replicas.run(lambda x: x, args=(PerReplica([1, 2, 3]),))


def test_arguments_that_are_no_tuple_are_an_error(two_replicas):
    with pytest.raises(TypeError, match=r"as a tuple: run\(fn, args=\(x,\)\)"):
        two_replicas.run(lambda x: x, args=np.ones(2))


def test_what_cannot_be_called_is_an_error(two_replicas):
    with pytest.raises(TypeError, match=r"needs a function to call. Received: 3"):
        two_replicas.run(3)


# -- results -------------------------------------------------------------------------------


def test_results_are_a_tree_of_per_replica_values(strategy):
    def fn():
        rank = get_replica_context().replica_id_in_sync_group
        return {"rank": rank, "pair": (rank + 1, 7)}

    result = strategy.run(fn)
    replicas = strategy.num_replicas_in_sync
    assert numbers(result["rank"]) == list(range(replicas))
    assert numbers(result["pair"][0]) == list(range(1, replicas + 1))
    assert numbers(result["pair"][1]) == [7] * replicas


def test_one_replica_returns_plain_arrays(alone):
    result = alone.run(lambda x: {"y": x + 1}, args=(np.arange(3),))
    assert isinstance(result["y"], jax.Array)
    assert result["y"].tolist() == [1, 2, 3]
    assert result["y"].devices() == set(alone.placement.devices)


def test_a_returned_variable_is_its_value(two_replicas):
    with two_replicas.scope():
        variable = unison.Variable(1.0, aggregation=VariableAggregation.SUM)
    assert numbers(two_replicas.run(lambda: variable.assign_add(2.0))) == [5.0, 5.0]


def test_nothing_returned_is_nothing(two_replicas):
    assert two_replicas.run(lambda: None) is None


# -- pure functions ------------------------------------------------------------------------


def test_a_pure_step_with_optax_equals_one_device(four_replicas):
    generator = np.random.default_rng(0)
    x = generator.normal(size=(8, 3)).astype("float32")
    y = generator.normal(size=8).astype("float32")
    optimizer = optax.adam(0.1)
    parameters = {"w": jnp.zeros(3), "b": jnp.zeros(())}

    def loss(parameters, x, y):
        return jnp.sum((x @ parameters["w"] + parameters["b"] - y) ** 2)

    def apply(parameters, state, gradients):
        updates, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state

    def step(parameters, state, x, y):
        gradients = jax.grad(loss)(parameters, x, y)
        return apply(parameters, state, get_replica_context().all_reduce("SUM", gradients))

    (batch,) = four_replicas.experimental_distribute_dataset([(x, y)])
    ours, ours_state = parameters, optimizer.init(parameters)
    theirs, theirs_state = parameters, optimizer.init(parameters)
    for _ in range(3):
        results = four_replicas.run(step, args=(ours, ours_state, *batch))
        first = jax.tree.map(
            lambda leaf: leaf.values[0], results, is_leaf=lambda v: isinstance(v, PerReplica)
        )
        ours, ours_state = first
        theirs, theirs_state = apply(theirs, theirs_state, jax.grad(loss)(theirs, x, y))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), (ours, ours_state),
        (theirs, theirs_state),
    )  # fmt: skip


# -- tracing -------------------------------------------------------------------------------


def test_python_runs_once_for_a_signature(two_replicas):
    calls = []

    def fn(x):
        calls.append(x.shape)
        return x

    for value in range(3):
        two_replicas.run(fn, args=(np.full(2, value),))
    two_replicas.run(fn, args=(np.zeros(3, int),))
    assert calls == [(2,), (3,)]


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (1.0, 2.0, 1),
        (np.zeros(2), np.ones(2), 1),
        (np.zeros(2), np.zeros(3), 2),
        (np.zeros(2, "float32"), np.zeros(2, "int32"), 2),
        (np.zeros(2, "int32"), np.zeros(2, "int64"), 1),  # JAX has one of them
        (np.float32(1), PerReplica([np.float32(1)] * 2), 2),
        (True, False, 2),
        ("a", "b", 2),
        ("a", "a", 1),
    ],
)
def test_a_new_signature_is_traced(two_replicas, one, other, expected):
    fresh = object()

    def fn(x):
        return 1 if fresh else x

    calls = [functools.partial(two_replicas.run, fn, args=(x,)) for x in (one, other, one)]
    assert traces(two_replicas, *calls) == expected


def test_a_lambda_made_in_a_loop_is_compiled_once(two_replicas):
    offset = jnp.ones(())

    def loop():
        for _ in range(3):
            two_replicas.run(lambda x: x + offset, args=(1.0,))

    assert traces(two_replicas, loop) == 1


def test_a_partial_made_in_a_loop_is_compiled_once(two_replicas):
    def add(x, *, by):
        return x + by

    def loop():
        for _ in range(3):
            two_replicas.run(functools.partial(add, by=2.0), args=(1.0,))

    assert traces(two_replicas, loop) == 1
    assert numbers(two_replicas.run(functools.partial(add, by=3.0), args=(1.0,))) == [4.0, 4.0]


def test_a_method_is_compiled_once_for_an_object(two_replicas):
    class Model:
        def __init__(self, weight):
            self.weight = weight

        def call(self, x):
            return self.weight * x

    two, three = Model(2.0), Model(3.0)
    results = []

    def calls():
        models = (two, three, two)
        results.extend(numbers(two_replicas.run(m.call, args=(1.0,)))[0] for m in models)

    assert traces(two_replicas, calls) == 2
    assert results == [2.0, 3.0, 2.0]


def adder(by, default=None, *, keyword=None):
    def add(x, more=default, *, most=keyword):
        return x + by + (more or 0) + (most or 0)

    return add


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (adder(1.0), adder(2.0)),
        (adder(0.0), adder(-0.0)),
        (adder(np.ones(1)), adder(np.zeros(1))),
        (adder(1, 2), adder(1, 3)),
        (adder(1, keyword=2), adder(1, keyword=3)),
        (adder(7), adder(7.0)),
    ],
    ids=["closure", "sign of zero", "object", "default", "keyword default", "type"],
)
def test_a_function_that_sees_other_objects_is_another_function(two_replicas, one, other):
    run = functools.partial(two_replicas.run, args=(1,))
    assert traces(two_replicas, lambda: run(one), lambda: run(other), lambda: run(one)) == 2


def test_a_function_sees_its_globals_as_they_are(two_replicas):
    # As in a notebook whose cell is run again, with a new value behind the same name.
    source = "def fn(x):\n    return (lambda: x + offset)()"
    namespace = {}
    results = []
    for offset in (1.0, 2.0):
        namespace["offset"] = offset
        exec(source, namespace)
        results.append(numbers(two_replicas.run(namespace["fn"], args=(0.0,))))
    assert results == [[1.0, 1.0], [2.0, 2.0]]


def test_a_function_that_is_traced_again_and_again_is_warned_about_once(two_replicas, caplog):
    def grow(x):
        return x

    with caplog.at_level(logging.WARNING, logger="unison"):
        for size in range(1, 12):
            two_replicas.run(grow, args=(np.zeros(size),))
    messages = [record.getMessage() for record in caplog.records]
    assert sum("grow has been traced and compiled 8 times" in message for message in messages) == 1


@pytest.mark.parametrize("was_on", [True, False])
def test_garbage_collection_waits_while_a_function_is_traced_and_lowered(two_replicas, was_on):
    seen = []

    def step(x, fails):
        seen.append(gc.isenabled())
        if fails:
            raise ArithmeticError
        return x

    if not was_on:
        gc.disable()
    try:
        two_replicas.run(step, args=(1.0, False))
        assert seen == [False]
        assert gc.isenabled() is was_on
        with pytest.raises(ArithmeticError):
            two_replicas.run(step, args=(1.0, True))
        assert gc.isenabled() is was_on
    finally:
        gc.enable()


def test_the_cache_keeps_the_programs_used_last(two_replicas):
    cache = ProgramCache(two_replicas.placement, two_replicas.replica_context, capacity=2)

    def run(size):
        cache(lambda x: x, (np.zeros(size),), {})

    for size in (1, 2, 1, 3):
        run(size)
    assert len(cache) == 2
    before = cache.trace_count
    run(1)
    assert cache.trace_count == before
    run(2)
    assert cache.trace_count == before + 1


def test_a_jitted_function_that_reads_variables_sees_their_values(two_replicas):
    with two_replicas.scope():
        variable = unison.Variable(1.0, aggregation=VariableAggregation.SUM)
    scale = jax.jit(lambda x: x * variable)
    assert numbers(two_replicas.run(scale, args=(PerReplica([1.0, 2.0]),))) == [1.0, 2.0]
    variable.assign(3.0)
    assert numbers(two_replicas.run(scale, args=(PerReplica([1.0, 2.0]),))) == [3.0, 6.0]
    assert numbers(two_replicas.run(scale, args=(2.0,))) == [6.0, 6.0]


# -- failures ------------------------------------------------------------------------------


def test_an_exception_leaves_variables_unchanged(two_replicas):
    with two_replicas.scope():
        combined = unison.Variable(1.0, aggregation=VariableAggregation.SUM)
        own = unison.Variable(1.0)

    def fails():
        combined.assign_add(1.0)
        own.assign(get_replica_context().replica_id_in_sync_group + 5.0)
        raise KeyError("in fn")

    for _ in range(2):
        with pytest.raises(KeyError, match="in fn"):
            two_replicas.run(fails)
    assert (float(combined), float(own)) == (1.0, 1.0)
    assert numbers(two_replicas.run(lambda: combined + own)) == [2.0, 2.0]


def test_run_inside_run_is_an_error(two_replicas):
    with pytest.raises(RuntimeError, match=r"strategy.run\(\) must be called in cross-replica"):
        two_replicas.run(lambda: two_replicas.run(lambda: 1))


def test_run_inside_merge_call_is_an_error(two_replicas):
    def fn():
        return get_replica_context().merge_call(lambda strategy: strategy.run(lambda: 1))

    with pytest.raises(RuntimeError, match="not even in merge_call"):
        two_replicas.run(fn)


@pytest.mark.parametrize("transform", [jax.jit, jax.grad, jax.vmap], ids=["jit", "grad", "vmap"])
def test_run_inside_a_transformation_of_jax_is_an_error(two_replicas, transform):
    def fn(x):
        return two_replicas.run(lambda y: y, args=(x,)).values[0]

    with pytest.raises(RuntimeError, match="cannot be called inside a function that JAX traces"):
        transform(fn)(jnp.ones(2) if transform is jax.vmap else 1.0)


def test_a_jitted_caller_does_not_touch_the_variables(two_replicas):
    with two_replicas.scope():
        variable = unison.Variable(1.0, aggregation=VariableAggregation.SUM)

    def add():
        variable.assign_add(1.0)

    with pytest.raises(RuntimeError, match="cannot be called inside a function that JAX traces"):
        jax.jit(lambda: two_replicas.run(add))()
    two_replicas.run(add)
    assert float(variable) == 3.0


@pytest.mark.parametrize("status", ["RESOURCE_EXHAUSTED", "INTERNAL: Error dispatching"])
def test_exhausted_memory_is_passed_on_with_the_sizes(two_replicas, monkeypatch, status):
    with two_replicas.scope():
        variable = unison.Variable(np.ones(2**18, "float32"), aggregation=VariableAggregation.SUM)

    def exhausted(*args):
        raise jax.errors.JaxRuntimeError(f"{status}: Out of memory allocating 9 bytes.")

    exhausted.lower = lambda *args: None
    monkeypatch.setattr("unison.program.compiling.jax.jit", lambda *args, **options: exhausted)
    message = (
        rf"(?s){status}: .* 9 bytes.*2 replicas. Its 2 arguments take 3.0 MiB. "
        r"The largest: float32\[524288\] of 2.0 MiB, float32\[262144\] of 1.0 MiB"
    )
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        two_replicas.run(lambda x: variable.assign_add(variable), (np.zeros(2**19, "float32"),))
    assert float(variable[0]) == 1.0


def test_a_program_that_fails_while_it_runs_leaves_a_clear_message(two_replicas):
    with two_replicas.scope():
        variable = unison.Variable(1.0, name="lost", aggregation=VariableAggregation.SUM)
    variable.cell.array.delete()  # as a program does that failed after it took the buffer
    for use in (variable.numpy, lambda: two_replicas.run(lambda: variable.assign_add(1.0))):
        with pytest.raises(RuntimeError, match=r"'lost' is not here.*Assign the variable"):
            use()
    variable.assign(2.0)
    assert float(variable) == 2.0


# -- threads and lifetimes -----------------------------------------------------------------


def test_threads_share_programs_and_lose_no_update(two_replicas):
    with two_replicas.scope():
        variable = unison.Variable(0, aggregation=VariableAggregation.SUM)
    failures = []

    def add():
        variable.assign_add(1)

    def work():
        try:
            for _ in range(20):
                two_replicas.run(add)
                int(variable)
        except Exception as failure:  # for the main thread
            failures.append(failure)

    threads = [threading.Thread(target=work) for _ in range(4)]
    before = two_replicas.trace_count
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert failures == []
    assert int(variable) == 2 * 4 * 20
    assert two_replicas.trace_count == before + 1


def test_a_variable_that_nobody_uses_is_freed(two_replicas):
    with two_replicas.scope():
        variable = unison.Variable(0.0)
    cell = weakref.ref(variable.cell)
    two_replicas.run(lambda: 1)  # a program that could have read it
    del variable
    gc.collect()
    assert cell() is None


def test_a_result_that_is_no_array_is_an_error():
    with pytest.raises(TypeError, match="must return arrays, numbers and variables"):
        unison.MirroredStrategy(["CPU:0", "CPU:1"]).run(lambda: object())
