"""Collective operations of the devices of one process, through memory and between their buffers.

The processes of a job use memory in the same way; see `tests/parallel/test_shared_memory.py`.
"""

import ctypes
import mmap
import shutil
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from unison.runtime.placement import REPLICA_AXIS, Placement
from unison.runtime.replica_function import ReplicaFunction
from unison.runtime.shared_memory import group as groups
from unison.runtime.shared_memory import library as libraries
from unison.runtime.shared_memory.library import (
    CHUNK_BYTES,
    TARGET,
    TARGET_IN_PROCESS,
    Kind,
    Ticket,
    exchange,
    library,
)

PER_REPLICA = PartitionSpec(REPLICA_AXIS)

pytestmark = pytest.mark.skipif(
    shutil.which("c++") is None, reason="the package was built without a C++ compiler"
)


def shared_by(count: int, seconds: float = 60.0) -> groups.SharedMemory:
    """The memory of the first devices of this process, on one machine."""
    assert library() is not None, "the compiled part is not there: pip install -e . builds it"
    num_bytes = library().unison_exchange_bytes(count, CHUNK_BYTES)
    devices = tuple(jax.devices("cpu")[:count])
    labels = [f"replica {index}" for index in range(count)]
    segment = mmap.mmap(-1, num_bytes)
    return groups.SharedMemory(devices, [range(count)], segment, labels, seconds)


@pytest.fixture(params=[2, 4])
def sharing(request, monkeypatch):
    """A placement whose replicas share memory, as if they were processes."""
    devices = tuple(jax.devices("cpu")[: request.param])
    monkeypatch.setitem(groups._of_devices, devices, shared_by(request.param))
    return Placement(devices)


@pytest.fixture(params=[2, 3, 8])
def in_process(request):
    """A placement whose replicas use each other's buffers."""
    placement = Placement(jax.devices("cpu")[: request.param])
    assert placement.exchanges_buffers
    return placement


@pytest.fixture(params=["memory-2", "memory-4", "buffers-2", "buffers-4"])
def placement(request, monkeypatch):
    kind, count = request.param.split("-")
    devices = tuple(jax.devices("cpu")[: int(count)])
    if kind == "memory":
        monkeypatch.setitem(groups._of_devices, devices, shared_by(int(count)))
    return Placement(devices)


def program_of(placement, function):
    """The program of a function of a value of every replica."""
    return placement.program(ReplicaFunction(function, PER_REPLICA, PER_REPLICA))


def both_ways(placement, function, *stacked):
    """What the replicas' function returns by exchanges, and by XLA's collective operations."""
    spread = [placement.spread(x) for x in stacked]

    def of_replica(*pieces):
        return jax.tree.map(lambda x: x[None], function(*(piece[0] for piece in pieces)))

    part = ReplicaFunction(of_replica, (PER_REPLICA,) * len(spread), PER_REPLICA)
    own = placement.program(part)
    target = TARGET if placement.devices in groups._of_devices else TARGET_IN_PROCESS
    assert f"{target}\n" in str(jax.make_jaxpr(own)(*spread)).replace(" ", "\n")
    by_xla = placement.jitted(part)
    return jax.tree.leaves(own(*spread)), jax.tree.leaves(by_xla(*spread))


def some(placement, *shape, dtype=np.float32):
    numbers = np.random.default_rng(0).integers(-50, 50, (placement.num_replicas, *shape))
    return numbers.astype(dtype)


OPERATIONS = {
    "sum of several": lambda x: lax.psum([x, x.T, x.astype(jnp.int32), x + 1j], REPLICA_AXIS),
    "maximum": lambda x: lax.pmax(x, REPLICA_AXIS),
    "minimum": lambda x: lax.pmin(x, REPLICA_AXIS),
    "gather": lambda x: lax.all_gather(x, REPLICA_AXIS),
    "gather into rows": lambda x: lax.all_gather(x, REPLICA_AXIS, axis=0, tiled=True),
    "gather into columns": lambda x: lax.all_gather(x, REPLICA_AXIS, axis=1, tiled=True),
    "gather a new last axis": lambda x: lax.all_gather(x, REPLICA_AXIS, axis=2),
    "gather truth": lambda x: lax.all_gather(x > 0, REPLICA_AXIS),
    "scatter rows": lambda x: lax.psum_scatter(x, REPLICA_AXIS, tiled=True),
    "scatter columns": lambda x: lax.psum_scatter(x, REPLICA_AXIS, scatter_dimension=1, tiled=True),
    "scatter an axis": lambda x: lax.psum_scatter(x[: lax.axis_size(REPLICA_AXIS)], REPLICA_AXIS),
    "scatter complex": lambda x: lax.psum_scatter(x * 1j, REPLICA_AXIS, tiled=True),
    "permute": lambda x: lax.ppermute(x, REPLICA_AXIS, [(0, 1)]),
    "rotate": lambda x: lax.ppermute(
        x,
        REPLICA_AXIS,
        [(i, (i + 1) % lax.axis_size(REPLICA_AXIS)) for i in range(lax.axis_size(REPLICA_AXIS))],
    ),
    "send to all": lambda x: lax.all_to_all(x, REPLICA_AXIS, 0, 0, tiled=True),
    "send rows, join columns": lambda x: lax.all_to_all(x, REPLICA_AXIS, 0, 1, tiled=True),
    "send columns, join rows": lambda x: lax.all_to_all(x, REPLICA_AXIS, 1, 0, tiled=True),
    "send an axis": lambda x: lax.all_to_all(
        x[: lax.axis_size(REPLICA_AXIS)], REPLICA_AXIS, 0, 1, tiled=False
    ),
    "left to XLA": lambda x: (
        lax.psum(x, REPLICA_AXIS, axis_index_groups=[range(lax.axis_size(REPLICA_AXIS))])
        + lax.psum(x, REPLICA_AXIS)
    ),
    "loop": lambda x: lax.fori_loop(0, 3, lambda _, y: lax.psum(y, REPLICA_AXIS) / 4, x),
    "while": lambda x: lax.while_loop(
        lambda y: lax.psum(y, REPLICA_AXIS).max() < 1e4, lambda y: 2 * y + 1, abs(x)
    ),
    "scan": lambda x: lax.scan(lambda c, y: (c + lax.psum(y, REPLICA_AXIS), c.sum()), x[0], x),
    "scan backwards": lambda x: lax.scan(
        lambda c, y: (c + lax.psum(y, REPLICA_AXIS), c.sum()), x[0], x, reverse=True
    ),
    "conditional": lambda x: lax.cond(
        lax.psum(x.sum(), REPLICA_AXIS) > 0,
        lambda y: lax.pmax(y, REPLICA_AXIS),
        lambda y: y * 2,
        x,
    ),
    "gradient": jax.grad(lambda x: (lax.psum(x**2, REPLICA_AXIS) ** 2).sum()),
    "called": lambda x: jax.jit(jax.checkpoint(lambda y: lax.psum(y, REPLICA_AXIS)))(x),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_gives_what_xla_gives(placement, name):
    own, expected = both_ways(placement, OPERATIONS[name], some(placement, 12, 24))
    for mine, other in zip(own, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(other))


def without_a_loop(x):
    lax.all_gather(x, REPLICA_AXIS)
    return lax.psum(x, REPLICA_AXIS)


def in_a_while_loop(x):
    def body(carry):
        step, x = carry
        lax.all_gather(x, REPLICA_AXIS)
        return step + 1, lax.psum(x, REPLICA_AXIS)

    return lax.while_loop(lambda carry: carry[0] < 3, body, (0, x))[1]


@pytest.mark.parametrize("function", [without_a_loop, in_a_while_loop])
def test_what_nobody_needs_is_exchanged_only_with_other_processes(placement, function):
    program = program_of(placement, function)
    traced = str(jax.make_jaxpr(program)(placement.spread(some(placement, 3))))
    assert "sum of float32" in traced
    # Another process may need it: each has traced the function by itself.
    assert ("gather of float32" in traced) == (placement.devices in groups._of_devices)


def test_a_branch_that_ignores_a_sum_takes_part_in_it(placement):
    def ignoring(x):
        lax.psum(x, REPLICA_AXIS)
        return x

    def function(x):
        is_first = lax.axis_index(REPLICA_AXIS) == 0
        own = lax.cond(is_first, lambda x: lax.psum(x, REPLICA_AXIS), ignoring, x)
        return lax.psum(own, REPLICA_AXIS)

    count = placement.num_replicas
    values = np.ones((count, 3), np.float32)
    traced = str(jax.make_jaxpr(program_of(placement, function))(placement.spread(values)))
    assert traced.count("sum of float32") == 3  # else the next line would wait for a time limit
    sums = program_of(placement, function)(placement.spread(values))
    np.testing.assert_array_equal(sums, np.full((count, 3), 2 * count - 1))


def test_numbers_of_every_type_are_reduced(placement):
    names = "float32 bfloat16 float16 int8 uint8 int16 uint16 int32 uint32".split()
    values = [some(placement, 1000, dtype=jnp.dtype(name)) for name in names]

    def function(*arrays):
        return lax.psum(arrays, REPLICA_AXIS), lax.pmax(arrays, REPLICA_AXIS)

    own, expected = both_ways(placement, function, *values)
    for mine, other in zip(own, expected, strict=True):
        assert mine.dtype == other.dtype
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(other))


def test_sizes_that_do_not_fit_the_chunks(placement):
    values = [some(placement, size) for size in (0, 1, 3, 32767, 32768, 32769, 200_003)]

    def function(*arrays):
        gathered = [lax.all_gather(x, REPLICA_AXIS) for x in arrays]
        return lax.psum(arrays, REPLICA_AXIS), [lax.psum(x, REPLICA_AXIS) for x in arrays], gathered

    own, expected = both_ways(placement, function, *values)
    for mine, other in zip(own, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(other))


def test_what_is_not_a_number_wins(placement):
    values = some(placement, 9)
    values[1, 4] = np.nan
    values[0, 5] = np.inf
    (total, largest, smallest), _ = both_ways(
        placement, lambda x: [f(x, REPLICA_AXIS) for f in (lax.psum, lax.pmax, lax.pmin)], values
    )
    np.testing.assert_array_equal(np.asarray(total)[0], values.sum(0))
    np.testing.assert_array_equal(np.asarray(largest)[0], values.max(0))
    np.testing.assert_array_equal(np.asarray(smallest)[0], values.min(0))


def test_all_replicas_get_the_same_bits(placement):
    values = np.random.default_rng(1).standard_normal((placement.num_replicas, 70_001))
    own, _ = both_ways(placement, lambda x: lax.psum(x, REPLICA_AXIS), values.astype("float32"))
    copies = np.asarray(own[0])
    assert all(np.array_equal(copies[0], copy) for copy in copies)


def test_programs_follow_each_other_in_one_order(placement):
    step = program_of(placement, lambda x: lax.psum(x, REPLICA_AXIS) / placement.num_replicas + 1)
    other = program_of(placement, lambda x: lax.pmax(x, REPLICA_AXIS))
    x = placement.spread(np.zeros((placement.num_replicas, 50), np.float32))
    y = placement.spread(some(placement, 50_000))
    largest = []
    for _ in range(200):  # nothing but the ticket makes one of them wait for the other
        x = step(x)
        largest.append(other(y))
    assert np.asarray(x).tolist() == np.full(x.shape, 200.0).tolist()
    expected = some(placement, 50_000).max(0)
    np.testing.assert_array_equal(np.asarray(largest[-1])[1], expected)


def alone(memory, function, rank=0):
    """Runs a function of a ticket where nobody else comes."""
    run = jax.jit(function)
    ticket = jnp.array([rank, 0, memory._number, 0, 0], jnp.uint32)
    return jax.block_until_ready(run(ticket))


def a_sum(size):
    def function(ticket):
        return exchange(Kind.SUM, f"sum of {size}", ticket, [jnp.ones(size)], [(size,)], [True])

    return function


def test_a_replica_that_does_not_come_is_named():
    memory = shared_by(2, seconds=0.2)
    with pytest.raises(jax.errors.JaxRuntimeError, match="replica 1 did not reach operation 0"):
        alone(memory, a_sum(5))


def test_waiting_ends_when_the_group_is_aborted():
    memory = shared_by(2)
    timer = threading.Timer(0.3, memory.abort, ["replica 1 has died"])
    timer.start()
    began = time.monotonic()
    with pytest.raises(jax.errors.JaxRuntimeError, match="replica 1 has died"):
        alone(memory, a_sum(5))
    assert time.monotonic() - began < 30  # the limit of waiting is 60
    with pytest.raises(jax.errors.JaxRuntimeError, match="replica 1 has died"):
        alone(memory, a_sum(5))


def test_replicas_that_do_something_else_find_out():
    memory = shared_by(2)
    errors = []

    def run(rank, size):
        try:
            with jax.default_device(jax.devices("cpu")[rank]):
                alone(memory, a_sum(size), rank)
        except jax.errors.JaxRuntimeError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=run, args=(rank, 5 + rank)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(errors) == 2
    assert all("sum of 5" in error and "sum of 6" in error for error in errors)


def test_replicas_of_a_process_that_do_something_else_find_out(in_process):
    def one_or_the_other(x):
        return lax.cond(
            lax.axis_index(REPLICA_AXIS) == 1,
            lambda y: lax.psum(y, REPLICA_AXIS),
            lambda y: lax.pmax(y, REPLICA_AXIS),
            x,
        )

    program = program_of(in_process, one_or_the_other)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"is at operation 0, .*of float32"):
        jax.block_until_ready(program(in_process.spread(some(in_process, 5))))


def test_replicas_of_a_process_whose_operands_have_other_sizes_find_out(in_process):
    def first_of_sums(sizes):  # a label has only the number of elements of the last ones
        return lambda y: sum(z[0] for z in lax.psum([y[0, :n] for n in sizes], REPLICA_AXIS))

    def function(x):
        is_other = lax.axis_index(REPLICA_AXIS) == 1
        of_others = first_of_sums((4, 4, 4, 5, 2))
        return x + lax.cond(is_other, first_of_sums((4, 4, 4, 2, 5)), of_others, x)

    program = program_of(in_process, function)
    with pytest.raises(jax.errors.JaxRuntimeError, match="is at operation 0"):
        jax.block_until_ready(program(in_process.spread(some(in_process, 5))))


def test_a_replica_of_a_process_that_does_not_come_is_not_waited_for(in_process, monkeypatch):
    monkeypatch.setattr(libraries, "_SECONDS_IN_PROCESS", 0.2)

    def sum_of_the_others(x):
        is_there = lax.axis_index(REPLICA_AXIS) > 0
        return lax.cond(is_there, lambda y: lax.psum(y, REPLICA_AXIS), lambda y: y, x)

    program = program_of(in_process, sum_of_the_others)
    with pytest.raises(jax.errors.JaxRuntimeError, match="A replica did not reach operation 0"):
        jax.block_until_ready(program(in_process.spread(some(in_process, 5))))


def test_programs_of_several_threads_do_not_meet(in_process):
    """XLA runs them at the same time, in an order of its own on every device."""
    step = program_of(in_process, lambda x: lax.psum(x, REPLICA_AXIS) / in_process.num_replicas + 1)
    results = {}

    def run(start):
        x = in_process.spread(np.full((in_process.num_replicas, 30_000), start, np.float32))
        for _ in range(50):
            x = step(x)
        results[start] = np.asarray(x)

    threads = [threading.Thread(target=run, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert {start: set(result.flat) for start, result in results.items()} == {
        start: {start + 50.0} for start in range(4)
    }


def test_a_program_of_a_group_that_is_not_there_is_refused():
    memory = shared_by(2)
    memory._number = 10**6
    with pytest.raises(jax.errors.JaxRuntimeError, match="shares none with them"):
        alone(memory, a_sum(5))


def test_counters_and_numbers_start_again_at_zero_after_the_last(sharing):
    placement, memory = sharing, groups._of_devices[sharing.devices]
    one, two = (library().unison_exchange_bytes(count, CHUNK_BYTES) for count in (1, 2))
    area = two - one
    for rank in range(placement.num_replicas):
        for counter in range(3):  # published, summed, taken
            place = memory.segment_address + rank * area + 128 * counter
            ctypes.c_uint32.from_address(place).value = 2**32 - 3
    first = np.array(memory.ticket)
    first[:, Ticket.OPERATION] = 2**32 - 2
    memory.ticket = placement.spread(first)
    step = program_of(placement, lambda x: lax.psum(x, REPLICA_AXIS))
    values = some(placement, 200_000)  # seven chunks
    for _ in range(3):
        result = step(placement.spread(values))
        np.testing.assert_array_equal(np.asarray(result)[0], values.sum(0))
    assert np.asarray(memory.ticket)[0].tolist() == [0, 1, memory._number, 0, 0]


def test_a_program_that_is_traced_leaves_the_ticket_alone(placement):
    step = program_of(placement, lambda x: lax.psum(x, REPLICA_AXIS))
    x = placement.spread(some(placement, 5))
    jax.make_jaxpr(step)(x)
    np.testing.assert_array_equal(np.asarray(step(x))[1], some(placement, 5).sum(0))


def test_what_was_built_from_another_source_is_not_used(monkeypatch, tmp_path, caplog):
    (tmp_path / "_exchange.so").write_bytes(libraries._FILE.read_bytes())
    (tmp_path / "exchange.cc").write_text("// another one")
    monkeypatch.setattr(libraries, "_FILE", tmp_path / "_exchange.so")
    assert libraries.library.__wrapped__() is None
    assert "another exchange.cc" in caplog.text


def test_what_was_built_for_a_newer_xla_is_not_used(monkeypatch, caplog):
    monkeypatch.setattr(libraries, "_version_of_jaxlib", lambda: (0, 0))
    assert libraries.library.__wrapped__() is None
    assert "of XLA's FFI, and this jaxlib has 0.0" in caplog.text


def test_how_a_sum_travels_is_said_on_request(placement, caplog):
    with caplog.at_level("DEBUG", logger="unison"):
        both_ways(placement, lambda x: lax.psum([x, x], REPLICA_AXIS), some(placement, 2**17))
    expected = f"A SUM of 2 arrays, 1.000 MiB: through the memory of {placement.num_replicas}"
    assert expected in caplog.text
