"""The additions of `unison.tf.keras` to Keras' classes, made when it is imported.

Methods, arguments and file formats of Keras 2 that TensorFlow programs use. What is added was an
error before. What Keras 3 does changes in two things: on JAX, it counts padding in metrics of
`fit`, and where a derivative has a step or a pole, its gradients are not TensorFlow's.
"""

from __future__ import annotations

import keras
import numpy as np
from keras.src import datasets
from keras.src.api_export import register_internal_serializable
from keras.src.backend.common import dtypes
from keras.src.backend.common.stateless_scope import StatelessScope
from keras.src.backend.jax.trainer import JAXTrainer
from keras.src.dtype_policies.dtype_policy import DTypePolicy
from keras.src.layers import layer as layer_module
from keras.src.models.functional import Functional
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.trainers.trainer import Trainer
from keras.src.utils import file_utils

from unison.keras import takeover, text_input
from unison.keras.normalization import init_taking_synchronized
from unison.keras.scope import ENTRY_POINTS
from unison.keras.stateful_step import STATE_OF_STEPS
from unison.tf.keras import gradients, layers, masks, old_models, old_optimizers, old_saving, utils
from unison.tf.keras.sharded_weights import of_whole_weights, weights_by_shards

#: Keras' own layers of these names need TensorFlow.
_OWN_LAYERS = ("HashedCrossing", "Hashing", "IntegerLookup", "StringLookup", "TextVectorization")

#: Of `compile`: they chose between implementations that are gone.
_OLD_COMPILE_ARGUMENTS = ("experimental_run_tf_function", "distribute", "pss_evaluation_shards")


def patch_keras() -> None:
    """Gives Keras' classes the old spellings."""
    _give(old_optimizers.OptimizerMethods, keras.optimizers.Optimizer)
    _give(old_optimizers.LossScaleMethods, keras.optimizers.LossScaleOptimizer)
    # Where it is defined: while a scope is open, `keras.optimizers.Optimizer` has another.
    BaseOptimizer.__init__ = old_optimizers.init_taking_lr(BaseOptimizer.__init__)
    optimizer = keras.optimizers.Optimizer
    optimizer._backend_apply_gradients = old_optimizers.accumulating(
        optimizer._backend_apply_gradients
    )
    _give(old_models.MetricMethods, keras.metrics.Metric)
    _give(old_models.VariableMethods, keras.Variable)
    keras.Variable.__init__ = old_models.init_starting_devices(keras.Variable.__init__)
    for owner in (keras.layers.Layer, keras.metrics.Metric):
        owner.add_weight = old_models.method_adding_weights(owner)
    keras.layers.Layer.weights = weights_by_shards(keras.layers.Layer.weights)
    for name in ("trainable_weights", "non_trainable_weights"):
        whole = of_whole_weights(getattr(keras.layers.Layer, name))
        setattr(keras.layers.Layer, name, whole)
    normalization = keras.layers.BatchNormalization
    normalization.__init__ = init_taking_synchronized(normalization.__init__)
    for tensors in ("input", "output"):
        setattr(keras.layers.Layer, f"{tensors}_shape", old_models.ShapeOf(tensors))
    # The class that defines it: Keras recognizes a program's own `compile` by comparing with that.
    Trainer.compile = old_models.compile_ignoring(_OLD_COMPILE_ARGUMENTS, Trainer.compile)
    Trainer.get_metrics_result = old_models.results_with_values(Trainer.get_metrics_result)
    for name in ENTRY_POINTS:
        setattr(keras.Model, name, old_models.entry_point(name))
    for name in ("fit", "evaluate", "predict"):
        setattr(keras.Model, f"{name}_generator", getattr(keras.Model, name))
    for name in STATE_OF_STEPS:
        setattr(keras.Model, name, old_models.step_with_or_without_state(name))
    JAXTrainer._make_function = takeover.handed_over(JAXTrainer._make_function)
    StatelessScope.get_current_value = takeover.asking_around(StatelessScope.get_current_value)
    StatelessScope.add_update = takeover.telling_around(StatelessScope.add_update)
    # Where they are defined, so that Keras and we recognize a program's own.
    JAXTrainer.compute_loss_and_updates = masks.returning_masks(JAXTrainer.compute_loss_and_updates)
    JAXTrainer._update_metrics_variables = masks.taking_masks(JAXTrainer._update_metrics_variables)
    _give(old_models.ModelMethods, keras.Model)
    _give(old_saving.SavingMethods, keras.Model)
    let_text_pass()
    gradients.take_gradients_of_tensorflow()
    for module in (file_utils, *vars(datasets).values()):
        if hasattr(module, "get_file"):
            module.get_file = utils.get_file


def let_text_pass() -> None:
    """Lets models take text, and Keras find our layers for it where it looks for its own.

    Models with such layers are saved as Keras saves them, and load in Keras with TensorFlow.
    """
    keras.Model.__call__ = text_input.calling_with_text(keras.Model.__call__)
    DTypePolicy.convert_input = text_input.casting_but_text(DTypePolicy.convert_input)
    Functional._convert_inputs_to_tensors = text_input.converting_but_text(
        Functional._convert_inputs_to_tensors
    )
    Functional._adjust_input_rank = text_input.ranking_but_text(Functional._adjust_input_rank)
    layer_module.is_backend_tensor_or_symbolic = text_input.counting_text_as_tensor(
        layer_module.is_backend_tensor_or_symbolic
    )
    dtypes.PYTHON_DTYPES_MAP[np.dtype(object)] = "string"
    for name in _OWN_LAYERS:
        layer = getattr(layers, name)
        setattr(keras.layers, name, layer)
        register_internal_serializable(f"keras.layers.{name}", layer)


def _give(methods: type, owner: type) -> None:
    for name, value in vars(methods).items():
        if not name.startswith("__"):
            setattr(owner, name, value)
