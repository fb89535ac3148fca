"""What becomes of jobs: checkpoints, Ctrl-C, a killed worker; and whether a job can be repeated."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.gpu.findings import Finding, Note, Row, Setting, Value, Wrong, environment
from benchmarks.processes import ROOT
from unison.train.orbax_format import is_orbax_installed

#: Steps of an epoch of a job, and epochs; a job that is to be restarted needs time to prepare.
STEPS, EPOCHS = 20, 4
_EPOCHS_OF_RESTARTED = 16

#: Seconds that a job may take to end once it was interrupted, or has lost a worker.
_SECONDS_TO_END = 30.0

#: A job that resumed trains as one that was not disturbed, but for the order of sums on GPUs.
_WEIGHTS_DIFFER = 1e-4

_INTERVAL = 0.05
_LINES = 15


def formats() -> list[str]:
    """Returns the formats of checkpoints for which all packages are installed."""
    has_checksums = importlib.util.find_spec("google_crc32c") is not None
    has = {"archive": True, "tensorflow": has_checksums, "orbax": is_orbax_installed()}
    return [name for name, is_there in has.items() if is_there]


def checkpoint(setting: Setting) -> Iterator[Finding]:
    """Training that continues from checkpoints, on the devices, and their files read on a CPU."""
    with _folder() as folder:
        _train(setting, "save", folder, setting.seconds)
        _train(setting, "restore", folder, setting.seconds)
        on_cpu = folder / "on-cpu"
        on_cpu.mkdir()
        for file in folder.glob("checkpoint*"):
            (on_cpu / file.name).symlink_to(file)
        cpu = Setting("cpu", 1, setting.seconds)
        _train(cpu, "restore", on_cpu, setting.seconds)
        saved = _weights(folder / "saved.npz")
        table = "Checkpoint: restored bit by bit"
        for name in formats():
            cells: dict[str, Value] = {"": name}
            for where, restored in ((f"to {setting.device}", folder), ("to one cpu", on_cpu)):
                cells[where] = _largest(saved, _weights(restored / f"restored-{name}.npz")) == 0
            yield Row(table, cells)
            if not all(cells.values()):
                yield Wrong(f"{name}: a restored weight is not the saved one, bit by bit.")
        straight, continued = _weights(folder / "straight.npz"), _weights(folder / "continued.npz")
        difference = _largest(straight, continued)
        yield Row("Checkpoint: more steps", {"": "largest difference", "value": difference})
        if difference > _WEIGHTS_DIFFER:
            yield Wrong(
                "Training that continues from a checkpoint gives other weights than training that "
                f"was not interrupted: they differ by {difference:.3g}, expected at most "
                f"{_WEIGHTS_DIFFER}."
            )


def interrupt(setting: Setting) -> Iterator[Finding]:
    """Ctrl-C in the middle of a job: it ends soon, and leaves no process behind."""
    with _folder() as folder, _job(setting, folder, pause=0.05) as job:
        job.wait_for_step(5, setting.seconds)
        pids = _pids(folder)
        begin = time.monotonic()
        os.kill(job.process.pid, signal.SIGINT)
        seconds = job.seconds_to_end(begin)
        cells: dict[str, Value] = {"": "Ctrl-C", "ended after s": seconds}
        cells["exit code"] = job.process.returncode
        cells["left behind"] = sum(map(_is_alive, pids))
        yield Row("Jobs that end", cells)
        if seconds is None:
            yield Wrong(f"A job did not end within {_SECONDS_TO_END:.0f} s after Ctrl-C.")
        elif job.process.returncode != 128 + signal.SIGINT:
            yield Wrong(
                f"A job that was interrupted ended with {job.process.returncode}, expected "
                f"{128 + signal.SIGINT}.\n{job.output()}"
            )
        if any(map(_is_alive, pids)):
            yield Wrong("A job that was interrupted left processes behind.")


def killed_worker(setting: Setting) -> Iterator[Finding]:
    """A worker is killed: the job ends and says which; started again, it resumes its training."""
    with _folder() as folder:
        undisturbed, disturbed = folder / "undisturbed", folder / "disturbed"
        with _job(setting, undisturbed) as job:
            job.wait_for_end(setting.seconds)
        with _job(setting, disturbed, pause=0.05) as job:
            job.wait_for_step(STEPS + 7, setting.seconds)
            pids = _pids(disturbed)
            begin = time.monotonic()
            os.kill(pids[-1], signal.SIGKILL)
            seconds = job.seconds_to_end(begin)
            code, output = job.process.returncode, job.output()
            left = sum(map(_is_alive, pids))
        with _job(setting, disturbed) as job:
            job.wait_for_end(setting.seconds)
        resumed_at = _steps_by_process(disturbed)[-1][0].number
        difference = _largest(
            _weights(undisturbed / "trained.npz"), _weights(disturbed / "trained.npz")
        )
        cells: dict[str, Value] = {"": f"worker {len(pids) - 1} of {len(pids)} killed"}
        cells |= {"ended after s": seconds, "exit code": code, "left behind": left}
        cells |= {"resumed at step": resumed_at, "of": STEPS * EPOCHS}
        cells["largest difference of weights"] = difference
        yield Row("Jobs that end", cells)
        if seconds is None:
            yield Wrong(f"A job did not end within {_SECONDS_TO_END:.0f} s after it lost a worker.")
        elif code != 128 + signal.SIGKILL or f"worker {len(pids) - 1}" not in output:
            yield Wrong(
                f"A job that lost worker {len(pids) - 1} ended with {code}, expected "
                f"{128 + signal.SIGKILL} and a message that names it.\n{output}"
            )
        if left:
            yield Wrong("A job that lost a worker left processes behind.")
        if resumed_at <= 1:
            yield Wrong("A job that was started again began with step 1: expected its backup.")
        if difference > _WEIGHTS_DIFFER:
            yield Wrong(
                f"A job that resumed has other weights than an undisturbed one: they differ by "
                f"{difference:.3g}, expected at most {_WEIGHTS_DIFFER}."
            )


def restarted(setting: Setting) -> Iterator[Finding]:
    """A worker is killed: all start again, from the memory of their host, and train on."""
    program = (f"--epochs={_EPOCHS_OF_RESTARTED}", "--no-backup")
    with _folder() as folder:
        undisturbed, disturbed = folder / "undisturbed", folder / "disturbed"
        with _job(setting, undisturbed, program=program) as job:
            job.wait_for_end(setting.seconds)
        options = ("--restarts=1", "--in-memory-checkpoints")
        with _job(setting, disturbed, pause=0.05, options=options, program=program) as job:
            job.wait_for_step(STEPS * _EPOCHS_OF_RESTARTED // 2, setting.seconds)
            pids = _pids(disturbed)
            killed_at = time.time()
            os.kill(pids[-1], signal.SIGKILL)
            job.wait_for_end(setting.seconds)
        before, after = _steps_by_process(disturbed)
        difference = _largest(
            _weights(undisturbed / "trained.npz"), _weights(disturbed / "trained.npz")
        )
        cells: dict[str, Value] = {"": f"worker {len(pids) - 1} of {len(pids)} killed"}
        cells["next step after s"] = after[0].time - killed_at
        cells["steps again"] = before[-1].number + 1 - after[0].number
        cells["largest difference of weights"] = difference
        yield Row("Jobs that start again from memory", cells)
        if after[0].number == 1:
            yield Wrong("A job that was started again began with step 1: expected its memory.")
        if difference > _WEIGHTS_DIFFER:
            yield Wrong(
                f"A job that resumed from memory has other weights than an undisturbed one: they "
                f"differ by {difference:.3g}, expected at most {_WEIGHTS_DIFFER}."
            )


def determinism(setting: Setting) -> Iterator[Finding]:
    """Whether a training gives the same bits twice, and what that costs."""
    steps = 1000 if setting.on_gpus else 6
    for options in ((), ("--deterministic",)):
        told = []
        for _ in range(2):
            with _folder() as folder:
                more = (f"--steps={steps}", *options)
                _train(setting, "repeat", folder, setting.seconds, *more)
                told.append(json.loads((folder / "told.json").read_text()))
        agree = told[0]["bits"] == told[1]["bits"]
        cells: dict[str, Value] = {"": "enable_op_determinism" if options else "default"}
        cells["same bits twice"] = agree
        cells["steps/s"] = max(each["steps/s"] for each in told)
        cells["compiling s"] = min(each["compiling s"] for each in told)
        yield Row("Determinism: a small network twice, in two processes", cells)
        if options and not agree:
            yield Wrong("With enable_op_determinism, two runs gave other bits.")
        if not options and agree:
            yield Note("The two runs without enable_op_determinism gave the same bits, too.")


class _Step(NamedTuple):
    """A step that the first worker has done, and when."""

    number: int
    time: float


class _Job:
    """A job of `unison run`, which writes to a folder."""

    def __init__(self, process: subprocess.Popen, folder: pathlib.Path, output: pathlib.Path):
        self.process = process
        self._folder = folder
        self._output = output

    def output(self) -> str:
        return "\n".join(self._output.read_text(errors="replace").splitlines()[-_LINES:])

    def wait_for_step(self, number: int, seconds: float) -> None:
        """Waits until the first worker has done a step.

        Raises:
            RuntimeError: It has ended, or it is too late.
        """
        deadline = time.monotonic() + seconds
        while not any(
            steps and steps[-1].number >= number for steps in _steps_by_process(self._folder)
        ):
            if self.process.poll() is not None:
                raise RuntimeError(
                    f"The job ended with {self.process.returncode}:\n{self.output()}"
                )
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"The job has not reached step {number} in {seconds:.0f} s:\n{self.output()}"
                )
            time.sleep(_INTERVAL)

    def seconds_to_end(self, begin: float) -> float | None:
        """Waits until the job has ended; returns how long after `begin`, or None if it has not."""
        try:
            self.process.wait(max(0.0, begin + _SECONDS_TO_END - time.monotonic()))
        except subprocess.TimeoutExpired:
            return None
        return time.monotonic() - begin

    def wait_for_end(self, seconds: float) -> None:
        """Waits until the job has ended well.

        Raises:
            RuntimeError: It has not.
        """
        try:
            status = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise RuntimeError(
                f"The job has not ended in {seconds:.0f} s:\n{self.output()}"
            ) from None
        if status:
            raise RuntimeError(f"The job ended with {status}:\n{self.output()}")


@contextlib.contextmanager
def _job(
    setting: Setting,
    folder: pathlib.Path,
    pause: float = 0.0,
    options: Sequence[str] = (),
    program: Sequence[str] = (),
) -> Iterator[_Job]:
    """Starts a job of as many workers as there are devices, at most four; ends it behind.

    Args:
        setting: The check's.
        folder: Where the job's files are.
        pause: Seconds behind each of its steps.
        options: More options of `unison run`.
        program: More options of the program.
    """
    folder.mkdir(exist_ok=True)
    workers = max(1, min(setting.devices, 4))
    command = [sys.executable, "-m", "unison", "run", "--no-color", "-n", str(workers), *options]
    command += ["-m", "benchmarks.gpu.training", "job", str(folder), f"--device={setting.device}"]
    command += [f"--pause={pause}", "--deterministic", *program]
    path = folder / "output"
    with open(path, "ab") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment(setting.device, 1),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        yield _Job(process, folder, path)
    finally:
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_SECONDS_TO_END / 2)
        process.kill()
        process.wait()


def _train(
    setting: Setting, program: str, folder: pathlib.Path, seconds: float, *options: str
) -> None:
    """Runs a program of `training` to its end, in one process with all devices.

    Raises:
        RuntimeError: It failed, or took too long.
    """
    command = [sys.executable, "-m", "benchmarks.gpu.training", program, str(folder)]
    command += [f"--device={setting.device}", *options]
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment(setting.device, setting.devices),
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"`{program}` has not ended in {seconds:.0f} s") from None
    if done.returncode:
        last = "\n".join(done.stderr.splitlines()[-_LINES:])
        raise RuntimeError(f"`{program}` ended with {done.returncode}:\n{last}")


@contextlib.contextmanager
def _folder() -> Iterator[pathlib.Path]:
    with tempfile.TemporaryDirectory(prefix="unison-gpu-") as folder:
        yield pathlib.Path(folder)


def _weights(path: pathlib.Path) -> list[np.ndarray]:
    with np.load(path) as archive:
        return [archive[name] for name in archive.files]


def _largest(ours: list[np.ndarray], theirs: list[np.ndarray]) -> float:
    """Returns the largest difference of two lists of arrays; NaN beside a number is infinite."""
    differences = [
        np.abs(our.astype(np.float64) - their.astype(np.float64)).max(initial=0.0)
        for our, their in zip(ours, theirs, strict=True)
    ]
    return float(np.nan_to_num(max(differences), nan=np.inf))


def _lines(folder: pathlib.Path) -> list[list[str]]:
    """Returns the words of each line of the workers' logs, worker by worker."""
    paths: list[pathlib.Path] = sorted(folder.glob("steps-*"))
    return [line.split() for path in paths for line in path.read_text().splitlines() if line]


def _pids(folder: pathlib.Path) -> list[int]:
    return [int(line[1]) for line in _lines(folder) if line[0] == "process" and len(line) == 2]


def _steps_by_process(folder: pathlib.Path) -> list[list[_Step]]:
    """Returns the steps of each process of the first worker, in the order of their starts."""
    path = folder / "steps-0"
    found: list[list[_Step]] = []
    for line in path.read_text().splitlines(keepends=True) if path.exists() else ():
        words = line.split()
        if words[0] == "process":
            found.append([])
        elif words[0] == "step" and line.endswith("\n"):  # the last one may be written just now
            found[-1].append(_Step(int(words[1]), float(words[2])))
    return found


def _is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended, and that nobody has waited for, does not."""
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
