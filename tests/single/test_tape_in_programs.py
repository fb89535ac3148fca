"""`tf.GradientTape` inside replica programs, compiled functions and Keras models."""

import collections
import re

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import unison
import unison.tf as tf


@pytest.fixture(scope="module", autouse=True)
def start_all_devices():
    tf.config.list_logical_devices()


RNG = np.random.default_rng(0)
X = RNG.normal(size=(10, 8)).astype("float32")
Y = RNG.integers(0, 3, 10)


def operations(program, *args):
    """How often each operation stands in the optimized program, and its floating-point work."""
    return operations_of(jax.jit(program).lower(*args).compile())


def operations_of(compiled):
    names = re.findall(r"= \S+ ([a-z][a-z\-]*)\(", compiled.as_text())
    return collections.Counter(names), compiled.cost_analysis()["flops"]


def mlp(weights, x):
    for w in weights[:-1]:
        x = jnp.tanh(x @ w)
    return jnp.mean((x @ weights[-1]) ** 2)


def cnn(weights, x):
    kernel, w = weights
    x = jax.lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return jnp.mean((jax.nn.relu(x).reshape(x.shape[0], -1) @ w) ** 2)


def recurrent(weights, x):
    w, u = weights

    def cell(state, row):
        state = jnp.tanh(row @ w + state @ u)
        return state, jnp.sum(state)

    state, sums = jax.lax.scan(cell, jnp.zeros((x.shape[1], u.shape[0])), x)
    return jnp.sum(state) + jnp.sum(sums)


PROGRAMS = {
    "mlp": (mlp, [np.ones((8, 16)), np.ones((16, 3))], np.ones((4, 8))),
    "cnn": (cnn, [np.ones((3, 3, 1, 4)), np.ones((64, 3))], np.ones((2, 4, 4, 1))),
    "recurrent": (recurrent, [np.ones((8, 5)), np.ones((5, 5))], np.ones((6, 2, 8))),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_compiled_step_with_a_tape_is_the_program_of_value_and_grad(name):
    loss, weights, x = PROGRAMS[name]
    weights, x = jax.tree.map(jnp.float32, (weights, x))

    def taped(weights, x):
        with tf.GradientTape() as tape:
            tape.watch(weights)
            value = loss(weights, x)
        return value, tape.gradient(value, weights)

    assert operations(taped, weights, x) == operations(jax.value_and_grad(loss), weights, x)


def test_a_replica_takes_its_own_gradient(strategy):
    with strategy.scope():
        w = tf.Variable(2.0)

    def gradient(x):
        with tf.GradientTape() as tape:
            loss = w * w * x
        return tape.gradient(loss, w)

    count = strategy.num_replicas_in_sync
    parts = unison.PerReplica([jnp.float32(index) for index in range(count)])
    result = strategy.run(gradient, args=(parts,))
    assert [float(part) for part in result.values] == [4.0 * index for index in range(count)]


def test_the_gradient_of_an_all_reduce_is_the_all_reduce_of_the_gradients(two_replicas):
    def gradient(x):
        replica = tf.distribute.get_replica_context()
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = replica.all_reduce("SUM", x * x) * (replica.replica_id_in_sync_group + 1.0)
        return tape.gradient(loss, x)

    result = two_replicas.run(gradient, (unison.PerReplica([jnp.float32(1), jnp.float32(10)]),))
    assert [float(part) for part in result.values] == [2 * 1 * 3.0, 2 * 10 * 3.0]


def test_variables_may_be_assigned_while_a_tape_records(two_replicas):
    with two_replicas.scope():
        w = tf.Variable(2.0)
        steps = tf.Variable(0.0, trainable=False, aggregation=tf.VariableAggregation.SUM)

    def step():
        with tf.GradientTape() as tape:
            loss = w * w + steps
            steps.assign_add(1.0)
        return tape.gradient(loss, w), steps.value()

    gradient, seen = two_replicas.run(step)
    assert [float(part) for part in gradient.values] == [4.0, 4.0]
    assert [float(part) for part in seen.values] == [2.0, 2.0]


def test_the_step_of_a_strategy_has_the_operations_of_value_and_grad(two_replicas):
    w = np.ones((8, 3), np.float32)

    def taped(w, x):
        with tf.GradientTape() as tape:
            tape.watch(w)
            loss = jnp.mean((x @ w) ** 2)
        return tape.gradient(loss, w)

    def differentiated(w, x):
        return jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)

    def jaxpr(step):
        mesh = two_replicas.placement.mesh
        spec = jax.sharding.PartitionSpec()
        mapped = jax.shard_map(step, mesh=mesh, in_specs=(spec, spec), out_specs=spec)
        return operations(mapped, w, X)

    assert jaxpr(taped) == jaxpr(differentiated)


def test_second_orders_and_custom_gradients_work_in_replicas(two_replicas):
    with two_replicas.scope():
        w = tf.Variable(2.0)

    @tf.custom_gradient
    def scaled(x):
        def gradient(upstream, variables=None):
            return upstream * 7.0, [upstream * 11.0 for _ in variables]

        return x * w, gradient

    def orders(x):
        with tf.GradientTape() as outer:
            with tf.GradientTape(persistent=True) as inner:
                inner.watch(x)
                cube, own = w**3 * x, scaled(x)
            first = inner.gradient(cube, w)
        return first, outer.gradient(first, w), *inner.gradient(own, [x, w])

    results = two_replicas.run(orders, (unison.PerReplica([jnp.float32(1), jnp.float32(10)]),))
    own = [[float(part) for part in result.values] for result in results]
    assert own == [[12.0, 120.0], [12.0, 120.0], [7.0, 7.0], [11.0, 11.0]]


@pytest.mark.parametrize("kind", ["unison", "keras"])
def test_what_a_replica_assigns_is_not_what_it_reads(two_replicas, kind):
    with two_replicas.scope():
        v = tf.Variable(2.0) if kind == "unison" else keras.Variable(2.0)
        fixed = tf.Variable(2.0, trainable=False)

    def assign_and_read(x):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            doubled = x * 2.0
            v.assign(doubled)
            fixed.assign(doubled)
            y = doubled * v * v
            z = fixed * x
        return *tape.gradient(y, [x, v, doubled]), *tape.gradient(z, [x])

    results = two_replicas.run(assign_and_read, (jnp.float32(3.0),))
    assert [float(result.values[0]) for result in results] == [72.0, 72.0, 36.0, 6.0]


def test_the_body_of_a_loop_reads_variables():
    w = tf.Variable(2.0)
    with tf.GradientTape() as tape:
        y, _ = jax.lax.scan(lambda c, a: (c * w, a), jnp.float32(1.0), jnp.arange(3.0))
    assert [float(y), float(tape.gradient(y, w))] == [8.0, 12.0]


def dense_layers():
    return [
        keras.layers.Dense(8, activation="gelu", dtype="mixed_bfloat16"),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.5),
    ]


MODELS = {
    "dense": (dense_layers, (4, 5)),
    "convolutional": (lambda: [keras.layers.Conv2D(4, 3), keras.layers.Flatten()], (4, 6, 6, 1)),
    "recurrent": (lambda: [keras.layers.LSTM(4)], (4, 3, 5)),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_step_of_a_keras_model_is_the_program_of_value_and_grad(name):
    layers, shape = MODELS[name]
    model = keras.Sequential([keras.Input(shape[1:]), *layers(), keras.layers.Dense(3)])
    x, labels = jnp.ones(shape), jnp.zeros(shape[0], "int32")
    trainable = [variable.value for variable in model.trainable_variables]
    others = [variable.value for variable in model.non_trainable_variables]

    def differentiated(trainable, others):
        def loss_of(trainable):
            logits, updated = model.stateless_call(trainable, others, x, training=True)
            return jnp.mean(losses_of(logits, labels)), updated

        (loss, updated), gradients = jax.value_and_grad(loss_of, has_aux=True)(trainable)
        return loss, updated, gradients

    def taped(trainable, others):
        variables = [*model.trainable_variables, *model.non_trainable_variables]
        pairs = list(zip(variables, [*trainable, *others], strict=True))
        with keras.StatelessScope(state_mapping=pairs) as scope:
            with tf.GradientTape() as tape:
                loss = jnp.mean(losses_of(model(x, training=True), labels))
            gradients = tape.gradient(loss, model.trainable_variables)
        updated = [scope.get_current_value(v) for v in model.non_trainable_variables]
        return loss, updated, gradients

    steps = [jax.jit(step).lower(trainable, others).compile() for step in (taped, differentiated)]
    assert operations_of(steps[0]) == operations_of(steps[1])
    results = [jax.tree.leaves(step(trainable, others)) for step in steps]
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_layers_that_are_recomputed_read_their_variables_anew():
    with keras.RematScope(mode="full"):
        layer = keras.layers.Dense(1, use_bias=False)
        layer.build((None, 1))
    for value in (2.0, 5.0):
        layer.kernel.assign([[value]])
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(tf.constant([[3.0]])) ** 2)
        assert float(tape.gradient(loss, layer.kernel)[0, 0]) == 2 * 9 * value


def build():
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.layers.Dense(16, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.0),
            keras.layers.Dense(3),
        ]
    )


def losses_of(logits, labels):
    return keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)


def make_step(model, optimizer):
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(losses_of(model(x, training=False), y)) / len(X)
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    return step


def trained_alone(make):
    model, optimizer = build(), keras.optimizers.Adam(0.05)
    step = make(make_step(model, optimizer))
    losses = [float(step(X, Y)) for _ in range(3)]
    return losses, model.get_weights()


@pytest.fixture(scope="module")
def alone():
    return trained_alone(lambda step: step)


def test_the_loss_falls(alone):
    losses, _ = alone
    assert losses == sorted(losses, reverse=True)


def test_a_compiled_function_trains_as_python_does(alone):
    compiled = trained_alone(tf.function)
    np.testing.assert_allclose(compiled[0], alone[0], rtol=1e-5)
    for one, other in zip(compiled[1], alone[1], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("replicas", [2, 4])
def test_a_custom_loop_under_a_strategy_trains_as_one_device(alone, replicas):
    strategy = tf.distribute.MirroredStrategy([f"CPU:{index}" for index in range(replicas)])
    with strategy.scope():
        model, optimizer = build(), keras.optimizers.Adam(0.05)
    step = make_step(model, optimizer)
    (batch,) = strategy.experimental_distribute_dataset([(X, Y)])  # 10 examples: uneven

    @tf.function
    def train(batch):
        return strategy.reduce("SUM", strategy.run(step, args=batch), axis=None)

    losses = [float(train(batch)) for _ in range(3)]
    np.testing.assert_allclose(losses, alone[0], rtol=1e-5)
    for one, other in zip(model.get_weights(), alone[1], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


LAYERS = {
    "embedding": lambda: keras.layers.Embedding(5, 4),
    "lstm": lambda: keras.layers.LSTM(3),
    "attention": lambda: keras.layers.MultiHeadAttention(2, 4),
    "convolution": lambda: keras.layers.Conv1D(3, 2),
    "normalization": lambda: keras.layers.LayerNormalization(),
}


@pytest.mark.parametrize("name", LAYERS)
def test_keras_layers_have_the_gradients_of_jax(name):
    keras.utils.set_random_seed(0)
    layer = LAYERS[name]()
    x = np.arange(6).reshape(2, 3) % 5 if name == "embedding" else RNG.normal(size=(2, 4, 3))
    x = jnp.asarray(x, "int32" if name == "embedding" else "float32")
    call = (lambda x: layer(x, x)) if name == "attention" else layer
    call(x)
    with tf.GradientTape() as tape:
        loss = jnp.sum(call(x) ** 2)
    taped = tape.gradient(loss, layer.trainable_variables)

    def loss_of(values):
        mapping = list(zip(layer.trainable_variables, values, strict=True))
        with keras.StatelessScope(state_mapping=mapping):
            return jnp.sum(call(x) ** 2)

    expected = jax.grad(loss_of)([variable.value for variable in layer.trainable_variables])
    for one, other in zip(taped, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_mixed_precision_gives_gradients_in_the_dtype_of_the_variables():
    layer = keras.layers.Dense(2, dtype="mixed_float16")
    with tf.GradientTape() as tape:
        loss = jnp.sum(layer(X).astype("float32"))
    gradients = tape.gradient(loss, layer.trainable_variables)
    assert [gradient.dtype for gradient in gradients] == [jnp.float32, jnp.float32]


def test_keras_is_as_it_was_after_a_tape():
    owner = next(base for base in keras.Variable.__mro__ if "_maybe_autocast" in vars(base))
    before = vars(owner)["_maybe_autocast"]
    with tf.GradientTape(), tf.GradientTape():
        assert vars(owner)["_maybe_autocast"] is not before
    assert vars(owner)["_maybe_autocast"] is before
