"""The process of a check: `python -m benchmarks.gpu.check MODULE:FUNCTION SETTING`.

Each finding is a line of JSON on standard output; what the check itself prints goes nowhere.
SIGTERM ends it through its `finally` blocks, so that it ends what it has started.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import sys

from benchmarks.gpu.findings import Setting, to_json


def main(function: str, setting: str) -> None:
    module, name = function.split(":")
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    faulthandler.enable()
    of_check = Setting(**json.loads(setting))
    check = getattr(importlib.import_module(module), name)
    for finding in check(of_check):
        answers.write(json.dumps(to_json(finding)) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
