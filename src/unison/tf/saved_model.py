"""`tf.saved_model`: objects with variables and functions, saved to be used without their code.

The format is Unison's own (see `unison.saving.directory`); TensorFlow cannot read it.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

from unison import saving
from unison.saving import contains_saved_model
from unison.saving.functions import DEFAULT_SIGNATURE as DEFAULT_SERVING_SIGNATURE_DEF_KEY
from unison.saving.load import SERVING
from unison.tf.missing import names_missing_from
from unison.tf.variables import Variable

__all__ = [
    "DEFAULT_SERVING_SIGNATURE_DEF_KEY",
    "SERVING",
    "LoadOptions",
    "SaveOptions",
    "contains_saved_model",
    "load",
    "save",
]


@dataclasses.dataclass
class SaveOptions:
    """Through which device TensorFlow writes a saved model; without effect.

    TF: `tf.saved_model.SaveOptions`.
    """

    experimental_io_device: str | None = None


@dataclasses.dataclass
class LoadOptions:
    """Through which device TensorFlow reads a saved model; without effect.

    TF: `tf.saved_model.LoadOptions`.
    """

    experimental_io_device: str | None = None


def save(
    obj: Any,
    export_dir: str | os.PathLike,
    signatures: Any = None,
    options: SaveOptions | None = None,
) -> None:
    """Saves an object with its variables and functions; see `unison.saving.save`.

    TF: `tf.saved_model.save`.
    """
    del options
    saving.save(obj, export_dir, signatures)


def load(
    export_dir: str | os.PathLike,
    tags: str | Sequence[str] | None = None,
    options: LoadOptions | None = None,
) -> Any:
    """Returns an object that `save` saved; see `unison.saving.load`.

    TF: `tf.saved_model.load`.
    """
    del options
    return saving.load(export_dir, tags, Variable)


__getattr__ = names_missing_from(
    __name__, {"Asset": "keep files beside the model, and their paths in your program"}
)
