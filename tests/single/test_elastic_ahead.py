"""Programs for the group without one of its workers: what is foreseen, and who compiles it."""

import threading

import numpy as np
import pytest

from elastic_placements import placement_of
from unison.program.arguments import Ragged, Stacked, Static, Whole
from unison.program.smaller_group import described_for, shapes_of
from unison.runtime.elastic.compiler import Compiler

FLOAT = np.dtype(np.float32)


@pytest.mark.parametrize(
    ("given", "num_replicas", "expected"),
    [
        (Stacked((2, 4, 3), FLOAT), 4, Stacked((2, 6, 3), FLOAT)),
        (Stacked((2, 3, 5), FLOAT), 4, Ragged(((5, 5), (5, 5), (5, 5), (3, 5)), FLOAT)),
        (
            Ragged(((2,), (2,), (2,), (2,), (2,), (1,)), FLOAT),
            4,
            Ragged(((3,),) * 3 + ((2,),), FLOAT),
        ),
        (Stacked((2,), FLOAT), 4, Stacked((2,), FLOAT)),
        (Stacked((2, 4, 3), FLOAT), 1, Whole((24, 3), FLOAT)),
        (Whole((7,), FLOAT), 4, Whole((7,), FLOAT)),
        (Static("text", "text"), 4, Static("text", "text")),
    ],
)
def test_the_parts_of_a_batch_grow_when_a_worker_is_lost(given, num_replicas, expected):
    assert described_for(num_replicas, [given], placement_of(6)) == (expected,)


def test_the_batches_of_replicas_stay_where_they_are_to():
    given = Stacked((2, 4, 3), FLOAT)
    kept = placement_of(6, keep="per_replica_batch")
    assert described_for(4, [given], kept) == (given,)


def test_what_nobody_can_know_is_not_foreseen():
    of_two_kinds = Ragged(((2, 1), (2, 2)), FLOAT)
    assert described_for(1, [Whole((), FLOAT), of_two_kinds], placement_of(2)) is None


def test_a_program_gets_the_own_replicas_part():
    described = [
        Static("text", "text"),
        Whole((), FLOAT, weak_type=True),
        Stacked((2, 6, 3), FLOAT),
        Ragged(((5,), (5,), (5,), (3,)), FLOAT),
    ]
    none, *shapes = shapes_of(described, 2)
    assert none is None
    assert [shape.shape for shape in shapes] == [(), (2, 6, 3), (2, 5)]
    assert shapes[0].weak_type


def test_only_who_looks_ahead_sees_another_number_of_replicas():
    placement = placement_of(6)
    placement.number(4, 6)
    seen = []
    with placement.as_if_of(2):
        assert (placement.num_replicas, placement.local_replicas) == (2, (0, 1))
        assert not placement.spans_processes
        other = threading.Thread(
            target=lambda: seen.append((placement.num_replicas, placement.local_replicas))
        )
        other.start()
        other.join(10)
    assert seen == [(6, (4, 5))]
    assert (placement.num_replicas, placement.local_replicas) == (6, (4, 5))
    assert placement.spans_processes
    assert placement.num_without_a_worker == 4


def test_what_cannot_be_compiled_ahead_does_not_keep_the_next_one_from_it():
    compiler = Compiler()
    compiled = threading.Event()
    compiler.add(lambda: 1 / 0)
    compiler.add(compiled.set)
    assert compiled.wait(10)
    compiler.close()


def test_nothing_more_is_compiled_at_the_end():
    compiler = Compiler()
    has_begun, may_end, later = threading.Event(), threading.Event(), threading.Event()

    def compile_it():
        has_begun.set()
        may_end.wait(10)

    compiler.add(compile_it)
    compiler.add(later.set)
    assert has_begun.wait(10)
    threading.Timer(0.1, may_end.set).start()
    compiler.close()
    assert may_end.is_set()
    assert not later.is_set()
