"""The options of `tf.saved_model.save` and `load`: each is followed, without effect, or refused."""

import pytest

import unison.tf as tf

VariablePolicy = tf.saved_model.experimental.VariablePolicy


@pytest.fixture
def module():
    made = tf.Module()
    made.weight = tf.Variable([1.0, 2.0])
    return made


@pytest.mark.parametrize("policy", [None, VariablePolicy.NONE])
def test_a_model_is_saved_without_a_policy_for_its_variables(module, tmp_path, policy):
    options = tf.saved_model.SaveOptions(experimental_variable_policy=policy)
    tf.saved_model.save(module, tmp_path / "model", options=options)
    loading = tf.saved_model.LoadOptions(experimental_variable_policy=policy)
    loaded = tf.saved_model.load(tmp_path / "model", options=loading)
    assert loaded.weight.numpy().tolist() == [1.0, 2.0]


@pytest.mark.parametrize("options", [tf.saved_model.SaveOptions, tf.saved_model.LoadOptions])
@pytest.mark.parametrize(
    "policy",
    [
        VariablePolicy.SAVE_VARIABLE_DEVICES,
        "save_variable_devices",
        VariablePolicy.EXPAND_DISTRIBUTED_VARIABLES,
        "EXPAND_DISTRIBUTED_VARIABLES",
    ],
    ids=str,
)
def test_a_policy_that_saves_devices_or_copies_is_refused(options, policy):
    with pytest.raises(ValueError, match=r"one value of each variable.*tf\.train\.Checkpoint"):
        options(experimental_variable_policy=policy)


def test_an_unknown_policy_is_an_error():
    with pytest.raises(ValueError, match="devices_of_variables"):
        tf.saved_model.SaveOptions(experimental_variable_policy="devices_of_variables")


@pytest.mark.parametrize(
    ("option", "value", "remedy"),
    [
        ("function_aliases", {"f": print}, "signatures="),
        ("experimental_sharding_callback", print, "checkpoint"),
        ("extra_tags", ["gpu"], "'serve'"),
    ],
)
def test_an_option_that_save_cannot_follow_is_refused(option, value, remedy):
    with pytest.raises(ValueError, match=f"{option} is not supported by Unison: .*{remedy}"):
        tf.saved_model.SaveOptions(**{option: value})


@pytest.mark.parametrize(
    ("option", "remedy"),
    [
        ("allow_partial_checkpoint", "restored"),
        ("experimental_skip_checkpoint", "assign"),
        ("experimental_load_function_aliases", "signatures"),
    ],
)
def test_an_option_that_load_cannot_follow_is_refused(option, remedy):
    assert not getattr(tf.saved_model.LoadOptions(), option)
    with pytest.raises(ValueError, match=f"{option} is not supported by Unison: .*{remedy}"):
        tf.saved_model.LoadOptions(**{option: True})


class Noise(tf.Module):
    def __init__(self):
        self.generator = tf.random.Generator.from_seed(7)

    @tf.function(input_signature=[])
    def draw(self):
        return self.generator.normal([2])


def test_a_generator_of_a_saved_module_continues_where_it_was(tmp_path):
    noise = Noise()
    noise.draw()
    tf.saved_model.save(noise, tmp_path / "model")
    loaded = tf.saved_model.load(tmp_path / "model")
    for _ in range(2):
        assert loaded.draw().tolist() == noise.draw().tolist()
