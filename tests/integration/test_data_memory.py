"""Data of 20 GB, memory-mapped, shuffled as a whole, train a model in a process of 2 GB.

The limit is `RLIMIT_DATA`: what a process may allocate (the heap, anonymous maps, stacks).
Read-only maps of files do not count, as the kernel takes their pages back whenever it needs them;
under `RLIMIT_AS` they would, and no memory map of 20 GB could be opened. A program that would hold
the data ends at once. Beside it, the peak of `RssAnon` is measured: the pages that the kernel
cannot take back.

The file is sparse: it has its size, and no blocks on the disk.
"""

import json
import shutil
import tracemalloc

import numpy as np
import pytest

from subprocess_program import run_program
from unison.data.transformations.shuffling import shuffled_indices

ROWS, COLUMNS = 25_000_000, 200
LIMIT = 2 << 30

LIMITED = """
import json, resource, sys, threading
import numpy as np

resource.setrlimit(resource.RLIMIT_DATA, (int(sys.argv[2]),) * 2)
"""

DATASET = """
peak = 0
is_over = threading.Event()

def watch():
    global peak
    while not is_over.wait(0.01):
        for line in open("/proc/self/status"):
            if line.startswith("RssAnon:"):
                peak = max(peak, int(line.split()[1]) << 10)

watcher = threading.Thread(target=watch, daemon=True)
watcher.start()

from unison.data import AUTOTUNE, Dataset

rows = np.load(f"{sys.argv[1]}/rows.npy", mmap_mode="r")
labels = np.load(f"{sys.argv[1]}/labels.npy", mmap_mode="r")
dataset = Dataset.from_tensor_slices((rows, labels))
dataset = dataset.shuffle(len(rows), seed=1).batch(256).prefetch(AUTOTUNE)
STEPS = 300
"""

PLAIN_LOOP = """
import jax, jax.numpy as jnp

@jax.jit
def step(weights, row, label):
    def loss(weights):
        return jnp.mean((row @ weights - label[:, None]) ** 2)
    return weights - 0.01 * jax.grad(loss)(weights)

weights = jnp.ones((rows.shape[1], 4))
seen = 0
for row, label in dataset.take(STEPS):
    weights = step(weights, row, label)
    seen += len(row)
"""

KERAS_FIT = """
import keras, unison

strategy = unison.MirroredStrategy()
with strategy.scope():
    model = keras.Sequential([keras.layers.Dense(8), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
model.fit(dataset, steps_per_epoch=STEPS, epochs=1, verbose=0)
seen = 256 * int(model.optimizer.iterations)
"""

KEPT_IN_FILES = """
# 480 MB, through a cache in files and a saved dataset, in memory for neither.
dataset = Dataset.from_tensor_slices(rows).take(600_000).batch(500)
cached = dataset.cache(f"{sys.argv[1]}/kept")
seen = sum(len(batch) for batch in cached)
assert sum(len(batch) for batch in cached) == seen
cached.save(f"{sys.argv[1]}/saved")
assert sum(len(batch) for batch in Dataset.load(f"{sys.argv[1]}/saved")) == seen
"""

END = """
is_over.set()
watcher.join()
print(json.dumps({"seen": seen, "peak": peak}))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("large")
    for name, dtype, shape in [
        ("rows", "float32", (ROWS, COLUMNS)),
        ("labels", "int64", (ROWS,)),
    ]:
        np.lib.format.open_memmap(folder / f"{name}.npy", "w+", dtype, shape)
    assert (folder / "rows.npy").stat().st_size > 20e9
    assert (folder / "rows.npy").stat().st_blocks < 1000
    yield folder
    shutil.rmtree(folder)


def run_in_two_gigabytes(program, folder):
    finished = run_program(LIMITED + DATASET + program + END, folder, LIMIT, timeout=100)
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout.splitlines()[-1])


@pytest.mark.parametrize("training", [PLAIN_LOOP, KERAS_FIT], ids=["plain loop", "keras fit"])
def test_20_gigabytes_shuffled_as_a_whole_train_a_model_in_2_gigabytes(training, folder):
    measured = run_in_two_gigabytes(training, folder)
    assert measured["seen"] == 300 * 256
    assert measured["peak"] < LIMIT / 2


@pytest.mark.parametrize("buffer_size", [1000, 10_000_000])
def test_an_order_takes_four_bytes_an_index_and_half_as_much_again_while_it_is_made(buffer_size):
    count = 5_000_000
    tracemalloc.start()
    try:
        order = shuffled_indices(count, buffer_size, seed=1, epoch=0)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert order.nbytes == 4 * count
    assert peak < 6 * count
    assert np.array_equal(np.sort(order), np.arange(count))


def test_elements_go_to_files_and_come_from_them_without_being_held(folder):
    measured = run_in_two_gigabytes(KEPT_IN_FILES, folder)
    assert measured["seen"] == 600_000
    assert measured["peak"] < 240e6


def test_the_limit_stops_a_program_that_holds_the_data(folder):
    program = LIMITED + "held = [np.ones(1 << 27) for _ in range(3)]"
    finished = run_program(program, folder, LIMIT, timeout=100)
    assert finished.returncode != 0
    assert "MemoryError" in finished.stderr
