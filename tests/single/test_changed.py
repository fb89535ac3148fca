"""`make changed` finds the tests that a change can reach."""

import pytest

from changed import edges, reached_tests, sources_of_all

SOURCES = {
    "src/unison/__init__.py": "",
    "src/unison/__init__.pyi": "from unison.cells import Cell as Cell",
    "src/unison/cells.py": "from unison.storage import atomic",
    "src/unison/storage/__init__.py": "",
    "src/unison/storage/atomic.py": "",
    "src/unison/hooks.py": "importlib.import_module('unison.late')",
    "src/unison/late.py": "",
    "src/unison/tf/__init__.py": "",
    "src/unison/tf/__init__.pyi": "from unison.tf import image as image",
    "src/unison/tf/image.py": "",
    "tests/program.py": "import unison\nunison.Cell()",
    "tests/programs/one.py": "from unison import late",
    "tests/single/test_cell.py": "import unison\nunison.Cell",
    "tests/single/test_storage.py": "from unison.storage import atomic",
    "tests/single/test_hooks.py": "from unison import hooks",
    "tests/single/test_image.py": "import unison.tf as tf\ntf.image.resize",
    "tests/single/test_in_a_process.py": "run(TESTS / 'program.py')",
    "tests/single/test_programs.py": "PROGRAMS = TESTS / 'programs'",
    "tests/single/test_pages.py": "PAGE = 'docs/keras.md'",
}


@pytest.mark.parametrize(
    ("changed", "reached"),
    [
        ("src/unison/storage/atomic.py", {"cell", "storage", "in_a_process"}),
        ("src/unison/cells.py", {"cell", "in_a_process"}),
        ("src/unison/late.py", {"hooks", "programs"}),
        ("src/unison/tf/image.py", {"image"}),
        ("tests/program.py", {"in_a_process"}),
        ("tests/single/test_image.py", {"image"}),
        ("docs/keras.md", {"pages"}),
        ("docs/other.md", set()),
    ],
)
def test_a_change_reaches_the_tests_that_use_it(changed, reached):
    found = {path.removeprefix("tests/single/test_") for path in reached_tests([changed], SOURCES)}
    assert found == {f"{name}.py" for name in reached}


def test_what_all_tests_depend_on_reaches_all():
    assert len(reached_tests(["pyproject.toml"], SOURCES)) == 7


@pytest.fixture(scope="module")
def ours():
    sources = sources_of_all()
    return sources, edges(sources)


def test_the_tests_of_a_module_are_among_those_that_its_change_reaches(ours):
    for changed, test in (
        ("src/unison/lockstep.py", "single/test_lockstep.py"),
        ("src/unison/tf/image.py", "single/test_tf_surface.py"),
        ("src/unison/parameter_server/calls.py", "integration/test_parameter_servers.py"),
        ("src/unison/keras/step.py", "parallel/test_multi_worker.py"),
        ("tests/tutorials/guide.py", "integration/test_tutorials.py"),
    ):
        assert f"tests/{test}" in reached_tests([changed], *ours), changed


def test_a_change_at_the_top_does_not_reach_everything(ours):
    tests = [path for path in ours[0] if "/test_" in path]
    assert len(reached_tests(["src/unison/benching/drawing.py"], *ours)) < len(tests) / 3
