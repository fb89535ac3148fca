"""The error that a subcommand raises for the user to read."""


class CommandError(Exception):
    """The command cannot fulfil the request; the message is one line, with a remedy."""
