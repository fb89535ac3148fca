"""`tf.data.Options` and its groups."""

from __future__ import annotations

from typing import Any, ClassVar

from unison.data import options as core
from unison.data.options import AutoShardPolicy
from unison.unsupported import UnsupportedMember


class _Group:
    """Options that are set as attributes; None if an option is not set."""

    _NAMES: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        for name, default in self._NAMES.items():
            value = default() if isinstance(default, type) else default
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._NAMES:
            raise AttributeError(
                f"Cannot set the property {name} on {type(self).__name__}. It has: "
                f"{', '.join(self._NAMES)}"
            )
        object.__setattr__(self, name, value)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    def __hash__(self) -> int:
        return id(self)


class AutotuneOptions(_Group):
    """Without effect. TF: `tf.data.experimental.AutotuneOptions`."""

    _NAMES: ClassVar = dict.fromkeys(
        "enabled cpu_budget ram_budget autotune_algorithm initial_parallelism "
        "min_parallelism".split()
    )


class DistributeOptions(_Group):
    """The division of a dataset by strategies. TF: `tf.data.experimental.DistributeOptions`.

    Attributes:
        auto_shard_policy: See `unison.data.AutoShardPolicy`.
        num_devices: Without effect.
    """

    auto_shard_policy: AutoShardPolicy

    _NAMES: ClassVar = {"auto_shard_policy": AutoShardPolicy.AUTO, "num_devices": None}


class OptimizationOptions(_Group):
    """Without effect. TF: `tf.data.experimental.OptimizationOptions`."""

    _NAMES: ClassVar = dict.fromkeys(
        "apply_default_optimizations filter_fusion filter_parallelization inject_prefetch "
        "map_and_batch_fusion map_and_filter_fusion map_fusion map_parallelization "
        "noop_elimination parallel_batch seq_interleave_prefetch "
        "shuffle_and_repeat_fusion".split()
    )


class ThreadingOptions(_Group):
    """The number of threads in which functions are called. TF: `tf.data.ThreadingOptions`.

    Attributes:
        private_threadpool_size: Their maximum number, for the transformations that follow; the
            number under `AUTOTUNE`. 0 and None: the default.
        max_intra_op_parallelism: Without effect.
    """

    private_threadpool_size: int | None

    _NAMES: ClassVar = dict.fromkeys("max_intra_op_parallelism private_threadpool_size".split())


class Options(_Group):
    """Options of a dataset.

    An effect have `deterministic` and `threading.private_threadpool_size`, on the transformations
    that follow (TensorFlow: on all of them), and `experimental_distribute.auto_shard_policy`. The
    others are accepted without effect: there is no graph to optimize, what `prefetch` does is
    said by `prefetch` (`experimental_slack`), and `AUTOTUNE` measures by itself (`autotune`).

    TF: `tf.data.Options`.
    """

    deterministic: bool | None
    experimental_deterministic: bool | None
    experimental_distribute: DistributeOptions
    experimental_threading: ThreadingOptions
    threading: ThreadingOptions

    experimental_service = UnsupportedMember(
        "start workers of tf.data.experimental.service, and apply distribute to the dataset"
    )

    _NAMES: ClassVar = {
        "autotune": AutotuneOptions,
        "dataset_name": None,
        "deterministic": None,
        "experimental_deterministic": None,
        "experimental_distribute": DistributeOptions,
        "experimental_external_state_policy": None,
        "experimental_optimization": OptimizationOptions,
        "experimental_slack": None,
        "experimental_symbolic_checkpoint": None,
        "experimental_threading": ThreadingOptions,
        "experimental_warm_start": None,
        "framework_type": None,
        "threading": ThreadingOptions,
    }

    def as_core(self) -> core.Options:
        """Returns the options that have an effect."""
        policy = self.experimental_distribute.auto_shard_policy
        said = (self.deterministic, self.experimental_deterministic)
        sizes = (
            self.threading.private_threadpool_size,
            self.experimental_threading.private_threadpool_size,
        )
        return core.Options(
            AutoShardPolicy(policy),
            deterministic=next((value for value in said if value is not None), None),
            num_threads=next((int(size) for size in sizes if size), None),
        )

    @classmethod
    def of(cls, options: core.Options) -> Options:
        """Returns the options with those set below."""
        made = cls()
        if options.auto_shard_policy is not None:
            made.experimental_distribute.auto_shard_policy = options.auto_shard_policy
        made.deterministic = options.deterministic
        made.threading.private_threadpool_size = options.num_threads
        return made

    def merge(self, other: Options) -> Options:
        """Returns both options merged; those of `other` take precedence."""
        return _merged(self, other)


def _merged(one: Any, other: Any) -> Any:
    merged = type(one)()
    fresh = type(one)()
    for name in one._NAMES:
        mine, theirs = getattr(one, name), getattr(other, name)
        if isinstance(mine, _Group):
            value = _merged(mine, theirs)
        else:
            value = mine if theirs == getattr(fresh, name) else theirs
        setattr(merged, name, value)
    return merged
