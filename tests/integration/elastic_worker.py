"""A worker of an elastic job that computes nothing, for `test_elastic_launching.py`.

    python elastic_worker.py FOLDER [WHAT]

It counts steps until there is FOLDER/end. It takes the worker's side of the protocol without the
rest of Unison, so that it starts in a tenth of a second.
"""

import importlib.util
import os
import signal
import sys
import time
import types
from pathlib import Path

SOURCE = Path(importlib.util.find_spec("unison").origin).parents[1]

for name in ("unison", "unison.runtime", "unison.runtime.elastic"):
    package = sys.modules[name] = types.ModuleType(name)
    package.__path__ = [str(SOURCE / name.replace(".", "/"))]
private_jax = sys.modules["unison.runtime.private_jax"] = types.ModuleType("private_jax")
private_jax.backend_is_started = private_jax.listen_for_collectives_at = None

from unison.errors import UnavailableError  # noqa: E402
from unison.runtime.elastic.environment import elastic_environment  # noqa: E402
from unison.runtime.elastic.membership import Membership  # noqa: E402
from unison.runtime.elastic.protocol import Ended, Interrupted  # noqa: E402

FOLDER = Path(sys.argv[1])
WHAT = sys.argv[2] if len(sys.argv) > 2 else ""

environment = elastic_environment()
membership = Membership(
    environment.register,
    environment.token,
    {
        "name": environment.name,
        "host": "this one",
        "replicas": 1,
        "slot": environment.slot,
        "software": {},
    },
    f"{environment.listen}:1",
    environment.heartbeat_timeout,
    environment.wait,
)


def end(code: int, step: int | None) -> None:
    """Ends the process; a step is the state that is left."""
    if step is not None:
        (Path(environment.folder) / "state").write_text(str(step))
    membership.close()
    sys.exit(code)


def told_to_end(number: int, frame: object) -> None:
    print("told", flush=True)
    if WHAT != "deaf":
        membership.notice()


def work() -> None:
    signal.signal(signal.SIGTERM, told_to_end)
    kept = None if environment.folder is None else Path(environment.folder) / "state"
    resumed = int(kept.read_text()) if kept is not None and kept.exists() else 0
    try:
        step = None if membership.enter().is_joining else resumed
    except UnavailableError:
        end(78, None)
    while not (FOLDER / "end").exists():
        try:
            view = membership.regroup(step, True)
            membership.confirm()
        except Interrupted:
            continue
        except Ended as ended:
            end(ended.code, step if ended.saves else None)
        except UnavailableError:
            end(78, step)
        # The state of a member with the greatest step; a newcomer has none.
        step = max((other for other in view.steps if other is not None), default=resumed)
        print("pid", os.getpid(), "of", len(view.members), "from", step, flush=True)
        if WHAT == "raise" and view.own == 1:
            raise ValueError("worker one is unwell")
        while membership.interrupted is None and not (FOLDER / "end").exists():
            time.sleep(0.02)
            step += 1
            membership.progress(step, "counts")
    membership.done()
    membership.close()


if WHAT == "crash":
    os.kill(os.getpid(), signal.SIGSEGV)
if WHAT == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(1)
work()
