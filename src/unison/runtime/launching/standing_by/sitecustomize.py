"""The process's side of `standby`: waits before the program.

Python imports the first `sitecustomize` on its path when it starts, before it looks at the program.
That of a standby is this one. It imports the modules, waits until it is told to go on, and ends;
then Python runs the program as ever: its arguments, `__main__`, tracebacks and exit codes are those
of a process that has not waited. Nothing of `unison` is imported, as that would import JAX before
the program's variables are set.
"""

import marshal
import os
import sys

#: The variable with the file descriptor of the pipe from which this process is told what to do.
_VARIABLE = "UNISON_STANDBY"

#: The value of the variable for a process that is to show that this file runs, and its exit code.
_TRIAL = "trial"
_SHOWN = 87


#: The variables of the job that runs now: this process is to be of the next one.
_WITHHELD = {"TF_CONFIG", "UNISON_KEY"}

#: The variables that imports have written, given a default, or removed.
_written: set[str] = set()


class _Noting(os._Environ[str]):
    """The environment, while modules are imported."""

    def __setitem__(self, name: str, value: str) -> None:
        _written.add(name)
        super().__setitem__(name, value)

    def __delitem__(self, name: str) -> None:
        _written.add(name)
        super().__delitem__(name)

    def setdefault(self, name: str, value: str) -> str:
        _written.add(name)
        return super().setdefault(name, value)


def _stand_by(said: str) -> Exception:
    """Waits until it is told to go on; returns the error of the environment's own file.

    Args:
        said: The value of the variable.
    """
    if said == _TRIAL:
        os._exit(_SHOWN)
    pipe = int(said)
    os.set_inheritable(pipe, False)
    output = os.dup(1)
    nothing = os.open(os.devnull, os.O_WRONLY)
    for standard in (1, 2):
        os.dup2(nothing, standard)
    os.close(nothing)
    with open(pipe, "rb") as told:
        begin, own, modules = marshal.load(told)
        _set_environment({name: begin[name] for name in begin.keys() - _WITHHELD})
        error = _import_the_next()
        os.environ.update(own)
        _import(modules)
        if _has_started_jax():
            os._exit(1)  # a program joins its job before
        final, unused = marshal.load(told)
    for name in _written:  # as if the program had imported them
        if final.get(name) == begin.get(name):
            final.pop(name, None)
            if name in os.environ:
                final[name] = os.environ[name]
    _set_environment(final)
    for standard in (1, 2):
        os.dup2(output, standard)
    for descriptor in (output, *unused):
        os.close(descriptor)
    return error


def _import_the_next() -> Exception:
    """Imports the `sitecustomize` that Python would have imported, and returns its error."""
    folder = os.path.dirname(__file__)
    sys.path.remove(folder)
    sys.path_importer_cache.pop(folder, None)
    del sys.modules["sitecustomize"]
    try:
        __import__("sitecustomize")
    except Exception as error:
        return error.with_traceback(None)
    return _NoError()


class _NoError(Exception):
    """There is such a file, which has no error."""


def _import(modules: list[str]) -> None:
    """Imports modules that there are, from where the program would."""
    path = _path_of_program()
    sys.path[:0] = path
    plain = type(os.environ)
    os.environ.__class__ = _Noting
    for name in modules:
        try:  # noqa: SIM105 - without importing more than the program does
            __import__(name)
        except (Exception, SystemExit):
            pass  # the program sees it, if it imports the module
    os.environ.__class__ = plain
    for folder in path:
        if folder in sys.path:
            sys.path.remove(folder)
        sys.path_importer_cache.pop(folder, None)  # files may be added while it waits


def _has_started_jax() -> bool:
    """Whether a module has computed something with JAX, which has started its backend."""
    private_jax = sys.modules.get("unison.runtime.private_jax")
    return private_jax is not None and bool(private_jax.backend_is_started())


def _path_of_program() -> list[str]:
    """Returns the entry of `sys.path` that Python is about to add, if any."""
    program = sys.argv[0]
    if sys.flags.safe_path:
        return []
    if program in ("-c", "-m"):
        return [os.getcwd()]
    return [os.path.dirname(os.path.realpath(program))] if os.path.isfile(program) else [program]


def _set_environment(environment: dict[str, str]) -> None:
    """Changes what differs, as other threads may read the rest."""
    for name in set(os.environ) - environment.keys():
        del os.environ[name]
    for name, value in environment.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def _end_interrupted() -> None:
    """Ends as an interrupted program ends."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)


def _error() -> Exception:
    try:
        return _stand_by(os.environ.pop(_VARIABLE))
    except KeyboardInterrupt:
        _end_interrupted()
        raise
    except BaseException:  # the process that has started this one has ended: never run the program
        os._exit(1)


if _VARIABLE in os.environ and not isinstance(_it := _error(), _NoError):
    raise _it
