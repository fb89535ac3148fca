"""The parts of a model's state that replicas shard, and could shard."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from unison.runtime.placement import OPTIMIZER, REPLICA_AXIS, WEIGHTS, Placement
from unison.strategies.model_parallel import BATCH_AXIS


class Division(NamedTuple):
    """The sharding of a model's state between devices.

    Attributes:
        mesh: The sizes of the mesh axes, as `ModelParallelStrategy` takes them.
        stage: What the replicas divide: the stage of ZeRO, 0 to 3.
        has_rules: Whether rules shard weights between the devices of a replica.
    """

    mesh: dict[str, int]
    stage: int = 0
    has_rules: bool = False

    @property
    def num_replicas(self) -> int:
        return self.mesh[BATCH_AXIS]

    @property
    def cores(self) -> int:
        """The number of neighbouring devices that compute a replica."""
        return math.prod(self.mesh.values()) // self.num_replicas

    def strategy(self, stage: int) -> str:
        """Returns the source code of the strategy whose replicas shard what `stage` says.

        Examples:
            >>> Division({"batch": 2, "model": 4}, has_rules=True).strategy(1)
            "ModelParallelStrategy(mesh={'batch': 2, 'model': 4}, rules=rules, zero=1)"
        """
        rules = "rules=rules, " if self.has_rules else ""
        return f"ModelParallelStrategy(mesh={self.mesh}, {rules}zero={stage})"

    def saved(self, state: Mapping[str, int], stage: int) -> int:
        """Returns the bytes that each device saves if replicas shard what `stage` says.

        Args:
            state: The bytes on each device, by kind.
            stage: A stage of ZeRO.

        Examples:
            >>> state = {"trainable_variables": 80, "optimizer_variables": 160}
            >>> Division({"batch": 4}).saved(state, 1), Division({"batch": 4}).saved(state, 3)
            (120, 180)
            >>> Division({"batch": 4}, stage=1).saved(state, 3)
            60
        """
        slots = state.get("optimizer_variables")
        if slots is None:  # nothing is trained
            return 0
        divided = slots if self.stage < OPTIMIZER <= stage else 0
        divided += state["trainable_variables"] if self.stage < WEIGHTS <= stage else 0
        return round(divided * (1 - 1 / self.num_replicas))


def division_by(placement: Placement) -> Division:
    """Returns how the devices of a placement shard a model's state."""
    axes = dict(placement.mesh.shape)
    mesh = {BATCH_AXIS: axes.pop(REPLICA_AXIS), **axes}
    stage = placement.zero or (OPTIMIZER if placement.shards_update else 0)
    return Division(mesh, stage, placement.rules is not None)
