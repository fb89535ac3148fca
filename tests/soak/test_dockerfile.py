"""Every command of the container's recipe runs in fresh environments, and the demo in the last."""

import pytest

from release.constraints import ROOT, TESTED_SETS
from release.dockerfile import execute
from release.interpreters import interpreter

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]


@pytest.mark.parametrize("extras", ["demo", "demo,cuda12", "demo,cuda13"])
@pytest.mark.parametrize("python", [tested.python for tested in TESTED_SETS])
def test_the_commands_of_the_dockerfile_run(python, extras):
    if interpreter(python) is None:
        pytest.skip(f"There is no Python {python} on this machine.")
    execute((ROOT / "Dockerfile").read_text(), ROOT, {"PYTHON": python, "EXTRAS": extras})
