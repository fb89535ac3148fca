"""`tf.saved_model`: objects with variables and functions, saved to be used without their code.

The format is Unison's own (see `unison.saving.directory`), which TensorFlow cannot read; it reads
what `unison.saving.save(..., format="tensorflow")` writes.
"""

from __future__ import annotations

import dataclasses
import enum
import os
from collections.abc import Mapping, Sequence
from typing import Any

from unison import saving
from unison.saving import contains_saved_model
from unison.saving.functions import DEFAULT_SIGNATURE as DEFAULT_SERVING_SIGNATURE_DEF_KEY
from unison.saving.load import SERVING
from unison.tf.missing import names_missing_from, namespace
from unison.tf.variables import Variable
from unison.unsupported import refuse_option

__all__ = [
    "DEFAULT_SERVING_SIGNATURE_DEF_KEY",
    "SERVING",
    "LoadOptions",
    "SaveOptions",
    "contains_saved_model",
    "experimental",
    "load",
    "save",
]


class VariablePolicy(enum.Enum):
    """The form in which the variables of a strategy are saved.

    Attributes:
        NONE: As variables of one replica, on no device.
        SAVE_VARIABLE_DEVICES: Refused: a saved model names no devices.
        EXPAND_DISTRIBUTED_VARIABLES: Refused: there is one value of each variable.

    TF: `tf.saved_model.experimental.VariablePolicy`.
    """

    NONE = None
    SAVE_VARIABLE_DEVICES = "save_variable_devices"
    EXPAND_DISTRIBUTED_VARIABLES = "expand_distributed_variables"


experimental = namespace(f"{__name__}.experimental", VariablePolicy=VariablePolicy)


@dataclasses.dataclass
class SaveOptions:
    """Options of `save`.

    Args:
        namespace_whitelist: Without effect: there are no graphs, and no namespaces of operations.
        save_debug_info: Without effect, likewise.
        function_aliases: Refused.
        experimental_debug_stripper: Without effect.
        experimental_io_device: The device through which TensorFlow writes files; without effect.
        experimental_variable_policy: A `VariablePolicy` or its value.
        experimental_custom_gradients: Without effect: saved functions have their gradients.
        experimental_image_format: Without effect: models of any size can be saved.
        experimental_skip_saver: Without effect: there is no graph that saves.
        experimental_sharding_callback: Refused.
        extra_tags: Refused.

    Raises:
        ValueError: The policy is another one than `NONE`, or an option is refused.

    TF: `tf.saved_model.SaveOptions`.
    """

    namespace_whitelist: Sequence[str] | None = None
    save_debug_info: bool = False
    function_aliases: Mapping[str, Any] | None = None
    experimental_debug_stripper: bool = False
    experimental_io_device: str | None = None
    experimental_variable_policy: VariablePolicy | str | None = None
    experimental_custom_gradients: bool = True
    experimental_image_format: bool = False
    experimental_skip_saver: bool = False
    experimental_sharding_callback: Any = None
    extra_tags: Sequence[str] | None = None

    def __post_init__(self) -> None:
        _require_one_value(self.experimental_variable_policy)
        refuse_option("function_aliases", self.function_aliases, "name functions by signatures=")
        refuse_option(
            "experimental_sharding_callback", self.experimental_sharding_callback, _SHARDS
        )
        refuse_option("extra_tags", self.extra_tags, f"a saved model has the tag {SERVING!r} only")


@dataclasses.dataclass
class LoadOptions:
    """Options of `load`; see `SaveOptions`.

    Raises:
        ValueError: An option asks for what `load` does not do.

    TF: `tf.saved_model.LoadOptions`.
    """

    allow_partial_checkpoint: bool = False
    experimental_io_device: str | None = None
    experimental_skip_checkpoint: bool = False
    experimental_variable_policy: VariablePolicy | str | None = None
    experimental_load_function_aliases: bool = False

    def __post_init__(self) -> None:
        _require_one_value(self.experimental_variable_policy)
        is_partial = self.allow_partial_checkpoint
        refuse_option(
            "allow_partial_checkpoint", is_partial, "all variables are saved, and restored"
        )
        refuse_option(
            "experimental_skip_checkpoint",
            self.experimental_skip_checkpoint,
            "load the variables, and assign them other values",
        )
        aliases = self.experimental_load_function_aliases
        refuse_option("experimental_load_function_aliases", aliases, "use the signatures")


_SHARDS = "the variables are saved as a checkpoint, each worker's shards in a file of its own"


def _require_one_value(policy: VariablePolicy | str | None) -> None:
    """Raises a ValueError if variables should be saved with their devices or copies."""
    text = policy.lower() if isinstance(policy, str) else policy
    if VariablePolicy(text) is not VariablePolicy.NONE:
        raise ValueError(
            "A saved model holds one value of each variable, and no devices. Received: "
            f"experimental_variable_policy={policy!r}. Leave it out; tf.train.Checkpoint saves "
            "the copies of variables that differ between replicas."
        )


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
