"""Facts about records and Examples: expressions, and what TensorFlow answers.

`record_facts.txt` holds them as plain data, so that the tests need no TensorFlow. To record its
answers anew, run this file in an environment that has it: `python record_facts.py tensorflow`.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from surface_facts import ARROW, agree, plain, recorded

__all__ = ["Setting", "agree", "facts"]

FACTS = Path(__file__).with_suffix(".txt")


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
        self._folder = folder
        self._names = {
            "tf": tf,
            "np": np,
            "ds": tf.data.Dataset,
            "io": tf.io,
            "example": self._example,
            "sequence": self._sequence,
            "feature": self._feature,
            "fixed": tf.io.FixedLenFeature,
            "varying": tf.io.VarLenFeature,
            "rows": lambda *args, **kwargs: tf.io.FixedLenSequenceFeature(
                *args, allow_missing=True, **kwargs
            ),
            "steps": tf.io.FixedLenSequenceFeature,
            "int64": tf.int64,
            "float32": tf.float32,
            "string": tf.string,
            "written": self._written,
            "file": self._file,
            "name": lambda name: str(folder / name),
            "records": lambda *args, **kwargs: [
                bytes(x) for x in tf.data.TFRecordDataset(*args, **kwargs).as_numpy_iterator()
            ],
        }

    def _feature(self, *values: Any) -> Any:
        """A feature of what kind its values are; of nothing, one that says nothing."""
        train = self._tf.train
        if not values:
            return train.Feature()
        if isinstance(values[0], float):
            return train.Feature(float_list=train.FloatList(value=values))
        if isinstance(values[0], int):
            return train.Feature(int64_list=train.Int64List(value=values))
        return train.Feature(bytes_list=train.BytesList(value=values))

    def _features(self, features: dict[str, Any]) -> Any:
        made = {
            key: self._feature(*values) if isinstance(values, list) else values
            for key, values in features.items()
        }
        return self._tf.train.Features(feature=made)

    def _example(self, **features: Any) -> bytes:
        """A serialized Example of lists of values."""
        return self._tf.train.Example(features=self._features(features)).SerializeToString()

    def _sequence(self, context: dict[str, Any], **lists: Any) -> bytes:
        """A serialized SequenceExample of lists of lists of values."""
        train = self._tf.train
        made = {
            key: train.FeatureList(feature=[self._feature(*values) for values in steps])
            for key, steps in lists.items()
        }
        example = train.SequenceExample(
            context=self._features(context), feature_lists=train.FeatureLists(feature_list=made)
        )
        return example.SerializeToString()

    def _written(self, *records: bytes, options: Any = None, to: str = "written") -> str:
        """The name of a TFRecord file that `tf` has written."""
        path = str(self._folder / to)
        with self._tf.io.TFRecordWriter(path, options) as writer:
            for record in records:
                writer.write(record)
        return path

    def _file(self, contents: bytes) -> str:
        """The name of a file of these bytes."""
        path = self._folder / "file"
        path.write_bytes(contents)
        return str(path)

    def answer(self, expression: str) -> Any:
        """What `expression` gives: plain Python values, or the name of the error raised."""
        try:
            return plain(self._listed(eval(expression, self._names)))
        except Exception as error:
            return {"raises": type(error).__name__}

    def _listed(self, value: Any) -> Any:
        """Returns `value` with the elements of datasets, and the parts of sparse tensors."""
        if isinstance(value, self._tf.data.Dataset):
            return [self._listed(element) for element in value]
        if isinstance(value, self._tf.sparse.SparseTensor):
            parts = [value.indices, value.values, value.dense_shape]
            return ["sparse", *map(self._listed, parts)]
        if isinstance(value, dict):
            return {key: self._listed(part) for key, part in value.items()}
        if isinstance(value, list | tuple):
            return [self._listed(part) for part in value]
        return value


def record(module: str, folder: Path) -> None:
    """Writes the answers of `module` into the file of facts."""
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    setting = Setting(importlib.import_module(module), folder)
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
