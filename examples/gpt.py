"""A GPT in Keras layers, trained on Python's own standard library, under any strategy.

    UNISON_CPU_DEVICES=4 python examples/gpt.py --strategy zero3
    UNISON_CPU_DEVICES=4 python examples/gpt.py --strategy tensor --devices-per-replica 2
    unison run -n 2 examples/gpt.py --strategy workers

Every strategy trains the same model on the same batches: the losses are the same. On GPUs, try
`--size small --bfloat16 --batch 64 --length 512`.
"""

import argparse
import importlib.util
import os
import pathlib
import time

import jax
import numpy as np

os.environ.setdefault("KERAS_BACKEND", "jax")  # before Keras is imported

import keras

import unison

#: The modules whose source is the text: about 800 kB, from the Python that runs this.
MODULES = (
    "argparse ast configparser difflib doctest inspect ipaddress mailbox pickle pydoc statistics "
    "tarfile typing _pydecimal"
).split()

CHARACTERS = 128

#: Blocks, width and attention heads.
SIZES = {"tiny": (2, 64, 4), "mini": (4, 128, 4), "small": (12, 768, 12), "medium": (24, 1024, 16)}

STRATEGIES = "mirrored workers zero1 zero2 zero3 tensor pipeline".split()

#: How the devices of a replica divide its attention heads and its dense layers.
RULES = {
    "attention/(query|key|value)/kernel": (None, "model", None),
    "attention/(query|key|value)/bias": ("model", None),
    "attention/attention_output/kernel": ("model", None, None),
    "up/kernel": (None, "model"),
    "up/bias": ("model",),
    "down/kernel": ("model", None),
}


def make_strategy(options):
    name, devices = options.strategy, options.devices
    if name == "mirrored":
        return unison.MirroredStrategy(devices)
    if name == "workers":
        return unison.MultiWorkerMirroredStrategy()
    if name == "tensor":
        mesh = {"model": options.devices_per_replica}
        return unison.ModelParallelStrategy(devices, mesh=mesh, rules=RULES)
    if name == "pipeline":
        mesh = {"stage": options.devices_per_replica}
        return unison.ModelParallelStrategy(devices, mesh=mesh)
    return unison.ModelParallelStrategy(devices, mesh={}, zero=int(name.removeprefix("zero")))


class Embeddings(keras.layers.Layer):
    """Adds the embedding of each token and that of its position."""

    def __init__(self, width, **options):
        super().__init__(**options)
        self.width = width
        self.tokens = keras.layers.Embedding(CHARACTERS, width)

    def build(self, shape):
        self.tokens.build(shape)
        self.positions = self.add_weight((shape[1], self.width), "random_normal", name="positions")

    def call(self, tokens):
        return self.tokens(tokens) + self.positions

    def get_config(self):
        return super().get_config() | {"width": self.width}


class Block(keras.layers.Layer):
    """Attention to earlier tokens, then two dense layers; each is added to its input."""

    def __init__(self, width, heads, **options):
        super().__init__(**options)
        self.width, self.heads = width, heads
        self.attention_norm = keras.layers.LayerNormalization(epsilon=1e-5)
        self.attention = keras.layers.MultiHeadAttention(heads, width // heads, name="attention")
        self.dense_norm = keras.layers.LayerNormalization(epsilon=1e-5)
        self.up = keras.layers.Dense(4 * width, "gelu", name="up")
        self.down = keras.layers.Dense(width, name="down")

    def build(self, shape):
        for norm in (self.attention_norm, self.dense_norm):
            norm.build(shape)
        self.attention.build(shape, shape)
        self.up.build(shape)
        self.down.build((*shape[:-1], self.up.units))

    def call(self, x):
        normed = self.attention_norm(x)
        x = x + self.attention(normed, normed, use_causal_mask=True)
        return x + self.down(self.up(self.dense_norm(x)))

    def get_config(self):
        return super().get_config() | {"width": self.width, "heads": self.heads}


def build(options):
    count, width, heads = SIZES[options.size]
    names = [f"block_{index}" for index in range(count)]
    with keras.RematScope("list_of_layers" if options.remat else None, layer_names=names):
        blocks = [Block(width, heads, name=name) for name in names]
    model = keras.Sequential(
        [
            keras.Input((options.length,), dtype="int32"),
            Embeddings(width),
            *blocks,
            keras.layers.LayerNormalization(epsilon=1e-5),
            # The stages of a pipeline have results of one dtype.
            keras.layers.Dense(
                CHARACTERS,
                use_bias=False,
                dtype=None if options.strategy == "pipeline" else "float32",
            ),
        ]
    )
    if options.strategy == "pipeline":
        per_stage = count // options.devices_per_replica
        ends = names[per_stage - 1 : -1 : per_stage]
        pipeline = unison.keras.Pipeline.cut(model, ends, options.microbatches, schedule="1f1b")
        model = keras.Sequential([keras.Input((options.length,), dtype="int32"), pipeline])
    model.compile(
        keras.optimizers.Adam(
            options.learning_rate,
            beta_2=0.99,
            gradient_accumulation_steps=options.accumulate if options.accumulate > 1 else None,
        ),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


def read(path):
    """Returns a text as tokens: its ASCII characters."""
    if path is not None:
        text = pathlib.Path(path).read_text("utf-8")
    else:
        sources = [importlib.util.find_spec(name).origin for name in MODULES]
        text = "".join(pathlib.Path(source).read_text("utf-8") for source in sources)
    return np.frombuffer(text.encode("ascii", "replace"), np.uint8)


def examples(tokens, options):
    """Returns batches of pieces of the text, each with the tokens that follow."""
    count = (len(tokens) - 1) // options.length
    starts = options.length * np.arange(count)
    pieces = tokens[starts[:, None] + np.arange(options.length + 1)]
    dataset = unison.data.Dataset.from_tensor_slices(pieces)
    dataset = dataset.shuffle(count, seed=0).batch(options.batch, drop_remainder=True)
    batches = dataset.map(
        lambda batch: (batch[:, :-1].astype("int32"), batch[:, 1:].astype("int32"))
    )
    return batches.take(options.steps) if options.steps else batches


def sample(model, prompt, count, options):
    """Returns the prompt with `count` characters of the model, each drawn from its distribution."""
    drawing = np.random.default_rng(0)
    tokens = list(prompt.encode("ascii", "replace"))
    rows = unison.get_strategy().num_replicas_in_sync
    if options.strategy == "pipeline":
        rows *= options.microbatches
    for _ in range(count):
        seen = np.array(tokens[-options.length :], np.int32)
        padded = np.pad(seen, (0, options.length - len(seen)))
        logits = model.predict_on_batch(np.tile(padded, (rows, 1)))[0, len(seen) - 1]
        odds = np.exp((logits - logits.max()) / options.temperature, dtype=np.float64)
        tokens.append(int(drawing.choice(CHARACTERS, p=odds / odds.sum())))
    return bytes(tokens).decode("ascii")


class Progress(keras.callbacks.Callback):
    """Prints the loss of each epoch, and the tokens that a second trains on."""

    def __init__(self, tokens_per_step):
        super().__init__()
        self.tokens_per_step = tokens_per_step

    def on_epoch_begin(self, epoch, logs=None):
        self.begin, self.steps = time.perf_counter(), 0

    def on_train_batch_begin(self, batch, logs=None):
        self.steps += 1

    def on_epoch_end(self, epoch, logs=None):
        speed = self.steps * self.tokens_per_step / (time.perf_counter() - self.begin)
        print(f"epoch {epoch + 1}: loss {logs['loss']:.4f}, {speed:,.0f} tokens/s", flush=True)


def parse(arguments=None):
    parser = argparse.ArgumentParser(description="A GPT under any strategy.")
    add = parser.add_argument
    add("--strategy", choices=STRATEGIES, default="mirrored")
    add("--devices", type=int, help="how many of this machine's to use (default: all)")
    add("--devices-per-replica", type=int, default=2, help="of tensor and pipeline")
    add("--microbatches", type=int, default=4, help="of a pipeline")
    add("--size", choices=SIZES, default="tiny")
    add("--length", type=int, default=128, help="tokens of an example")
    add("--batch", type=int, default=32, help="examples of a global batch")
    add("--epochs", type=int, default=3)
    add("--steps", type=int, help="of an epoch (default: the whole text)")
    add("--learning-rate", type=float, default=1e-3)
    add("--accumulate", type=int, default=1, metavar="N", help="update after N batches")
    add("--bfloat16", action="store_true", help="compute in bfloat16")
    add("--remat", action="store_true", help="compute blocks again rather than keep their values")
    add("--checkpoint", metavar="FOLDER", help="save there; resume from there")
    add("--data", metavar="FILE", help="a text (default: parts of Python's standard library)")
    add("--prompt", default="def ")
    add("--sample", type=int, default=200, help="characters to draw at the end")
    add("--temperature", type=float, default=0.8)
    options = parser.parse_args(arguments)
    blocks, _, heads = SIZES[options.size]
    for strategy, what, number in (("pipeline", "blocks", blocks), ("tensor", "heads", heads)):
        if options.strategy == strategy and number % options.devices_per_replica:
            parser.error(
                f"--devices-per-replica: expected a divisor of the {number} {what} of "
                f"{options.size!r}. Received: {options.devices_per_replica}"
            )
    return options


def main(arguments=None):
    options = parse(arguments)
    if options.bfloat16:
        keras.config.set_dtype_policy("mixed_bfloat16")
    strategy = make_strategy(options)
    keras.utils.set_random_seed(0)
    is_first = jax.process_index() == 0
    if is_first:
        print("replicas:", strategy.num_replicas_in_sync)
    with strategy.scope():
        model = build(options)
        callbacks = [Progress(options.batch * options.length)] if is_first else []
        if options.checkpoint:
            backup = keras.callbacks.BackupAndRestore(options.checkpoint, delete_checkpoint=False)
            callbacks.append(backup)
        data = examples(read(options.data), options)
        history = model.fit(data, epochs=options.epochs, verbose=0, callbacks=callbacks)
        text = sample(model, options.prompt, options.sample, options)  # by all workers together
        if is_first:
            print(text)
    return history.history.get("loss", [])  # none if the checkpoint is that of the last epoch


if __name__ == "__main__":
    main()
