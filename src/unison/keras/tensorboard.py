"""`TensorBoard`: metrics of a training under a strategy, written once for all workers."""

from __future__ import annotations

import os
from time import perf_counter
from typing import Any

import keras
import numpy as np

from unison.compression import LocalTraining
from unison.data import waited_seconds
from unison.keras.aggregation import compression_of
from unison.keras.compression import report_of
from unison.profiling.clocks import compare_clocks
from unison.profiling.events import event_writer
from unison.profiling.merging import seconds_of_regions
from unison.profiling.tracing import Trace
from unison.runtime import process_group


class TensorBoard(keras.callbacks.Callback):
    """Writes metrics, and the time and the communication of the steps, for TensorBoard.

    Pass it to `fit` or `evaluate` on every worker, under any strategy: the first worker writes. The
    metrics are in `log_dir/train` and `log_dir/validation`, with the names of
    `keras.callbacks.TensorBoard`; `log_dir/train` also has, after each epoch,

    - `speed/step_milliseconds` and `speed/examples_per_second`, of training alone; in the first
      epoch, including compilation;
    - `speed/input_wait`, the fraction of that time that a worker waited for its input: of the
      worker that waited longest;
    - `communication/bytes_a_step`, the bytes that a replica sends, by the step's collectives;
    - with a compression, `communication/bytes_saved_a_step` and `communication/residual_norm`, the
      norm of the residuals;
    - with several workers, `workers/skew_milliseconds`: the time between the first and the last of
      them that begins a step, the median over the last steps;
    - after `profile_batch`, `profile/..._milliseconds`: the time of a step in each region.

    Args:
        log_dir: The folder.
        update_freq: `"epoch"`; or `"batch"`, or a number of steps, after which the metrics are
            written as `batch_...`, too. The program then waits for every step.
        profile_batch: The step, or the first and the last, counted from 1, for which a trace is
            written to `log_dir/profile/trace.json.gz`; see `unison.profiling.trace`.

    Raises:
        ImportError: tensorboardX is not installed.
        ValueError: An argument is invalid.

    Examples:
        model.fit(dataset, epochs=2, callbacks=[unison.keras.TensorBoard("logs")])
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str] = "logs",
        update_freq: str | int = "epoch",
        profile_batch: int | tuple[int, int] | None = None,
    ):
        super().__init__()
        self._folder = os.fspath(log_dir)
        self._every = _steps_of(update_freq)
        self._profiled = _bounds_of(profile_batch)
        self._writers: dict[str, Any] = {}
        self._profile: StepProfile | None = None
        self._is_training = False
        #: The seconds for which the current epoch has trained, once its training has ended.
        self._trained: float | None = None
        #: The number of steps for which this callback was called, if it is called for steps.
        self._steps = 0
        if self._every or self._profiled:
            # Only then: the program waits for each step for which a callback is called.
            self.on_train_batch_begin = self._begin_step
            self.on_train_batch_end = self._end_step

    # -- what Keras calls ------------------------------------------------------------------

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._is_training = True
        if process_group.is_first():
            self._writer("train")  # raises immediately if it cannot

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._trained = None
        self._begin_counting()

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        if self._is_training and self._trained is None:  # a validation's time is not training's
            self._end_counting()

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        optimizer = self.model.optimizer
        if optimizer is not None:
            step = int(optimizer.iterations)
            for name, value in (logs or {}).items():
                self._write("validation", f"evaluation_{name}_vs_iterations", value, step)
        if not self._is_training:
            self._close()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        logs = logs or {}
        if self._trained is None:
            self._end_counting()
        for name, value in logs.items():
            is_of_validation = name.startswith("val_")
            run = "validation" if is_of_validation else "train"
            self._write(run, f"epoch_{name.removeprefix('val_')}", value, epoch)
        rate = getattr(self.model.optimizer, "learning_rate", None)
        if rate is not None and "learning_rate" not in logs:
            self._write("train", "epoch_learning_rate", rate, epoch)
        for name, value in (self._speed() | self._communication()).items():
            self._write("train", name, value, epoch)
        for writer in self._writers.values():
            writer.flush()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        if self._profile is not None:  # the training was shorter than the steps to be profiled
            self._end_profile()
        self._is_training = False
        self._close()

    def _close(self) -> None:
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def _begin_step(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if (
            self._profiled is not None
            and self._profile is None
            and self._steps + 1 == self._profiled[0]
        ):
            self._profile = StepProfile(self._folder)

    def _end_step(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._steps += 1
        if self._every and self._steps % self._every == 0:
            for name, value in (logs or {}).items():
                self._write("train", f"batch_{name}", value, self._steps)
        profiled = self._profiled
        if self._profile is not None and profiled is not None and self._steps >= profiled[1]:
            self._end_profile()

    # -- what is written -------------------------------------------------------------------

    def _begin_counting(self) -> None:
        trainer = _trainer_of(self.model)
        self._at_begin = (
            perf_counter(),
            waited_seconds(),
            0 if trainer is None else trainer.steps,
            0 if trainer is None else trainer.examples,
        )

    def _end_counting(self) -> None:
        begin, waited, steps, examples = self._at_begin
        trainer = _trainer_of(self.model)
        self._trained = perf_counter() - begin
        self._waited = waited_seconds() - waited
        self._steps_run = trainer.steps - steps if trainer else self.params.get("steps") or 0
        self._examples = trainer.examples - examples if trainer else 0

    def _speed(self) -> dict[str, float]:
        seconds = self._trained or 0.0
        trainer = _trainer_of(self.model)
        begun = [] if trainer is None else list(trainer.begun)[-self._steps_run :]
        told: dict[str, float] = {}
        wait = self._waited / seconds if seconds else 0.0
        if trainer is not None and process_group.count() > 1:
            clocks = compare_clocks()
            of_all = process_group.all_gather_json([wait, begun], "What TensorBoard is told")
            wait = max(of_worker for of_worker, _ in of_all)
            told["workers/skew_milliseconds"] = 1000 * skew(
                [
                    [moment - clock.ahead for moment in moments]
                    for (_, moments), clock in zip(of_all, clocks, strict=True)
                ]
            )
        told["speed/input_wait"] = wait
        if self._steps_run:
            told["speed/step_milliseconds"] = 1000 * seconds / self._steps_run
        if self._examples:
            told["speed/examples_per_second"] = self._examples / seconds
        return told

    def _communication(self) -> dict[str, float]:
        trainer = _trainer_of(self.model)
        if trainer is None or trainer.training_step is None:
            return {}
        optimizer = self.model.optimizer
        if optimizer is None or compression_of(optimizer) is None:
            return {"communication/bytes_a_step": trainer.training_step.bytes_sent}
        sent, norm = report_of(optimizer)
        is_apart = isinstance(compression_of(optimizer), LocalTraining)
        is_on = is_apart or trainer.strategy.communication_options.compresses
        return {
            "communication/bytes_a_step": sent.bytes_sent if is_on else sent.bytes_uncompressed,
            "communication/bytes_saved_a_step": sent.bytes_saved if is_on else 0.0,
            "communication/residual_norm": norm,
        }

    def _end_profile(self) -> None:
        profile, self._profile = self._profile, None
        assert profile is not None
        assert self._profiled is not None
        steps = self._steps - self._profiled[0] + 1
        self._profiled = None
        for name, value in profile.end(steps).items():
            self._write("train", name, value, self._steps)

    def _write(self, run: str, name: str, value: Any, step: int) -> None:
        if not process_group.is_first() or np.ndim(value) != 0:
            return
        self._writer(run).add_scalar(name, float(value), step)

    def _writer(self, run: str) -> Any:
        if run not in self._writers:
            self._writers[run] = event_writer(os.path.join(self._folder, run))
        return self._writers[run]


class StepProfile:
    """A trace of some steps of all workers, which is recorded from now on.

    Args:
        log_dir: TensorBoard's folder; the trace is `log_dir/profile/trace.json.gz`.

    Raises:
        RuntimeError: The profiler is already recording.
    """

    def __init__(self, log_dir: str):
        self._trace = Trace(os.path.join(log_dir, "profile"))
        self._trace.start()

    def end(self, steps: int) -> dict[str, float]:
        """Ends the recording, which all workers must do, and writes the trace.

        Args:
            steps: The number of recorded steps.

        Returns:
            The time of a step in each region, by the name in TensorBoard.
        """
        self._trace.stop()
        return {
            f"profile/{region}_milliseconds": 1000 * seconds / max(steps, 1)
            for region, seconds in seconds_of_regions(self._trace.slices).items()
        }


def skew(of_workers: list[list[float]]) -> float:
    """Returns the median time in seconds between the first and the last worker that begins a step.

    Args:
        of_workers: The times at which each worker began its latest steps, by one clock.

    Examples:
        >>> skew([[1.0, 2.0, 3.0], [1.25, 2.25, 4.0]])
        0.25
    """
    count = min(map(len, of_workers))
    if count == 0:
        return 0.0
    moments = np.array([moments[-count:] for moments in of_workers])
    return float(np.median(np.ptp(moments, axis=0)))


def _trainer_of(model: keras.Model) -> Any:
    from unison.keras.trainer import ReplicaTrainer, trainer_of

    trainer = trainer_of(model)
    return trainer if isinstance(trainer, ReplicaTrainer) else None


def _steps_of(update_freq: str | int) -> int:
    """Returns the number of steps after which metrics are written; 0 for never."""
    if update_freq in ("epoch", "batch"):
        return int(update_freq == "batch")
    if isinstance(update_freq, int) and not isinstance(update_freq, bool) and update_freq > 0:
        return update_freq
    raise ValueError(
        'update_freq must be "epoch", "batch", or a number of steps. Received: '
        f"update_freq={update_freq!r}"
    )


def _bounds_of(profile_batch: int | tuple[int, int] | None) -> tuple[int, int] | None:
    """Returns the first and the last step that are profiled; None for none."""
    if not profile_batch:
        return None
    bounds = (profile_batch,) * 2 if isinstance(profile_batch, int) else tuple(profile_batch)
    if len(bounds) != 2 or not 1 <= bounds[0] <= bounds[1]:
        raise ValueError(
            "profile_batch must be a step or the first and the last, counted from 1. Received: "
            f"profile_batch={profile_batch!r}"
        )
    return bounds
