"""TensorFlow 1's optimizers update as TensorFlow's do, alone and on several replicas."""

from __future__ import annotations

from typing import NamedTuple

import keras
import numpy as np
import pytest

import unison
import unison.tf as tf
import unison.train
from hlo import all_reduces, compiled_programs
from unison.cells import Layout

v1 = tf.compat.v1
METHODS = ["ADD_N", "DEFAULT", "TREE", "EXPERIMENTAL_ACCUMULATE_N"]


# -- what TensorFlow 2.21 answers -----------------------------------------------------------

# Five steps of `loss(w, b, scale)` from W and B: alone with scale 1, and on two replicas of a
# MirroredStrategy with scales 0.5 and 1. The values of w and b, and w's slots, in one row.
W = [1.0, -2.0, 0.5]
B = [[0.25, -1.5]]
SCALES = [0.5, 1.0]


def loss(w, b, scale):
    weights = tf.constant([1.0, 0.5, 2.0])
    return scale * (tf.reduce_sum(weights * w * w) / 2 + tf.reduce_sum(tf.sin(b)))


class Answer(NamedTuple):
    """What TensorFlow computes with an optimizer and its arguments."""

    optimizer: str
    arguments: dict
    alone: list[float]
    mirrored: list[float]
    slots: dict[str, list[float]]


ANSWERS = {
    "sgd": Answer(
        "GradientDescentOptimizer",
        {"learning_rate": 0.1},
        [0.59049, -1.5475619, 0.16383998, -0.24441412, -1.5289785],
        [0.44370532, -1.3543742, 0.084034994, -0.4828788, -1.5393702],
        {},
    ),
    "momentum": Answer(
        "MomentumOptimizer",
        {"learning_rate": 0.1, "momentum": 0.9},
        [-0.029160023, -0.834312, -0.29021, -1.0194271, -1.5728279],
        [-0.35630465, -0.3560914, -0.38913995, -1.5708866, -1.5959882],
        {"momentum": [2.5595999, -3.282756, 1.3591001]},
    ),
    "nesterov": Answer(
        "MomentumOptimizer",
        {"learning_rate": 0.1, "momentum": 0.9, "use_nesterov": True},
        [-0.104581654, -0.6318847, -0.20785876, -1.2973306, -1.578178],
        [-0.32955682, -0.15452448, -0.17392612, -1.8092039, -1.5941117],
        {"momentum": [2.1008976, -2.9889176, 0.86588407]},
    ),
    "adam": Answer(
        "AdamOptimizer",
        {},
        [0.9950004, -1.9950002, 0.49500093, 0.2449999, -1.5049934],
        [0.9950004, -1.9950002, 0.49500093, 0.2449999, -1.5049934],
        {
            "m": [0.40860522, -0.40905765, 0.40770045],
            "v": [0.0049699964, 0.0049799634, 0.0049501094],
        },
    ),
    "adam large": Answer(
        "AdamOptimizer",
        {"learning_rate": 0.3, "beta1": 0.5, "beta2": 0.8, "epsilon": 0.1},
        [-0.016975433, -0.8068841, -0.06758368, -1.0135193, -1.5575432],
        [-0.05129846, -0.7505376, -0.052804537, -1.0696936, -1.5683794],
        {"m": [0.27182353, -0.5938082, -0.097808674], "v": [0.19026108, 0.34915957, 0.12722796]},
    ),
    "rmsprop": Answer(
        "RMSPropOptimizer",
        {"learning_rate": 0.01},
        [0.95081353, -1.950407, 0.45162478, 0.2009706, -1.504054],
        [0.93588203, -1.9352728, 0.4371085, 0.18558386, -1.5060035],
        {
            "momentum": [0.009691001, -0.009845364, 0.009383296],
            "rms": [0.98233944, 0.99106115, 0.96553105],
        },
    ),
    "rmsprop momentum": Answer(
        "RMSPropOptimizer",
        {"learning_rate": 0.05, "decay": 0.7, "momentum": 0.6, "epsilon": 0.01},
        [0.5829569, -1.5658011, 0.12181669, -0.19751228, -1.5422562],
        [0.5184199, -1.4974394, 0.06946999, -0.26958328, -1.5569549],
        {
            "momentum": [0.099044055, -0.107365906, 0.07946675],
            "rms": [0.71226835, 0.84233207, 0.52411854],
        },
    ),
    "rmsprop centered": Answer(
        "RMSPropOptimizer",
        {"learning_rate": 0.05, "decay": 0.8, "momentum": 0.5, "epsilon": 1e-3, "centered": True},
        [0.59091985, -1.5653732, 0.14168973, -0.20603314, -1.5330818],
        [0.48650616, -1.4470276, 0.06819739, -0.33631927, -1.5455848],
        {
            "mg": [0.55357593, -0.6112223, 0.4488022],
            "momentum": [0.096871585, -0.10985649, 0.07148126],
            "rms": [0.79190046, 0.8856481, 0.6553286],
        },
    ),
    "adagrad": Answer(
        "AdagradOptimizer",
        {"learning_rate": 0.1},
        [0.7056088, -1.694938, 0.22963734, -0.06673856, -1.5592645],
        [0.7013287, -1.6905032, 0.22587037, -0.071507305, -1.5669901],
        {"accumulator": [3.796277, 4.399463, 2.8525963]},
    ),
    "adagrad initial": Answer(
        "AdagradOptimizer",
        {"learning_rate": 0.5, "initial_accumulator_value": 2.0},
        [0.21727145, -1.0302423, 0.008042744, -0.84185386, -1.5627574],
        [0.13788794, -0.88787603, 0.000925981, -0.99108493, -1.5691451],
        {"accumulator": [4.0116262, 5.052014, 3.221128]},
    ),
    "adadelta": Answer(
        "AdadeltaOptimizer",
        {},
        [0.9999976, -1.9999976, 0.49999774, 0.24999772, -1.5000024],
        [0.9999976, -1.9999976, 0.49999774, 0.24999772, -1.5000024],
        {
            "accum": [0.22621864, 0.22621888, 0.22621827],
            "accum_update": [4.7068312e-08, 4.706834e-08, 4.7068255e-08],
        },
    ),
    "adadelta large": Answer(
        "AdadeltaOptimizer",
        {"learning_rate": 1.0, "rho": 0.7, "epsilon": 0.01},
        [0.23930931, -1.1014425, 0.006149467, -0.7453127, -1.5707964],
        [0.23297776, -1.0924753, 0.0051694177, -0.75516975, -1.5721493],
        {
            "accum": [0.287342, 0.4866663, 0.13529396],
            "accum_update": [0.01669533, 0.026191557, 0.00668769],
        },
    ),
    "ftrl": Answer(
        "FtrlOptimizer",
        {"learning_rate": 0.1},
        [0.44413963, -1.1278743, 0.126446, -0.1441388, -0.3260737],
        [0.5200114, -1.3001027, 0.1531617, -0.12456743, -0.38128433],
        {"accum": [2.2581375, 2.6144075, 1.7480006], "linear": [-6.6741304, 18.236744, -1.6717674]},
    ),
    "ftrl regularized": Answer(
        "FtrlOptimizer",
        {
            "learning_rate": 0.2,
            "l1_regularization_strength": 0.3,
            "l2_regularization_strength": 0.1,
        },
        [0.21482162, -0.81463194, 0.016475152, -0.39981616, -0.48575854],
        [0.27655572, -0.98342544, 0.026685026, -0.4066297, -0.52034557],
        {"accum": [1.5736438, 2.076414, 1.1626835], "linear": [-1.6903787, 6.332255, -0.39211902]},
    ),
    "ftrl power": Answer(
        "FtrlOptimizer",
        {"learning_rate": 0.2, "learning_rate_power": -0.7, "initial_accumulator_value": 0.5},
        [0.21768092, -0.7123094, 0.02993951, -0.33986127, -0.43708834],
        [0.34033078, -1.007679, 0.060448322, -0.26750162, -0.43497273],
        {
            "accum": [1.9034535, 2.2018478, 1.6040432],
            "linear": [-1.7079296, 6.1885624, -0.20838474],
        },
    ),
    "ftrl shrinkage": Answer(
        "FtrlOptimizer",
        {
            "learning_rate": 0.2,
            "l1_regularization_strength": 0.05,
            "l2_shrinkage_regularization_strength": 0.2,
            "beta": 0.4,
        },
        [0.13569885, -0.4652823, 0.01643848, -0.35507667, -0.28354082],
        [0.19685666, -0.6627038, 0.025532562, -0.37251565, -0.35101324],
        {
            "accum": [1.3233192, 1.5090234, 1.1450305],
            "linear": [-1.1019077, 3.8383822, -0.17082784],
        },
    ),
}


def optimizer_of(answer):
    return getattr(v1.train, answer.optimizer)(**answer.arguments)


def variables():
    return tf.Variable(W, name="w"), tf.Variable(B, name="b")


def row(*values):
    return np.concatenate([np.ravel(value) for value in values])


@pytest.mark.parametrize("name", ANSWERS)
def test_five_steps_alone_are_those_of_tensorflow(name):
    answer = ANSWERS[name]
    w, b = variables()
    optimizer = optimizer_of(answer)
    for _ in range(5):
        optimizer.minimize(lambda: loss(w, b, 1.0), var_list=[w, b])
    np.testing.assert_allclose(row(w, b), answer.alone, rtol=2e-6, atol=2e-7)
    slots = {slot: optimizer.get_slot(w, slot) for slot in optimizer.get_slot_names()}
    assert slots.keys() == answer.slots.keys()
    for slot, expected in answer.slots.items():
        np.testing.assert_allclose(slots[slot], expected, rtol=2e-5, atol=2e-7)


@pytest.mark.parametrize("name", ANSWERS)
def test_five_steps_on_two_replicas_are_those_of_tensorflow(name, two_replicas):
    answer = ANSWERS[name]
    with two_replicas.scope():
        w, b = variables()
        optimizer = optimizer_of(answer)

    def step(scale):
        grads_and_vars = optimizer.compute_gradients(lambda: loss(w, b, scale), [w, b])
        optimizer.apply_gradients(grads_and_vars)

    for _ in range(5):
        two_replicas.run(step, args=(unison.PerReplica(SCALES),))
    np.testing.assert_allclose(row(w, b), answer.mirrored, rtol=2e-6, atol=2e-7)
    for variable in (w, b, *optimizer.variables()):
        first, second = variable.cell.copies()
        np.testing.assert_array_equal(first, second)


# -- methods of an optimizer ---------------------------------------------------------------


def sgd(**arguments):
    return v1.train.GradientDescentOptimizer(0.1, **arguments)


def test_slots_exist_from_the_first_update_on():
    w = tf.Variable([1.0, 2.0])
    optimizer = v1.train.MomentumOptimizer(0.1, 0.9)
    assert optimizer.get_slot(w, "momentum") is None
    assert optimizer.get_slot_names() == []
    assert optimizer.variables() == []
    optimizer.apply_gradients([([1.0, 1.0], w)])
    assert optimizer.get_slot(w, "momentum").numpy().tolist() == [1.0, 1.0]
    assert optimizer.get_slot_names() == ["momentum"]
    assert optimizer.get_slot(w, "velocity") is None
    assert not optimizer.get_slot(w, "momentum").trainable


def test_a_variable_that_comes_later_gets_slots_of_its_own():
    first, second = tf.Variable(1.0), tf.Variable(2.0)
    optimizer = v1.train.MomentumOptimizer(0.1, 0.9)
    optimizer.apply_gradients([(1.0, first)])
    optimizer.apply_gradients([(5.0, second), (1.0, first)])
    assert float(optimizer.get_slot(first, "momentum")) == pytest.approx(1.9)
    assert float(optimizer.get_slot(second, "momentum")) == 5.0


@pytest.mark.parametrize(
    ("optimizer", "names"),
    [
        (sgd(), []),
        (v1.train.MomentumOptimizer(0.1, 0.9), ["b/Momentum:0", "w/Momentum:0"]),
        (
            v1.train.AdamOptimizer(),
            ["b/Adam:0", "b/Adam_1:0", "beta1_power:0", "beta2_power:0", "w/Adam:0", "w/Adam_1:0"],
        ),
        (
            v1.train.RMSPropOptimizer(0.1, centered=True, name="r"),
            ["b/r:0", "b/r_1:0", "b/r_2:0", "w/r:0", "w/r_1:0", "w/r_2:0"],
        ),
        (
            v1.train.FtrlOptimizer(0.1, accum_name="acc", linear_name="lin"),
            ["b/acc:0", "b/lin:0", "w/acc:0", "w/lin:0"],
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_variables_of_an_optimizer_are_called_as_in_tensorflow(optimizer, names):
    w, b = variables()
    optimizer.apply_gradients([(np.ones(3, "float32"), w), (np.ones((1, 2), "float32"), b)])
    assert [variable.name for variable in optimizer.variables()] == names


def test_the_powers_of_adam_are_those_of_the_next_step():
    optimizer = v1.train.AdamOptimizer()
    optimizer.apply_gradients([(1.0, tf.Variable(1.0))])
    powers = {v.name: float(v) for v in optimizer.variables() if v.name.startswith("beta")}
    # TF 2.21
    assert powers == pytest.approx({"beta1_power:0": 0.80999994, "beta2_power:0": 0.99800104})


def test_the_default_variables_are_the_trainable_ones_that_the_loss_reads():
    w, b = tf.Variable([1.0, 2.0], name="w"), tf.Variable(3.0, name="b")
    frozen, unread = tf.Variable(1.0, trainable=False), tf.Variable(1.0)
    grads_and_vars = sgd().compute_gradients(lambda: tf.reduce_sum(b * w) + frozen)
    assert {variable.name: np.asarray(g).tolist() for g, variable in grads_and_vars} == {
        "w:0": [3.0, 3.0],
        "b:0": 3.0,
    }
    assert unread not in [variable for _, variable in grads_and_vars if variable is unread]


def test_a_variable_that_the_loss_does_not_read_has_no_gradient_and_stays():
    w, b = tf.Variable([1.0, 2.0]), tf.Variable(3.0)
    optimizer = sgd()
    (gradient_w, _), (gradient_b, _) = optimizer.compute_gradients(lambda: b * 2.0, [w, b])
    assert gradient_w is None
    assert float(gradient_b) == 2.0
    optimizer.apply_gradients([(gradient_w, w), (gradient_b, b)])
    assert w.numpy().tolist() == [1.0, 2.0]
    assert float(b) == pytest.approx(2.8)


def test_grad_loss_weighs_the_elements_of_the_loss():
    w = tf.Variable([1.0, 2.0])
    [(gradient, _)] = sgd().compute_gradients(
        lambda: w * w, [w], grad_loss=tf.constant([1.0, 10.0])
    )
    assert gradient.tolist() == [2.0, 40.0]


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_the_global_step_counts_the_updates(dtype):
    w, step = tf.Variable(1.0), tf.Variable(5, dtype=dtype)
    sgd().minimize(lambda: w * w, global_step=step)
    sgd().apply_gradients([(1.0, w)], global_step=step)
    assert int(step) == 7


@pytest.mark.parametrize(
    "learning_rate",
    [lambda: 0.5, tf.Variable(0.5, trainable=False), np.float64(0.5)],
    ids=["function", "variable", "number"],
)
def test_the_learning_rate_is_a_number_a_variable_or_a_function(learning_rate):
    w = tf.Variable(1.0)
    v1.train.GradientDescentOptimizer(learning_rate).apply_gradients([(1.0, w)])
    assert float(w) == 0.5


def test_a_learning_rate_that_changes_is_read_in_every_step():
    w, rate = tf.Variable(1.0), tf.Variable(0.5, trainable=False)
    optimizer = v1.train.AdagradOptimizer(lambda: rate * 2)
    optimizer.apply_gradients([(1.0, w)])
    rate.assign(0.0)
    before = float(w)
    optimizer.apply_gradients([(1.0, w)])
    assert float(w) == before


def test_a_constraint_is_applied_after_the_update():
    w = tf.Variable([1.0, 2.0], constraint=lambda value: tf.clip_by_value(value, 0.0, 1.5))
    v1.train.GradientDescentOptimizer(1.0).apply_gradients([([5.0, -5.0], w)])
    assert w.numpy().tolist() == [0.0, 1.5]


def test_an_update_in_float64_takes_hyperparameters_that_are_float32():
    w = tf.Variable([1.0, 2.0], dtype=tf.float64)
    optimizer = v1.train.AdamOptimizer(0.1)
    optimizer.apply_gradients([(tf.constant([1.0, 2.0], tf.float64), w)])
    np.testing.assert_allclose(w, [0.90000003, 1.90000001], rtol=1e-8)  # TF 2.21
    assert optimizer.get_slot(w, "m").dtype == tf.float64


# After two steps from [1, 2] with gradients [1, 2]. Adam divides by 0 in bfloat16, where its beta2
# of 0.999 is 1: in TensorFlow, too.
HALVES = {
    "bfloat16": {
        v1.train.AdamOptimizer: [-630784, -1261570],
        v1.train.RMSPropOptimizer: [0.796875, 1.671875],
        v1.train.AdagradOptimizer: [0.8359375, 1.828125],
        v1.train.FtrlOptimizer: [0.53515625, 1.515625],
    },
    "float16": {
        v1.train.AdamOptimizer: [0.8, 1.801],
        v1.train.RMSPropOptimizer: [0.8, 1.665],
        v1.train.AdagradOptimizer: [0.836, 1.831],
        v1.train.FtrlOptimizer: [0.5337, 1.519],
    },
}


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("kind", HALVES["float16"])
def test_an_update_is_computed_in_the_dtype_of_the_variable(dtype, kind):
    w = tf.Variable([1.0, 2.0], dtype=dtype)
    optimizer = kind(0.1)
    for _ in range(2):
        optimizer.apply_gradients([(tf.constant([1.0, 2.0], dtype), w)])
    assert w.numpy().dtype == dtype
    tolerance = 1e-3 if dtype == "float16" else 5e-3
    np.testing.assert_allclose(w.numpy().astype("float32"), HALVES[dtype][kind], rtol=tolerance)


def test_locking_and_names_are_accepted():
    w = tf.Variable(1.0)
    optimizer = sgd(use_locking=True, name="descent")
    grads_and_vars = optimizer.compute_gradients(
        lambda: w * w, gate_gradients=optimizer.GATE_GRAPH, colocate_gradients_with_ops=True
    )
    assert optimizer.apply_gradients(grads_and_vars, name="update") is None
    assert optimizer.get_name() == "descent"
    assert (optimizer.GATE_NONE, optimizer.GATE_OP, optimizer.GATE_GRAPH) == (0, 1, 2)


def test_an_optimizer_updates_in_a_compiled_function():
    w = tf.Variable([1.0, -2.0])
    optimizer = v1.train.MomentumOptimizer(0.1, 0.9)

    @tf.function
    def step(x):
        optimizer.minimize(lambda: tf.reduce_sum(w * w * x))

    for _ in range(3):
        step(tf.constant(2.0))
    reference = tf.Variable([1.0, -2.0])
    eager = v1.train.MomentumOptimizer(0.1, 0.9)
    for _ in range(3):
        eager.minimize(lambda: tf.reduce_sum(reference * reference * 2.0))
    np.testing.assert_allclose(w, reference, rtol=1e-6)


# -- errors --------------------------------------------------------------------------------


def test_a_loss_must_be_a_function():
    with pytest.raises(RuntimeError, match="function of no arguments"):
        sgd().compute_gradients(tf.constant(1.0))


def test_there_must_be_variables():
    with pytest.raises(ValueError, match="No variables were given"):
        sgd().apply_gradients([])


def test_a_variable_must_have_a_gradient():
    with pytest.raises(ValueError, match="No variable has a gradient"):
        sgd().apply_gradients([(None, tf.Variable(1.0, name="lonely"))])


def test_a_loss_must_depend_on_a_variable():
    with pytest.raises(ValueError, match=r"depends on none of the variables \['lonely:0'\]"):
        sgd().minimize(lambda: tf.constant(1.0), var_list=[tf.Variable(1.0, name="lonely")])
    with pytest.raises(ValueError, match="depends on none"):
        sgd().minimize(lambda: tf.constant(1.0))


def test_a_gradient_must_have_the_shape_of_its_variable():
    with pytest.raises(ValueError, match=r"'w' must have its shape \(2,\). Received: shape \(3,\)"):
        sgd().apply_gradients([(tf.ones(3), tf.Variable([1.0, 2.0], name="w"))])


def test_integers_are_not_updated():
    with pytest.raises(ValueError, match="floating dtypes"):
        sgd().apply_gradients([(1, tf.Variable(1))])


def test_an_optimizer_needs_a_name():
    with pytest.raises(ValueError, match="name"):
        sgd(name="")


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("initial_accumulator_value", -1.0),
        ("learning_rate_power", 1.0),
        ("l1_regularization_strength", -1.0),
        ("l2_regularization_strength", -1.0),
        ("l2_shrinkage_regularization_strength", -1.0),
    ],
)
def test_the_numbers_of_ftrl_have_ranges(argument, value):
    with pytest.raises(ValueError, match=argument):
        v1.train.FtrlOptimizer(0.1, **{argument: value})


def test_the_accumulator_of_adagrad_starts_above_0():
    with pytest.raises(ValueError, match="more than 0"):
        v1.train.AdagradOptimizer(0.1, initial_accumulator_value=0.0)


def test_gradients_are_not_applied_in_cross_replica_context(two_replicas):
    with two_replicas.scope():
        w = tf.Variable(1.0)
        with pytest.raises(RuntimeError, match=r"inside the function that strategy\.run calls"):
            sgd().apply_gradients([(1.0, w)])
        with pytest.raises(RuntimeError, match="cross-replica context"):
            sgd().minimize(lambda: w * w)


# -- on replicas ---------------------------------------------------------------------------


def test_the_global_step_counts_once_for_all_replicas(two_replicas):
    with two_replicas.scope():
        w = tf.Variable(1.0)
        steps = [
            tf.Variable(0, dtype=tf.int64),
            tf.Variable(0, dtype=tf.int64, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA),
            tf.Variable(0, dtype=tf.int64, aggregation=tf.VariableAggregation.SUM),
        ]
    optimizer = sgd()
    for step in steps:
        two_replicas.run(lambda step=step: optimizer.minimize(lambda: w * w, global_step=step))
        assert int(step) == 1


@pytest.mark.parametrize("aggregation", ["NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA"])
def test_the_aggregation_of_a_variable_does_not_count_for_an_update(aggregation, two_replicas):
    with two_replicas.scope():
        w = tf.Variable(1.0, aggregation=tf.VariableAggregation[aggregation])
    two_replicas.run(lambda: sgd().apply_gradients([(1.0, w)]))
    assert float(w) == pytest.approx(0.8)  # TF 2.21: the sum of two gradients of 1
    assert w.cell.layout is Layout.MIRRORED


def test_copies_of_their_own_are_each_updated_by_the_sum(two_replicas):
    with two_replicas.scope():
        w = tf.Variable(
            1.0,
            trainable=True,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )
    two_replicas.run(lambda: sgd().apply_gradients([(1.0, w)]))
    assert [float(copy) for copy in w.cell.copies()] == pytest.approx([0.8, 0.8])  # TF 2.21


def test_gradients_that_are_sums_already_are_not_summed_again(two_replicas):
    with two_replicas.scope():
        w = tf.Variable(1.0)

    def step():
        total = tf.distribute.get_replica_context().all_reduce("SUM", tf.constant(1.0))
        sgd().apply_gradients([(total, w)], skip_gradients_aggregation=True)

    two_replicas.run(step)
    assert float(w) == pytest.approx(0.8)


def test_an_optimizer_that_is_used_outside_the_scope_updates_all_copies(two_replicas):
    with two_replicas.scope():
        w = tf.Variable(1.0)
    optimizer = v1.train.MomentumOptimizer(0.1, 0.9)
    optimizer.apply_gradients([(1.0, w)])
    assert [float(copy) for copy in w.cell.copies()] == pytest.approx([0.9, 0.9])
    two_replicas.run(lambda: optimizer.apply_gradients([(1.0, w)]))
    assert float(optimizer.get_slot(w, "momentum")) == pytest.approx(2.9)


def test_an_uneven_batch_counts_every_example_once(four_replicas):
    x = np.arange(6, dtype="float32")
    with four_replicas.scope():
        w = tf.Variable(2.0)
        optimizer = sgd()

    def step(batch):
        optimizer.minimize(lambda: tf.reduce_sum((w - batch) ** 2) / 6)

    [batch] = four_replicas.experimental_distribute_dataset([x])  # 2, 2, 2 and none
    four_replicas.run(step, args=(batch,))
    assert float(w) == pytest.approx(2.0 - 0.1 * np.mean(2 * (2.0 - x)))


def test_keras_variables_are_updated_too(two_replicas):
    def trained(scope, run):
        with scope:
            keras.utils.set_random_seed(3)
            layer = keras.layers.Dense(2)
            layer.build((None, 3))
            optimizer = v1.train.AdamOptimizer(0.1)
        x = np.ones((2, 3), "float32")
        for _ in range(3):
            run(lambda: optimizer.minimize(lambda: tf.reduce_sum(layer(x) ** 2)))
        return layer.get_weights(), optimizer

    alone, _ = trained(unison.get_strategy().scope(), lambda step: step())
    mirrored, optimizer = trained(two_replicas.scope(), two_replicas.run)
    for one, other in zip(alone, mirrored, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)  # Adam's steps have no scale
    assert len(optimizer.variables()) == 6


def test_slots_of_keras_variables_have_their_dtype():
    weight = keras.Variable(np.ones(2), dtype="bfloat16")
    optimizer = v1.train.MomentumOptimizer(0.5, 0.9)
    optimizer.apply_gradients([(np.ones(2), weight)])
    assert optimizer.get_slot(weight, "momentum").dtype == "bfloat16"
    assert weight.numpy().tolist() == [0.5, 0.5]


def test_a_checkpoint_brings_slots_back(tmp_path):
    def program():
        w, b = variables()
        optimizer = v1.train.AdamOptimizer(0.1)
        return w, b, optimizer, unison.train.Checkpoint(w=w, b=b, optimizer=optimizer)

    def step(w, b, optimizer):
        optimizer.minimize(lambda: loss(w, b, 1.0), var_list=[w, b])

    w, b, optimizer, checkpoint = program()
    step(w, b, optimizer)
    path = checkpoint.save(tmp_path / "checkpoint")
    step(w, b, optimizer)
    again_w, again_b, again, checkpoint = program()
    checkpoint.restore(path)
    step(again_w, again_b, again)
    np.testing.assert_array_equal(row(w, b), row(again_w, again_b))
    for original, restored in zip(optimizer.variables(), again.variables(), strict=True):
        np.testing.assert_array_equal(original, restored)


# -- aggregation methods -------------------------------------------------------------------


def collectives(text):
    return {"all-reduces": len(all_reduces(text)), "exchanges": text.count(" collective-permute(")}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("place", ["compute_gradients", "apply_gradients", "minimize"])
def test_a_method_does_not_change_the_result(method, place, two_replicas):
    answer = ANSWERS["rmsprop momentum"]
    with two_replicas.scope():
        w, b = variables()
        optimizer = optimizer_of(answer)
    named = {"aggregation_method": v1.AggregationMethod[method]}

    def step(scale):
        def loss_of_replica():
            return loss(w, b, scale)

        if place == "minimize":
            optimizer.minimize(loss_of_replica, var_list=[w, b], **named)
            return
        given = {"compute_gradients": {}, "apply_gradients": {}} | {place: named}
        pairs = optimizer.compute_gradients(loss_of_replica, [w, b], **given["compute_gradients"])
        optimizer.apply_gradients(pairs, **given["apply_gradients"])

    for _ in range(5):
        two_replicas.run(step, args=(unison.PerReplica(SCALES),))
    np.testing.assert_allclose(row(w, b), answer.mirrored, rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("ADD_N", {"all-reduces": 1, "exchanges": 0}),
        ("TREE", {"all-reduces": 0, "exchanges": 1}),
    ],
)
@pytest.mark.parametrize("place", ["compute", "apply"])
def test_a_method_makes_another_program(method, expected, place, two_replicas, monkeypatch):
    with two_replicas.scope():
        w, b = variables()
    optimizer = sgd()

    def step(scale):
        given = method if place == "compute" else None
        pairs = optimizer.compute_gradients(
            lambda: loss(w, b, scale), [w, b], aggregation_method=given
        )
        clipped = [
            (tf.clip_by_value(gradient, -1.0, 1.0), variable) for gradient, variable in pairs
        ]
        optimizer.apply_gradients(clipped, aggregation_method=None if given else method)

    texts = compiled_programs(monkeypatch)
    two_replicas.run(step, args=(unison.PerReplica(SCALES),))
    assert [collectives(text) for text in texts] == [expected]


def test_an_unknown_method_is_refused():
    with pytest.raises(ValueError, match="Expected an AggregationMethod"):
        sgd().compute_gradients(lambda: tf.constant(1.0), [], aggregation_method="BEST")


def test_the_methods_are_found_where_tensorflow_has_them():
    assert tf.AggregationMethod is v1.AggregationMethod is unison.AggregationMethod
