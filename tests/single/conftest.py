"""Fixtures of the tests that run in this process, on its four logical devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import pytest

from unison.runtime import devices

# Values that several parametrized tests share, by test and by their other parameters.
_alone: dict[Any, Any] = {}
_strategies: dict[int, Any] = {}


@pytest.fixture(autouse=True, scope="session")
def four_devices() -> None:
    """Starts JAX with the four logical devices before a test does so with one."""
    devices.prepare_backend()


@pytest.fixture(autouse=True)
def explicit_64_bits(request: pytest.FixtureRequest) -> Iterator[None]:
    """Lets JAX keep 64-bit dtypes where a test uses `unison.tf`, and not elsewhere.

    The face sets this option when it is imported, for the whole process.
    """
    uses_the_face = any(
        getattr(value, "__name__", "").startswith("unison.tf")
        for value in vars(request.module).values()
    )
    option = "jax_explicit_x64_dtypes"
    before = getattr(jax.config, option)
    jax.config.update(option, "allow" if uses_the_face else "warn")
    yield
    jax.config.update(option, before)


@pytest.fixture(params=[2, 4], ids="{}-replicas".format)
def strategy(request: pytest.FixtureRequest) -> Any:
    """A `MirroredStrategy` of 2, and one of 4 replicas."""
    return _mirrored(request.param)


@pytest.fixture
def two_replicas() -> Any:
    """A `MirroredStrategy` of 2 replicas, for facts that do not depend on their number."""
    return _mirrored(2)


@pytest.fixture
def four_replicas() -> Any:
    """A `MirroredStrategy` of 4 replicas, of which small batches leave some idle."""
    return _mirrored(4)


def _mirrored(replicas: int) -> Any:
    from keras_comparison import mirrored

    if replicas not in _strategies:
        _strategies[replicas] = mirrored(replicas)
    return _strategies[replicas]


@pytest.fixture
def assert_trains_as_alone(request: pytest.FixtureRequest, strategy: Any) -> Callable[..., None]:
    """Returns `check(build, train)`, which trains without and with the strategy and compares.

    The training without a strategy runs once for all numbers of replicas.
    """
    from keras_comparison import assert_same_outcome, run_training, run_training_under

    parameters = getattr(request.node, "callspec", None)
    others = {k: v for k, v in parameters.params.items() if k != "strategy"} if parameters else {}
    key = (request.path, request.function.__name__, repr(sorted(others.items())))

    def check(build: Callable[[], Any], train: Callable[[Any], Any]) -> None:
        if key not in _alone:
            _alone[key] = run_training(build, train)
        assert_same_outcome(run_training_under(strategy, build, train), _alone[key])

    return check
