"""A minute of what each listener does not expect."""

import os

import pytest

from listener_conversations import LISTENERS
from listener_fuzzing import Fuzzing

SECONDS = 60.0


@pytest.mark.soak
@pytest.mark.timeout(SECONDS + 120)
@pytest.mark.parametrize("listener", LISTENERS)
def test_a_listener_serves_for_a_minute_whatever_it_is_sent(listener):
    seed = int.from_bytes(os.urandom(4))
    with Fuzzing(seed) as fuzzing:
        cases = fuzzing.run(listener, seconds=SECONDS)
    print(f"{listener}: seed {seed}, {cases} cases")
