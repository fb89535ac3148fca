"""The page of a running job: one file, which requests the job's state once per second."""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.resources
from collections.abc import Mapping
from typing import Final

from unison.report import page


def _part(name: str) -> str:
    return importlib.resources.files("unison.monitoring").joinpath(name).read_text("utf-8")


_SCRIPT: Final = _part("page.js")
_DIGEST: Final = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()

#: The headers of all responses: they must not be cached, and the page runs only its own script,
#: sends requests only to its own server, and cannot be embedded in other pages.
SECURITY_HEADERS: Final[Mapping[str, str]] = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        f"default-src 'none'; script-src 'sha256-{_DIGEST}'; style-src 'unsafe-inline'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@functools.cache
def html() -> str:
    """Returns the page.

    Examples:
        >>> html().splitlines()[3]
        '<title>unison top</title>'
    """
    return page("unison top", [_part("page.html"), f"<script>{_SCRIPT}</script>"])
