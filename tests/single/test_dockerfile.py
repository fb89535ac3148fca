"""The container's recipe: what it needs is there, and gets to it."""

import re

import pytest

from release.constraints import FOLDER, ROOT, TESTED_SETS
from release.dockerfile import execute, instructions, sent

RECIPE = (ROOT / "Dockerfile").read_text()


def test_the_image_has_a_python_with_a_tested_set():
    (python,) = re.findall(r"^ARG PYTHON=(.+)$", RECIPE, re.MULTILINE)
    assert python in {tested.python for tested in TESTED_SETS}


def test_an_image_gets_all_that_the_wheel_is_built_from_and_nothing_else():
    files = {path.as_posix() for path in sent(ROOT)}
    roots = {path.partition("/")[0] for path in files}
    hooks = {hook.name for hook in ROOT.glob("hatch_*.py")}
    assert roots == {"LICENSE", "README.md", "constraints", "pyproject.toml", "src"} | hooks
    assert {f"constraints/{path.name}" for path in FOLDER.iterdir()} <= files
    assert "src/unison/runtime/shared_memory/exchange.cc" in files
    assert not [path for path in files if path.endswith((".so", ".pyc"))]


@pytest.fixture
def context(tmp_path):
    (tmp_path / ".dockerignore").write_text("*\n!kept\n**/*.so\n**/cache\n")
    for name in ("left.txt", "kept/a.txt", "kept/b.so", "kept/deep/cache/c.txt", "kept/deep/d.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


def test_the_last_line_of_dockerignore_that_matches_decides(context):
    assert [path.as_posix() for path in sent(context)] == ["kept/a.txt", "kept/deep/d.txt"]


def test_an_instruction_that_cannot_be_executed_is_named():
    with pytest.raises(ValueError, match="Received: HEALTHCHECK"):
        instructions("FROM python:3.13\nHEALTHCHECK NONE\n")


def test_an_argument_that_the_dockerfile_does_not_have_is_named(context):
    with pytest.raises(ValueError, match="has no ARG EXTRA"):
        execute("ARG EXTRAS=demo\n", context, {"EXTRA": "cuda13"})


def test_an_image_other_than_pythons_is_named(context):
    with pytest.raises(ValueError, match="Received: debian:13"):
        execute("ARG BASE=debian:13\nFROM ${BASE}\n", context, {})
