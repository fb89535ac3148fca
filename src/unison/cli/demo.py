"""`unison demo`: trains a small Keras network on several replicas, and compares it with one device.

Without an accelerator the replicas are logical CPU devices, so the demonstration runs anywhere.
"""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

import unison
from unison.cli.demo_data import load_images
from unison.cli.errors import CommandError
from unison.cli.numbers import positive
from unison.runtime import devices

if TYPE_CHECKING:
    from unison.cli.demo_training import Difference, Training

_LOGICAL_CPU_DEVICES = 2


def add_command(commands: Any) -> None:
    """Adds `demo` to the subcommands of a parser."""
    parser = commands.add_parser(
        "demo",
        help="train a Keras network on several replicas and compare it with one device",
        description="Trains a network for hand-written digits (784-512-10 with dropout, Adam) "
        "with MirroredStrategy: on all accelerators, or on logical CPU devices where there is "
        "none. Then trains it for some steps without dropout, which must give what a single "
        "device gives, and shows the difference.",
    )
    parser.add_argument(
        "--replicas",
        type=positive,
        metavar="N",
        help="how many devices take part (default: all accelerators, else "
        f"{_LOGICAL_CPU_DEVICES} logical CPU devices)",
    )
    parser.add_argument(
        "--batch",
        type=positive,
        default=64,
        metavar="N",
        help="examples in a global batch (default: 64)",
    )
    parser.add_argument(
        "--epochs",
        type=positive,
        default=10,
        metavar="N",
        help="passes over the training data (default: 10)",
    )
    parser.add_argument(
        "--data",
        default="digits",
        metavar="digits|mnist|PATH.npz",
        help="scans that scikit-learn ships, MNIST as Keras downloads it, or a file in that "
        "format (default: digits)",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Runs the demonstration.

    Raises:
        CommandError: The devices, the data or Keras on JAX are not available.
    """
    _choose_keras_backend()
    strategy = _strategy_of(options.replicas)
    images = load_images(options.data)
    # Keras is imported here: after its backend has been chosen.
    from unison.cli import demo_training

    console = Console()
    console.print(
        f"Training on {strategy.num_replicas_in_sync} replicas: {len(images.x_train):,} images, "
        f"{options.epochs} epochs, global batch {options.batch}"
    )
    training = demo_training.train(strategy, images, options.batch, options.epochs)
    console.print("Training the same network without dropout, here and on one device ...")
    difference = demo_training.compare_with_one_device(strategy, images, options.batch)
    console.print(_table(strategy, options.batch, training, difference))


def _table(
    strategy: unison.Strategy, batch: int, training: Training, difference: Difference
) -> Table:
    rows = {
        "devices": ", ".join(map(str, strategy.placement.devices)),
        "replicas": str(strategy.num_replicas_in_sync),
        "global batch": str(batch),
        f"images/s ({training.timed})": f"{training.images_per_second:,.0f}",
        "training accuracy": f"{training.training_accuracy:.2%}",
        "test accuracy": f"{training.test_accuracy:.2%}",
        f"largest difference to one device after {difference.steps} steps": "",
        "  of a weight": f"{difference.weight:.1e}",
        "  of an epoch's loss": f"{difference.loss:.1e}",
    }
    table = Table(title="unison demo", show_header=False)
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _choose_keras_backend() -> None:
    chosen = os.environ.setdefault("KERAS_BACKEND", "jax")
    if chosen != "jax":
        raise CommandError(
            f"Unison runs Keras on JAX, but KERAS_BACKEND={chosen} is set. Unset it, "
            "or set KERAS_BACKEND=jax"
        )


def _strategy_of(replicas: int | None) -> unison.MirroredStrategy:
    """Returns a strategy on `replicas` accelerators, or logical CPU devices if there are none."""
    try:
        if devices.stated_cpu_devices() is None:
            unison.set_logical_cpu_devices(replicas or _LOGICAL_CPU_DEVICES)
        available = devices.local_devices()
    except (devices.DeviceCountError, devices.BackendStartedError) as error:
        raise CommandError(str(error)) from error
    if replicas is not None and replicas > len(available):
        raise CommandError(
            f"--replicas {replicas} asks for more devices than there are: "
            f"{', '.join(map(str, available))}. Ask for fewer, or set "
            f"JAX_PLATFORMS=cpu UNISON_CPU_DEVICES={replicas}"
        )
    return unison.MirroredStrategy(available[:replicas])
