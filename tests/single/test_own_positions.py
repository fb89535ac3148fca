"""`OwnPositions`: together, the workers read every example of every batch once."""

import itertools
import sys

import pytest

from unison.data import Shares
from unison.data.distribution.own_positions import OwnPositions


def batches_of(count, batch, processes, drop_remainder):
    """The batches that Grain's processes make, in the order in which they are taken."""
    of_processes = []
    for first in range(processes):
        own = list(range(first, count, processes))
        of_processes.append([own[at : at + batch] for at in range(0, len(own), batch)])
    rounds = itertools.zip_longest(*of_processes)
    found = [part for each in rounds for part in each if part is not None]
    return [part for part in found if len(part) == batch or not drop_remainder]


@pytest.mark.parametrize(
    ("count", "batch", "processes", "drop_remainder"),
    [(30, 8, 1, False), (30, 8, 1, True), (3, 8, 1, False), (32, 4, 4, False), (49, 6, 2, True)],
)
def test_workers_read_the_rows_of_their_replicas(count, batch, processes, drop_remainder):
    for worker in range(2):
        replicas = range(2 * worker, 2 * worker + 2)
        own = OwnPositions(
            range(count),
            batch,
            lambda size: Shares(size, 4),
            replicas,
            processes=processes,
            drop_remainder=drop_remainder,
        )
        # Each process reads its part of these positions, too.
        positions = batches_of(len(own), own.own, processes, drop_remainder=False)
        whole = batches_of(count, batch, processes, drop_remainder)
        assert own.num_batches == len(whole)
        rows = iter(positions)
        for number, examples in enumerate(whole):
            shares = own.shares_of(number)
            assert shares.examples == len(examples)
            expected = examples[shares.of(replicas)]
            read = [own[position] for position in next(rows)] if expected else []
            assert read == expected
        assert next(rows, None) is None


def test_a_sequence_without_an_end_has_batches_without_an_end():
    class Endless:
        def __len__(self):
            return sys.maxsize

        def __getitem__(self, index):
            return index

    own = OwnPositions(Endless(), 6, lambda size: Shares(size, 3), range(1, 2), processes=2)
    assert own.num_batches is None
    # The second process's first batch has the examples 1, 3, 5 and so on.
    assert [own[position] for position in (0, 1, 2, 3)] == [4, 5, 6, 7]


@pytest.mark.parametrize(("count", "batch", "processes"), [(30, 9, 1), (30, 8, 2), (36, 8, 2)])
def test_batches_that_cannot_be_divided_are_refused(count, batch, processes):
    with pytest.raises(ValueError, match="rows of every batch"):
        OwnPositions(range(count), batch, lambda size: Shares(size, 4), range(1), processes)
