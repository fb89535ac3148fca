"""`tf.data` and distributed input answer what TensorFlow answers.

The expressions and TensorFlow's answers are in `data_facts.txt`.
"""

import pytest

import unison.tf as tf
from data_facts import Setting, agree, facts

FACTS = list(facts())


@pytest.fixture(scope="module")
def setting(tmp_path_factory) -> Setting:
    return Setting(tf, tmp_path_factory.mktemp("files"))


@pytest.mark.parametrize(("expression", "answer"), FACTS, ids=[fact[0] for fact in FACTS])
def test_the_answer_is_tensorflows(expression, answer, setting):
    given = setting.answer(expression)
    assert agree(given, answer), f"Unison: {given}\nTensorFlow: {answer}"


def test_there_are_many_facts():
    assert len(FACTS) > 520
