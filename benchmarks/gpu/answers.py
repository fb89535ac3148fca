"""What programs of `tests` give on one kind of device: `python -m benchmarks.gpu.answers OPTIONS`.

Each program's answer is a file in a folder, which is there as soon as the program has ended: the
check that reads them takes what it finds when the time is over.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import json
import logging
import math
import pathlib
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.machine import expect_device
from unison.storage.atomic import replacing

#: Importing what programs need takes some of the time that they have.
_BEGIN = time.monotonic()

#: Programs of the parity set that are compared.
PARITY_PROGRAMS = 40

#: The seed of the random programs.
SEED = 20


def parity_programs(replicas: int, count: int) -> list[Any]:
    """Returns the facts of the parity set that are compared on so many devices, topic by topic.

    Those whose answers have fractions, of which no program names a device itself: first those with
    most replicas, and of every topic some.
    """
    from parity.facts import facts
    from parity.recorded_answers import recorded

    theirs = recorded()
    needed = {"two": 2, "four": 4}
    by_topic: dict[str, list[tuple[int, int, Any]]] = {}
    for place, fact in enumerate(facts()):
        uses = max([needed.get(name, 1) for name in inspect.signature(fact.program).parameters])
        source = inspect.getsource(fact.program)
        if uses > replicas or "CPU:" in source or fact.topic == "datasets" or fact.alone:
            continue
        if has_fractions(theirs[fact.topic][fact.name]):
            by_topic.setdefault(fact.topic, []).append((-uses, place, fact))
    queues = [sorted(of_topic, key=lambda each: each[:2]) for of_topic in by_topic.values()]
    chosen: list[Any] = []
    while len(chosen) < count and any(queues):
        for queue in queues:
            if queue and len(chosen) < count:
                chosen.append(queue.pop(0)[2])
    return chosen


def has_fractions(answer: Any) -> bool:
    """Whether an answer has a finite number that is not whole: something to be rounded."""
    if isinstance(answer, dict):
        return any(map(has_fractions, answer.values()))
    if isinstance(answer, list):
        return any(map(has_fractions, answer))
    return isinstance(answer, float) and math.isfinite(answer) and not answer.is_integer()


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    # Keras and JAX are imported here, behind the options that they start with.
    import jax

    from unison.runtime.devices import prepare_backend

    warnings.simplefilter("ignore")
    logging.getLogger("unison").setLevel(logging.ERROR)
    if options.tf32 == "off":
        jax.config.update("jax_default_matmul_precision", "highest")
    prepare_backend()
    expect_device(options.device)
    run = _parity if options.kind == "parity" else _random
    deadline = _BEGIN + options.seconds
    numbers = list(range(options.count))
    if options.only:
        numbers = [int(number) for number in options.only.split(",")]
    part, parts = map(int, options.part.split("/"))
    for number in numbers[part::parts]:
        if time.monotonic() > deadline:
            break
        run(number, options)
        gc.collect()


def _parity(number: int, options: argparse.Namespace) -> None:
    import unison.tf as tf
    from parity.answers import answers

    fact = parity_programs(options.replicas, options.count)[number]
    [(_, answer)] = answers(tf, [fact], kind=options.device.upper())
    with replacing(str(options.folder / f"{number}.json")) as file:
        file.write(json.dumps(answer).encode())


def _random(number: int, options: argparse.Namespace) -> None:
    import contextlib

    from generated_programs.comparing import is_random
    from generated_programs.drawing import draw_program, on_replicas
    from generated_programs.running import in_double_precision, mirrored, run_alone, run_under

    program = on_replicas(draw_program(SEED, number), options.replicas)
    precision = in_double_precision() if options.double else contextlib.nullcontext()
    is_reference = options.reference and not is_random(program)
    seen: dict[str, Any] = {}
    failed = ""
    with tempfile.TemporaryDirectory(prefix="unison-programs-") as folder, precision:
        try:
            if is_reference:
                seen = run_alone(program, pathlib.Path(folder))
            else:
                strategy = mirrored(options.replicas, options.device.upper())
                seen = run_under(program, strategy, pathlib.Path(folder))
        except Exception:
            failed = traceback.format_exc()
    write_seen(options.folder / f"{number}.npz", seen, failed)


def write_seen(path: pathlib.Path, seen: dict[str, Any], failed: str = "") -> None:
    """Writes what was seen of a program, or the traceback with which it failed."""
    arrays = {f"a{index}": _plain(np.asarray(value)) for index, value in enumerate(seen.values())}
    about = json.dumps({"names": list(seen), "failed": failed})
    with replacing(str(path)) as file:
        np.savez(file, about=np.array(about), **arrays)


def read_seen(path: pathlib.Path) -> tuple[dict[str, Any], str]:
    """Reads what `write_seen` has written."""
    with np.load(path, allow_pickle=False) as archive:
        about = json.loads(str(archive["about"]))
        seen = {name: archive[f"a{index}"] for index, name in enumerate(about["names"])}
    return seen, about["failed"]


def _plain(array: np.ndarray) -> np.ndarray:
    """Returns numbers of a dtype that NumPy's files have: bfloat16 as float32."""
    return array if array.dtype.kind in "biuf" else array.astype(np.float32)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.answers", description=__doc__)
    add = parser.add_argument
    add("kind", choices=("parity", "random"))
    add("folder", type=pathlib.Path, help="where the answers are written")
    add("--device", choices=("cpu", "gpu"), default="cpu")
    add("--replicas", type=int, default=1, help="the devices of a strategy")
    add("--count", type=int, default=PARITY_PROGRAMS, help="how many programs")
    add("--only", default="", metavar="N,N", help="the numbers of these programs")
    add("--part", default="0/1", metavar="I/N", help="each N-th of them, from the I-th")
    add("--seconds", type=float, default=60.0, help="no program is begun later")
    add("--tf32", choices=("on", "off"), default="off")
    add("--double", action="store_true", help="compute in float64; random programs only")
    add("--reference", action="store_true", help="random programs on one device, as documented")
    return parser


if __name__ == "__main__":
    main()
