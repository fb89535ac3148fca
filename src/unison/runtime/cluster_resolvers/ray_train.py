"""The workers of a Ray Train job, which Ray starts and numbers, but does not connect on CPUs."""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

from unison.errors import DeadlineExceededError
from unison.net.listening import listen
from unison.net.secret import KEY_VARIABLE, new_key
from unison.runtime.cluster_resolvers.launchers import Launch
from unison.runtime.cluster_resolvers.ranks import RankedClusterResolver, Ranks

_LAUNCHER = "Ray Train"

#: Seconds for all workers to create the resolver.
_TIMEOUT = 300.0


class RayTrainClusterResolver(RankedClusterResolver):
    """The workers of a Ray Train job; all are workers, in the order of their world ranks.

    All of them must create it at the same point of the training function. The first one chooses a
    free port of its node, and Ray tells it to the others, with a new key of the job if the first
    has no `UNISON_KEY`. `cluster_spec` sets `CUDA_VISIBLE_DEVICES` to the GPUs that Ray has given
    to this worker, since `TorchTrainer` shows each those of all workers of a node.

    `JaxTrainer` connects the workers itself on TPUs and GPUs; `JAXClusterResolver` then applies.

    Args:
        port: A free port of the first worker's node. Default: one that is free there now.

    Raises:
        RuntimeError: This process is no worker of Ray Train, or Ray Train's first version runs it,
            in which workers cannot tell each other anything.
        DeadlineExceededError: Another worker has not created it within five minutes.

    Source: Ray, `ray.train.get_context`, `ray.train.collective.broadcast_from_rank_zero`.
    """

    environment = "ray-train"

    def __init__(self, port: int | None = None):
        context = _context()
        if context is None:
            raise RuntimeError(
                "Expected a worker of Ray Train. Received: a process in which "
                "ray.train.get_context() knows of none."
            )
        ranks = Ranks(
            context.get_world_rank(),
            context.get_world_size(),
            context.get_local_rank(),
            context.get_local_world_size(),
        )
        told = _told_by_the_first(_meeting_point(port) if ranks.index == 0 else None)
        if told["key"] is not None:
            os.environ[KEY_VARIABLE] = told["key"]
        super().__init__(_LAUNCHER, ranks, told["host"], told["port"], auto_set_gpu=False)
        self._gpus = ",".join(map(str, _ray().get_gpu_ids())) or None

    @staticmethod
    def is_here() -> bool:
        """Returns whether this process is one of several workers of Ray Train."""
        return ray_train_launch() is not None


def ray_train_launch() -> Launch | None:
    """Returns how Ray Train has started this process as one of several; None if it has not."""
    context = _context()
    if context is None or context.get_world_size() < 2:
        return None
    return Launch(_LAUNCHER, {}, context.get_world_size(), context.get_world_rank())


def _context() -> Any:
    """Returns Ray Train's context of this process; None if it is no worker of Ray Train."""
    train = sys.modules.get("ray.train")  # a worker has imported it
    try:
        context = None if train is None else train.get_context()
        return context if context is not None and context.get_world_size() else None
    except Exception:  # Ray's errors, of several kinds, for processes that are no workers
        return None


def _meeting_point(port: int | None) -> dict[str, Any]:
    host = _ray().util.get_node_ip_address()
    if port is None:
        with listen(host, 0) as trial:
            port = trial.getsockname()[1]
    key = None if os.environ.get(KEY_VARIABLE) else new_key()
    return {"host": host, "port": port, "key": key}


def _ray() -> Any:
    """Returns Ray, which a worker of Ray Train has imported."""
    return sys.modules["ray"]


def _told_by_the_first(own: dict[str, Any] | None) -> dict[str, Any]:
    """Returns what the first worker passes; all must call this."""
    told: list[Any] = []

    def ask() -> None:
        try:
            from ray.train.collective import broadcast_from_rank_zero

            told.append(broadcast_from_rank_zero(own))
        except Exception as error:
            told.append(error)

    # Ray waits without an end by default (RAY_TRAIN_COLLECTIVE_TIMEOUT_S).
    asking = threading.Thread(target=ask, name="unison-ray-train", daemon=True)
    asking.start()
    asking.join(_TIMEOUT)
    if not told:
        raise DeadlineExceededError(
            message=f"Not all workers of Ray Train have created a strategy within {_TIMEOUT:g} s. "
            "All of them must, at the same point of the training function."
        )
    (answer,) = told
    if isinstance(answer, ImportError | RuntimeError):  # those of the first version
        raise RuntimeError(
            "Expected Ray Train to tell this worker where the first one listens, as its second "
            f"version does (RAY_TRAIN_V2_ENABLED=1). Received: {type(answer).__name__}: {answer}"
        ) from answer
    if isinstance(answer, Exception):
        raise answer
    found: dict[str, Any] = answer
    return found
