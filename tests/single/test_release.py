"""Releases: the tested sets satisfy pyproject.toml, and a wrong distribution is found."""

import dataclasses
import re
import tomllib

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from release import distributions
from release.constraints import EXTRAS, FOLDER, ROOT, TESTED_SETS

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def named(tested):
    return tested.path.stem


def pins_of(tested) -> dict[str, str]:
    """The version of every package, on Linux and the Python of the set."""
    here = default_environment() | {
        "python_version": tested.python,
        "python_full_version": f"{tested.python}.0",
        "platform_machine": "x86_64",
        "sys_platform": "linux",
    }
    lines = tested.path.read_text().splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    return {
        canonicalize_name(pin.name): str(pin.specifier).removeprefix("==")
        for pin in pins
        if pin.marker is None or pin.marker.evaluate(here)
    }


def requirements() -> list[Requirement]:
    """Everything that the package, and the extras that a set has, ask of others."""
    extras = PROJECT["optional-dependencies"]
    lines = [*PROJECT["dependencies"], *(line for name in extras for line in extras[name])]
    found = [Requirement(line) for line in lines]
    assert set(EXTRAS) <= set(extras)
    return [each for each in found if each.name != "unison"]


@pytest.mark.parametrize("tested", TESTED_SETS, ids=named)
def test_a_tested_set_satisfies_the_bounds_of_the_project(tested):
    pins = pins_of(tested)
    wrong = [
        f"{requirement}: {pins.get(canonicalize_name(requirement.name))}"
        for requirement in requirements()
        if pins.get(canonicalize_name(requirement.name)) not in requirement.specifier
    ]
    assert wrong == [], "make constraints"


@pytest.mark.parametrize("tested", TESTED_SETS, ids=named)
def test_a_tested_set_has_the_jax_that_its_name_says(tested):
    jax, python = re.fullmatch(r"jax([\d.]+)-python([\d.]+)", tested.path.stem).groups()
    assert pins_of(tested)["jax"].startswith(f"{jax}.")
    assert python == tested.python


def test_a_newer_python_takes_the_constraints_of_the_newest_jax():
    newest = TESTED_SETS[-1]
    newer = dataclasses.replace(newest, python="3.14", constraints=newest.path)
    assert newer.path == newest.path
    assert newer.name == newest.name.replace(newest.python, "3.14")


def test_the_oldest_set_has_the_lowest_versions_of_what_the_project_names():
    pins = pins_of(TESTED_SETS[0])
    for requirement in requirements():
        (lowest,) = (each.version for each in requirement.specifier if each.operator == ">=")
        pinned = pins[canonicalize_name(requirement.name)]
        assert pinned == lowest or pinned.startswith(f"{lowest}."), requirement


def test_the_compiled_part_is_built_with_the_headers_of_the_oldest_jax():
    """XLA refuses operations that were built for a newer version of its FFI than it has."""
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]
    assert f"jaxlib=={TESTED_SETS[0].jax}" in build["requires"]


def test_every_constraints_file_is_that_of_a_tested_set():
    assert set(FOLDER.iterdir()) == {tested.path for tested in TESTED_SETS}


AUDIT = """
unison-1.0-py3-none-manylinux_2_28_x86_64.whl is consistent with the
following platform tag: "manylinux_{}_x86_64".
"""


@pytest.mark.parametrize(
    ("wheel", "found", "is_right"),
    [
        ("unison-1.0-py3-none-manylinux_2_28_x86_64.whl", "2_17", True),
        ("unison-1.0-py3-none-manylinux_2_28_aarch64.whl", "2_28", True),
        ("unison-1.0-py3-none-manylinux_2_28_x86_64.whl", "2_34", False),
        ("unison-1.0-py3-none-linux_x86_64.whl", "2_17", False),
    ],
)
def test_a_platform_tag_must_hold_what_it_promises(wheel, found, is_right):
    complaints = distributions.complaints_about_platform(wheel, AUDIT.format(found))
    assert (complaints == []) == is_right


SDIST = {
    "LICENSE",
    "PKG-INFO",
    "README.md",
    "hatch_build.py",
    "pyproject.toml",
    "src/unison/__init__.py",
    "src/unison/py.typed",
}
PURE = {
    "unison/__init__.py",
    "unison/py.typed",
    "unison-1.0.dist-info/METADATA",
    "unison-1.0.dist-info/RECORD",
    "unison-1.0.dist-info/WHEEL",
    "unison-1.0.dist-info/entry_points.txt",
    "unison-1.0.dist-info/licenses/LICENSE",
}


def test_distributions_with_the_right_files_are_accepted():
    compiled = "unison-1.0-py3-none-manylinux_2_28_x86_64.whl"
    assert distributions.complaints_about_sdist(SDIST) == []
    assert distributions.complaints_about_wheel("unison-1.0-py3-none-any.whl", PURE, SDIST) == []
    with_library = PURE | distributions.LIBRARIES
    assert distributions.complaints_about_wheel(compiled, with_library, SDIST) == []


def test_a_wheel_that_lacks_a_file_or_has_another_is_refused():
    compiled = "unison-1.0-py3-none-manylinux_2_28_x86_64.whl"
    files = PURE - {"unison/py.typed"} | {"tests/conftest.py"}
    assert distributions.complaints_about_wheel(compiled, files, SDIST) == [
        f"{compiled} lacks unison/py.typed.",
        *(f"{compiled} lacks {library}." for library in sorted(distributions.LIBRARIES)),
        f"{compiled} has tests/conftest.py.",
    ]


@pytest.mark.parametrize(
    "left",
    [
        "src/unison/__pycache__/cells.cpython-311.pyc",
        "tests/.pytest_cache/README.md",
        ".venv/pyvenv.cfg",
        "src/unison/runtime/shared_memory/_exchange.so",
    ],
)
def test_an_sdist_with_what_a_work_tree_leaves_behind_is_refused(left):
    assert distributions.complaints_about_sdist(SDIST | {left}) == [f"The sdist has {left}."]
