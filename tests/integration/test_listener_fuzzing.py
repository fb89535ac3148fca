"""Listeners serve rightful clients whatever else they are sent: some cases of each."""

import random

import pytest

from listener_conversations import LISTENERS
from listener_fuzzing import Fuzzing
from mutations import mutated_bytes, mutated_structure

#: `tests/soak` takes another one each time.
SEED = 0
CASES = 60


@pytest.fixture(scope="module")
def fuzzing():
    with Fuzzing(SEED) as machine:
        yield machine


@pytest.mark.parametrize("listener", LISTENERS)
def test_a_listener_serves_whatever_strangers_and_clients_have_sent(fuzzing, listener):
    assert fuzzing.run(listener, CASES) == CASES


def test_a_case_is_made_again_by_its_seed():
    message = {"is": "hello", "about": {"list": [1, 2, 3]}}
    for number in range(100):
        once, again = random.Random(f"5 {number}"), random.Random(f"5 {number}")
        assert mutated_bytes(once, b"some bytes") == mutated_bytes(again, b"some bytes")
        assert repr(mutated_structure(once, message)) == repr(mutated_structure(again, message))
    assert message == {"is": "hello", "about": {"list": [1, 2, 3]}}
