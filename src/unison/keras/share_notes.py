"""Notes on errors about a replica's share of a batch: users only know the whole batch."""

from __future__ import annotations

import re
from collections.abc import Sequence

from unison.data import Shares


def note_share(
    error: BaseException, shapes: Sequence[tuple[int, ...]], rows: int, shares: Shares
) -> None:
    """Adds a note to an error that a model raised for a replica's share of a batch.

    Where the message does not have the size of the share, it is left as it is.

    Args:
        error: What Keras or JAX has raised, about shapes.
        shapes: Those of the arrays of the batch.
        rows: How many examples the replica has got.
        shares: How the batch is divided.
    """
    is_divided = shares.num_replicas > 1 and rows != shares.examples
    if not is_divided or not re.search(rf"\b{rows}\b", str(error)):
        return
    whole = ", ".join(str(shape) for shape in shapes)
    share = ", ".join(str((rows, *shape[1:])) for shape in shapes)
    error.add_note(
        f"On a replica: the batch of {shares.examples} rows is divided among "
        f"{shares.num_replicas} replicas, and the shapes above are those of a share of {rows} "
        f"rows. The batch: {whole}. The share: {share}. A size that the model fixes (batch_shape, "
        "batch_size, the first axis of a reshape) must be that of the share."
    )
