"""Keras models as saved models: their computation, and Keras' archive to rebuild them from."""

from __future__ import annotations

import os
from typing import Any

import unison.keras  # noqa: F401  (before Keras: it chooses the JAX backend)
from unison.errors import NotFoundError
from unison.saving import directory as folder
from unison.saving.functions import DEFAULT_SIGNATURE
from unison.saving.keras_models import inference_of
from unison.saving.save import save, write_object
from unison.storage.names import path_inside

import keras  # isort: skip


def save_model(model: keras.Model, directory: str | os.PathLike, signatures: Any = None) -> None:
    """Saves a Keras model in a folder, from which `load_model` rebuilds it.

    Args:
        model: The model.
        directory: The folder. Its previous content is replaced.
        signatures: See `unison.saving.save`.

    TF: `tf.keras.Model.save` with a folder.
    """
    save(model, directory, signatures)


def load_model(
    directory: str | os.PathLike,
    custom_objects: dict[str, Any] | None = None,
    compile: bool = True,
) -> keras.Model:
    """Rebuilds a Keras model that `save_model` has saved, in the strategy's scope if there is one.

    Args:
        directory: The folder.
        custom_objects: Classes and functions of the program that the model uses, by name.
        compile: Whether to compile the model as before, with its optimizer's state.

    Raises:
        NotFoundError: There is no model in the folder, or none that can be rebuilt.

    TF: `tf.keras.models.load_model` of a folder.
    """
    path = os.fspath(directory)
    with folder.local_copy(path) as copy:
        archive = path_inside(copy, folder.KERAS_MODEL)
        if not os.path.exists(archive):
            raise NotFoundError(
                message=f"{path} holds functions and variables, but no Keras model to rebuild: it "
                "was exported, or its class has no get_config. Call its functions with "
                "tf.saved_model.load, or save the model as a .keras file."
            )
        return keras.saving.load_model(archive, custom_objects, compile)


def export_model(
    model: keras.Model, directory: str | os.PathLike, input_signature: Any = None
) -> None:
    """Saves only the computation of a Keras model, as the function and the signature `serve`.

    Args:
        model: The model, built.
        directory: The folder. Its previous content is replaced.
        input_signature: The specs of its inputs. Default: those for which it was built.

    Raises:
        ValueError: The model is not built.

    TF: `tf.keras.Model.export`.
    """
    function, inputs = inference_of(model, input_signature, keep_names=True)

    def gather(saved: Any) -> None:
        saved.add_function("serve", function, inputs)
        for name in ("serve", DEFAULT_SIGNATURE):
            saved.add_signature(name, function, inputs)

    write_object(model, os.fspath(directory), gather)
