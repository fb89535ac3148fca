"""Four logical CPU devices in one process for every test, and programs that compile soon.

JAX and Keras read these variables when they are first imported, so they are set here, before
pytest imports a test or, for the doctests, a module of the package.
"""

import os

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
