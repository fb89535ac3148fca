"""What each host of a large job writes and holds for a checkpoint: `python -m
benchmarks.checkpoint_plan`.

The model has the sizes of Llama 2 70B (80 layers of width 8192, a feed-forward width of 28,672, 8
heads of keys and values of 64, a vocabulary of 32,000), in float32 with Adam's two slots, divided
over all devices by ZeRO 3. Nothing is allocated: the variables are made on devices that are only
described, and the chunks are assigned by the function that saving calls.
"""

from __future__ import annotations

import argparse

import numpy as np
from jax.sharding import NamedSharding

import unison
from unison.runtime.placement import WEIGHTS
from unison.runtime.tpu.slices import describe_slice
from unison.train.chunk_plan import ChunkPlan, spread_by

WIDTH, FEED_FORWARD, KEYS, LAYERS, VOCABULARY = 8192, 28_672, 1024, 80, 32_000

#: The weights, and Adam's two slots of each.
COPIES = 3


def shapes() -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the weights, by name."""
    layer = {
        "query": (WIDTH, WIDTH),
        "key": (WIDTH, KEYS),
        "value": (WIDTH, KEYS),
        "output": (WIDTH, WIDTH),
        "gate": (WIDTH, FEED_FORWARD),
        "up": (WIDTH, FEED_FORWARD),
        "down": (FEED_FORWARD, WIDTH),
        "attention_norm": (WIDTH,),
        "feed_forward_norm": (WIDTH,),
    }
    layers = {f"{n}/{name}": shape for n in range(LAYERS) for name, shape in layer.items()}
    ends = {"embedding": (VOCABULARY, WIDTH), "head": (WIDTH, VOCABULARY), "norm": (WIDTH,)}
    return layers | ends


def bytes_of_hosts(topology: str) -> dict[int, int]:
    """Returns the bytes that each host writes, by its number.

    While they are written, it holds copies of as many.
    """
    num_devices = len(describe_slice(topology).devices)
    strategy = unison.ModelParallelStrategy(
        topology=topology, mesh={"batch": num_devices}, zero=WEIGHTS
    )
    placement = strategy.placement
    plan = ChunkPlan(sorted({device.process_index for device in placement.devices}))
    for name, shape in shapes().items():
        division = placement.division_at(WEIGHTS, name, shape)
        spread = spread_by(NamedSharding(placement.mesh, division), shape, np.float32)
        for _ in range(COPIES):
            plan.add(spread)
    return dict(plan.bytes_of)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[2])
    parser.add_argument("--topology", default="v5p:4x8x8", help="a TPU slice")
    options = parser.parse_args()
    of_hosts = bytes_of_hosts(options.topology).values()
    total = sum(of_hosts) / 2**30
    least, most = min(of_hosts) / 2**30, max(of_hosts) / 2**30
    print(f"state: {total:,.1f} GiB on {len(of_hosts)} hosts, {options.topology}")
    print(f"a host writes, and holds copies of, {least:.3f} to {most:.3f} GiB")
    print(f"gathered into one file, each would hold {total:,.1f} GiB, and one write it")


if __name__ == "__main__":
    main()
