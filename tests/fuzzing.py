"""Fuzzing of file formats: whatever a file holds, reading gives right data or a clear error.

A case is a good file with one change, of its bytes or of what they mean with right checksums again,
and ends well if its reader

- returns what the file was written with (where bytes were changed, and the format has checksums for
  them), or whatever else the changed file says;
- or raises an error of `unison.errors`, or another one that it documents, and nothing else: no
  IndexError, KeyError, AttributeError, RecursionError, MemoryError or UnicodeDecodeError;
- within 2 seconds of the processor, and 100 MB of memory beyond the file's size;
- and touches no path outside of the folder that it was given.

Cases run in a child process, which has a limit of memory and is watched: one that hangs or crashes
is a failure, and the next case runs in another child. A case is known by its format, the seed and
its number:

    python tests/fuzzing.py checkpoint --seed 7 --case 1234     runs one, and shows its traceback
    python tests/fuzzing.py --cases 2000                        runs 2,000 of every format
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import gc
import importlib
import json
import logging
import os
import random
import resource
import selectors
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fuzzed.format import Format
from fuzzed.mutations import changed_bytes
from peak_memory import peak_memory

SECONDS = 2.0
BYTES = 100_000_000

#: After so many seconds without a sign, a case hangs: more than `SECONDS` on a busy machine.
PATIENCE = 40.0

#: After so many seconds without a first sign, a child does not start.
START = 120.0

#: How much more address space a child may take: a claimed terabyte is an error at once.
ADDRESS_SPACE = 3 << 30


class Sandbox:
    """A folder with a format's files, beside one that nobody has named."""

    def __init__(self, root: Path, made: Format):
        self.folder = root / "named"
        self.outside = root / "outside"
        self.folder.mkdir()
        self.outside.mkdir()
        (self.outside / "secret").write_bytes(b"nobody reads this")
        (self.outside / "shard-00000").mkdir()
        made.write(self.folder)
        self._good = {path: path.read_bytes() for path in self._files()}
        self.touched: list[str] = []
        self._is_watching = False
        sys.addaudithook(self._look)

    def _files(self) -> list[Path]:
        return sorted(path for path in self.folder.rglob("*") if path.is_file())

    def restore(self) -> None:
        """Makes all files good again."""
        for path in sorted(self.folder.rglob("*"), reverse=True):
            if path.is_symlink() or (path.is_file() and path not in self._good):
                path.unlink()
        for path, content in self._good.items():
            if not path.is_file() or path.read_bytes() != content:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)

    def change_bytes(self, chance: random.Random) -> str:
        """Changes the bytes of a file; returns what was done."""
        path = chance.choice([*self._good])
        content, how = changed_bytes(self._good[path], chance)
        path.write_bytes(content)
        return f"{how} {path.relative_to(self.folder)}"

    def size(self) -> int:
        return sum(path.stat().st_size for path in self._files())

    def watching(self, is_on: bool) -> None:
        """Begins or ends to note which paths are touched."""
        self._is_watching = is_on
        if is_on:
            self.touched = []

    def is_outside_untouched(self) -> bool:
        return sorted(os.listdir(self.outside)) == ["secret", "shard-00000"]

    def _look(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._is_watching and event in _TOUCHES:
            for given in arguments[:2]:
                if isinstance(given, str | bytes | os.PathLike):
                    path = os.path.realpath(os.fsdecode(given)) if given else ""
                    is_in_root = path.startswith(f"{self.outside.parent}{os.sep}")
                    is_named = path == str(self.folder) or path.startswith(f"{self.folder}{os.sep}")
                    if (is_in_root and not is_named) or path.startswith("/etc/passwd"):
                        self.touched.append(f"{event} {path}")


_TOUCHES = {
    "open", "os.chmod", "os.link", "os.listdir", "os.mkdir", "os.remove", "os.rename", "os.rmdir",
    "os.scandir", "os.symlink", "os.truncate", "shutil.rmtree", "mmap.__new__",
}  # fmt: skip


# -- in a child ----------------------------------------------------------------------------------


def chance_of(name: str, seed: int, number: int) -> random.Random:
    return random.Random(f"{name} {seed} {number}")


def run_cases(
    made: Format, name: str, seed: int, numbers: Sequence[int], shows: bool = False
) -> None:
    """Runs cases of a format, and prints a line of JSON before and after each."""
    with tempfile.TemporaryDirectory(prefix="unison-fuzzing-") as root:
        sandbox = Sandbox(Path(root).resolve(), made)
        right = made.read(sandbox.folder)
        sandbox.restore()
        assert made.read(sandbox.folder) == right, f"{name}: reading it twice differs"
        for number in numbers:
            print(json.dumps({"begins": [name, number]}), flush=True)
            outcome = _run_case(made, sandbox, chance_of(name, seed, number), right, shows)
            print(json.dumps({"ends": [name, number], **outcome}), flush=True)
            if number % 20 == 0:
                gc.collect()


def _quieten() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    with open("/proc/self/status") as file:
        (line,) = (line for line in file if line.startswith("VmSize"))
    limit = int(line.split()[1]) * 1024 + ADDRESS_SPACE
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _run_case(
    made: Format, sandbox: Sandbox, chance: random.Random, right: Any, shows: bool
) -> dict[str, Any]:
    from unison.errors import OpError

    sandbox.restore()
    if made.structures and (not made.changes_bytes or chance.random() < 0.5):
        structure = chance.choice(made.structures)
        how, is_structure = f"{structure.__name__}: {structure(sandbox.folder, chance)}", True
    else:
        how, is_structure = sandbox.change_bytes(chance), False
    size = sandbox.size()
    complaint = None
    with peak_memory() as peak:
        begin = time.process_time()
        sandbox.watching(True)
        try:
            found = made.read(sandbox.folder)
        except OpError as error:
            outcome = f"error {type(error).__name__}"
            complaint = _complaint_about(error)
        except Exception as error:
            outcome = f"error {type(error).__name__}"
            if type(error) not in made.errors:
                where = traceback.extract_tb(error.__traceback__)[-1]
                place = f"{Path(where.filename).name}:{where.lineno}"
                complaint = f"raised {type(error).__name__}: {str(error)[:200]} ({place})"
            else:
                complaint = _complaint_about(error)
            if shows:
                traceback.print_exc()
        else:
            outcome = "right data" if found == right else "other data"
            if not is_structure and not made.is_right(found, right):
                complaint = f"gave wrong data: {str(found)[:200]}"
        finally:
            sandbox.watching(False)
        seconds = time.process_time() - begin
    if sandbox.touched or not sandbox.is_outside_untouched():
        complaint = f"touched {sandbox.touched[:3] or 'the folder outside'}"
    elif seconds > SECONDS:
        complaint = complaint or f"took {seconds:.1f} s"
    elif peak.bytes > BYTES + size:
        complaint = complaint or f"took {peak.bytes / 1e6:.0f} MB beyond what it had"
    return {"how": how, "outcome": outcome, "complaint": complaint, "seconds": seconds}


def _complaint_about(error: Exception) -> str | None:
    """Says what is wrong with a message: empty, or as long as the file."""
    if not str(error):
        return f"raised {type(error).__name__} without a message"
    return f"raised a message of {len(str(error))} characters" if len(str(error)) > 5000 else None


# -- in the parent -------------------------------------------------------------------------------


@dataclasses.dataclass
class Report:
    """What became of the cases of a format.

    Attributes:
        name: The format.
        seed: The seed.
        outcomes: How many cases ended in what.
        failures: What is to be mended, a line each, with what runs that case again.
        slowest: The most seconds of the processor that a case took.
    """

    name: str
    seed: int
    outcomes: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    failures: list[str] = dataclasses.field(default_factory=list)
    slowest: float = 0.0

    def note(self, number: int, how: str, complaint: str) -> None:
        again = f"python tests/fuzzing.py {self.name} --seed {self.seed} --case {number}"
        self.failures.append(f"{complaint} [{how}]: {again}")

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {what}" for what, count in self.outcomes.most_common())
        return (
            f"{self.name}: {sum(self.outcomes.values())} cases of seed {self.seed}: {counts}; "
            f"slowest {self.slowest:.2f} s; {len(self.failures)} failures"
        )


def fuzz(
    names: Sequence[str], seed: int, count: int, module: str = "fuzzed.formats"
) -> list[Report]:
    """Runs cases of formats, one after the other, and returns what became of them.

    Args:
        names: The formats.
        seed: The seed of all random numbers.
        count: How many cases of each.
        module: The module that has the formats.
    """
    reports = {name: Report(name, seed) for name in names}
    left = [(name, 0) for name in names]
    while left:
        left = _run_child(reports, left, seed, count, module)
    return [*reports.values()]


def _run_child(
    reports: dict[str, Report], left: list[tuple[str, int]], seed: int, count: int, module: str
) -> list[tuple[str, int]]:
    """Runs the cases that are left in one child; returns those that are left then.

    Args:
        reports: Get what became of the cases, by the format.
        left: The formats, each with the number of its first case.
        seed: The seed.
        count: How many cases each format has.
        module: The module that has the formats.
    """
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "KERAS_BACKEND": "jax"}
    command = [sys.executable, __file__, "--seed", str(seed), "--cases", str(count)]
    command += ["--formats", module]
    begun: tuple[str, int] | None = None
    ended = None
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            [*command, "--child", json.dumps(left)],
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment,
            text=True,
        )
        try:
            for line in _lines_of(child):
                said = json.loads(line)
                if "begins" in said:
                    begun, ended = (said["begins"][0], said["begins"][1]), None
                    continue
                ended, begun = (said["ends"][0], said["ends"][1]), None
                report = reports[ended[0]]
                report.outcomes[said["outcome"]] += 1
                report.slowest = max(report.slowest, said["seconds"])
                if said["complaint"] is not None:
                    report.note(ended[1], said["how"], said["complaint"])
            status: Any = child.wait(PATIENCE)
        except TimeoutError:
            status = "it hangs"
        finally:
            child.kill()
            child.wait(PATIENCE)
            child.stdout.close()  # type: ignore[union-attr]
        errors.seek(0)
        said_last = errors.read()[-3000:].decode(errors="replace")
    if status == 0:
        return []
    if begun is None:
        raise RuntimeError(f"The child has failed after {ended} ({status}):\n{said_last}")
    name, number = begun
    reports[name].outcomes["crash"] += 1
    last = " ".join(said_last.strip().splitlines()[-3:])[-300:]
    reports[name].note(number, "?", f"ended the process ({status}: {last})")
    names = [each for each, _ in left]
    following = left[names.index(name) + 1 :]
    return [(name, number + 1), *following] if number + 1 < count else following


def _lines_of(child: subprocess.Popen[str]) -> Any:
    """Yields the lines of a child.

    Raises:
        TimeoutError: There was none for too long.
    """
    assert child.stdout is not None
    with selectors.DefaultSelector() as selector:
        os.set_blocking(child.stdout.fileno(), False)
        selector.register(child.stdout, selectors.EVENT_READ)
        rest, patience = "", max(START, PATIENCE)
        while True:
            if not selector.select(patience):
                raise TimeoutError
            patience = PATIENCE
            piece = os.read(child.stdout.fileno(), 1 << 16).decode()
            if not piece:
                return
            *lines, rest = (rest + piece).split("\n")
            yield from lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("formats", nargs="*", help="the formats; default: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=100, help="how many of each format")
    parser.add_argument("--case", type=int, help="run this one here, and show its error")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument(
        "--formats", default="fuzzed.formats", dest="module", help=argparse.SUPPRESS
    )
    options = parser.parse_args()
    found = importlib.import_module(options.module).FORMATS
    if options.child is not None:
        _quieten()
        for name, begin in json.loads(options.child):
            run_cases(found[name], name, options.seed, range(begin, options.cases))
        return 0
    if options.case is not None:
        _quieten()
        (name,) = options.formats
        run_cases(found[name], name, options.seed, [options.case], shows=True)
        return 0
    failed = 0
    for name in options.formats or found:
        (report,) = fuzz([name], options.seed, options.cases)
        failed += len(report.failures)
        print(report, flush=True)
        for failure in report.failures:
            print(f"    {failure}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
