"""The programs that are measured. Each module has a function `build(work) -> Contestant`.

This file only names them, for the driver: it imports none.
"""

from __future__ import annotations

import dataclasses

from benchmarks.workloads import REPLICAS, AggregationWork, FitWork, RunWork, Work

#: With fewer threads XLA's collectives between logical CPU devices of one process deadlock.
_XLA_POOL = {"NPROC": str(2 * REPLICAS)}
_TWO_JAX_DEVICES = {"JAX_NUM_CPU_DEVICES": str(REPLICAS), "KERAS_BACKEND": "jax", **_XLA_POOL}


@dataclasses.dataclass(frozen=True)
class Entry:
    """A contestant as the driver sees it.

    Attributes:
        name: Its name in the tables.
        family: Its name in `--contestants`.
        module: The module in this package that builds it.
        kinds: The workloads it takes part in.
        environment: The environment variables it needs.
    """

    name: str
    family: str
    module: str
    kinds: tuple[type[Work], ...]
    environment: dict[str, str]


ENTRIES = (
    Entry("unison", "unison", "unison_fit", (FitWork,), {"KERAS_BACKEND": "jax"}),
    Entry("unison", "unison", "unison_run", (RunWork,), {}),
    Entry("hand", "hand", "hand_written_fit", (FitWork,), _TWO_JAX_DEVICES),
    Entry("hand", "hand", "hand_written_run", (RunWork,), _TWO_JAX_DEVICES),
    Entry("keras", "keras", "keras_data_parallel", (FitWork,), _TWO_JAX_DEVICES),
    Entry("tf", "tf", "tensorflow_fit", (FitWork,), {"KERAS_BACKEND": "tensorflow"}),
    Entry("unison", "unison", "aggregation_default", (AggregationWork,), {}),
    Entry("ADD_N", "unison", "aggregation_add_n", (AggregationWork,), {}),
    Entry("TREE", "unison", "aggregation_tree", (AggregationWork,), {}),
    Entry("ACCUMULATE_N", "unison", "aggregation_accumulate_n", (AggregationWork,), {}),
    Entry("hand", "hand", "aggregation_psum", (AggregationWork,), {}),
    Entry("tf function", "tf", "tensorflow_run_function", (RunWork,), {}),
    Entry("tf direct", "tf", "tensorflow_run_direct", (RunWork,), {}),
)
FAMILIES = tuple(dict.fromkeys(entry.family for entry in ENTRIES))
