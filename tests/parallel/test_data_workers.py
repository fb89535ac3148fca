"""Datasets of several processes: the same as with threads (`tests/single/test_data_sharding.py`),
by JAX's coordination service.
"""

import pytest

from worker_processes import run_workers

#: Reads a data set, and reports for every step what each replica got.
READING = """
from unison.data import *
from unison.data.distribution.input_workers import workers_of_cluster
from unison.runtime.placement import Placement

workers = workers_of_cluster(COUNT, INDEX, patience=20)
placement = Placement(jax.local_devices())

def listed(batch):
    leaf = batch.tolist()
    return [x.decode() if isinstance(x, bytes) else x for x in leaf]

def read(dataset, policy):
    options = Options(auto_shard_policy=AutoShardPolicy[policy])
    distributed = distribute_dataset(dataset.with_options(options), placement, None, workers)
    return [listed(batch) for batch in distributed]
"""


def read(count, source, given=None):
    return [said for said, _ in run_workers(READING + source, count, given)]


def write_files(folder, lines):
    names = []
    for number, count in enumerate(lines):
        path = folder / f"{number}.txt"
        path.write_text("".join(f"{number}-{line}\n" for line in range(count)))
        names.append(str(path))
    return names


def all_of(steps_of_workers):
    return sorted(x for steps in steps_of_workers for step in steps for x in step)


@pytest.mark.parametrize("count", [2, 3])
def test_processes_read_every_element_once(tmp_path, count):
    lines = [5, 1, 8, 2]
    names = write_files(tmp_path, lines)
    runs = read(
        count,
        """
        names = GIVEN
        unknown = Dataset.range(50).filter(lambda x: x % 7 > 0)
        report({
            "DATA": read(Dataset.range(29).shuffle(29).batch(6), "DATA"),
            "unknown": read(unknown.shuffle(9).batch(5), "DATA"),
            "FILE": read(TextLineDataset(names).shuffle(3).batch(4), "FILE"),
            "AUTO": read(Dataset.list_files(names).interleave(TextLineDataset).batch(4), "AUTO"),
            "few files": read(TextLineDataset(names[:1]).batch(2), "AUTO"),
            "OFF": read(Dataset.range(5).batch(4), "OFF"),
        })
        """.replace("\n        ", "\n"),
        names,
    )
    told = {name: [run[name] for run in runs] for name in runs[0]}
    for steps in told.values():
        assert len({len(of_worker) for of_worker in steps}) == 1
    every_line = sorted(f"{number}-{line}" for number, n in enumerate(lines) for line in range(n))
    assert all_of(told["DATA"]) == list(range(29))
    assert all_of(told["unknown"]) == [x for x in range(50) if x % 7]
    assert all_of(told["FILE"]) == all_of(told["AUTO"]) == every_line
    assert all_of(told["few files"]) == [f"0-{line}" for line in range(5)]
    assert all_of(told["OFF"]) == sorted(list(range(5)) * count)


def test_a_process_that_fails_in_its_input_is_named_by_the_others():
    runs = read(
        2,
        """
def dataset_fn(context):
    if context.input_pipeline_id == 1:
        raise OSError("no such disk")
    return Dataset.range(4).batch(2)

def last(x):
    if INDEX and x == 3:
        raise KeyError("no such key")
    return x

said = []
failing = Dataset.range(4).map(last).batch(1)
for make in (dataset_fn, lambda context: failing):
    try:
        list(distribute_from_function(make, placement, None, workers))
    except Exception as error:
        said.append(f"{type(error).__name__}: {error}")
report(said)
""",
    )
    assert runs[0] == [
        "AbortedError: Worker 1 of 2 failed in its input: OSError: no such disk",
        "AbortedError: Worker 1 of 2 failed in its input: KeyError: 'no such key'",
    ]
    assert runs[1] == ["OSError: no such disk", "KeyError: 'no such key'"]


def test_answers_of_any_length_arrive_and_are_forgotten():
    runs = read(
        2,
        """
from unison.runtime.private_jax import coordination_client
talk = workers.talk("x")
long = bytes(3_000_000) + b"end"
answers = talk.ask(long if INDEX else None)
for question in range(200):
    assert talk.ask(question) == [question] * 2
left = coordination_client().key_value_dir_get_bytes("unison/input/x/0/worker0")
report([answers[0], answers[1] == long, len(left)])
""",
    )
    assert [run[:2] for run in runs] == [[None, True]] * 2
    assert all(0 < run[2] <= 128 for run in runs)


def test_a_process_that_does_not_come_is_named():
    runs = read(
        2,
        """
import time
workers = workers_of_cluster(COUNT, INDEX, patience=1)
try:
    if INDEX == 0:
        read(Dataset.range(4).batch(2), "DATA")
    else:
        time.sleep(3)
    report(None)
except Exception as error:
    report(f"{type(error).__name__}: {error}")
""",
    )
    assert runs[0].startswith("DeadlineExceededError: Timed out: worker 1 of 2 has not reached")
    assert runs[1] is None


def test_a_pass_goes_on_in_another_number_of_processes(tmp_path):
    names = write_files(tmp_path, [7, 3, 9, 4, 6])
    begin = """
import itertools
options = Options(auto_shard_policy=AutoShardPolicy.FILE)
dataset = TextLineDataset(GIVEN["names"]).shuffle(4).batch(6).with_options(options)
iterator = iter(distribute_dataset(dataset, placement, None, workers))
if GIVEN["state"]:
    import numpy as np
    data = np.frombuffer(bytes.fromhex(GIVEN["state"].pop("data")), np.uint8)
    iterator.set_state({**GIVEN["state"], "data": data})
steps = [listed(batch) for batch in itertools.islice(iterator, GIVEN["steps"])]
state = iterator.get_state() if GIVEN["steps"] else None
report([steps, state and {**state, "data": state["data"].tobytes().hex()}])
"""
    first = read(2, begin, {"names": names, "state": None, "steps": 2})
    rest = read(3, begin, {"names": names, "state": first[0][1], "steps": None})
    seen = all_of([steps for steps, _ in first]) + all_of([steps for steps, _ in rest])
    assert len(all_of([steps for steps, _ in first])) == 12
    assert sorted(seen) == sorted(
        f"{f}-{x}" for f, n in enumerate([7, 3, 9, 4, 6]) for x in range(n)
    )


@pytest.mark.parametrize("count", [2, 4])
def test_a_worker_reads_the_bytes_of_its_own_files(tmp_path, count):
    names = []
    for number in range(8):
        path = tmp_path / f"{number}.txt"
        path.write_text(f"{number:0127}\n" * 8192)  # 1 MiB
        names.append(str(path))
    runs = read(
        count,
        """
def bytes_read():
    with open("/proc/self/io") as file:
        return int(file.readline().split()[1])

def of_a_pass(policy):
    before = bytes_read()
    examples = sum(map(len, read(TextLineDataset(GIVEN).batch(1024), policy)))
    return [examples, bytes_read() - before]

of_a_pass("FILE")  # which imports what a pass needs
report({policy: of_a_pass(policy) for policy in ("FILE", "DATA")})
""",
        names,
    )
    for run in runs:
        examples, size = run["FILE"]
        assert examples == 8 * 8192 // count
        # Beside the files: what the workers say to each other.
        assert (8 << 20) / count <= size < 1.05 * (8 << 20) / count
        assert run["DATA"][1] >= 8 << 20
