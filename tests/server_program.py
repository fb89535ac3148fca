"""A program of workers and parameter servers, which sums what a file beside it yields."""

from pathlib import Path

_PROGRAM = """
import sys
import unison
from beside import batches
from unison.parameter_server import ClusterCoordinator

strategy = unison.ParameterServerStrategy()
coordinator = ClusterCoordinator(strategy)
with strategy.scope():
    total = unison.Variable(0.0)
iterator = iter(coordinator.create_per_worker_dataset(batches))


def step(own):
    strategy.run(lambda x: total.assign_add(x.sum()), args=(next(own),))


for _ in range(20):
    coordinator.schedule(step, args=(iterator,))
coordinator.join()
print("total", float(total))
"""

_BESIDE = """
import numpy as np

def batches():
    print("reads", flush=True)
    while True:
        yield np.ones(3, "f4")
"""


def write_program(folder: Path, at_the_end: str) -> Path:
    """Writes it into a folder, and what it does at the end; returns its path."""
    (folder / "beside.py").write_text(_BESIDE)
    path = folder / "program.py"
    path.write_text(_PROGRAM + at_the_end)
    return path
