"""The programs of `tests/parity` give under `unison.tf` what they give under TensorFlow.

TensorFlow's answers are recorded in `tests/parity/recorded`. Where the environment names a Python
that has TensorFlow (`UNISON_TF_PYTHON`), they are asked for again, and must be the same.
"""

import os

import pytest

import unison.tf as tf
from parity.answers import Setting
from parity.documentation import PAGE, page
from parity.facts import Fact, attempt, facts, raises
from parity.recorded_answers import ask_tensorflow, disagreement, expected_of, recorded

RECORDED = recorded()
FACTS = list(facts())
TF_PYTHON = os.environ.get("UNISON_TF_PYTHON")
# Numbers of one TensorFlow on two machines: it chooses its kernels by the processor.
OF_ONE_TENSORFLOW = 1e-4


@pytest.fixture(scope="module")
def setting() -> Setting:
    return Setting(tf)


def id_of(fact: Fact) -> str:
    return f"{fact.topic}-{fact.name}"


@pytest.mark.parametrize("fact", FACTS, ids=id_of)
def test_a_program_gives_what_it_gives_under_tensorflow(fact, setting):
    theirs = RECORDED[fact.topic][fact.name]
    said = disagreement(expected_of(fact, theirs), setting.answer(fact), fact.tolerance)
    assert not said, said


@pytest.mark.parametrize("fact", [fact for fact in FACTS if fact.differs], ids=id_of)
def test_a_difference_is_one(fact):
    theirs = RECORDED[fact.topic][fact.name]
    assert disagreement(fact.ours, theirs, fact.tolerance), "it agrees: remove `ours`"


def test_every_answer_that_is_recorded_belongs_to_a_fact():
    stated = {(fact.topic, fact.name) for fact in FACTS}
    kept = {(topic, name) for topic, of_topic in RECORDED.items() for name in of_topic}
    assert kept == stated


def test_there_are_many_facts():
    assert len(FACTS) > 400


def test_the_page_of_differences_is_up_to_date():
    assert PAGE.read_text() == page(), "write it anew: cd tests && python -m parity document"


@pytest.mark.skipif(not TF_PYTHON, reason="UNISON_TF_PYTHON names no Python with TensorFlow")
@pytest.mark.timeout(600)
def test_tensorflow_still_answers_what_is_recorded():
    given = ask_tensorflow(TF_PYTHON)["answers"]
    changed = [
        f"{topic}::{name} {said}"
        for topic, of_topic in given.items()
        for name, answer in of_topic.items()
        if (said := disagreement(RECORDED[topic][name], answer, OF_ONE_TENSORFLOW))
    ]
    assert not changed, "\n".join(changed)


# -- the comparison itself -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("expected", "answer"),
    [
        (1.0, 1.001),
        (1, 1.0),
        (True, 1),
        ([1, 2], [1]),
        ({"a": 1}, {"a": 1, "b": 2}),
        ({"dtype": "int32", "values": 1}, {"dtype": "int64", "values": 1}),
        (raises("ValueError"), 1.0),
        (None, 0),
    ],
)
def test_answers_that_differ_disagree(expected, answer):
    assert disagreement(expected, answer, tolerance=1e-5)
    assert disagreement(answer, expected, tolerance=1e-5)


def test_numbers_agree_up_to_the_tolerance():
    assert not disagreement([1.0, 1e-9], [1.000001, 0.0], tolerance=1e-5)


def test_errors_of_one_family_agree(setting):
    program = Fact("", "", lambda tf: [attempt(lambda: int("x"))], 0.0, None, "", alone=False)
    assert setting.answer(program) == [raises("ValueError")]
