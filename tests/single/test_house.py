"""The house keeps its floors: who may import whom, and what importing the package must not do."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "unison"

# From the ground up: a room imports only from its own floor or from those below.
FLOORS = (
    "lazy_loader",
    "fingerprint",
    "errors",
    "tracebacks",
    "names",
    "storage",
    "net",
    "partitioning",
    "pipelining",
    "references",
    "equations",
    "runtime",
    "profiling",
    "stepping",
    "slices",
    "values",
    "cells",
    "collectives",
    "compression",
    "lowering",
    "lifting",
    "lockstep",
    "reads",
    "variables",
    "module",
    "program",
    "branches",
    "data",
    "strategies",
    "functions",
    "keras",
    "train",
    "saving",
    "report",
    "monitoring",
    "planning",
    "elastic",
    "parameter_server",
    "testing",
    "benching",
    "hooks",
    "unison",  # the public face: __init__.py
    "cli",
    "tf",
)
PRIVATE_JAX = "runtime/private_jax.py"


class Import(NamedTuple):
    """One name that a module imports, as the absolute dotted path of the module or attribute."""

    line: int
    path: str


def modules() -> list[str]:
    found = [*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.pyi")]  # stubs list what is loaded later
    return sorted(module.relative_to(PACKAGE).as_posix() for module in found)


def room_of(module: str) -> str:
    """The room of a file of the package, `collectives/packing.py` being in `collectives`."""
    first = Path(module.split("/")[0]).stem
    return {"__init__": "unison", "__main__": "cli"}.get(first, first)


def imports_of(module: str, source: str) -> Iterator[Import]:
    """Every import statement of `source`, wherever it stands; one inside a function counts too."""
    folders = ["unison", *module.split("/")[:-1]]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (Import(node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = [node.module] if node.module else []
            if node.level:
                origin = folders[: len(folders) - node.level + 1] + origin
            base = ".".join(origin)
            yield from (Import(node.lineno, f"{base}.{alias.name}") for alias in node.names)


def upward_imports(module: str, source: str) -> list[str]:
    """One sentence for each import that goes up the house, or into the drop-in face."""
    room = room_of(module)
    if room not in FLOORS:  # said by `test_every_module_lies_on_a_floor`
        return []
    complaints = []
    for line, path in imports_of(module, source):
        if path.split(".")[0] != "unison":
            continue
        target = path.split(".")[1] if path.count(".") else "unison"
        if target not in FLOORS:  # a public name, taken from the package itself
            target = "unison"
        if FLOORS.index(target) > FLOORS.index(room):
            complaints.append(f"{module}:{line}: {room} imports {path}, which lies above it")
    return complaints


def private_jax_imports(module: str, source: str) -> list[str]:
    return [
        f"{module}:{line}: imports {path}; move what needs it to {PRIVATE_JAX}"
        for line, path in imports_of(module, source)
        if path.startswith(("jax._src", "jaxlib._")) and module != PRIVATE_JAX
    ]


#: What makes listeners, proofs and encryption, which are made in one room.
NET = "net"
NETWORK_MODULES = ("hmac", "http.server", "socketserver", "ssl", "xmlrpc.server")
NETWORK_CALLS = ("create_server", "start_server", "compare_digest", "Listener", "listen")


def network_of_its_own(module: str, source: str) -> list[str]:
    """One sentence for each listener, proof or encryption that `net` does not make."""
    if room_of(module) == NET:
        return []
    imports = list(imports_of(module, source))
    complaints = [
        f"{module}:{line}: imports {path}; use what unison.net has"
        for line, path in imports
        if any(path == name or path.startswith(f"{name}.") for name in NETWORK_MODULES)
    ]
    own = {path.split(".")[-1] for _, path in imports if path.startswith("unison.")}
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        of_ours = isinstance(node.func.value, ast.Name) and node.func.value.id in own
        if node.func.attr in NETWORK_CALLS and not of_ours:
            complaints.append(f"{module}:{node.lineno}: calls {node.func.attr}")
    return complaints


def test_listeners_and_proofs_are_made_in_one_room():
    sources = {module: (PACKAGE / module).read_text() for module in modules()}
    assert [each for name in sources for each in network_of_its_own(name, sources[name])] == []


@pytest.mark.parametrize(
    "source",
    [
        "import hmac",
        "from http.server import HTTPServer",
        "import ssl as tls",
        "import socket\nsocket.create_server(('', 0))",
        "import socket\nown = socket.socket()\nown.listen()",
        "import secrets\nsecrets.compare_digest(a, b)",
        "import multiprocessing.connection as c\nc.Listener()",
    ],
)
def test_a_listener_elsewhere_is_found(source):
    assert len(network_of_its_own("program.py", source)) == 1
    assert network_of_its_own("net/listening.py", source) == []


def test_what_else_is_called_listen_is_not_one():
    source = "from unison.runtime.elastic import faults\nfaults.listen()"
    assert network_of_its_own("program.py", source) == []


@pytest.mark.parametrize("module", modules())
def test_every_module_lies_on_a_floor(module):
    assert room_of(module) in FLOORS, f"Place the room of {module} in FLOORS."


@pytest.mark.parametrize("module", modules())
def test_imports_go_down_the_house(module):
    assert upward_imports(module, (PACKAGE / module).read_text()) == []


@pytest.mark.parametrize("module", modules())
def test_the_private_names_of_jax_are_imported_in_one_file(module):
    assert private_jax_imports(module, (PACKAGE / module).read_text()) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("values.py", "from unison.strategies import MirroredStrategy"),
        ("values.py", "from .strategies.mirrored import MirroredStrategy"),
        ("runtime/devices.py", "from .. import values"),
        ("runtime/devices.py", "from ..values import PerReplica"),
        ("program.py", "def late():\n    import unison.keras.trainer"),
        ("strategies/mirrored.py", "import unison"),
        ("strategies/mirrored.py", "from unison import Variable"),
        ("cli/demo.py", "import unison.tf as tf"),
        ("__init__.py", "from unison import tf"),
    ],
)
def test_an_import_that_goes_up_is_found(module, source):
    assert len(upward_imports(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("strategies/mirrored.py", "from unison.values import PerReplica"),
        ("strategies/mirrored.py", "from .base import Strategy"),
        ("strategies/mirrored.py", "from .. import collectives"),
        ("keras/trainer.py", "import keras"),
        ("cli/demo.py", "import unison"),
        ("tf/distribute.py", "from unison.keras import fit"),
    ],
)
def test_an_import_from_the_same_floor_or_below_is_allowed(module, source):
    assert upward_imports(module, source) == []


@pytest.mark.parametrize("source", ["import jax._src.core", "from jax._src import core"])
def test_a_private_name_of_jax_elsewhere_is_found(source):
    assert len(private_jax_imports("program.py", source)) == 1


def run_in_a_fresh_interpreter(program: str) -> str:
    """What `program` prints in a process of its own that has this one's environment."""
    finished = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.strip()


def test_importing_unison_imports_neither_keras_nor_tensorflow():
    program = (
        "import sys, unison; "
        "print([name for name in ('keras', 'tensorflow', 'unison.tf') if name in sys.modules])"
    )
    assert run_in_a_fresh_interpreter(program) == "[]"


def test_importing_unison_starts_no_backend():
    program = (
        "import unison; "
        "from jax._src import xla_bridge; "
        "print(xla_bridge.backends_are_initialized())"
    )
    assert run_in_a_fresh_interpreter(program) == "False"
