"""Which GPUs a task has where several share a machine; nothing here starts JAX."""

from __future__ import annotations

import importlib.util
import itertools
import os
import pkgutil
import subprocess

#: What CUDA reads to learn which GPUs a process may use.
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"

#: Seconds that the driver may take to list them; where nothing has used them yet, it starts first.
_SECONDS_TO_LIST = 30.0


#: What stands in the place of the first GPU where a process may use none.
_NONE = ("", "-1", "NoDevFiles")


def gpus_of_jax() -> list[str]:
    """Returns those of `visible_gpus` that JAX would compute with: all, or none."""
    if (os.environ.get("JAX_PLATFORMS") or "cuda").split(",")[0] not in ("cuda", "gpu"):
        return []
    plugins = importlib.util.find_spec("jax_plugins")
    folders = plugins.submodule_search_locations if plugins else None
    if not any(each.name.startswith("xla_cuda") for each in pkgutil.iter_modules(folders or [])):
        return []
    return visible_gpus()


def visible_gpus() -> list[str]:
    """Returns the GPUs of NVIDIA's that this process may use, as `CUDA_VISIBLE_DEVICES` has them.

    Examples:
        >>> from unison.runtime.environment import environment
        >>> with environment({"CUDA_VISIBLE_DEVICES": "4,5,-1,7"}):  # CUDA stops at -1, too
        ...     visible_gpus()
        ['4', '5']
    """
    told = os.environ.get(VISIBLE_GPUS)
    if told is not None:
        names = (name.strip() for name in told.split(","))
        return list(itertools.takewhile(lambda name: name not in _NONE, names))
    try:
        listed = subprocess.run(
            ["nvidia-smi", "--list-gpus"],
            capture_output=True,
            text=True,
            timeout=_SECONDS_TO_LIST,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    count = sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
    return [str(index) for index in range(count)]


def share_of_gpus(place: int, tasks: int) -> str | None:
    """Returns the GPUs of one of several tasks that share this machine's equally.

    Args:
        place: The task's place among those of this machine.
        tasks: How many they are.

    Returns:
        What `CUDA_VISIBLE_DEVICES` is for the task. None: there are fewer GPUs than tasks.
    """
    shares = shares_of_gpus(visible_gpus(), tasks)
    return shares[place] if shares else None


def shares_of_gpus(names: list[str], tasks: int) -> list[str]:
    """Returns the equal shares of several tasks, by task; none where there are too few GPUs.

    Examples:
        >>> shares_of_gpus(["0", "1", "2", "3"], 2), shares_of_gpus(["0"], 2)
        (['0,1', '2,3'], [])
    """
    each = len(names) // tasks
    if not each:
        return []
    return [",".join(names[task * each : (task + 1) * each]) for task in range(tasks)]
