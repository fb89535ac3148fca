"""The programs of `tests/programs` train on two replicas as under TensorFlow on one device.

TensorFlow's numbers are recorded in `tests/parity/recorded/whole_programs.json`. Where a program's
replicas are meant to give something else than one device (each normalizes by its own examples,
say), they are those of two replicas of TensorFlow; `docs/whole-programs.md` lists them.
"""

import pytest

import unison.tf as tf
from parity.documentation import PAGE_OF_PROGRAMS, SLOWER, page_of_programs, speed_ratios
from parity.recorded_answers import disagreement
from parity.recorded_programs import recorded_programs
from parity.whole_programs import load, names, numbers, strategy_of

RECORDED = recorded_programs()
#: One trained by `fit`, and one by its own loop.
SMOKE = ("convolutional_network", "reinforce")
#: Those whose compilation takes longest, which only `make soak` runs.
SOAK = frozenset(
    "attention_translation bidirectional_lstm captcha_reader character_rnn contrastive_learning "
    "low_light_enhancement masked_language_model mixup real_nvp sequential_recommendation "
    "shifted_window_transformer speech_recognition_ctc translation_transformer unet_segmentation "
    "wavenet window_generator".split()
)


@pytest.fixture(scope="module")
def two_replicas():
    return strategy_of(tf, 2)


def marks_of(name):
    return [pytest.mark.smoke] * (name in SMOKE) + [pytest.mark.soak] * (name in SOAK)


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks_of(name)) for name in names()])
def test_a_program_gives_the_numbers_that_it_gives_under_tensorflow(name, two_replicas):
    program = load(name)
    said = disagreement(RECORDED[name], numbers(tf, program, two_replicas), program.tolerance)
    assert not said, said


def test_all_numbers_that_are_recorded_belong_to_programs():
    assert sorted(RECORDED) == names()


def test_there_are_many_programs_of_all_tasks():
    tasks = [load(name).task for name in names()]
    assert len(tasks) > 60
    assert set(tasks) == {
        "audio",
        "generative",
        "graphs",
        "recommenders",
        "reinforcement learning",
        "structured data",
        "text",
        "time series",
        "vision",
    }


def test_each_program_that_is_slower_than_under_tensorflow_has_a_reason():
    ratios = speed_ratios()
    assert sorted(ratios) == names()
    assert {name for name, ratio in ratios.items() if ratio < 1} == set(SLOWER)


def test_the_page_of_programs_is_up_to_date():
    written = PAGE_OF_PROGRAMS.read_text()
    assert written == page_of_programs(), "write it anew: cd tests && python -m parity document"
