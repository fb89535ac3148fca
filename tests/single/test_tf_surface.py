"""The surface: what TensorFlow answers, `unison.tf` answers (see `tests/surface_facts.py`)."""

import builtins

import pytest

import surface_facts
import unison.tf as tf

FACTS = list(surface_facts.facts())


def test_there_are_facts():
    assert len(FACTS) > 300


@pytest.mark.parametrize(("expression", "answer"), FACTS, ids=[fact[0][:60] for fact in FACTS])
def test_the_answer_is_tensorflows(expression, answer):
    if isinstance(answer, dict) and "raises" in answer:
        name = answer["raises"]
        error = getattr(tf.errors, name) if name in vars(tf.errors) else getattr(builtins, name)
        with pytest.raises(error):
            eval(expression, {"tf": tf, "np": surface_facts.np})
        return
    found = surface_facts.plain(eval(expression, {"tf": tf, "np": surface_facts.np}))
    assert surface_facts.agree(found, answer), f"\nTensorFlow: {answer}\nUnison:     {found}"
