"""Which sizes `unison bench` measures."""

import pytest

from unison.benching.points import Point, Scaling, SizeError, points


def test_with_strong_scaling_the_global_batch_stays():
    found = points([(1, 1), (1, 2), (1, 4)], [64], [1000], Scaling.STRONG)
    assert [(point.replicas, point.batch) for point in found] == [(1, 64), (2, 64), (4, 64)]


def test_with_weak_scaling_each_replicas_part_stays():
    found = points([(2, 1), (4, 1)], [64], [1000], Scaling.WEAK)
    assert [(point.workers, point.batch) for point in found] == [(2, 64), (4, 128)]


def test_a_point_of_both_is_measured_once():
    found = points([(1, 1), (1, 2)], [64, 128], [], Scaling.BOTH)
    assert found == [
        Point(1, 1, 64, None),
        Point(1, 1, 128, None),
        Point(1, 2, 64, None),
        Point(1, 2, 128, None),
        Point(1, 2, 256, None),
    ]


def test_every_size_of_the_data_is_measured():
    found = points([(1, 1)], [64], [100, 1000])
    assert [point.examples for point in found] == [100, 1000]


def test_a_program_that_decides_is_measured_by_replicas_only():
    assert points([(1, 2), (1, 1)], [], []) == [Point(1, 1, None, None), Point(1, 2, None, None)]


def test_more_replicas_than_examples_in_a_batch_are_refused():
    with pytest.raises(SizeError, match="A batch of 2 has too few examples for 4 replicas"):
        points([(1, 4)], [2], [100], Scaling.STRONG)


def test_a_batch_that_outgrows_the_data_is_refused():
    with pytest.raises(SizeError, match="A batch of 128 is larger than the data, 100 examples"):
        points([(1, 1), (1, 2)], [64], [100], Scaling.WEAK)


def test_weak_scaling_takes_multiples():
    with pytest.raises(SizeError, match=r"the fewest replicas, 2\. Received: 3"):
        points([(1, 2), (1, 3)], [64], [100], Scaling.WEAK)
