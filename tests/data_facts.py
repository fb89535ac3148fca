"""Facts about `tf.data`: expressions, and what TensorFlow answers.

`data_facts.txt` holds them as plain data, so that the tests need no TensorFlow. To record its
answers anew, run this file in an environment that has it: `python data_facts.py tensorflow`.
"""

from __future__ import annotations

import importlib
import itertools
import os
import sys
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from surface_facts import ARROW, agree, plain, recorded

__all__ = ["Setting", "agree", "facts"]

FACTS = Path(__file__).with_suffix(".txt")
MANY = 40

Point = namedtuple("Point", "x y")


def facts() -> Iterator[tuple[str, Any]]:
    """Every expression with the answer that was recorded."""
    return recorded(FACTS)


class Setting:
    """What the expressions may name.

    Args:
        tf: TensorFlow, or `unison.tf`.
        folder: An empty folder, for files.
    """

    def __init__(self, tf: Any, folder: Path):
        self._tf = tf
        (folder / "one.txt").write_bytes(b"a\nb\r\nc")
        (folder / "two.txt").write_bytes(b"d\n\ne\n")
        (folder / "empty.txt").write_bytes(b"")
        (folder / "table.csv").write_bytes(b'a,b,c\n1,2.5,x\n3,,"y\nz"\n 4 ,5,w\n')
        numbers = tf.data.Dataset.range(10)
        self._names = {
            "csv": str(folder / "table.csv"),
            "generator_that_fails": _generator_that_fails,
            "imbalanced": np.random.default_rng(5).choice(2, 2000, p=[0.8, 0.2]).astype("int32"),
            "known_endless_unknown": [
                numbers,
                numbers.repeat(),
                numbers.filter(lambda x: True),
            ],
            "nested": self._nested(),
            "points": self._nested(with_text=False),
            "raises": _raises,
            "shares": _shares,
            "tf": tf,
            "np": np,
            "ds": tf.data.Dataset,
            "files": str(folder),
            "Point": Point,
            "two": tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]),
            "four": tf.distribute.MirroredStrategy([f"CPU:{index}" for index in range(4)]),
            "ints": lambda dataset: [int(x) for x in dataset],
            "of_shapes": self._of_shapes,
            "with_policy": self._with_policy,
        }

    def _of_shapes(self, rows: Any, dtype: str = "int32") -> Any:
        spec = self._tf.TensorSpec([None], dtype)
        return self._tf.data.Dataset.from_generator(lambda: iter(rows), output_signature=spec)

    def _nested(self, with_text: bool = True) -> Any:
        """Three elements `(a, {"p": Point(x, y), "q": text})`, or without the text."""
        points = Point(np.arange(6.0, dtype="f4").reshape(3, 2), np.array([[1], [2], [3]], "i4"))
        labels = {"p": points, **({"q": ["r", "st", "u"]} if with_text else {})}
        return self._tf.data.Dataset.from_tensor_slices((np.arange(1, 4), labels))

    def _with_policy(self, name: str, dataset: Any) -> Any:
        options = self._tf.data.Options()
        policy = getattr(self._tf.data.experimental.AutoShardPolicy, name)
        options.experimental_distribute.auto_shard_policy = policy
        return dataset.with_options(options)

    def answer(self, expression: str) -> Any:
        """What `expression` gives: plain Python values, or the name of the error raised."""
        try:
            return plain(self._listed(eval(expression, self._names)))
        except Exception as error:
            return {"raises": type(error).__name__}

    def _listed(self, value: Any) -> Any:
        """Returns `value` with the elements of every dataset, and the values of every replica."""
        distribute = self._tf.distribute
        if isinstance(value, self._tf.data.Dataset | distribute.DistributedDataset):
            return [self._listed(element) for element in itertools.islice(iter(value), MANY)]
        if isinstance(value, distribute.DistributedValues):
            return [self._listed(part) for part in value.values]
        if isinstance(value, dict):
            return {key: self._listed(part) for key, part in value.items()}
        if isinstance(value, list | tuple):
            return [self._listed(part) for part in value]
        return value


def _generator_that_fails() -> Iterator[int]:
    yield 1
    raise ValueError("no more")


def _raises(call: Callable[[], Any]) -> str:
    """Whether a call raises an error, or the word of the end."""
    try:
        call()
    except StopIteration:
        return "the end"
    except Exception:
        return "an error"
    return "nothing"


def _shares(pairs: Any) -> list[float]:
    """The share of each class in pairs of a class and an element, to one digit."""
    classes = [int(pair[0]) for pair in pairs]
    return np.round(np.bincount(classes, minlength=2) / len(classes), 1).tolist()


def record(module: str, folder: Path) -> None:
    """Writes the answers of `module` into the file of facts."""
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    tf = importlib.import_module(module)
    if module == "tensorflow":
        cpu = tf.config.list_physical_devices("CPU")[0]
        logical = [tf.config.LogicalDeviceConfiguration() for _ in range(4)]
        tf.config.set_logical_device_configuration(cpu, logical)
    setting = Setting(tf, folder)
    lines = []
    for line in FACTS.read_text("utf-8").splitlines():
        if line.startswith(ARROW):
            continue
        lines.append(line)
        if line and not line.startswith("#"):
            lines.append(f"{ARROW}{setting.answer(line)!r}")
    FACTS.write_text("\n".join(lines) + "\n", "utf-8")


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as made:
        record(sys.argv[1], Path(made))
