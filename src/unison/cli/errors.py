"""What a subcommand raises for the user to read."""


class CommandError(Exception):
    """The command cannot do what it was asked for; the message is one line with the mend."""
