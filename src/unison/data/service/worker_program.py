"""The program of a `WorkerServer`'s process.

It is run as a file, so that it finds its parent's modules before it imports any. The main module
of the parent is not run again.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading


def main() -> None:
    """Serves until the parent closes the socket whose descriptor is the argument, or ends."""
    # An interrupt is for the parent, which ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = socket.socket(fileno=int(sys.argv[1]))
    with parent.makefile("rb") as file:
        settings = json.loads(file.readline())
    sys.path[:] = settings["path"]
    from unison.data.service.configuration import WorkerConfig
    from unison.data.service.elements import described_error
    from unison.data.service.worker import InputWorker
    from unison.errors import OpError

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


if __name__ == "__main__":
    main()
