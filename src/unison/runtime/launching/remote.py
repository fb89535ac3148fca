"""Commands on other machines, which `ssh` starts.

A command gets the job's key on its standard input, since arguments can be seen by all users of a
machine. That input stays open: when it ends, because this process or the connection has ended, the
command is terminated.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from unison.net.addresses import own_address
from unison.net.secret import KEY_VARIABLE
from unison.runtime.launching.workers import Program

#: Becomes the command that follows, so that it is a Python program's process.
_BECOME = "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])"

#: `ssh` asks no questions, and gives up on machines that cannot be reached.
_SSH = ("ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=30")

#: Runs a command with the key from the input, and terminates it when the input ends. A background
#: command would read from /dev/null instead of the input.
_SCRIPT = """\
read -r {variable} && export {variable} && cd {folder} || exit 1
exec 3<&0
{command} </dev/null 3<&- & own=$!
(cat <&3; kill $own) >/dev/null 2>&1 & other=$!
exec 3<&-
wait $own; code=$?
kill $other 2>/dev/null
exit $code
"""


def remote_program(
    host: str, command: Sequence[str], folder: str, environment: Mapping[str, str], key: str
) -> Program:
    """Returns the program that runs a command on a machine; on this one without `ssh`.

    Args:
        host: The machine, as `ssh` takes it: a name, an address, or one of its configuration.
        command: The command and its arguments.
        folder: The folder in which it runs.
        environment: Additions to its environment.
        key: The job's key, in hexadecimal digits.
    """
    assigned = [f"{name}={value}" for name, value in environment.items()]
    script = _SCRIPT.format(
        variable=KEY_VARIABLE,
        folder=shlex.quote(folder),
        command=shlex.join(["env", *assigned, *command] if assigned else list(command)),
    )
    is_here = own_address(host.rpartition("@")[2]) is not None
    start = ["sh", "-c", script] if is_here else [*_SSH, host, script]
    return Program(["-c", _BECOME, *start], {}, call=f"{key}\n".encode(), holds_input=True)
