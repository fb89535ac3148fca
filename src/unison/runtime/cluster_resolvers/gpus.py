"""Which GPUs a task has where several share a machine."""

from __future__ import annotations

import os
import subprocess

#: What CUDA reads to learn which GPUs a process may use.
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"


def count_gpus() -> int:
    """Returns how many GPUs of NVIDIA's this process may use, without starting JAX."""
    visible = os.environ.get(VISIBLE_GPUS)
    if visible is not None:
        return len([index for index in visible.split(",") if index.strip()])
    try:
        command = ["nvidia-smi", "--list-gpus"]
        listed = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def share_of_gpus(place: int, tasks: int) -> str | None:
    """Returns the GPUs of one of several tasks that share this machine's equally.

    Args:
        place: The task's place among those of this machine.
        tasks: How many they are.

    Returns:
        What `CUDA_VISIBLE_DEVICES` is for the task. None: there are fewer GPUs than tasks.
    """
    visible = os.environ.get(VISIBLE_GPUS)
    names = visible.split(",") if visible else [str(index) for index in range(count_gpus())]
    each = len(names) // tasks
    return ",".join(names[place * each : (place + 1) * each]) if each else None
