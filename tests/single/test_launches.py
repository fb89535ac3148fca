"""Programs over several devices are launched one at a time, and few of them are in flight.

With more than 32 in flight, XLA's CPU client gets stuck (see `unison.runtime.launches`).
"""

import textwrap
import types

import jax
import numpy as np
import pytest

from subprocess_program import EXCHANGING, PREPARED, TRAINING, run_program
from unison.runtime.devices import local_devices
from unison.runtime.launches import LAUNCH_LOCK
from unison.runtime.placement import Placement
from unison.runtime.replica_function import ReplicaFunction

#: With as many threads as devices, whatever the machine has.
ENVIRONMENT = {"UNISON_CPU_DEVICES": "2", "NPROC": "1"}


@pytest.mark.parametrize("sums", [PREPARED, EXCHANGING], ids=["XLA", "buffers"])
def test_training_fed_from_the_host_does_not_deadlock(sums):
    done = run_program(sums + TRAINING, 256, 200, 1, env=ENVIRONMENT, timeout=60)
    assert done.stdout.startswith("trained 2 256 200"), done.stderr[-2000:]


def test_many_threads_that_launch_under_the_lock_do_not_deadlock():
    done = run_program(PREPARED + TRAINING, 256, 10, 8, env=ENVIRONMENT, timeout=60)
    assert done.stdout.startswith("trained 2 256 10"), done.stderr[-2000:]


#: Every step is followed by operations on the replicas' devices that are not waited for.
BETWEEN_STEPS = """
import jax, sys
import jax.numpy as jnp
import numpy as np
import unison

strategy = unison.MirroredStrategy()
placement = strategy.placement
with strategy.scope():
    heavy = unison.Variable(np.eye(600, dtype=np.float32))
    small = [unison.Variable(np.float32(i)) for i in range(50)]

def step(x):
    total = unison.get_replica_context().all_reduce("SUM", x)
    for _ in range(4):
        total = total @ heavy.value()
    heavy.assign(heavy.value() * 0.5 + total * 0.0)
    for variable in small:
        variable.assign(variable.value() + total[0, 0])

x = jnp.ones((600, 600))
by_rows = placement.divide(np.ones((2, 300, 600), np.float32))
whole = placement.bring(np.ones((2, 600, 600), np.float32))
for _ in range(150):
    WORK
print("done", float(small[1].read_value()))
"""


@pytest.mark.parametrize(
    "work",
    [
        pytest.param("strategy.run(step, (x,))", id="no results"),
        pytest.param(
            """
            strategy.run(step, (x,))
            kept = [variable.value() for variable in small]  # so that the next step copies them
            """,
            id="variables read",
        ),
        pytest.param(
            """
            strategy.run(step, (x,))
            clones = [variable.cell.clone() for variable in small]
            """,
            id="variables cloned",
        ),
        pytest.param(
            """
            strategy.run(step, (x,))
            moved = [placement.spread(whole), placement.bring(by_rows), placement.divide(whole)]
            """,
            id="arrays divided differently",
        ),
        pytest.param(
            """
            strategy.run(step, (x,))
            for variable in small:
                variable.assign_add(1.0)
            """,
            id="variables assigned",
        ),
    ],
)
def test_what_comes_between_steps_does_not_deadlock(work):
    text = BETWEEN_STEPS.replace("    WORK", textwrap.indent(textwrap.dedent(work).strip(), "    "))
    done = run_program(text, env=ENVIRONMENT, timeout=60)
    assert done.stdout.startswith("done"), done.stderr[-2000:]


def in_flight(results):
    """How many programs have not finished, by results that nobody takes."""
    return sum(not result.is_ready() for result in results)


@pytest.mark.parametrize("donate", [(), (0,)], ids=["kept", "donated"])
@pytest.mark.parametrize("size", [1, 1 << 16], ids=["small", "large"])
def test_few_programs_are_in_flight(size, donate):
    placement = Placement(local_devices()[:2])
    everywhere = jax.sharding.PartitionSpec()

    def slow(state, heavy):
        product = heavy
        for _ in range(3):
            product = product @ heavy
        return state + product[0, 0], product[:size, 0].sum()

    run = placement.program(
        ReplicaFunction(slow, (everywhere, everywhere), (everywhere, everywhere), donate=donate)
    )
    state = placement.mirror(np.zeros(size, np.float32))
    heavy = placement.mirror(np.zeros((300, 300), np.float32))
    results, most = [], 0
    for _ in range(50):
        state, result = run(state, heavy)
        results.append(result)
        most = max(most, in_flight(results))
    assert most <= 14
    jax.block_until_ready(results)


FAILING = """
import jax, numpy as np
from jax.sharding import PartitionSpec
from unison.runtime.devices import local_devices
from unison.runtime.placement import Placement
from unison.runtime.replica_function import ReplicaFunction

def fails(value):
    raise ValueError("mine")

placement, everywhere = Placement(local_devices()), PartitionSpec()
run = placement.program(
    ReplicaFunction(lambda x: jax.pure_callback(fails, x, x), (everywhere,), everywhere)
)
value = placement.mirror(np.float32(0))
results = [run(value) for _ in range(40)]
try:
    jax.block_until_ready(results[0])
except jax.errors.JaxRuntimeError as error:
    print("raised", "mine" in str(error))
"""


def test_the_error_of_a_program_is_raised_where_its_result_is_read():
    done = run_program(FAILING, env=ENVIRONMENT, timeout=60)
    assert done.stdout == "raised True\n", done.stderr[-2000:]


class AcceleratorOfName:
    """As much of a `jax.Device` as a placement needs."""

    process_index = 0

    def __init__(self, platform, index):
        self.platform, self.id = platform, index

    def default_memory(self):
        return types.SimpleNamespace(kind="device")


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_programs_of_several_devices_are_launched_under_one_lock(platform):
    placement = Placement([AcceleratorOfName(platform, index) for index in range(2)])
    assert placement.launch_lock is LAUNCH_LOCK


def test_programs_of_one_device_are_launched_without_the_lock():
    placement = Placement([AcceleratorOfName("gpu", 0)])
    assert placement.launch_lock is not LAUNCH_LOCK
