"""`ThreadLocal`: a value of each thread, which a block replaces for as long as it lasts."""

import threading

import pytest

from unison.thread_local import ThreadLocal


def in_another_thread(function):
    results = []
    thread = threading.Thread(target=lambda: results.append(function()), daemon=True)
    thread.start()
    thread.join(20)
    (result,) = results
    return result


def test_a_block_has_its_value_and_gives_the_outer_one_back():
    depth = ThreadLocal(0)
    with depth.bound_to(1), depth.bound_to(2) as innermost:
        assert depth.value == innermost == 2
    assert depth.value == 0


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_block_that_fails_gives_the_outer_value_back(error):
    depth = ThreadLocal(0)
    with pytest.raises(error), depth.bound_to(1):
        raise error
    assert depth.value == 0


def test_another_thread_has_the_default():
    depth = ThreadLocal(0)
    with depth.bound_to(1):
        assert in_another_thread(lambda: depth.value) == 0


def test_threads_do_not_share_what_the_factory_makes():
    names = ThreadLocal(default_factory=list)
    names.value.append("here")
    assert in_another_thread(lambda: names.value) == []
    assert names.value == ["here"]


def test_a_block_that_ends_after_those_around_it_leaves_their_value():
    depth = ThreadLocal(0)
    with depth.bound_to(1):
        late = depth.bound_to(2)
        late.__enter__()
    assert depth.value == 0
    late.__exit__(None, None, None)
    assert depth.value == 0
    with depth.bound_to(3):
        assert depth.value == 3
    assert depth.value == 0
