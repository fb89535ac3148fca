"""Keras models as saved models: what they compute, and Keras' archive to rebuild them from."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Callable
from typing import Any

import jax

import unison.keras  # noqa: F401  (before Keras: it chooses the JAX backend)
from unison.errors import NotFoundError
from unison.saving import directory as folder
from unison.saving import keras_files
from unison.saving.functions import DEFAULT_SIGNATURE
from unison.saving.specs import ArraySpec
from unison.storage.names import path_inside

import keras  # isort: skip
from keras.src.export import export_utils  # isort: skip

logger = logging.getLogger("unison")


def save_model(model: keras.Model, directory: str | os.PathLike, signatures: Any = None) -> None:
    """Saves a Keras model in a folder, from which `load_model` rebuilds it.

    Args:
        model: The model.
        directory: The folder. What was saved there before is replaced.
        signatures: See `unison.saving.save`.

    TF: `tf.keras.Model.save` with a folder.
    """
    from unison.saving.save import save

    save(model, directory, signatures)


def load_model(
    directory: str | os.PathLike,
    custom_objects: dict[str, Any] | None = None,
    compile: bool = True,
) -> keras.Model:
    """Rebuilds a Keras model that `save_model` saved, in the strategy's scope if there is one.

    Args:
        directory: The folder.
        custom_objects: Classes and functions of the program that the model uses, by name.
        compile: Whether to compile the model as it was, with its optimizer's state.

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
    """Saves only what a Keras model computes, as the function and the signature `serve`.

    Args:
        model: The model, built.
        directory: The folder. What was saved there before is replaced.
        input_signature: The specs of its inputs. Default: those that it was built for.

    Raises:
        ValueError: The model is not built.

    TF: `tf.keras.Model.export`.
    """
    from unison.saving.save import write_object

    function, inputs = inference_of(model, input_signature, keep_names=True)

    def gather(saved: Any) -> None:
        saved.add_function("serve", function, inputs)
        for name in ("serve", DEFAULT_SIGNATURE):
            saved.add_signature(name, function, inputs)

    write_object(model, os.fspath(directory), gather)


def inference_of(
    model: keras.Model, input_signature: Any = None, keep_names: bool = False
) -> tuple[Callable[..., Any], tuple[tuple, dict[str, Any]]]:
    """Returns the function that a model computes in inference, and its arguments.

    Args:
        model: The model.
        input_signature: The specs of its inputs. Default: those that it was built for.
        keep_names: Whether the arguments have the names of the specs; they are `inputs`,
            `inputs_1`, ... otherwise.

    Raises:
        ValueError: The model is not built, so that its inputs are not known.
    """
    specs = export_utils.get_input_signature(model) if input_signature is None else input_signature
    args = tuple(specs) if isinstance(specs, list | tuple) else (specs,)

    def plain(spec: Any) -> ArraySpec:
        described = ArraySpec.of(spec)
        return described if keep_names else dataclasses.replace(described, name="inputs")

    def infer(*inputs: Any) -> Any:
        return model(*inputs, training=False)

    return infer, (jax.tree.map(plain, args, is_leaf=lambda leaf: hasattr(leaf, "dtype")), {})


def keras_archive_of(model: keras.Model) -> Callable[[str], None]:
    """Returns what writes Keras' archive of a model into a folder, with its values as they are now.

    It writes none if the model's class does not say how to rebuild it. All processes that have
    parts of the values must call this.
    """
    held = keras_files.held_values(model)

    def write(path: str) -> None:
        archive = os.path.join(path, folder.KERAS_MODEL)
        try:
            with held():
                keras.saving.save_model(model, archive)
        except (NotImplementedError, TypeError, ValueError) as error:
            with contextlib.suppress(FileNotFoundError):
                os.remove(archive)
            logger.warning(
                "Model %r is saved with its functions and variables, but load_model cannot "
                "rebuild it. %s",
                model.name,
                " ".join(str(error).partition("Example:")[0].split()),
            )

    return write
