"""Runs a Python program in a process of its own, for what only a fresh process can show."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping

from warm_processes import STARTUP, start_program

SOURCE = pathlib.Path(__file__).resolve().parents[1] / "src"
#: Where a program finds Unison, and what shortens its imports (see `startup`).
PYTHON_PATH = os.pathsep.join([STARTUP, str(SOURCE)])
_DEVICE_VARIABLES = ("NPROC", "XLA_FLAGS", "UNISON_CPU_DEVICES", "JAX_NUM_CPU_DEVICES")

#: The command `unison`, as a program whose arguments are the command's.
UNISON = "import sys; from unison.cli import main; sys.exit(main())"

#: What is added to the environment of a program that is to compile as soon as those of this process
#: (see `conftest`), and need not compile as users' do.
FEW_OPTIMIZATIONS = {"XLA_FLAGS": os.environ.get("XLA_FLAGS", "")}

# Steps fed from host memory, launched without waiting for the previous one: what an input pipeline
# does, and what needs most threads. Without enough of them it hangs once 32 steps are in flight.
TRAINING = """
import sys, threading
import numpy as np
import jax, jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

batch, steps, launchers = map(int, sys.argv[1:4])
mesh = jax.sharding.Mesh(np.array(DEVICES), ("replica",), axis_types=(AxisType.Auto,))
split, everywhere = NamedSharding(mesh, P("replica")), NamedSharding(mesh, P())
sizes = [784, 512, 512, 10]
weights = [np.full(shape, 1e-3, np.float32) for shape in zip(sizes, sizes[1:])]

def loss(weights, x):
    for w in weights:
        x = jnp.tanh(x @ w)
    return jnp.mean((x - 1) ** 2)

def step(weights, x):
    gradients = jax.lax.pmean(jax.grad(loss)(weights, x), "replica")
    return [w - 0.1 * g for w, g in zip(weights, gradients)]

step = compiled_by(step, mesh)
x = np.ones((batch, 784), np.float32)

def train():
    state = jax.device_put(weights, everywhere)
    for _ in range(steps):
        with LOCK:
            state = step(state, jax.device_put(x, split))
    jax.block_until_ready(state)

threads = [threading.Thread(target=train) for _ in range(launchers)]
[t.start() for t in threads]
[t.join() for t in threads]
print("trained", len(DEVICES), batch, steps)
"""
_BY_XLA = """
def compiled_by(step, mesh):
    return jax.jit(jax.shard_map(
        step, mesh=mesh, in_specs=(P(), P("replica")), out_specs=P(), check_vma=False))
"""
UNPREPARED = (
    _BY_XLA
    + """
import contextlib, jax
jax.config.update("jax_num_cpu_devices", 2)
DEVICES, LOCK = jax.devices(), contextlib.nullcontext()
"""
)
#: Launched as Unison launches its programs.
PREPARED = (
    _BY_XLA
    + """
from unison.runtime import devices
from unison.runtime.launches import LAUNCH_LOCK as LOCK, launched
DEVICES, jitted = devices.default_devices(), compiled_by
def compiled_by(step, mesh):
    compiled = jitted(step, mesh)
    def launch(*args):
        results = compiled(*args)
        launched(results)
        return results
    return launch
"""
)
#: Sums are between the replicas' buffers.
EXCHANGING = (
    PREPARED
    + """
from unison.runtime.placement import Placement
from unison.runtime.replica_function import ReplicaFunction
def compiled_by(step, mesh):
    placement = Placement(DEVICES)
    assert placement.exchanges_buffers
    return placement.program(ReplicaFunction(step, (P(), P("replica")), P()))
"""
)


def run_program(
    source: str,
    *args: object,
    env: Mapping[str, str] | None = None,
    timeout: float = 60,
    given: str = "",
    folder: pathlib.Path | None = None,
    imported: tuple[str, ...] = (),
) -> subprocess.CompletedProcess[str]:
    """Runs `python -c source args...` on the CPU and waits at most `timeout` seconds.

    The program sees this environment without what sets devices and threads, then `env`. It and all
    processes that it started are killed at the end, also when time runs out
    (`subprocess.TimeoutExpired`, with the output so far).

    Args:
        source: The program.
        args: Its arguments.
        env: What is added to its environment.
        timeout: Seconds, at most.
        given: What it reads from its standard input.
        folder: Its working folder. None: this one's.
        imported: Modules that take long to import and are imported already in its process: see
            `warm_processes`. For programs that have something else to show.
    """
    arguments = [source, *map(str, args)]
    environment = environment_of_program(env or {})
    with contextlib.ExitStack() as files:
        stdin, stdout, stderr = (files.enter_context(tempfile.TemporaryFile()) for _ in range(3))
        stdin.write(given.encode())
        stdin.seek(0)
        process = start_program(
            *arguments,
            imported=imported,
            environment=environment,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            folder=folder,
        )

        def written() -> list[str]:
            for stream in (stdout, stderr):
                stream.seek(0)
            return [stream.read().decode(errors="replace") for stream in (stdout, stderr)]

        try:
            returncode = process.wait(timeout)
        except subprocess.TimeoutExpired as expired:
            kill_group(process.pid)
            process.wait()
            expired.output, expired.stderr = written()
            raise
        finally:
            kill_group(process.pid)
        return subprocess.CompletedProcess(arguments, returncode, *written())


def imported_by(source: str) -> tuple[str, ...]:
    """Returns which modules a program imports itself, or with Unison, of those that take long.

    Keras only where a program imports it before the first scope: that it must is not hidden so.
    """
    before_scopes = source.partition(".scope(")[0]
    if re.search(r"^import .*\bkeras\b", before_scopes, re.MULTILINE):
        return ("jax", "keras", "unison")
    return ("jax", "unison") if "jax" in source or "unison" in source else ()


def unison_run(*arguments: object) -> list[str]:
    """Returns the command that runs `unison run` with arguments."""
    return [sys.executable, "-m", "unison", "run", "--no-color", *map(str, arguments)]


def environment_of_program(env: Mapping[str, str]) -> dict[str, str]:
    """Returns this environment without what sets devices and threads, and then `env`."""
    environment = {k: v for k, v in os.environ.items() if k not in _DEVICE_VARIABLES}
    return environment | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": PYTHON_PATH, **env}


def stop_process(process: int, seconds: float = 60.0) -> None:
    """Stops a process, and waits until none of its threads runs.

    One of them takes the signal when it gets a core, and stops the others: until then they go on.
    """
    os.kill(process, signal.SIGSTOP)
    deadline = time.monotonic() + seconds
    threads = pathlib.Path(f"/proc/{process}/task")
    while any(_state(path) not in "Tt" for path in threads.glob("*/stat")):
        if time.monotonic() > deadline:
            raise TimeoutError(f"Process {process} has not stopped within {seconds:g} s.")
        time.sleep(0.01)


def _state(stat: pathlib.Path) -> str:
    """The letter of a thread's state in Linux; that of a stopped one if it has ended."""
    try:
        return stat.read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "T"


def kill_group(group: int) -> None:
    """Kills all processes of a group, if there are any."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
