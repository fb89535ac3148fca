"""Runs a program, on one device or under a strategy, and notes all that can be seen of it."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from keras.src.backend.common import dtypes

import unison
import unison.tf as tf
from generated_programs import models
from generated_programs.choices import VALIDATION_SPLIT, Program
from generated_programs.examples import CLASS_WEIGHTS, Examples, batches_of, make_examples
from generated_programs.layers import Captures, ReferenceNormalization, imitating
from generated_programs.loops import Loop
from generated_programs.parts import LOSSES, METRICS, make_optimizers
from generated_programs.steps import STEPS, DividesByBatch

#: Names of the weights that only models on one device have.
_OF_REFERENCE = ("of_replicas", "captured")

#: What can be seen of a program, by what it is and when it was seen.
Seen = dict[str, Any]


def mirrored(replicas: int, kind: str = "CPU") -> Any:
    """Returns a strategy of so many logical CPU devices, or GPUs."""
    return unison.MirroredStrategy([f"{kind}:{index}" for index in range(replicas)])


def run_alone(program: Program, folder: pathlib.Path) -> Seen:
    """Runs a program on one device without a strategy.

    Layers that look at their replica's share on purpose calculate what the documentation says of
    the program's number of replicas.
    """
    with imitating(program.replicas):
        return _Run(program, None, folder).seen


def run_under(program: Program, strategy: Any, folder: pathlib.Path) -> Seen:
    """Runs a program under a strategy."""
    return _Run(program, strategy, folder).seen


@contextlib.contextmanager
def in_double_precision() -> Iterator[None]:
    """Inside, programs compute in float64, also layers that ask Keras for a result's dtype.

    On JAX, Keras answers them with 32 bits (normalizations for one, which would round off), and
    JAX's attention takes the softmax in float32, which `_attention` does not.
    """
    x64, floatx = jax.config.jax_enable_x64, keras.config.floatx()
    jax.config.update("jax_enable_x64", True)
    keras.config.set_floatx("float64")
    narrower = dtypes.BIT64_TO_BIT32_DTYPE
    before = narrower["float64"]
    narrower["float64"] = "float64"
    attention, jax.nn.dot_product_attention = jax.nn.dot_product_attention, _attention
    try:
        yield
    finally:
        jax.nn.dot_product_attention = attention
        narrower["float64"] = before
        jax.config.update("jax_enable_x64", x64)
        keras.config.set_floatx(floatx)


def _attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    *,
    scale: float,
    is_causal: bool,
    implementation: str,
) -> jax.Array:
    """`jax.nn.dot_product_attention`, in the dtype of its arguments, for attention to all steps."""
    assert not is_causal
    assert implementation == "xla"
    key, value = (jnp.repeat(each, query.shape[2] // each.shape[2], 2) for each in (key, value))
    logits = jnp.einsum("btnh,bsnh->bnts", query, key) * scale
    if bias is not None:
        logits += bias
    if mask is not None:
        logits = jnp.where(mask, logits, -0.7 * jnp.finfo(logits.dtype).max)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(logits, -1), value)


@contextlib.contextmanager
def _dtype_policy(policy: str) -> Iterator[None]:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy if keras.config.floatx() == "float32" else "float64")
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


class _Batches(keras.utils.PyDataset):
    """Batches of changing sizes."""

    def __init__(self, batches: list[Examples]):
        super().__init__()
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> Any:
        return self._batches[index].parts()


class _Run:
    """One run of a program.

    Attributes:
        seen: What was seen.
    """

    def __init__(self, program: Program, strategy: Any, folder: pathlib.Path):
        self._program, self._strategy, self._folder = program, strategy, folder
        self._examples = make_examples(program)
        self.seen: Seen = {}
        self._loop: Loop | None = None
        with _dtype_policy(program.policy):
            self._build(program.seed)
            for number, action in enumerate(program.actions):
                where = f"{number} {action}"
                getattr(self, f"_{action}")(where)
                self._see_variables(where)

    @contextlib.contextmanager
    def _scope(self) -> Iterator[None]:
        models.built_in_scope(self._strategy is not None)
        with self._strategy.scope() if self._strategy is not None else contextlib.nullcontext():
            yield

    def _build(self, seed: int) -> None:
        tf.keras.utils.set_random_seed(seed)
        with self._scope():
            self._model = models.make_model(self._program, STEPS[self._program.step])
            self._compile()

    def _compile(self) -> None:
        """Compiles the model; in a scope."""
        program = self._program
        if program.step == "loop":
            strategy = self._strategy or tf.distribute.get_strategy()
            self._loop = Loop(program, self._model, strategy)
            return
        named = program.named
        outputs = {f"out_{number}": output for number, output in enumerate(program.outputs)}

        def of_outputs(values: dict[str, Any]) -> Any:
            return values if named or len(values) == 1 else list(values.values())

        optimizer, *further = make_optimizers(program)
        self._model.compile(
            optimizer,
            of_outputs(
                {
                    name: LOSSES[output.kind][output.loss](reduction=output.reduction)
                    for name, output in outputs.items()
                }
            ),
            loss_weights=of_outputs({name: each.loss_weight for name, each in outputs.items()}),
            metrics=of_outputs(
                {
                    name: [METRICS[each.kind][metric]() for metric in each.metrics]
                    for name, each in outputs.items()
                }
            ),
            weighted_metrics=of_outputs(
                {
                    name: [METRICS[each.kind][metric]() for metric in each.weighted_metrics]
                    for name, each in outputs.items()
                }
            ),
            steps_per_execution=program.steps_per_execution,
        )
        self._prepare_step(*further)

    def _prepare_step(self, second_optimizer: Any = None) -> None:
        """Gives a model with a step of its own what that needs."""
        vars(self._model)["applying"] = self._program.applying
        vars(self._model)["second_optimizer"] = second_optimizer
        by_example = self._program.step in ("average", "global_batch")
        vars(self._model)["example_losses"] = [
            LOSSES[output.kind][output.loss](reduction=None if by_example else output.reduction)
            for output in self._program.outputs
        ]
        if isinstance(self._model, DividesByBatch):
            vars(self._model)["global_batch"] = self._program.batch

    # -- actions -------------------------------------------------------------------------------

    def _fit(self, where: str) -> None:
        program = self._program
        if self._loop is not None:
            self._loop.fit(self._examples, self.seen, where)
            return
        options: dict[str, Any] = {"epochs": program.epochs, "verbose": 0}
        if program.has_layer("captures"):
            options["callbacks"] = [_SetsFactors()]
        if program.validation == "data":
            options["validation_data"] = make_examples(program, program.batch + 1, 1).parts()
            options["validation_batch_size"] = program.batch
        elif program.validation == "split":
            options["validation_split"] = VALIDATION_SPLIT
        if program.class_weight:
            options["class_weight"] = CLASS_WEIGHTS
        if program.source == "arrays":
            x, y, *weights = self._examples.parts()
            options |= {"batch_size": program.batch, "shuffle": program.shuffle}
            options["sample_weight"] = weights[0] if weights else None
            history = self._model.fit(x, y, **options)
        elif program.source == "dataset":
            dataset = tf.data.Dataset.from_tensor_slices(self._examples.parts())
            history = self._model.fit(dataset.batch(program.batch), **options)
        else:
            batches = _Batches(list(batches_of(program, self._examples)))
            history = self._model.fit(batches, shuffle=False, **options)
        self._note(where, history.history)

    def _evaluate(self, where: str) -> None:
        x, y, *weights = self._examples.parts()
        weight = weights[0] if weights else None
        options = {"batch_size": self._program.batch, "verbose": 0, "return_dict": True}
        self._note(where, self._model.evaluate(x, y, sample_weight=weight, **options))

    def _predict(self, where: str) -> None:
        self._note_tree(
            where, self._model.predict(self._examples.x, self._program.batch, verbose=0)
        )

    def _train_on_batch(self, where: str) -> None:
        x, y, *weights = next(batches_of(self._program, self._examples)).parts()
        options: dict[str, Any] = {"sample_weight": weights[0] if weights else None}
        self._note(where, self._model.train_on_batch(x, y, return_dict=True, **options))

    def _test_on_batch(self, where: str) -> None:
        x, y, *weights = next(batches_of(self._program, self._examples)).parts()
        options: dict[str, Any] = {"sample_weight": weights[0] if weights else None}
        self._note(where, self._model.test_on_batch(x, y, return_dict=True, **options))

    def _predict_on_batch(self, where: str) -> None:
        batch = next(batches_of(self._program, self._examples))
        self._note_tree(where, self._model.predict_on_batch(batch.x))

    def _freeze(self, where: str) -> None:
        trained = [layer for layer in self._model.layers if layer.trainable_variables]
        if len(trained) > 1:
            trained[0].trainable = False
        self._recompile(where)

    def _unfreeze(self, where: str) -> None:
        self._model.trainable = True
        self._recompile(where)

    def _recompile(self, where: str) -> None:
        with self._scope():
            self._compile()

    def _save_model(self, where: str) -> None:
        path = self._folder / f"{where.replace(' ', '_')}.keras"
        self._model.save(path)
        with self._scope():
            self._model = keras.saving.load_model(path)
            self._prepare_step(*make_optimizers(self._program)[1:])  # which no file holds
        self._restart_statistics()

    def _save_weights(self, where: str) -> None:
        path = self._folder / f"{where.replace(' ', '_')}.weights.h5"
        self._model.save_weights(path)
        self._build(self._program.seed + 1)
        self._model.load_weights(path)
        self._restart_statistics()

    def _checkpoint(self, where: str) -> None:
        path = str(self._folder / where.replace(" ", "_"))
        tf.train.Checkpoint(**self._saved()).write(path)
        self._build(self._program.seed + 1)
        tf.train.Checkpoint(**self._saved()).restore(path)
        self._restart_statistics()

    def _saved(self) -> dict[str, Any]:
        of_loop = [] if self._loop is None else self._loop.optimizers
        optimizers = {f"optimizer_{number}": each for number, each in enumerate(of_loop)}
        return {"model": self._model, **optimizers}

    def _restart_statistics(self) -> None:
        """Files hold the mean of the replicas' statistics, and not what steps have captured."""
        for layer in self._model._flatten_layers():
            if isinstance(layer, ReferenceNormalization):
                layer.take_means()
            elif isinstance(layer, Captures):
                layer.restart()

    # -- what is seen --------------------------------------------------------------------------

    def _note(self, where: str, logs: dict[str, Any]) -> None:
        if self._program.step in ("compute_loss", "average", "global_batch", "loss_object"):
            # The tracker of such a step's loss shows a replica's part of it; see docs/keras.md.
            is_of_own_step = "fit" in where or "train_on_batch" in where
            logs = {k: v for k, v in logs.items() if not (is_of_own_step and _is_loss(k))}
        for name, value in logs.items():
            self.seen[f"{where}, {name}"] = np.asarray(value)

    def _note_tree(self, where: str, tree: Any) -> None:
        for number, leaf in enumerate(jax.tree.leaves(tree)):
            self.seen[f"{where}, output {number}"] = np.asarray(leaf)

    def _see_variables(self, where: str) -> None:
        if self._strategy is None and self._program.optimizer.ema is not None:
            # Keras gives weights the arrays of their averages, and then donates them to XLA.
            for variable in self._model.trainable_variables:
                variable.assign(np.array(variable))
        weights = [v for v in self._model.weights if v.name not in _OF_REFERENCE]
        for number, variable in enumerate(weights):
            self.seen[f"{where}, weight {number} {variable.name}"] = _value(variable)
        if self._loop is not None:
            optimizers = self._loop.optimizers
        else:
            optimizers = [self._model.optimizer, vars(self._model)["second_optimizer"]]
        variables = [v for each in optimizers if each is not None for v in each.variables]
        for number, variable in enumerate(variables):
            self.seen[f"{where}, optimizer {number}"] = _value(variable)


class _SetsFactors(keras.callbacks.Callback):
    """Sets the variables of `Captures` layers after every step."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        for number, layer in enumerate(self.model._flatten_layers()):
            if isinstance(layer, Captures):
                layer.set_factor(((batch + number) % 5 - 2) / 2)


def _is_loss(name: str) -> bool:
    return name == "loss" or (name.endswith("_loss") and not name.startswith("val_"))


def _value(variable: keras.Variable) -> np.ndarray:
    return np.asarray(variable.numpy())
