"""The register of an elastic job, in a process of its own as under `unison run`: `PORT WORKERS`."""

from __future__ import annotations

import sys

from unison.runtime.elastic.register import Register

#: What the processes of a contestant know, and nobody else needs to.
TOKEN = "of this contestant"


def main(port: str, workers: str) -> None:
    with Register(
        int(workers),
        int(workers),
        port=int(port),
        token=TOKEN,
        heartbeat_timeout=10.0,
        wait=60.0,
        start_timeout=60.0,
        on_event=lambda event: None,
    ) as register:
        while register.wait(60.0) is None:
            pass


if __name__ == "__main__":
    main(*sys.argv[1:])
