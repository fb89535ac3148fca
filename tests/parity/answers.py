"""Runs the programs and turns what they return into plain data.

    python -m parity.answers MODULE PROCESS [TOPIC ...]

prints the answers that the programs of a process give with MODULE as `tf`. TensorFlow's Python
runs this file, so it imports nothing but NumPy.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
import tempfile
import traceback
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from parity.facts import Fact, Raised, facts

#: How many logical CPU devices the programs have.
DEVICES = 4
#: The family of an error, by the first class among its bases that is listed here. TensorFlow raises
#: one or the other class of a family depending on how deep in its runtime a value is looked at.
FAMILIES = {
    "ValueError": "ValueError",
    "TypeError": "ValueError",
    "InvalidArgumentError": "ValueError",
    "IndexError": "ValueError",
    "KeyError": "KeyError",
    "RuntimeError": "RuntimeError",
    "FailedPreconditionError": "RuntimeError",
    "NotImplementedError": "NotImplementedError",
    "UnimplementedError": "NotImplementedError",
    "AttributeError": "AttributeError",
    "AssertionError": "AssertionError",
    "OutOfRangeError": "OutOfRangeError",
    "NotFoundError": "NotFoundError",
    "FileNotFoundError": "NotFoundError",
    "StopIteration": "StopIteration",
}


class Setting:
    """What the programs are given: a module, and strategies of it on logical CPU devices, or GPUs.

    Args:
        tf: The module.
        kind: Of which kind the strategies' devices are: "CPU" or "GPU".
    """

    def __init__(self, tf: Any, kind: str = "CPU"):
        self.tf = tf
        self._kind = kind
        self._strategies: dict[int, Any] = {}

    def answer(self, fact: Fact) -> Any:
        """Runs the program of `fact` and returns its answer as plain data."""
        with tempfile.TemporaryDirectory() as folder:
            return plain(fact.program(**self._arguments(fact, folder)))

    def _arguments(self, fact: Fact, folder: str) -> dict[str, Any]:
        given = {
            "tf": lambda: self.tf,
            "folder": lambda: folder,
            "one": lambda: self._strategy(1),
            "two": lambda: self._strategy(2),
            "four": lambda: self._strategy(4),
        }
        return {name: given[name]() for name in inspect.signature(fact.program).parameters}

    def _strategy(self, replicas: int) -> Any:
        if replicas not in self._strategies:
            self._strategies[replicas] = (
                self.tf.distribute.OneDeviceStrategy(f"{self._kind}:0")
                if replicas == 1
                else self.tf.distribute.MirroredStrategy(
                    [f"{self._kind}:{i}" for i in range(replicas)]
                )
            )
        return self._strategies[replicas]


def plain(value: Any) -> Any:
    """Returns `value` as what JSON can hold, with dtypes and shapes."""
    if isinstance(value, Raised):
        return {"raises": family_of(value.error)}
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float) and not isinstance(value, np.generic):
        return _rounded(value)
    if isinstance(value, bytes):
        return {"bytes": value.decode("latin-1")}
    if isinstance(value, Mapping):
        return {str(key): plain(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, list | tuple):
        if type(value).__name__ == "TensorShape":
            return list(value)
        return [plain(item) for item in value]
    if type(value).__name__ == "TensorShape":
        return None if value.rank is None else list(value.as_list())
    if type(value).__name__ in ("PerReplica", "Mirrored"):
        return {"replicas": [plain(copy) for copy in value.values]}
    if hasattr(value, "numpy"):
        return _array(value.numpy())
    if isinstance(value, np.ndarray | np.generic) or hasattr(value, "__array__"):
        return _array(np.asarray(value))
    raise TypeError(f"no plain data for {type(value).__name__}: {value!r}")


def family_of(error: BaseException) -> str:
    """The family of an error: that of the first class in its ancestry that has one."""
    for kind in type(error).__mro__:
        if kind.__name__ in FAMILIES:
            return FAMILIES[kind.__name__]
    return type(error).__name__


def _array(array: Any) -> Any:
    array = np.asarray(array)
    if array.dtype.kind in "OSU":
        values, dtype = np.vectorize(_text, otypes=[object])(array).tolist(), "string"
    elif array.dtype.kind == "c":
        values, dtype = _rounded(np.stack([array.real, array.imag], -1).tolist()), array.dtype.name
    elif array.dtype.kind in "biu":
        values, dtype = array.tolist(), array.dtype.name
    else:
        values, dtype = _rounded(array.astype(np.float64).tolist()), array.dtype.name
    return {"dtype": dtype, "shape": list(array.shape), "values": values}


def _text(item: Any) -> str:
    return item.decode("latin-1") if isinstance(item, bytes) else str(item)


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.9g}") if np.isfinite(value) else str(value)


def answers(tf: Any, chosen: Iterable[Fact], kind: str = "CPU") -> Iterator[tuple[Fact, Any]]:
    """Each fact with its answer, or with how its program failed; see `Setting`."""
    setting = Setting(tf, kind)
    for fact in chosen:
        try:
            yield fact, setting.answer(fact)
        except Exception as error:
            traceback.print_exc()
            yield fact, {"failed": f"{type(error).__name__}: {error}"}


def main(module: str, process: str, *only: str) -> None:
    tf = importlib.import_module(module)
    use_logical_devices(tf)
    chosen = (fact for fact in facts(*only) if fact.process == process)
    found = [[fact.topic, fact.name, answer] for fact, answer in answers(tf, chosen)]
    print(json.dumps({"versions": _versions(tf), "answers": found}))


def use_logical_devices(tf: Any) -> None:
    """Divides the CPU into the logical devices that the programs have."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * DEVICES
    )


def _versions(tf: Any) -> dict[str, str]:
    return {"tensorflow": tf.__version__, "keras": tf.keras.__version__}


if __name__ == "__main__":
    main(*sys.argv[1:])
