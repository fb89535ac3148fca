"""Saving models and weights as programs of Keras 2 do: in a directory, or a checkpoint.

| name | a model becomes | weights become |
| --- | --- | --- |
| `*.keras` | Keras' archive | |
| `*.weights.h5`, `*.weights.json` | | Keras' file of weights |
| other `*.h5`, `*.hdf5`, `save_format="h5"` | Keras 2's HDF5 file | Keras 2's HDF5 file |
| any other | a directory (`unison.saving`) | a checkpoint (`unison.train`) |
"""

from __future__ import annotations

import os
from typing import Any

import h5py
import jax
import keras
from keras.src.legacy.saving import json_utils, legacy_h5_format, saving_utils
from keras.src.saving.orbax_util import is_orbax_checkpoint

from unison.storage import files
from unison.train.sharded_archive import INDEX

# Keras' own, whose names `SavingMethods` takes.
_save = keras.Model.save
_save_weights = keras.Model.save_weights
_load_weights = keras.Model.load_weights

_HDF5 = (".h5", ".hdf5")
_COMPILED = ("loss", "metrics", "weighted_metrics")
_KERAS_WEIGHTS = (".weights.h5", ".weights.json")


class SavingMethods:
    """For `keras.Model`."""

    def save(
        self: Any,
        filepath: Any,
        overwrite: bool = True,
        save_format: str | None = None,
        *,
        include_optimizer: bool = True,
        signatures: Any = None,
        options: Any = None,
        save_traces: bool = True,
        **kwargs: Any,
    ) -> None:
        """Saves the model in the format of the file's name, or of `save_format` (see this module).

        Args:
            filepath: Where to.
            overwrite: Whether to overwrite an existing file without a prompt.
            save_format: "keras", "h5" or "tf".
            include_optimizer: Whether the optimizer's state is saved; a `.keras` file has it.
            signatures: Functions to save with a directory, by name.
            options: Without effect, as `save_traces`.
            save_traces: Without effect.
            kwargs: Others of Keras 3's `save`.

        TF: `tf.keras.Model.save`.
        """
        del options, save_traces
        path = os.fspath(filepath)
        if path.endswith(".keras") or "zipped" in kwargs:
            _save(self, path, overwrite=overwrite, **kwargs)
        elif path.endswith(_HDF5) or save_format == "h5":
            legacy_h5_format.save_model_to_hdf5(self, path, overwrite, include_optimizer)
        else:
            from unison.saving import keras_directory

            keras_directory.save_model(self, path, signatures=signatures)

    def save_weights(
        self: Any,
        filepath: Any,
        overwrite: bool = True,
        save_format: str | None = None,
        options: Any = None,
        **kwargs: Any,
    ) -> None:
        """Saves the weights in the format of the file's name, or `save_format` (see this module).

        TF: `tf.keras.Model.save_weights`.
        """
        del options
        path = os.fspath(filepath)
        if path.endswith(_KERAS_WEIGHTS):
            _save_weights(self, path, overwrite=overwrite, **kwargs)
        elif path.endswith(_HDF5) or save_format == "h5":
            with h5py.File(path, "w") as file:
                legacy_h5_format.save_weights_to_hdf5_group(file, self)
        else:
            from unison.train import weights

            weights.save_weights(self, path)

    def load_weights(
        self: Any,
        filepath: Any,
        skip_mismatch: bool = False,
        by_name: bool = False,
        options: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Loads weights that `save_weights` or the callback `OrbaxCheckpoint` saved.

        Returns:
            Of a checkpoint, how loading went, with `expect_partial()` and `assert_consumed()`.

        TF: `tf.keras.Model.load_weights`.
        """
        del options
        path = os.fspath(filepath)
        if path.endswith((*_KERAS_WEIGHTS, *_HDF5, ".keras")):
            if by_name:
                kwargs["by_name"] = True
            return _load_weights(self, path, skip_mismatch, **kwargs)
        if _is_hdf5(path):
            with h5py.File(path) as file:
                return legacy_h5_format.load_weights_from_hdf5_group(file, self, skip_mismatch)
        if is_orbax_checkpoint(path) and not files.exists(os.path.join(path, INDEX)):
            return _load_weights(self, path, skip_mismatch, **kwargs)
        from unison.train import weights

        return weights.load_weights(self, path)


def save_model(model: keras.Model, filepath: Any, overwrite: bool = True, **kwargs: Any) -> None:
    """Saves `model` as `model.save` does. TF: `tf.keras.models.save_model`."""
    model.save(filepath, overwrite=overwrite, **kwargs)


def load_model(
    filepath: Any,
    custom_objects: dict[str, Any] | None = None,
    compile: bool = True,
    safe_mode: bool = True,
    options: Any = None,
) -> keras.Model:
    """Loads a model that `model.save` saved, as a file or as a directory, or `OrbaxCheckpoint`.

    TF: `tf.keras.models.load_model`.
    """
    del options
    path = os.fspath(filepath)
    is_of_keras = os.path.exists(os.path.join(path, "config.json")) or is_orbax_checkpoint(path)
    if os.path.isdir(path) and not is_of_keras:
        from unison.saving import keras_directory

        return keras_directory.load_model(path, custom_objects=custom_objects, compile=compile)
    if _is_hdf5(path):
        model = legacy_h5_format.load_model_from_hdf5(path, custom_objects, False, safe_mode)
        if compile:
            _compile_as_saved(model, path, custom_objects)
        return model
    return keras.saving.load_model(path, custom_objects, compile, safe_mode)


def _compile_as_saved(model: keras.Model, path: str, custom_objects: dict[str, Any] | None) -> None:
    """Compiles `model` from the HDF5 file, and restores its optimizer's state.

    Keras 3.15 would build the optimizer for no variables, with which it cannot go on, and does
    not know again the short names ("mse") that it saved.
    """
    with h5py.File(path) as file:
        saved = file.attrs.get("training_config")
        if saved is None:
            return
        config = json_utils.decode(saved)
        named = {name: config.get(name) for name in _COMPILED if _are_names(config.get(name))}
        other = {**config, **dict.fromkeys(named)}
        arguments = saving_utils.compile_args_from_training_config(other, custom_objects)
        model.compile(**{**arguments, **named})
        saving_utils.try_build_compiled_arguments(model)
        model.optimizer.build(model.trainable_variables)
        if "optimizer_weights" in file:
            weights = legacy_h5_format.load_optimizer_weights_from_hdf5_group(file)
            model.optimizer.set_weights(weights)


def _are_names(config: Any) -> bool:
    leaves = jax.tree.leaves(config)
    return bool(leaves) and all(isinstance(leaf, str) for leaf in leaves)


def _is_hdf5(path: str) -> bool:
    return os.path.isfile(path) and h5py.is_hdf5(path)
