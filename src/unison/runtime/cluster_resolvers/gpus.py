"""The GPUs of each task if several share a machine; nothing here starts JAX."""

from __future__ import annotations

import importlib.util
import itertools
import os
import pkgutil
import subprocess

#: The variable with the GPUs that a process may use.
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"

#: Timeout of `nvidia-smi` in seconds: if the GPUs have not been used yet, the driver loads first.
_SECONDS_TO_LIST = 30.0


#: Entries at which CUDA stops reading the list of GPUs: it ignores them and all that follow.
_NONE = ("", "-1", "NoDevFiles")


def gpus_of_jax() -> list[str]:
    """Returns the `visible_gpus` if JAX would compute with GPUs, otherwise none."""
    if (os.environ.get("JAX_PLATFORMS") or "cuda").split(",")[0] not in ("cuda", "gpu"):
        return []
    plugins = importlib.util.find_spec("jax_plugins")
    folders = plugins.submodule_search_locations if plugins else None
    if not any(each.name.startswith("xla_cuda") for each in pkgutil.iter_modules(folders or [])):
        return []
    return visible_gpus()


def visible_gpus() -> list[str]:
    """Returns the NVIDIA GPUs that this process may use, by their `CUDA_VISIBLE_DEVICES` names.

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
    listed = _driver_says("--list-gpus") or []
    count = sum(line.startswith("GPU ") for line in listed)
    return [str(index) for index in range(count)]


def pci_devices() -> dict[str, str]:
    """Returns the PCI addresses of this machine's NVIDIA GPUs, by their indices and by their UUIDs.

    Both are names in `CUDA_VISIBLE_DEVICES`. Empty if the driver does not say.
    """
    found = {}
    for line in _driver_says("--query-gpu=index,uuid,pci.bus_id", "--format=csv,noheader") or []:
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 3:
            index, uuid, bus = fields
            domain, _, place = bus.lower().partition(":")
            found[index] = found[uuid] = f"{domain[-4:]}:{place}"  # the driver pads the domain
    return found


def _driver_says(*arguments: str) -> list[str] | None:
    """Returns what `nvidia-smi` prints, by lines; None if it fails."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments],
            capture_output=True,
            text=True,
            timeout=_SECONDS_TO_LIST,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.splitlines()


def share_of_gpus(place: int, tasks: int) -> str | None:
    """Returns the GPUs of one of several tasks that share this machine's GPUs equally.

    Args:
        place: The task's index among those of this machine.
        tasks: The number of tasks.

    Returns:
        The value of `CUDA_VISIBLE_DEVICES` for the task. None if there are fewer GPUs than tasks.
    """
    shares = shares_of_gpus(visible_gpus(), tasks)
    return shares[place] if shares else None


def shares_of_gpus(names: list[str], tasks: int) -> list[str]:
    """Returns equal shares for several tasks, by task; an empty list if there are too few GPUs.

    Examples:
        >>> shares_of_gpus(["0", "1", "2", "3"], 2), shares_of_gpus(["0"], 2)
        (['0,1', '2,3'], [])
    """
    each = len(names) // tasks
    if not each:
        return []
    return [",".join(names[task * each : (task + 1) * each]) for task in range(tasks)]
