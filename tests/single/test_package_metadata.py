"""What the package says of itself: its version, its README, its extras."""

import importlib.metadata
import importlib.util
import re
import tomllib
from pathlib import Path

import pytest
from hatchling.metadata.core import ProjectMetadata
from hatchling.plugin.manager import PluginManager
from packaging.requirements import Requirement

import unison

ROOT = Path(__file__).parents[2]
RELATIVE_LINK = re.compile(r"\]\((?!\w+:|#)[^)]*\)")
NAMED_EXTRAS = re.compile(r"(?:\bunison|['\"]\.)\[(?P<extras>[a-z0-9_,-]+)\]")


@pytest.fixture(scope="module")
def metadata():
    return ProjectMetadata(str(ROOT), PluginManager()).core


def module_at(path: Path):
    place = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(place)
    place.loader.exec_module(module)
    return module


def test_the_version_is_that_of_the_source():
    assert ProjectMetadata(str(ROOT), PluginManager()).version == unison.__version__


def test_the_licence_is_an_spdx_expression_and_its_text_is_included(metadata):
    assert metadata.license_expression == "Apache-2.0"
    assert metadata.license_files == ["LICENSE"]


def test_the_readme_has_no_link_that_only_the_repository_can_follow(metadata):
    assert RELATIVE_LINK.search((ROOT / "README.md").read_text())
    assert RELATIVE_LINK.findall(metadata.readme) == []
    assert metadata.readme_content_type == "text/markdown"


README = """See [input](docs/data.md#here), [JAX](https://docs.jax.dev), [below](#end).

![A plot](results/a.svg)

```python
table[index](argument)
```
"""


def test_links_of_the_readme_lead_to_the_release_where_there_is_an_address():
    hook = module_at(ROOT / "hatch_readme.py")
    text = hook.readable_elsewhere(README, "https://example.org/unison/", "1.2.0")
    assert "[input](https://example.org/unison/blob/v1.2.0/docs/data.md#here)" in text
    assert "![A plot](https://example.org/unison/raw/v1.2.0/results/a.svg)" in text
    assert "[JAX](https://docs.jax.dev), [below](#end)" in text
    assert "table[index](argument)" in text


def test_links_of_the_readme_become_their_text_where_there_is_none():
    hook = module_at(ROOT / "hatch_readme.py")
    text = hook.readable_elsewhere(README, None, "1.2.0")
    assert text.startswith("See input, [JAX](https://docs.jax.dev), [below](#end).\n\nA plot\n")
    assert "table[index](argument)" in text


def files_that_name_extras() -> list[Path]:
    places = [*ROOT.glob("src/**/*.py"), *ROOT.glob("docs/*.md"), *ROOT.glob("*.md")]
    return [place for place in places if NAMED_EXTRAS.search(place.read_text())]


def test_every_extra_that_a_message_or_a_page_names_exists(metadata):
    files = files_that_name_extras()
    assert len(files) > 15
    named = {
        (place.relative_to(ROOT).as_posix(), extra)
        for place in files
        for match in NAMED_EXTRAS.finditer(place.read_text())
        for extra in match["extras"].split(",")
    }
    missing = {each for each in named if each[1] not in metadata.optional_dependencies}
    assert missing == set()


def test_the_extras_that_are_asked_of_other_packages_exist(metadata):
    """Of those that are installed here; for JAX that is the version whose extras are asked for."""
    asked = [
        Requirement(line) for lines in metadata.optional_dependencies.values() for line in lines
    ]
    missing = []
    for requirement in asked:
        if requirement.name == "unison":
            continue
        try:
            offered = importlib.metadata.metadata(requirement.name).get_all("Provides-Extra", [])
        except importlib.metadata.PackageNotFoundError:
            continue
        missing += [(requirement.name, extra) for extra in requirement.extras - set(offered)]
    assert missing == []


def test_all_has_every_extra_but_those_for_accelerators_and_for_work_on_unison():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    (everything,) = (Requirement(line) for line in extras["all"])
    accelerators = {"cuda", "cuda12", "cuda13", "plan-gpu", "rocm", "tpu"}
    for_work = {"all", "dev", "docs", "lint", "release", "test"}
    assert everything.extras == set(extras) - accelerators - for_work
