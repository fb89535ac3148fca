"""`docs/tf-names.md` says truly what each name of TensorFlow's guide and tutorials is."""

import functools
import re
from pathlib import Path

import pytest

import unison.tf as tf

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "tf-names.md"
NAMES = [
    line
    for line in (TESTS / "parity" / "tutorial_names.txt").read_text().splitlines()
    if line.startswith("tf.")
]
ROW = re.compile(r"^\| `(?P<name>tf\.[\w.]+)` \| (?P<state>.+) \|$", re.MULTILINE)
STATES = {row["name"]: row["state"] for row in ROW.finditer(PAGE.read_text())}
WORKING = [name for name, state in STATES.items() if state.startswith("works")]
FORM = re.compile(r"works(, with a difference: .+)?|comes with issue \d+|not supported: .+")
# A path such as `tf.nn.relu` in a program; not one that a variable begins.
USED = re.compile(r"(?<![\w.])tf\.[A-Za-z_][\w.]*\b")


def resolve(name: str) -> object:
    return functools.reduce(getattr, name.split(".")[1:], tf)


def test_the_table_has_every_name_of_the_tutorials_and_no_other():
    assert sorted(STATES) == sorted(NAMES)


def test_a_state_is_one_of_four():
    assert [name for name, state in STATES.items() if not FORM.fullmatch(state)] == []


@pytest.mark.parametrize("name", WORKING)
def test_a_name_that_works_is_there(name):
    assert resolve(name) is not None


@pytest.mark.parametrize("name", sorted(STATES.keys() - set(WORKING)))
def test_a_name_that_does_not_work_is_refused_with_what_to_use_instead(name):
    with pytest.raises(AttributeError, match=r"not supported by Unison: \S+"):
        resolve(name)


def test_the_names_that_our_versions_of_the_tutorials_use_are_in_the_table():
    used = {
        name
        for program in (TESTS / "tutorials").glob("*.py")
        for name in USED.findall(program.read_text())
    }
    begun = {name.rpartition(".")[0] for name in NAMES}  # such as `tf.keras.losses`
    assert sorted(used - begun - set(NAMES)) == []
