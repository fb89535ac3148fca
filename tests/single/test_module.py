"""`Module` and `ClusterSpec` do what TensorFlow's do; its answers are the literals."""

import collections

import jax.numpy as jnp
import keras
import numpy as np
import pytest

import unison
from unison.names import NameScope, current_name_scope
from unison.runtime.cluster import ClusterSpec
from unison.runtime.devices import prepare_backend
from unison.train.moving_average import ExponentialMovingAverage


@pytest.fixture(autouse=True, scope="module")
def _devices():
    prepare_backend()  # before Keras starts one with a single device


def variable(name, trainable=True):
    return unison.Variable(1.0, name=name, trainable=trainable)


def names(variables):
    return [each.name for each in variables]


class Dense(unison.Module):
    def __init__(self):
        super().__init__()
        self.w = variable("w")
        self.b = variable("b", trainable=False)


class MLP(unison.Module):
    def __init__(self, name=None):
        super().__init__(name=name)
        with self.name_scope:
            self.layers = [Dense(), Dense()]
        self.a = variable("a")


def nested():
    """A module with variables at many places, and a submodule that refers back to it."""
    shared = variable("shared")
    module = unison.Module()
    module.b = module.a = shared
    module.z = {"y": variable("zy"), "x": variable("zx")}
    module.t = (variable("t0"), [variable("t10")])
    module.sub = unison.Module()
    module.sub.q = variable("q")
    module.sub.sub = unison.Module()
    module.sub.sub.r = variable("r")
    module._p = variable("p")
    module.c = unison.Module()
    module.c.u = variable("u")
    module.c.back = module
    return module


def test_variables_are_ordered_by_attribute_and_those_of_submodules_follow():
    assert names(nested().variables) == ["p", "shared", "t0", "t10", "zx", "zy", "u", "q", "r"]


def test_variables_in_lists_of_submodules_are_found():
    assert names(MLP().variables) == ["a", "mlp/b", "mlp/w", "mlp/b", "mlp/w"]


def test_trainable_and_other_variables_are_told_apart():
    assert names(MLP().trainable_variables) == ["a", "mlp/w", "mlp/w"]
    assert names(MLP().non_trainable_variables) == ["mlp/b", "mlp/b"]


def test_submodules_are_found_at_any_depth_once():
    module = nested()
    assert module.submodules == (module.c, module.sub, module.sub.sub)


def test_collections_are_tuples():
    module = MLP()
    assert {type(module.variables), type(module.submodules)} == {tuple}


def test_variables_in_named_tuples_are_found():
    pair = collections.namedtuple("pair", "f g")
    module = unison.Module()
    module.n = pair(variable("f"), Dense())
    assert names(module.variables) == ["f", "b", "w"]


def test_dictionary_with_numbers_as_keys_is_ordered_by_them():
    module = unison.Module()
    module.d = {1: variable("one"), 0: variable("zero")}
    assert names(module.variables) == ["zero", "one"]


def test_dictionary_whose_keys_cannot_be_sorted_is_refused_by_name():
    module = unison.Module()
    module.d = {1: variable("one"), "a": variable("a")}
    with pytest.raises(ValueError, match=r"Module\.d = "):
        _ = module.variables


def test_paths_lead_through_attributes_keys_and_modules():
    module = nested()
    found = module._flatten(predicate=lambda leaf: hasattr(leaf, "cell"), with_path=True)
    assert [path for path, _ in found] == [
        ("_p",),
        ("a",),
        ("b",),
        ("t", 0),
        ("t", 1, 0),
        ("z", "x"),
        ("z", "y"),
        ("c", "u"),
        ("c", "back", "_p"),
        ("c", "back", "a"),
        ("c", "back", "b"),
        ("c", "back", "t", 0),
        ("c", "back", "t", 1, 0),
        ("c", "back", "z", "x"),
        ("c", "back", "z", "y"),
        ("sub", "q"),
        ("sub", "sub", "r"),
    ]


def test_variables_of_a_module_without_super_init_are_found():
    class Careless(unison.Module):
        def __init__(self):
            self.v = variable("v")

    assert names(Careless().variables) == ["v"]


@pytest.mark.parametrize(
    ("class_name", "name"),
    [
        ("MLP", "mlp"),
        ("MyHTTPModule2D", "my_http_module2_d"),
        ("ABC", "abc"),
        ("Aa1Bb", "aa1_bb"),
        ("_Priv", "__priv"),
    ],
)
def test_default_name_is_the_class_name_in_snake_case(class_name, name):
    assert type(class_name, (unison.Module,), {})().name == name


@pytest.mark.parametrize("name", ["a-b", "1a", "", "a/b", "é", "a\n"])
def test_name_must_be_an_identifier(name):
    with pytest.raises(ValueError, match="Python identifier"):
        unison.Module(name=name)


def test_name_scope_holds_the_scopes_that_the_module_was_made_in():
    module = MLP()
    assert module.name_scope.name == "mlp/"
    assert module.layers[0].name_scope.name == "mlp/dense/"
    assert module.layers[0].name == "dense"


def test_entered_name_scope_is_the_whole_prefix_wherever_it_is_entered():
    with NameScope("outer"):
        module = MLP()
    with NameScope("elsewhere"), module.name_scope as prefix:
        assert prefix == current_name_scope() == "outer/mlp/"
    assert current_name_scope() == ""


def test_variable_made_in_a_name_scope_is_named_by_it():
    class Lazy(unison.Module):
        @unison.Module.with_name_scope
        def make(self):
            return variable("late")

    assert Lazy().make().name == "lazy/late"


def test_method_with_name_scope_runs_in_it_and_keeps_its_name():
    class Layer(unison.Module):
        @unison.Module.with_name_scope
        def prefix(self):
            return current_name_scope()

    assert Layer(name="mine").prefix() == "mine/"
    assert Layer.prefix.__name__ == "prefix"


def test_variables_of_keras_layers_and_their_inner_layers_count():
    module = unison.Module()
    module.net = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    module.v = variable("v")
    assert names(module.variables) == ["v", "kernel", "bias", "kernel", "bias"]
    assert module.submodules[0] is module.net
    assert set(module.net.layers) <= set(module.submodules)


def test_weights_of_a_frozen_keras_layer_are_not_trainable():
    module = unison.Module()
    module.layer = keras.layers.Dense(3)
    module.layer.build((None, 2))
    module.layer.trainable = False
    assert module.trainable_variables == ()
    assert names(module.non_trainable_variables) == ["kernel", "bias"]


def test_module_of_a_strategy_runs_on_its_replicas(two_replicas):
    with two_replicas.scope():
        module = Dense()
    result = two_replicas.run(lambda x: x * module.w, args=(jnp.arange(2.0),))
    np.testing.assert_equal(np.stack(result.values), [[0.0, 1.0], [0.0, 1.0]])


# -- moving averages ---------------------------------------------------------------------------


def test_moving_average_remembers_exponentially():
    averages, x = ExponentialMovingAverage(0.9), unison.Variable(1.0, name="x")
    averages.apply([x])
    x.assign(3.0)
    averages.apply([x])
    assert float(averages.average(x)) == np.float32(1.2)
    assert averages.average(x).name == "x/ExponentialMovingAverage"


def test_moving_average_forgets_soon_at_first():
    averages, x = ExponentialMovingAverage(0.9, num_updates=1), unison.Variable(1.0)
    averages.apply([x])
    x.assign(3.0)
    averages.apply([x])
    np.testing.assert_allclose(float(averages.average(x)), 2.6363635, rtol=1e-6)


def test_variable_without_a_moving_average_has_none():
    assert ExponentialMovingAverage(0.9).average(unison.Variable(1.0)) is None


# -- clusters ----------------------------------------------------------------------------------

CLUSTER = {"worker": ["a:1", "b:2"], "ps": {1: "c:3"}}


def test_cluster_is_described_as_it_was_given():
    assert ClusterSpec(CLUSTER).as_dict() == CLUSTER
    assert ClusterSpec(CLUSTER).jobs == ["worker", "ps"]


def test_tasks_of_a_cluster_have_indices_and_addresses():
    cluster = ClusterSpec(CLUSTER)
    assert (cluster.num_tasks("worker"), cluster.num_tasks("ps")) == (2, 1)
    assert (cluster.task_indices("worker"), cluster.task_indices("ps")) == ([0, 1], [1])
    assert (cluster.task_address("ps", 1), cluster.task_address("worker", 0)) == ("c:3", "a:1")
    assert cluster.job_tasks("ps") == [None, "c:3"]


@pytest.mark.parametrize(
    ("tasks", "as_dict"),
    [(("a:1",), ["a:1"]), ({"1": "a"}, {1: "a"}), ([], {}), ([b"a"], ["a"])],
)
def test_tasks_may_be_given_as(tasks, as_dict):
    assert ClusterSpec({"w": tasks}).as_dict() == {"w": as_dict}


def test_clusters_are_compared_by_their_tasks():
    assert ClusterSpec(CLUSTER) == ClusterSpec(ClusterSpec(CLUSTER))
    assert ClusterSpec(CLUSTER) != ClusterSpec({})
    assert ClusterSpec(CLUSTER) != 3


def test_cluster_without_jobs_is_false():
    assert ClusterSpec(CLUSTER)
    assert not ClusterSpec({})


def test_cluster_shows_its_jobs_by_name():
    shown = "ClusterSpec({'ps': {1: 'c:3'}, 'worker': ['a:1', 'b:2']})"
    assert repr(ClusterSpec(CLUSTER)) == str(ClusterSpec(CLUSTER)) == shown


@pytest.mark.parametrize(
    "ask",
    [
        lambda cluster: cluster.num_tasks("x"),
        lambda cluster: cluster.task_address("worker", 5),
        lambda cluster: cluster.job_tasks("x"),
        lambda cluster: cluster.task_indices("x"),
    ],
)
def test_unknown_job_or_task_is_a_value_error(ask):
    with pytest.raises(ValueError, match=r"The cluster has the jobs|has the tasks"):
        ask(ClusterSpec(CLUSTER))


@pytest.mark.parametrize("cluster", [3, {"w": 3}, {"w": [1]}, {3: ["b"]}, {"w": "abc"}])
def test_wrong_description_of_a_cluster_is_a_type_error(cluster):
    with pytest.raises(TypeError, match="Received"):
        ClusterSpec(cluster)


def test_index_that_is_no_number_is_a_value_error():
    with pytest.raises(ValueError, match="must be an integer"):
        ClusterSpec({"w": {"a": "b"}})
