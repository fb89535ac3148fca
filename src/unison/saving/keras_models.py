"""The saved parts of a Keras model: its inference as a function, and Keras' own archive."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Callable
from typing import Any

import jax

import unison.keras  # noqa: F401  (before Keras: it chooses the JAX backend)
from unison.saving import directory as folder
from unison.saving import keras_files
from unison.saving.specs import ArraySpec

import keras  # isort: skip
from keras.src.export import export_utils  # isort: skip

logger = logging.getLogger("unison")


def inference_of(
    model: keras.Model, input_signature: Any = None, keep_names: bool = False
) -> tuple[Callable[..., Any], tuple[tuple, dict[str, Any]]]:
    """Returns the inference function of a model, and its arguments.

    Args:
        model: The model.
        input_signature: The specs of its inputs. Default: those for which it was built.
        keep_names: Whether the arguments have the names of the specs; otherwise they are `inputs`,
            `inputs_1`, ...

    Raises:
        ValueError: The model is not built, so its inputs are unknown.
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
    """Returns a function that writes a model's Keras archive, with its present values, to a folder.

    It writes nothing if the model's class has no configuration. All processes that have
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
