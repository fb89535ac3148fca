"""The worker's side of `launch`: calls the function, and sends back what it returned."""

from __future__ import annotations

import os
import sys

import cloudpickle


def main(call: int, result: int) -> None:
    """Calls the function that `launch` sends.

    Args:
        call: The open pipe, by number, with the pickled function and its arguments.
        result: The open pipe for what it returns.
    """
    os.set_inheritable(result, False)  # a child that outlives the worker must not hold it open
    with open(call, "rb") as pipe:
        function, args = cloudpickle.load(pipe)
    returned = function(*args)
    try:
        pickled = cloudpickle.dumps(returned)
    except Exception as error:
        raise TypeError(
            f"launch sends back what the function returns. {returned!r} cannot be pickled: "
            f"{error}. Return numbers, text, NumPy arrays, or structures of them."
        ) from error
    with open(result, "wb") as pipe:
        pipe.write(pickled)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
