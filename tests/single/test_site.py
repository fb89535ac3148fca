"""The documentation is whole: links lead somewhere, pages are found, and nothing is left out.

What the examples on the pages print is tested in `test_documentation.py`.
"""

import argparse
import ast
import builtins
import importlib
import os
import re
import shlex
import tomllib
import unicodedata
from pathlib import Path

import pytest

from public_api import PACKAGES
from single.test_house import FLOORS
from unison import cli
from unison.cli import bench

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SOURCE = ROOT / "src" / "unison"

FENCED = re.compile(
    r"^[ \t]*```(?P<tag>\w*)[^\n]*\n(?P<body>.*?)^[ \t]*```[ \t]*$", re.MULTILINE | re.DOTALL
)
CODE = re.compile(r"(`+).+?\1")
COMMAND = re.compile(
    r"^\s*(?:\$ )?(?:\w+=(?:\$\(.*?\)|\S*) )*unison (?P<arguments>.+?)(?: +[#>&].*)?$", re.MULTILINE
)
LINK = re.compile(r"!?\[[^\]]*\]\((?P<target>[^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} +(?P<text>.+?)(?: +\{[^}]*\})?$", re.MULTILINE)
REFERENCE = re.compile(r"^::: (?P<name>[\w.]+)$", re.MULTILINE)
INCLUDED = re.compile(r'^--8<-- "(?P<path>[^"]+)"$', re.MULTILINE)

#: Classes of errors that no program gets to see: each is caught where it is meant to be.
INTERNAL_ERRORS = {
    "CommandError",
    "FillerCombinedError",
    "NeedsPythonError",
    "RefusedError",
    "StateCapturedError",
    "WantsBatchError",
}


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def text_of(page: Path) -> str:
    """The page with what it includes."""
    return INCLUDED.sub(lambda match: (ROOT / match["path"]).read_text(), page.read_text())


def prose_of(page: Path) -> str:
    """The page without its blocks of code."""
    return FENCED.sub("", text_of(page))


def anchor_of(heading: str) -> str:
    """The anchor that Python-Markdown gives to a heading.

    Examples:
        >>> anchor_of("`strategy.reduce`, and [more](more.md)")
        'strategyreduce-and-more'
    """
    words = LINK.sub(lambda link: link[0][1 : link[0].index("]")], heading)
    ascii_only = unicodedata.normalize("NFKD", words).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", ascii_only).strip().lower())


def anchors_of(page: Path) -> set[str]:
    prose = prose_of(page)
    headings = [anchor_of(heading["text"]) for heading in HEADING.finditer(prose)]
    again = {
        f"{anchor}_{number}" for anchor in headings for number in range(1, headings.count(anchor))
    }
    return {*headings, *again, *(name["name"] for name in REFERENCE.finditer(prose))}


def broken_links(page: Path) -> list[str]:
    """One sentence for each link of the page that leads nowhere."""
    complaints = []
    for link in LINK.finditer(CODE.sub("", prose_of(page))):
        target, _, anchor = link["target"].partition("#")
        if re.match(r"\w+:", target):
            continue
        place = page if not target else (page.parent / target).resolve()
        if not place.exists():
            complaints.append(f"{link[0]}: there is no {target}")
        elif anchor and anchor not in anchors_of(place):
            complaints.append(f"{link[0]}: {target or 'the page'} has no heading #{anchor}")
    return complaints


@pytest.mark.parametrize("page", pages(), ids=named)
def test_the_links_of_a_page_lead_somewhere(page):
    assert broken_links(page) == []


def test_a_link_that_leads_nowhere_is_found(tmp_path):
    (tmp_path / "there.md").write_text("# There\n\n## What `it` is\n")
    page = tmp_path / "page.md"
    page.write_text("# Page\n[a](there.md#what-it-is) [b](#page) [c](gone.md) [d](there.md#gone)\n")
    assert broken_links(page) == [
        "[c](gone.md): there is no gone.md",
        "[d](there.md#gone): there.md has no heading #gone",
    ]


def test_the_navigation_has_every_page_once():
    listed = re.findall(r":\s+([\w.-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(page.name for page in DOCS.glob("*.md"))


def unknown_names(program: str) -> set[str]:
    """The names that a program reads and nobody has bound."""
    bound, read = set(dir(builtins)), set()
    for node in ast.walk(ast.parse(program)):
        if isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            bound.add(node.name)
    return read - bound


def test_each_program_of_the_readme_stands_alone():
    blocks = FENCED.finditer((ROOT / "README.md").read_text())
    programs = [block["body"] for block in blocks if block["tag"] == "python"]
    assert len(programs) >= 3
    assert [unknown_names(program) for program in programs] == [set()] * len(programs)


@pytest.mark.parametrize("page", pages(), ids=named)
def test_a_page_is_finished(page):
    left = re.findall(r"^[A-Z]+(?:_[A-Z]+)+$|\b(?:TODO|FIXME|TBD|XXX)\b", prose_of(page), re.M)
    assert left == []


@pytest.mark.parametrize("page", pages(), ids=named)
def test_a_table_or_list_has_an_empty_line_around_it(page):
    """Where it is missing, the site shows a paragraph, or a heading as a row."""
    complaints = []
    before = ""
    for line in prose_of(page).splitlines():
        row, was_row = line.startswith("|"), before.startswith("|")
        begins_list = re.match(r"[-*] |\d+\. ", line) is not None
        goes_on = not before.strip() or re.match(r" {1,3}\S|\s*[-*] |\s*\d+\. ", before) is not None
        if (row != was_row and line.strip() and before.strip()) or (begins_list and not goes_on):
            complaints.append(line)
        before = line
    assert complaints == []


def section_of(page: str, heading: str) -> str:
    """What stands under a heading, up to the next one of its level."""
    return (DOCS / page).read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def first_cells(table: str) -> str:
    """What the rows of a table begin with, of those that begin with code."""
    return "\n".join(re.findall(r"^\| (`.*?) \|", table, re.MULTILINE))


def options_of(parser: argparse.ArgumentParser) -> set[str]:
    """The options of a command, all spellings of each."""
    return {
        option
        for action in parser._actions
        for option in action.option_strings
        if option not in ("-h", "--help")
    }


def commands() -> dict[str, argparse.ArgumentParser]:
    found = {**subcommands_of(cli._parser()), "bench compare": bench._comparing_parser()}
    for name, parser in list(found.items()):
        found |= {f"{name} {role}": each for role, each in subcommands_of(parser).items()}
    return found


def subcommands_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parsers of a command's subcommands, by name."""
    return {
        name: each
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
        for name, each in action.choices.items()
    }


@pytest.mark.parametrize("command", sorted(commands()))
def test_the_options_of_a_command_are_those_of_its_table(command):
    cells = first_cells(section_of("command-line.md", f"`unison {command}`"))
    assert set(re.findall(r"`(--?[a-z][\w-]*)", cells)) == options_of(commands()[command])


def commands_on(page: Path) -> list[str]:
    """What follows `unison` in the shell commands of a page."""
    return [
        command["arguments"]
        for block in FENCED.finditer(text_of(page))
        if block["tag"] in ("", "bash", "console")
        for command in COMMAND.finditer(block["body"])
    ]


@pytest.mark.parametrize("page", [page for page in pages() if commands_on(page)], ids=named)
def test_the_commands_of_a_page_are_accepted(page):
    for command in commands_on(page):
        cli._parser().parse_args(shlex.split(command))  # raises, or ends the process, if not


def test_the_environment_variables_are_those_of_the_code():
    variable = re.compile(r"\bUNISON_[A-Z_]*[A-Z]\b")
    sources = "".join(file.read_text() for file in SOURCE.rglob("*.py"))
    said = section_of("command-line.md", "Environment variables")
    assert set(variable.findall(said)) == set(variable.findall(sources))


def test_every_extra_is_documented():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    said = re.findall(r"`([\w-]+)`", first_cells(section_of("getting-started.md", "Extras")))
    assert sorted(said) == sorted(project["optional-dependencies"])


def error_classes() -> set[str]:
    """The classes under `unison`, not the face, that are named as errors and not private."""
    return {
        node.name
        for file in SOURCE.rglob("*.py")
        if file.relative_to(SOURCE).parts[0] != "tf"
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ClassDef) and re.fullmatch(r"[A-Z]\w*Error", node.name)
    }


def test_every_class_of_errors_is_documented():
    cells = first_cells(section_of("troubleshooting.md", "Classes of errors"))
    said = set(re.findall(r"\b([A-Z]\w*Error)\b", cells))
    assert said == error_classes() - INTERNAL_ERRORS


def referred_to() -> set[str]:
    """The names that the API reference has an entry for."""
    pages = "\n".join(page.read_text() for page in DOCS.glob("api*.md"))
    return set(REFERENCE.findall(pages))


@pytest.mark.parametrize("room", PACKAGES)
def test_every_public_name_of_a_room_is_in_the_reference(room):
    reference = referred_to()
    module = importlib.import_module(room)
    missing = [
        name
        for name in module.__all__
        if not isinstance(getattr(module, name), type(os))  # a room has a part of its own
        and name != "start_if_asked"  # what `import unison` calls
        and not reference & {f"{room}.{name}", f"unison.{name}"}
    ]
    assert missing == []


def test_the_table_of_rooms_has_every_floor():
    page = (ROOT / "CONTRIBUTING.md").read_text()
    table = page.partition("| floor | holds |")[2].partition("\n\n")[0]
    said = re.findall(r"`(\w+)`", first_cells(table))
    assert said == [floor for floor in FLOORS if floor != "unison"]


def test_the_files_that_the_architecture_names_are_there():
    paths = re.findall(r"`((?:\w+/)*(?:\w+\.py|\w+/))`", (DOCS / "architecture.md").read_text())
    assert len(paths) > 40
    assert [path for path in paths if not (SOURCE / path).exists()] == []
