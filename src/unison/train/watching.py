"""Watching the checkpoints of a training from another process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

from unison.train.latest import get_checkpoint_state, latest_checkpoint

_SECONDS_BETWEEN_LOOKS = 1.0


def checkpoints_iterator(
    checkpoint_dir: str | os.PathLike,
    min_interval_secs: float = 0,
    timeout: float | None = None,
    timeout_fn: Callable[[], bool] | None = None,
) -> Iterator[str]:
    """Yields each new latest checkpoint of a folder, while another process writes them.

    A checkpoint is left out if a newer one is written before the next iteration.

    Args:
        checkpoint_dir: The folder; it may be created later.
        min_interval_secs: The minimum number of seconds between two checkpoints.
        timeout: The timeout in seconds for a new one. None: no timeout.
        timeout_fn: Called after the timeout: True ends, False waits once more. Default: end.

    TF: `tf.train.checkpoints_iterator`.
    """
    before: str | None = None
    while True:
        begun = time.monotonic()
        path = _next_checkpoint(checkpoint_dir, before, timeout)
        if path is not None:
            before = path
            yield path
            time.sleep(max(0.0, begun + min_interval_secs - time.monotonic()))
        elif timeout_fn is None or timeout_fn():
            return


def _next_checkpoint(
    folder: str | os.PathLike, before: str | None, timeout: float | None
) -> str | None:
    """Returns the latest checkpoint once it differs from `before`; None after `timeout`."""
    end = None if timeout is None else time.monotonic() + timeout
    while True:
        state = get_checkpoint_state(folder)
        if state is not None and state.model_checkpoint_path != before:
            path = latest_checkpoint(folder)  # which reads it
            if path not in (None, before):
                return path
        rest = _SECONDS_BETWEEN_LOOKS if end is None else end - time.monotonic()
        if rest <= 0:
            return None
        time.sleep(min(rest, _SECONDS_BETWEEN_LOOKS))
