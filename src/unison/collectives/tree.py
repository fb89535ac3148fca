"""An all-reduce as a tree of exchanges between pairs of replicas, first in hosts, then across.

On each level the replicas form teams: those of a host, and then those with the same index in their
hosts. In a team of p = 2^k replicas, number i exchanges with i XOR 1, i XOR 2, i XOR 4, ... and
adds, so that after k exchanges every replica has the sum (recursive doubling). If another level
follows, a large vector is instead halved by each of the k exchanges, and reassembled by k more on
the way back (recursive halving and doubling): a replica then sends only its part of the vector to
other hosts. If the size of a team is not a power of two, the replicas beyond its core (the largest
power of two) first send their values to one inside, and receive the sum from it at the end.

Every element is summed in the same order on all replicas, so the results are bitwise equal.

Source: Thakur, Rabenseifner and Gropp 2005, "Optimization of Collective Communication Operations
in MPICH".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from unison.runtime.placement import REPLICA_AXIS

#: Replicas that exchange with each other; indices along the replica axis.
Team = tuple[int, ...]

#: Vectors of up to this many bytes are exchanged whole on every level: halving them costs more
#: exchanges, and saves only few bytes (measured between processes of one machine).
_SMALL_BYTES = 2**18


def all_reduce_tree(
    tensor: jax.Array, hosts: Sequence[Team], axis_name: str = REPLICA_AXIS
) -> jax.Array:
    """Returns the sum of `tensor` over the replicas, added up along a tree.

    Args:
        tensor: An array of equal shape on all replicas.
        hosts: The indices of the replicas of every host; each replica belongs to one.
        axis_name: The mesh axis to reduce over.
    """
    core = _power_of_two_below(min(len(host) for host in hosts))
    levels: list[list[Team]] = [list(hosts)]
    if len(hosts) > 1:
        levels.append([tuple(host[place] for host in hosts) for place in range(core)])
    halves = len(hosts) > 1 and tensor.nbytes > _SMALL_BYTES
    vector = tensor.reshape(-1)
    padding = -vector.size % core if halves else 0
    summed = _sum_along(levels, jnp.pad(vector, (0, padding)), halves, axis_name)
    return summed[: vector.size].reshape(tensor.shape)


def _sum_along(
    levels: Sequence[Sequence[Team]], vector: jax.Array, halves: bool, axis_name: str
) -> jax.Array:
    """Sums `vector` over the teams of the first level, and their sums over the others."""
    if not levels:
        return vector
    teams, *others = levels
    core = _power_of_two_below(min(map(len, teams)))
    vector = _fold(vector, teams, core, axis_name)
    if others and halves:
        bits = _bits_of_rank(teams, core, axis_name)
        for distance, bit in reversed(bits):
            lower, upper = jnp.split(vector, 2)
            kept = jnp.where(bit, upper, lower)
            sent = jnp.where(bit, lower, upper)
            vector = kept + _exchange(sent, teams, core, distance, axis_name)
        vector = _sum_along(others, vector, halves, axis_name)
        for distance, bit in bits:
            received = _exchange(vector, teams, core, distance, axis_name)
            lower, upper = jnp.where(bit, received, vector), jnp.where(bit, vector, received)
            vector = jnp.concatenate([lower, upper])
    else:
        for distance in _distances(core):
            vector = vector + _exchange(vector, teams, core, distance, axis_name)
        vector = _sum_along(others, vector, halves, axis_name)
    return _unfold(vector, teams, core, axis_name)


def _exchange(
    vector: jax.Array, teams: Sequence[Team], core: int, distance: int, axis_name: str
) -> jax.Array:
    """Returns the vector of the replica at `distance` in the core of this replica's team."""
    pairs = [(team[rank], team[rank ^ distance]) for team in teams for rank in range(core)]
    return lax.ppermute(vector, axis_name, pairs)


def _fold(vector: jax.Array, teams: Sequence[Team], core: int, axis_name: str) -> jax.Array:
    """Adds the vectors of the replicas outside the cores to those inside."""
    for inside_to_outside in _rounds(teams, core):
        pairs = [(outside, inside) for inside, outside in inside_to_outside]
        vector = vector + lax.ppermute(vector, axis_name, pairs)
    return vector


def _unfold(vector: jax.Array, teams: Sequence[Team], core: int, axis_name: str) -> jax.Array:
    """Sends the vectors inside the cores to the replicas outside."""
    result = vector
    for pairs in _rounds(teams, core):
        received = lax.ppermute(vector, axis_name, pairs)
        outside = [receiver for _, receiver in pairs]
        result = jnp.where(_is_among(outside, axis_name), received, result)
    return result


def _rounds(teams: Sequence[Team], core: int) -> Iterator[list[tuple[int, int]]]:
    """Yields rounds of pairs (inside, outside) of a core; no replica occurs twice in a round."""
    for start in range(core, max(map(len, teams)), core):
        yield [
            pair for team in teams for pair in zip(team, team[start : start + core], strict=False)
        ]


def _bits_of_rank(teams: Sequence[Team], core: int, axis_name: str) -> list[tuple[int, jax.Array]]:
    """Returns, for every distance in a core, whether this replica is the upper one of its pair."""
    return [
        (
            distance,
            _is_among(
                [team[rank] for team in teams for rank in range(core) if rank & distance],
                axis_name,
            ),
        )
        for distance in _distances(core)
    ]


def _is_among(replicas: Sequence[int], axis_name: str) -> jax.Array:
    table = np.zeros(lax.axis_size(axis_name), bool)
    table[list(replicas)] = True
    return jnp.asarray(table)[lax.axis_index(axis_name)]


def _distances(core: int) -> list[int]:
    return [1 << exponent for exponent in range(core.bit_length() - 1)]


def _power_of_two_below(count: int) -> int:
    """Returns the largest power of two that is at most `count`."""
    return 1 << (count.bit_length() - 1)
