"""Datasets as bytes for workers: pickled, with a signature by the key.

A pickle can run any code, so only one is loaded whose signature shows that a process with the key
has made it, wherever it was stored in between. The dispatcher loads none.
"""

from __future__ import annotations

from unison.data.plan import Plan
from unison.errors import InvalidArgumentError
from unison.net.proof import sign, verified


def pickled(plan: Plan, secret: bytes) -> bytes:
    """Returns a plan as bytes for workers, with a signature by the key.

    Raises:
        TypeError: A part of it cannot be sent to another process.
    """
    import cloudpickle

    try:
        return sign(secret, cloudpickle.dumps(plan))
    except Exception as error:
        raise TypeError(
            f"The dataset cannot be sent to input workers: {plan.description[:500]}: {error}. Make "
            "objects such as open files, locks and devices inside the functions of the dataset, at "
            "their first call."
        ) from error


def unpickled(signed: bytes, secret: bytes) -> Plan:
    """Returns the plan that `pickled` has converted.

    Raises:
        UnauthenticatedError: It was changed, or signed with another key.
        InvalidArgumentError: This process lacks a module that the dataset uses.
    """
    import cloudpickle

    payload = verified(secret, signed)
    try:
        plan: Plan = cloudpickle.loads(payload)
        return plan
    except (ImportError, AttributeError) as error:
        raise InvalidArgumentError(
            message=f"An input worker cannot load the dataset: {error}. Workers import the modules "
            "that its functions are defined in: start them in the same environment, with the same "
            "PYTHONPATH."
        ) from error
