"""Four logical CPU devices in one process for every test, and programs that compile soon.

JAX and Keras read these variables when they are first imported, so they are set here, before
pytest imports a test or, for the doctests, a module of the package.
"""

import os

import pytest

os.environ["UNISON_CPU_DEVICES"] = "4"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["KERAS_BACKEND"] = "jax"

# Compiling is most of what tests in this process do. XLA's optimizations are two thirds of it, and
# the programs are small. What `subprocess_program` starts is compiled as users have it, without
# these flags; `XLA_FLAGS= make test` compiles everything so.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0"
    " --xla_cpu_use_fusion_emitters=false"
    " --xla_cpu_parallel_codegen_split_count=1",
)

#: Programs that tests run: importing them starts a training, or does without the package's own
#: imports.
collect_ignore = ["integration/elastic_program.py", "integration/elastic_worker.py"]


@pytest.fixture
def server_key(monkeypatch):
    """The key by which the parameter servers of a test know who may use them."""
    monkeypatch.setenv("UNISON_KEY", "ab" * 32)


@pytest.fixture
def started(server_key):
    """A function that starts workers and parameter servers as threads, which are ended."""
    from parameter_server_threads import clusters

    with clusters() as start:
        yield start
