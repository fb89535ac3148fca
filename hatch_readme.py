"""Makes a README of README.md that renders outside of the repository, for the package's metadata.

Links into the repository lead nowhere on a package index. They become links to the release at the
address that `project.urls` names as `Repository`; where there is none, they become their text.
"""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_FENCED = r"^```.*?^```$"
_LINK = r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)"
_PIECES = re.compile(f"{_FENCED}|{_LINK}", re.MULTILINE | re.DOTALL)


class MetadataHook(MetadataHookInterface):
    """Sets `readme`, which pyproject.toml declares as dynamic."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        urls = metadata.get("urls", {})
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": readable_elsewhere(text, urls.get("Repository"), metadata["version"]),
        }


def readable_elsewhere(text: str, repository: str | None, version: str) -> str:
    """Replaces the links of `text` that only the repository can follow; code stays as it is."""

    def replacement(piece: re.Match[str]) -> str:
        target = piece["target"]
        if target is None or re.match(r"\w+:|#", target):
            return piece[0]
        if repository is None:
            return piece["text"]
        kind = "raw" if piece["image"] else "blob"
        address = f"{repository.rstrip('/')}/{kind}/v{version}/{target}"
        return f"{piece['image']}[{piece['text']}]({address})"

    return _PIECES.sub(replacement, text)
