"""Files for TensorBoard, written by the package tensorboardX."""

from __future__ import annotations

from typing import Any


def event_writer(folder: str, **options: Any) -> Any:
    """Returns a `tensorboardX.SummaryWriter` into a folder.

    Args:
        folder: Where it writes.
        options: Further arguments of it.

    Raises:
        ImportError: tensorboardX is not installed.
    """
    try:
        import tensorboardX
    except ImportError as error:
        raise ImportError(
            "Summaries for TensorBoard are written by tensorboardX, which is not installed. "
            "Install it with pip install 'unison[tensorboard]', or pip install tensorboardX."
        ) from error
    return tensorboardX.SummaryWriter(folder, **options)
