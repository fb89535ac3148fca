"""Workers of elastic jobs whose loops signal handlers interrupt, at random moments.

After each interruption the worker's variables are those of a whole step, readable and savable,
which the program itself checks; the others train on, and the worker joins them again. The training
ends with the weights of one to which nothing happened, and each example is used once.
"""

import functools

import pytest

from elastic_training import require_the_same_training, train, train_alone
from keras_forms import forms

LIMIT = 200

pytestmark = pytest.mark.timeout(LIMIT + 120)


@functools.cache
def alone(*given):
    return train_alone(*given)


@forms("tf", soaked=["keras"])
@pytest.mark.parametrize("kind", ["fit", pytest.param("loop", marks=pytest.mark.soak)])
def test_a_worker_that_is_interrupted_joins_the_others_again(kind, form):
    given = (kind, "epochs=16", f"form={form}")  # it takes longer than until the last alarm
    alarms = ("alarms=4", "seed=1", "slow=0.02", "full=2")
    outcome = train(2, [], *given, *alarms, timeout=LIMIT)
    assert len(require_the_same_training(outcome, alone(*given))) == 2
    # It is the second member of the group, whichever process that is.
    printed = [*outcome.output(0), *outcome.output(1)]
    interrupted = [line for line in printed if line.startswith("INTERRUPTED")]
    assert 1 <= len(interrupted) <= 4  # an alarm may come between two loops
