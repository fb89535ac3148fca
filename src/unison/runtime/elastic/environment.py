"""The settings that an elastic worker gets from the process that started it."""

from __future__ import annotations

import json
import os
from typing import NamedTuple

from unison.errors import InvalidArgumentError

#: The variables: a JSON object, and the job's secret.
VARIABLE = "UNISON_ELASTIC"
TOKEN_VARIABLE = "UNISON_ELASTIC_TOKEN"


class ElasticEnvironment(NamedTuple):
    """An elastic worker's settings.

    Attributes:
        register: The register's address, as host:port.
        token: The job's secret.
        name: The worker's name.
        slot: Its index among the workers that its supervisor starts; None if the supervisor has not
            started it.
        listen: The address at which it listens for other members.
        heartbeat_timeout: Seconds of silence after which a peer counts as lost.
        wait: Seconds to wait for the register, and for enough workers.
        folder: The folder for the job's state; None if the state is not saved.
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
    """Returns the settings of this process; None if it is not an elastic worker.

    Raises:
        InvalidArgumentError: They cannot be parsed.
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
    """Returns whether this process was started as a worker of an elastic job."""
    return VARIABLE in os.environ
