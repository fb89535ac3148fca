"""The key of a job, by which its processes authenticate each other."""

from __future__ import annotations

import os
import pathlib
import secrets

from unison.errors import InvalidArgumentError, PermissionDeniedError
from unison.net.runtime_folder import runtime_folder
from unison.storage import atomic

#: The environment variable with the key of a job, in hexadecimal digits.
KEY_VARIABLE = "UNISON_KEY"

#: A shorter key could be found by trying all keys against a recorded proof.
_LEAST_BYTES = 16


def key() -> bytes:
    """Returns the key of this process's job.

    It is `UNISON_KEY` if that is set, else the content of a file that only the user can read. The
    file is created when it is first needed: in the user's configuration folder, or if that is not
    writable, in the runtime folder.

    Raises:
        InvalidArgumentError: `UNISON_KEY` or the file does not contain a key.
        PermissionDeniedError: Other users can read the file, or it cannot be created.
    """
    given = os.environ.get(KEY_VARIABLE)
    if given:
        return _parsed(given, KEY_VARIABLE)
    home = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    try:
        path = _written(pathlib.Path(home).expanduser() / "unison")
    except (OSError, RuntimeError) as error:  # no home, or a read-only one
        try:
            path = _written(runtime_folder())
        except OSError as second:
            raise PermissionDeniedError(
                message=f"Expected a writable folder for the key of this user. Received: {error}; "
                f"{second}. Set {KEY_VARIABLE} to the same key for all processes of the job."
            ) from error
    about = path.stat()
    if about.st_uid != os.getuid() or about.st_mode & 0o077:
        raise PermissionDeniedError(
            message=f"Expected {path} to be readable by its owner only: who knows this key can run "
            f"code in this user's jobs. Run `chmod 600 {path}`, or set {KEY_VARIABLE}."
        )
    return _parsed(path.read_text(errors="replace"), str(path))


def new_key() -> str:
    """Returns a new key for `UNISON_KEY`.

    Examples:
        >>> len(bytes.fromhex(new_key()))
        32
    """
    return secrets.token_hex(32)


def _written(folder: pathlib.Path) -> pathlib.Path:
    """Returns the key file in a folder; creates it if necessary."""
    path = folder / "key"
    if not path.exists():
        with atomic.aside(str(path)) as new:
            with new.opened(0o600) as file:
                file.write(new_key().encode())
            new.publish_if_absent()  # another process may be faster
    return path


def _parsed(text: str, where: str) -> bytes:
    try:
        found = bytes.fromhex(text.strip())
        if len(found) < _LEAST_BYTES:
            raise ValueError(f"{len(found)} bytes")
    except ValueError as error:
        raise InvalidArgumentError(
            message=f"Expected {where} to hold at least {2 * _LEAST_BYTES} hexadecimal digits. "
            f"Received: {error}. `python -c 'import secrets; print(secrets.token_hex(32))'` makes "
            "a key."
        ) from error
    return found
