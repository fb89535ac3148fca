"""What an elastic worker is told by the process that started it."""

from __future__ import annotations

import json
import os
from typing import NamedTuple

from unison.errors import InvalidArgumentError

#: The variables: a JSON object, and the job's secret.
VARIABLE = "UNISON_ELASTIC"
TOKEN_VARIABLE = "UNISON_ELASTIC_TOKEN"


class ElasticEnvironment(NamedTuple):
    """An elastic worker's place in its job.

    Attributes:
        register: Where the register listens, as host:port.
        token: The job's secret.
        name: What the worker is called.
        slot: Its number among those that its supervisor has started.
        listen: The address at which it listens for other members.
        heartbeat_timeout: Seconds of silence after which somebody counts as lost.
        wait: Seconds that it waits for the register, and for enough workers.
        folder: Where the job keeps its state; None: nowhere.
    """

    register: str
    token: str
    name: str
    slot: int | None
    listen: str
    heartbeat_timeout: float
    wait: float
    folder: str | None


def elastic_environment() -> ElasticEnvironment | None:
    """Returns what this process was told; None if it is no elastic worker.

    Raises:
        InvalidArgumentError: It cannot be understood.
    """
    told = os.environ.get(VARIABLE)
    if told is None:
        return None
    try:
        found = json.loads(told)
        return ElasticEnvironment(
            register=str(found["register"]),
            token=os.environ[TOKEN_VARIABLE],
            name=str(found.get("name", "worker")),
            slot=found.get("slot"),
            listen=str(found.get("listen", "127.0.0.1")),
            heartbeat_timeout=float(found.get("heartbeat_timeout", 10.0)),
            wait=float(found.get("wait", 60.0)),
            folder=found.get("folder"),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidArgumentError(
            message=f"Expected {VARIABLE} and {TOKEN_VARIABLE} as `unison run --min-workers` sets "
            f"them. Received: {VARIABLE}={told!r} ({type(error).__name__}: {error}). Start the "
            "program by that command."
        ) from error


def is_elastic_worker() -> bool:
    """Whether this process has been started as one of a job whose workers may change."""
    return VARIABLE in os.environ
