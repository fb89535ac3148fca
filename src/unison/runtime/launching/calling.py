"""The worker's side of `launch`: calls the function, and sends back the result."""

from __future__ import annotations

import os
import socket
import sys

import cloudpickle


def main() -> None:
    """Calls the function that is received on standard input (a socket), and replies there."""
    # A duplicate that the worker's children do not inherit; their standard input is empty.
    connection = socket.socket(fileno=os.dup(sys.stdin.fileno()))
    connection.settimeout(None)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), sys.stdin.fileno())
    with connection, connection.makefile("rb") as call:
        function, args = cloudpickle.load(call)
        returned = function(*args)
        try:
            pickled = cloudpickle.dumps(returned)
        except Exception as error:
            raise TypeError(
                f"launch sends back what the function returns. {returned!r} cannot be pickled: "
                f"{error}. Return numbers, text, NumPy arrays, or structures of them."
            ) from error
        connection.sendall(pickled)


if __name__ == "__main__":
    main()
