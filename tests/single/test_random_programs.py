"""Some random programs on several replicas; `tests/soak` has 2,000.

See `random_programs`, which says what a program is, and runs one alone.
"""

import dataclasses

import keras
import numpy as np
import pytest

import random_programs
from generated_programs import comparing, drawing, parts
from generated_programs.choices import Input, Layer, Optimizer, Output, Program, describe
from generated_programs.comparing import complaint_about
from generated_programs.drawing import draw_program, on_replicas
from generated_programs.running import in_double_precision
from generated_programs.shrinking import shrink
from unison.keras import losses, optimizers

SEED = 3


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(0, marks=pytest.mark.soak),
        1,
        2,
        pytest.param(3, marks=pytest.mark.smoke),
        4,
    ],
)
def test_random_program_trains_on_several_replicas_as_on_one_device(number):
    report = random_programs.check(SEED, number, 1, replicas=(), shrinks=False)
    assert report.failures == []


# -- the machine itself --------------------------------------------------------------------------

#: A program with more choices than a fault needs.
LARGE = Program(
    inputs=(Input(layers=(Layer(regularizer="l2"),)),),
    optimizer=Optimizer("momentum"),
    actions=("train_on_batch", "fit"),
)


def fails(program):
    complaint = complaint_about(program)
    return complaint is not None and complaint.kind == "different"


@pytest.fixture
def wrong_gradients(monkeypatch):
    """Replicas' gradients are added without their shares."""
    share_of_replica = optimizers.current_share

    def share(scaled_by=None):
        return share_of_replica() if scaled_by is None else None

    monkeypatch.setattr(optimizers, "current_share", share)


def test_wrong_scaling_of_gradients_is_found(wrong_gradients):
    assert "weight" in complaint_about(LARGE).text


def test_a_failing_program_shrinks_to_the_choices_that_it_needs(wrong_gradients):
    assert shrink(LARGE, fails) == Program()


def test_a_failing_program_is_printed_with_the_command_that_repeats_it(
    wrong_gradients, monkeypatch
):
    monkeypatch.setattr(drawing, "draw_program", lambda seed, number: LARGE)
    (failure,) = random_programs.check(9, 4, 1, replicas=(), shrinks=False).failures
    assert describe(LARGE) in failure
    assert "python tests/random_programs.py --seed 9 --first 4 --programs 1" in failure


def test_a_metric_that_forgets_other_replicas_is_found(monkeypatch):
    class Forgets(parts.Spread):
        def _variable(self, aggregation):
            return super()._variable("only_first_replica")

    monkeypatch.setitem(parts.METRICS["number"], "spread", lambda: Forgets(name="spread"))
    program = Program(outputs=(Output(metrics=("spread",)),))
    assert "spread" in complaint_about(program).text


def test_a_loss_that_is_reduced_by_replica_is_found(monkeypatch):
    monkeypatch.setattr(losses.GlobalLoss, "__call__", lambda self, *args: self.of_replica(*args))
    program = Program(outputs=(Output(reduction="sum"),))
    assert fails(program)


def test_a_program_that_raises_on_replicas_only_is_found(monkeypatch):
    def broken(*args):
        raise RuntimeError("nobody knows why")

    monkeypatch.setattr(comparing, "run_under", broken)
    complaint = complaint_about(Program())
    assert complaint.kind == "raised"
    assert "nobody knows why" in complaint.text


def test_round_off_is_not_a_difference():
    program = Program(outputs=(Output("classes"),))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(comparing.TOLERANCES, "float32", (0.0, 0.0))
        assert complaint_about(program) is None


def test_round_off_of_one_device_in_half_precision_is_not_a_difference():
    # The bias of a convolution has a sum over all places and examples for a gradient.
    program = Program(
        seed=300,
        replicas=4,
        inputs=(Input("image", (Layer("average_pool"), Layer("conv2d", "l2"))),),
        head=(Layer("layer_norm"),),
        outputs=(Output("binary", "hinge", "sum", weights="some"),),
        optimizer=Optimizer("amsgrad", "global_clipnorm", ema=2, accumulation=3),
        policy="mixed_bfloat16",
        step="compute_loss",
        applying="minimize",
        examples=6,
        batch=6,
        source="dataset",
        epochs=2,
        actions=("fit", "save_weights"),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparing, "_without_round_off", lambda seen, *others: seen)
        assert fails(program)
    assert complaint_about(program) is None


def test_a_difference_in_half_precision_that_float32_does_not_explain_is_found(wrong_gradients):
    assert fails(dataclasses.replace(LARGE, policy="mixed_bfloat16"))


def test_layers_that_ask_keras_for_a_dtype_compute_in_double_precision_too():
    with in_double_precision():
        assert keras.backend.result_type("float64", "float32") == "float64"
    assert keras.backend.result_type("float64", "float32") == "float32"


def test_an_r2_score_of_equal_targets_is_not_compared():
    def difference(score, expected):
        seen = {"0 fit, r2": np.array([score])}
        return comparing.difference(seen, {"0 fit, r2": np.array([expected])}, (0, 0), Program())

    assert difference(3.6e8, 0.0) is None
    assert difference(0.4, 0.5) is not None


def test_a_program_is_the_same_whenever_it_is_drawn():
    assert draw_program(7, 12) == draw_program(7, 12)
    assert draw_program(8, 12) != draw_program(7, 12)


def test_a_program_for_another_number_of_replicas_still_has_an_answer():
    # Three replicas share a batch of three evenly, two do not: the means of their losses and of
    # their activity regularizers are then not those of the global batch, as on TensorFlow.
    layers = (Layer("relu", activity=True),)
    program = Program(
        replicas=3, head=layers, step="loop", loop_loss="loss_object", examples=18, batch=3
    )
    program = drawing.consistent(program)
    assert program.head == layers
    on_two = on_replicas(program, 2)
    assert not on_two.head[0].activity
    assert on_two.loop_loss == "global_batch"


def test_programs_are_consistent():
    # One that was not: its sizes had been judged by a validation split that it then lost.
    programs = [draw_program(20261125, number) for number in (455, *range(200))]
    assert [each for each in programs if drawing.consistent(each) != each] == []


def test_every_choice_is_drawn():
    programs = [draw_program(1, number) for number in range(2000)]
    outputs = [output for program in programs for output in program.outputs]
    drawn = {
        "layers": {layer.kind for program in programs for layer in program.layers()},
        "optimizers": {program.optimizer.name for program in programs},
        "steps": {program.step for program in programs},
        "applying": {program.applying for program in programs},
        "loss_scales": {program.optimizer.loss_scale for program in programs},
        "actions": {action for program in programs for action in program.actions},
        "reductions": {output.reduction for output in outputs},
        "losses": {(output.kind, output.loss) for output in outputs},
    }
    assert drawn["layers"] == {*drawing.LAYERS}
    assert drawn["optimizers"] == {*parts.OPTIMIZERS}
    assert drawn["steps"] == {*drawing.STEPS}
    assert drawn["applying"] == {*drawing.APPLYING}
    assert drawn["loss_scales"] == {None, *drawing.LOSS_SCALES}
    assert drawn["actions"] == {*drawing.ACTIONS}
    assert drawn["reductions"] == {*parts.REDUCTIONS}
    assert drawn["losses"] == {(kind, name) for kind in parts.LOSSES for name in parts.LOSSES[kind]}


def test_a_description_makes_the_program_again():
    for number in range(50):
        program = draw_program(2, number)
        names = {each.__name__: each for each in (Program, Input, Layer, Output, Optimizer)}
        assert eval(describe(program), names) == program
