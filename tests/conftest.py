"""Four logical CPU devices in one process for every test, and programs that compile soon.

JAX and Keras read these variables when they are first imported, so they are set here, before
pytest imports a test or, for the doctests, a module of the package.
"""

import collections
import gc
import logging
import os
import sys
import time
from importlib.metadata import version

import pytest

from durations import Durations, Recorder
from startup import sitecustomize  # noqa: F401

os.environ["UNISON_CPU_DEVICES"] = "4"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["KERAS_BACKEND"] = "jax"
# The key that the processes of a test's jobs prove to each other, and not the user's own.
os.environ.setdefault("UNISON_KEY", "ab" * 32)

# Compiling is most of what tests in this process do. XLA's optimizations are two thirds of it, and
# the programs are small. What `subprocess_program` starts is compiled as users have it, where it is
# not given these flags (`FEW_OPTIMIZATIONS`); `XLA_FLAGS= make test` compiles everything so.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
    # Later jaxlibs have one way to emit fusions, and end a process that is given this flag.
    + " --xla_cpu_use_fusion_emitters=false" * (version("jaxlib") < "0.11"),
)

from subprocess_program import PYTHON_PATH  # which reads the flags

# All programs that tests start import less, as this process does: see `startup`.
os.environ.setdefault("PYTHONPATH", PYTHON_PATH)

#: Programs that tests run: importing them starts a training, does without the package's own
#: imports, or changes what is imported.
collect_ignore = [
    "integration/elastic_program.py",
    "integration/elastic_worker.py",
    "integration/in_memory_program.py",
    "startup",
]

#: The memory of a process that runs tests, in bytes.
ROOM = 4_000_000_000

#: When this process forgets what JAX has compiled; more, where that has not helped.
_bytes_to_forget_at = 3 * ROOM // 4

#: The folders of tests that start processes.
WAITING = ("integration", "parallel")


def pytest_xdist_auto_num_workers():
    """One process more than there are cores, since many tests wait; each has room for `ROOM`."""
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None  # xdist takes that
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(cores + 1, memory // ROOM))


def pytest_addoption(parser):
    parser.addoption("--record-durations", action="store_true", help="write tests/durations.txt")
    parser.addoption(
        "--until",
        type=float,
        metavar="SECONDS",
        help="skip the tests that would begin after this time, in seconds since 1970",
    )


def pytest_configure(config):
    if config.getoption("--record-durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder())


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    until = item.config.getoption("--until")
    if until is not None and time.time() > until:
        pytest.skip("the time is over that --until gives")


@pytest.hookimpl(tryfirst=True)  # before tests are left out by their marks
def pytest_collection_modifyitems(items):
    """Marks the tests that are slow, and orders the files.

    The longest files come first, so that no process is left with one at the end. Those whose tests
    wait for other processes are put between those whose tests compute: so both kinds run side by
    side. The doctests come last: their files are short.
    """
    recorded = Durations.read()
    files, seconds = {}, collections.Counter()
    for item in items:
        files.setdefault(item.path, []).append(item)
        seconds[item.path] += recorded.seconds(item.nodeid)
        if recorded.is_slow(item.nodeid):
            item.add_marker(pytest.mark.slow)
    longest = sorted(files, key=seconds.__getitem__, reverse=True)
    waiting = [path for path in longest if path.parent.name in WAITING]
    computing = [path for path in longest if path.parent.name == "single"]
    between = 0.9 * len(computing) / max(1, len(waiting))
    places = {path: number * between for number, path in enumerate(waiting)}
    places |= {path: number for number, path in enumerate(computing)}
    order = sorted(files, key=lambda path: places.get(path, len(files)))
    items[:] = [item for path in order for item in files[path]]


def pytest_collection_finish():
    """Starts JAX for tests that use it, as Unison does, and leaves what stays out of collections.

    A test that called JAX first would start it with one device for all tests after it. What stays
    are thousands of tests, and what they import.
    """
    if "jax" in sys.modules:
        from unison.runtime.devices import prepare_backend

        prepare_backend()
    gc.collect()
    gc.freeze()


def process_state():
    """What tests may change of this process, and those after them would find changed."""
    import jax

    logger = logging.getLogger("unison")
    return {
        "environment": {
            name: value
            for name, value in os.environ.items()
            if name.startswith(("JAX_", "KERAS_", "TF_CONFIG", "UNISON_", "XLA_"))
        },
        "working directory": os.getcwd(),
        "JAX's configuration": dict(jax.config.values),
        "logger": (logger.level, logger.isEnabledFor(logging.DEBUG), logger.propagate),
    }


@pytest.fixture(autouse=True)
def the_process_is_left_as_it_was():
    """Fails the test that changes what others rely on, and not the one that relies on it."""
    before = process_state()
    yield
    assert process_state() == before


@pytest.fixture(autouse=True, scope="module")
def compiled_programs_are_forgotten_where_they_fill_the_memory():
    """Keeps to `ROOM`, as far as it is full of what JAX has compiled for the files before."""
    global _bytes_to_forget_at
    yield
    if sys.platform == "linux" and "jax" in sys.modules and resident_bytes() > _bytes_to_forget_at:
        sys.modules["jax"].clear_caches()
        gc.collect()
        _bytes_to_forget_at = max(_bytes_to_forget_at, resident_bytes() + ROOM // 4)


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def started():
    """A function that starts workers and parameter servers as threads, which are ended."""
    from parameter_server_threads import clusters

    with clusters() as start:
        yield start
