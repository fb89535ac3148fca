"""Every Python example in the README and the documentation runs, and prints what it says.

The blocks of a page that are tagged `python` share a namespace and run in order, in a process of
their own with two logical devices. A block tagged `output` holds what the block before it prints.
A block under `<!-- not run: reason -->` is skipped.
"""

import json
import re
import subprocess
import textwrap
from pathlib import Path
from typing import NamedTuple

import pytest

from subprocess_program import FEW_OPTIMIZATIONS, imported_by, run_program

ROOT = Path(__file__).parents[2]
SECONDS_FOR_A_PAGE = 120

FENCE = re.compile(
    r"^(?P<indent>[ \t]*)```(?P<tag>python|output)\b[^\n]*\n(?P<body>.*?)^(?P=indent)```[ \t]*$",
    re.MULTILINE | re.DOTALL,
)
SKIPPED = re.compile(r"<!--\s*not run:(?P<reason>.*?)-->\s*\Z", re.DOTALL)

# Runs the blocks of one page in order. Compiled under the page's own name and lines, a block that
# fails is quoted in the traceback where it stands on the page.
RUNNER = """
import contextlib, io, json, sys

page, blocks = sys.argv[1], json.load(sys.stdin)
namespace = {"__name__": "__main__"}
for block in blocks:
    print(f"{page}:{block['line']}", file=sys.stderr, flush=True)
    program = compile("\\n" * block["line"] + block["source"], page, "exec")
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            exec(program, namespace)
    except BaseException:
        print(printed.getvalue(), file=sys.stderr)
        raise
    if block["output"] is not None and printed.getvalue().split() != block["output"].split():
        sys.exit(f"The page says that it prints:\\n{block['output']}\\n"
                 f"It prints:\\n{printed.getvalue()}")
"""


class Block(NamedTuple):
    """An example: the line of its opening fence, its source, and what it is said to print."""

    line: int
    source: str
    output: str | None


def blocks_of(page: str) -> list[Block]:
    """The blocks of a page that are to run.

    Raises:
        ValueError: If a block is skipped without a reason, or an `output` follows no block.
    """
    blocks: list[Block] = []
    before_is_skipped = False
    for fence in FENCE.finditer(page):
        line = page.count("\n", 0, fence.start()) + 1
        body = textwrap.dedent(fence["body"])
        if fence["tag"] == "python":
            skipped = SKIPPED.search(page, 0, fence.start())
            if skipped and not skipped["reason"].strip():
                raise ValueError(f"Line {line}: `not run:` is followed by the reason.")
            before_is_skipped = bool(skipped)
            if not skipped:
                blocks.append(Block(line, body, None))
        elif not before_is_skipped:
            if not blocks or blocks[-1].output is not None:
                raise ValueError(f"Line {line}: `output` follows the block that prints it.")
            blocks[-1] = blocks[-1]._replace(output=body)
    return blocks


def run_page(page: Path, folder: Path, seconds: float = SECONDS_FOR_A_PAGE) -> str | None:
    """Runs a page's blocks with `folder` as the working folder; returns what went wrong, if any."""
    blocks = blocks_of(page.read_text())
    try:
        finished = run_program(
            RUNNER,
            page,
            given=json.dumps([block._asdict() for block in blocks]),
            env={"UNISON_CPU_DEVICES": "2", "KERAS_BACKEND": "jax", **FEW_OPTIMIZATIONS},
            folder=folder,
            timeout=seconds,
            imported=imported_by("".join(block.source for block in blocks)),
        )
    except subprocess.TimeoutExpired as expired:
        said = f"the page has {seconds} s.\n{expired.stderr}"
        return f"{last_block(page, expired.stderr)} did not end: {said}"
    if finished.returncode:
        return f"{last_block(page, finished.stderr)} failed.\n{finished.stderr}"
    return None


def last_block(page: Path, said: str) -> str:
    """The block that was running last, as `The block at PAGE:LINE`."""
    begun = re.findall(rf"^{re.escape(str(page))}:\d+$", said, re.MULTILINE)
    return f"The block at {begun[-1]}" if begun else f"{page}"


def pages() -> list[Path]:
    return [
        page
        for page in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
        if "```python" in page.read_text()
    ]


@pytest.mark.timeout(SECONDS_FOR_A_PAGE + 30)
@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_examples_of_a_page_run(page, tmp_path):
    failure = run_page(page, tmp_path)
    if failure:
        pytest.fail(failure, pytrace=False)


@pytest.fixture
def write_page(tmp_path):
    def write(text: str) -> Path:
        page = tmp_path / "page.md"
        page.write_text(textwrap.dedent(text))
        return page

    return write


def test_a_block_sees_the_names_of_those_before_it(write_page, tmp_path):
    page = write_page("""
        ```python
        replicas = 2
        ```
        ```python
        assert replicas == 2
        ```
    """)
    assert run_page(page, tmp_path) is None


def test_a_block_that_fails_is_named_by_page_and_line(write_page, tmp_path):
    page = write_page("""
        ```python
        replicas = 2
        ```

        ```python
        assert replicas == 3
        ```
    """)
    failure = run_page(page, tmp_path)
    assert failure is not None
    assert f"The block at {page}:6 failed" in failure
    assert "line 7" in failure
    assert "assert replicas == 3" in failure


def test_a_block_that_hangs_is_named_by_page_and_line(write_page, tmp_path):
    page = write_page("""
        ```python
        import threading
        threading.Event().wait()
        ```
    """)
    failure = run_page(page, tmp_path, seconds=4)
    assert failure is not None
    assert f"The block at {page}:2 did not end" in failure


def test_a_block_that_prints_something_else_than_it_says_fails(write_page, tmp_path):
    page = write_page("""
        ```python
        print(1 + 1)
        ```
        ```output
        3
        ```
    """)
    failure = run_page(page, tmp_path)
    assert failure is not None
    assert "It prints:\n2" in failure


def test_a_block_that_prints_what_it_says_passes(write_page, tmp_path):
    page = write_page("""
        ```python
        print(1 + 1)
        ```
        ```output
        2
        ```
    """)
    assert run_page(page, tmp_path) is None


def test_a_block_under_a_reason_is_skipped_with_its_output():
    page = "<!-- not run: needs a GPU -->\n```python\nprint(1)\n```\n\n```output\n1\n```\n"
    assert blocks_of(page) == []


def test_a_reason_skips_only_the_block_under_it():
    page = "<!-- not run: needs a GPU -->\n```python\na = 1\n```\n```python\nb = 2\n```\n"
    assert [block.source for block in blocks_of(page)] == ["b = 2\n"]


def test_a_block_is_not_skipped_without_a_reason():
    with pytest.raises(ValueError, match="followed by the reason"):
        blocks_of("<!-- not run: -->\n```python\na = 1\n```\n")


def test_a_block_inside_an_admonition_is_dedented():
    page = "!!! note\n    ```python\n    if True:\n        a = 1\n    ```\n"
    assert blocks_of(page) == [Block(2, "if True:\n    a = 1\n", None)]


def test_a_block_in_another_language_is_not_collected():
    assert blocks_of("```bash\nmake test\n```\n```pycon\n>>> 1\n```\n") == []


def test_the_messages_of_the_troubleshooting_page_are_those_of_the_code():
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    messages = [
        message
        for row in re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
        for message in re.findall(r"`([^`]+)`", row)
    ]
    source = "".join(file.read_text() for file in (ROOT / "src").rglob("*.py"))
    in_one_line = re.sub(r'"\s*\n\s*f?"', "", source)
    assert len(messages) > 100
    assert [message for message in messages if message not in in_one_line] == []
