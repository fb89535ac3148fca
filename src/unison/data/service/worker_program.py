"""The process of a `WorkerServer`, which `unison.data.workers.start` runs.

It imports those parts of the package that it needs, which only use NumPy; what the functions of a
dataset use is imported when they are loaded. The main module of the parent is not run again.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading

from unison.data.service.configuration import WorkerConfig
from unison.data.service.elements import described_error
from unison.data.service.worker import InputWorker
from unison.errors import OpError
from unison.runtime.memory import keep_freed_memory


def serve(descriptor: int) -> None:
    """Serves until the parent closes the other end of a socket, or ends.

    Args:
        descriptor: The descriptor of the socket.
    """
    parent = socket.socket(fileno=descriptor)
    with parent.makefile("rb") as file:
        settings = json.loads(file.readline())
    sys.path[:] = settings["path"]
    keep_freed_memory()  # every element and every batch creates an array
    try:
        worker = InputWorker(WorkerConfig(**settings["config"]), settings["id"])
        worker.wait_until_registered(settings["seconds_to_register"])
        answer = {"address": worker.address}
    except Exception as error:
        answer = described_error(error, f"process {os.getpid()}")
    try:
        parent.sendall(json.dumps(answer).encode() + b"\n")
    except OSError:
        os._exit(0)
    if "error" in answer:
        return

    def end_with_parent() -> None:
        try:
            parent.recv(1)
        finally:
            worker.stop()

    threading.Thread(target=end_with_parent, daemon=True).start()
    try:
        worker.join()
    except OpError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        os._exit(1)
    # Functions of the user's may still run in threads of tasks.
    os._exit(0)
