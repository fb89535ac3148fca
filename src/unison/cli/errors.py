"""The error that a subcommand raises for the user to read."""

from __future__ import annotations

from collections.abc import Mapping


class CommandError(Exception):
    """The command cannot fulfil the request; the message is one line, with a remedy."""


def require_alone(option: str, others: Mapping[str, bool]) -> None:
    """Rejects an option beside those for other kinds of jobs.

    Args:
        option: The option, which is given.
        others: Whether the others are given, by name.

    Raises:
        CommandError: One of them is.
    """
    for name, is_given in others.items():
        if is_given:
            raise CommandError(f"{option} and {name} are for different jobs: leave one out.")
