"""`tf.keras.callbacks`: Keras' callbacks, with Keras 2's arguments."""

from __future__ import annotations

from typing import Any

import keras

from unison.keras.tensorboard import StepProfile
from unison.runtime import process_group
from unison.tf.keras.names import make_module, stand_over

_ACCEPTED_NAME = {True: "x.weights.h5", False: "x.keras"}


class ModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Saves the model or its weights while it trains, in whatever format `filepath` names.

    A name without extension makes a checkpoint of the weights, or a directory of the model.

    Args:
        filepath: Where to, with `{epoch}` and names of logs in it.
        monitor: The log by which the best model is chosen.
        verbose: 1 to print each save.
        save_best_only: Whether only a better model is saved.
        save_weights_only: Whether only the weights are saved.
        mode: "min", "max" or "auto": which value of `monitor` is better.
        save_freq: "epoch", or a number of batches.
        options: Without effect.
        initial_value_threshold: What has to be better than this value.
        kwargs: `period` of Keras 2: a number of epochs.

    TF: `tf.keras.callbacks.ModelCheckpoint`.
    """

    def __init__(
        self,
        filepath: Any,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_best_only: bool = False,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: Any = "epoch",
        options: Any = None,
        initial_value_threshold: float | None = None,
        **kwargs: Any,
    ) -> None:
        del options
        self._period = kwargs.pop("period", 1)
        if kwargs:
            raise TypeError(f"ModelCheckpoint has no arguments {sorted(kwargs)}.")
        super().__init__(
            _ACCEPTED_NAME[save_weights_only],
            monitor=monitor,
            verbose=verbose,
            save_best_only=save_best_only,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
            initial_value_threshold=initial_value_threshold,
        )
        self.filepath = str(filepath)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if (epoch + 1) % self._period == 0:
            super().on_epoch_end(epoch, logs)


class TensorBoard(keras.callbacks.TensorBoard):
    """Writes logs, histograms of weights and profiles for TensorBoard, but not the graph.

    The arguments are those of `keras.callbacks.TensorBoard`; others of Keras 2 do nothing. Of
    several workers, the first one writes. `profile_batch` makes one trace of all of them,
    `log_dir/profile/trace.json.gz`: see `unison.profiling.trace`.

    TF: `tf.keras.callbacks.TensorBoard`.
    """

    def __init__(
        self,
        log_dir: Any = "logs",
        histogram_freq: int = 0,
        write_graph: bool = True,
        write_images: bool = False,
        write_steps_per_second: bool = False,
        update_freq: Any = "epoch",
        profile_batch: Any = 0,
        embeddings_freq: int = 0,
        embeddings_metadata: Any = None,
        **kwargs: Any,
    ) -> None:
        for name in ("write_grads", "batch_size", "embeddings_layer_names", "embeddings_data"):
            kwargs.pop(name, None)
        super().__init__(
            str(log_dir),
            histogram_freq,
            write_graph,
            write_images,
            write_steps_per_second,
            update_freq,
            0,  # Keras refuses some values for the sake of its own profiler
            embeddings_freq,
            embeddings_metadata,
            **kwargs,
        )
        self._init_profile_batch(profile_batch)
        self._profile: StepProfile | None = None
        if self.update_freq == "epoch" and not (self.write_steps_per_second or self._should_trace):
            # Nothing is written for a batch, so the program does not have to wait for it.
            for event in ("begin", "end"):
                self.__dict__[f"on_train_batch_{event}"] = _nothing
            self.__dict__["on_test_batch_begin"] = _nothing

    @property
    def summary(self) -> Any:
        from unison.tf import summary

        return summary

    @property
    def _train_writer(self) -> Any:
        return self._writer_into("train", self._train_dir)

    @property
    def _val_writer(self) -> Any:
        return self._writer_into("val", self._val_dir)

    def _writer_into(self, name: str, folder: str) -> Any:
        """Returns a writer for a folder; on workers other than the first, it writes nothing."""
        if not process_group.is_first():
            return self.summary.create_noop_writer()
        if name not in self._writers:
            self._writers[name] = self.summary.create_file_writer(folder)
        return self._writers[name]

    def _write_keras_model_summary(self) -> None:
        """There is no graph to write."""

    def _write_keras_model_train_graph(self) -> None:
        """There is no graph to write."""

    def _start_profiler(self, logdir: str) -> None:
        """Keras warms its profiler up; `_start_trace` begins at once."""

    def _stop_profiler(self, save: bool = True) -> None:
        """See `_start_profiler`."""

    def _start_trace(self) -> None:
        self._profile = StepProfile(self.log_dir)
        self._is_tracing = True

    def _stop_trace(self, batch: int | None = None) -> None:
        del batch
        assert self._profile is not None
        self._is_tracing = False
        step = self._global_train_batch
        told = self._profile.end(step - self._start_batch + 1)
        with self._train_writer.as_default():
            for name, value in told.items():
                self.summary.scalar(name, value, step=step)


def _nothing(batch: int, logs: Any = None) -> None:
    """The methods of a callback that does nothing for a batch."""


_nothing._is_default = True  # type: ignore[attr-defined]  # Keras skips such methods


class BackupAndRestore(keras.callbacks.BackupAndRestore):
    """Backs the model up while it trains, and resumes an interrupted training.

    Args:
        backup_dir: Where to.
        save_freq: "epoch", or a number of batches.
        delete_checkpoint: Whether the backup is deleted when training has ended.
        save_before_preemption: Ignored: training resumes at the latest epoch.
        kwargs: `double_checkpoint` of Keras 3.

    TF: `tf.keras.callbacks.BackupAndRestore`.
    """

    def __init__(
        self,
        backup_dir: Any,
        save_freq: Any = "epoch",
        delete_checkpoint: bool = True,
        save_before_preemption: bool = False,
        **kwargs: Any,
    ) -> None:
        del save_before_preemption
        super().__init__(
            str(backup_dir), save_freq=save_freq, delete_checkpoint=delete_checkpoint, **kwargs
        )


__getattr__ = stand_over(__name__)
make_module(f"{__name__}.experimental", {"BackupAndRestore": BackupAndRestore})
