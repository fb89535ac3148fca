"""Datasets that `Dataset.save` has written."""

from __future__ import annotations

import json
import zlib

import numpy as np

from fuzzed.changes import comparable, link_in, outside_of
from fuzzed.format import Format
from fuzzed.mutations import changed_bytes, changed_value
from unison.data import Dataset


def saved_dataset():
    return Dataset.from_tensor_slices(
        {
            "x": np.random.RandomState(1).randn(60, 3).astype(np.float32),
            "t": np.array([b"a" * (number % 9) for number in range(60)], object),
        }
    )


def ragged_dataset():
    return Dataset.from_generator(
        lambda: iter([(np.full((n % 3, 2), n), np.array(["ab" * n, "c"])) for n in range(9)])
    )


def writes_dataset(make, **options):
    return lambda folder: make().save(folder / "data", **options)


def read_dataset(folder):
    dataset = Dataset.load(folder / "data")
    in_order = comparable(list(dataset.take(200).as_numpy_iterator()))
    list(dataset.take(200).shuffle(30, seed=1).as_numpy_iterator())
    return in_order


def read_dataset_and_save_over_it(folder):
    found = read_dataset(folder)
    Dataset.range(3).save(folder / "data")
    return found


def change_index(path, change):
    described = json.loads(path.read_bytes().partition(b"\n")[2])
    changed, how = change(described)
    body = json.dumps(changed).encode()
    path.write_bytes(b"%08x\n" % zlib.crc32(body) + body)
    return how


def dataset_index(folder, chance):
    path = folder / "data" / "dataset.json"
    return change_index(path, lambda found: changed_value(found, chance, outside_of(folder)))


def dataset_part(folder, chance):
    """Changes the bytes of a part, and gives it the checksum and the sizes that it has then."""
    path = chance.choice(sorted((folder / "data").glob("run-*/shard-*/leaf*")))
    content, how = changed_bytes(path.read_bytes(), chance)
    if path.suffix != ".values" and chance.random() < 0.7:
        numbers = np.frombuffer(path.read_bytes(), np.int64).copy()
        numbers[chance.randrange(numbers.size)] = chance.choice(
            [-1, 0, 1, 2**40, 2**62, 2**63 - 1, -(2**63)]
        )
        content, how = numbers.tobytes(), "number"
    path.write_bytes(content)

    def correct(described):
        for shard in described["shards"]:
            for block in shard["blocks"]:
                for number, leaf in enumerate(block["leaves"]):
                    name = path.name.removeprefix(f"leaf{number}.")
                    if name in leaf["parts"]:
                        stored, size, _ = leaf["parts"][name]
                        size = len(content) if stored == size else size
                        leaf["parts"][name] = [len(content), size, zlib.crc32(content)]
        return described, f"{how} {path.name}"

    return change_index(folder / "data" / "dataset.json", correct)


DATASET_STRUCTURES = (dataset_index, dataset_index, dataset_part, link_in("data"))


FORMATS = {
    "dataset": Format(
        writes_dataset(saved_dataset), read_dataset_and_save_over_it, DATASET_STRUCTURES
    ),
    "dataset-ragged": Format(writes_dataset(ragged_dataset), read_dataset, DATASET_STRUCTURES),
    "dataset-gzip": Format(
        writes_dataset(saved_dataset, compression="GZIP"), read_dataset, [dataset_index]
    ),
    "dataset-snappy": Format(
        writes_dataset(ragged_dataset, compression="SNAPPY"), read_dataset, [dataset_index]
    ),
    "dataset-shards": Format(
        writes_dataset(lambda: Dataset.range(40), shard_func=lambda x: x % 3),
        read_dataset,
        DATASET_STRUCTURES,
    ),
}
