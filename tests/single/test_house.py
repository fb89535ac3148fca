"""The house keeps its floors: who may import whom, and what importing the package must not do."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from import_graph import PACKAGE, circles, file_imports, imports_of, modules

# From the ground up: a room imports only from its own floor or from those below.
FLOORS = (
    "lazy_loader",
    "fingerprint",
    "errors",
    "unsupported",
    "tracebacks",
    "interrupts",
    "thread_local",
    "thread_pool",
    "names",
    "native",
    "storage",
    "net",
    "partitioning",
    "pipelining",
    "identity_key",
    "jaxprs",
    "runtime",
    "profiling",
    "conversion",
    "eager_fallback",
    "slices",
    "values",
    "captured",
    "cells",
    "collectives",
    "compression",
    "lowering",
    "lifting",
    "lockstep",
    "observers",
    "variables",
    "module",
    "program",
    "branches",
    "autograph",
    "data",
    "strategies",
    "functions",
    "keras",
    "train",
    "saving",
    "report",
    "planning",
    "monitoring",
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


def room_of(module: str) -> str:
    """The room of a file of the package, `collectives/packing.py` being in `collectives`."""
    first = Path(module.split("/")[0]).stem
    return {"__init__": "unison", "__main__": "cli"}.get(first, first)


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


#: What is made in one place: the module, and what others use instead.
MADE_ONCE = {
    "threading.local": ("thread_local.py", "unison.thread_local.ThreadLocal"),
    "concurrent.futures.ThreadPoolExecutor": ("thread_pool.py", "unison.thread_pool.ThreadPool"),
}


def made_elsewhere(module: str, source: str) -> list[str]:
    """One sentence for each use of what one module makes."""
    used = list(imports_of(module, source))
    used += [
        (node.lineno, ast.unparse(node))
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute)
    ]
    return [
        f"{module}:{line}: uses {path}; use {MADE_ONCE[path][1]}"
        for line, path in used
        if path in MADE_ONCE and MADE_ONCE[path][0] != module
    ]


#: What gives a file another name, and the modules that may call it: `tf.io.gfile.rename` is what a
#: user calls.
RENAMES = ("os.link", "os.rename", "os.replace", "os.renames", "shutil.move")
RENAMING = ("storage/atomic.py", "tf/io/gfile.py")


def renames_of_its_own(module: str, source: str) -> list[str]:
    """One sentence for each file that appears under its name by other means than `storage`."""
    if module in RENAMING:
        return []
    return [
        f"{module}:{node.lineno}: calls {ast.unparse(node.func)}; use unison.storage.atomic"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in RENAMES
    ]


#: The one place that traces what users give, and those that trace a jaxpr, or a part of one, again.
TRACING = "program/tracing.py"
TRACING_AGAIN = (
    "compression/reporting.py",  # a compression's own functions, to count what they send
    "lockstep.py",
    "lowering/gathering.py",
    "lowering/rewrite.py",
    "parameter_server/splitting.py",
    "program/numerics.py",
    "runtime/private_jax.py",
    "runtime/shared_memory/rewriting.py",
    "tf/data/functions.py",
)


def traces_of_its_own(module: str, source: str) -> list[str]:
    """One sentence for each trace of a user's function that `program.tracing` does not make."""
    if module in (TRACING, *TRACING_AGAIN):
        return []
    return [
        f"{module}:{node.lineno}: uses jax.make_jaxpr; use unison.program.tracing.traced"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "jax.make_jaxpr"
    ]


#: Where errors are caught in threads and processes of the package's own, in which Python runs no
#: signal handler.
IN_THREADS = (
    "benching/recording.py",
    "parameter_server/serving.py",
    "parameter_server/worker_threads.py",
    "train/preemption.py",
)
ROOMS_OF_THREADS = ("data/service/", "data/workers/", "monitoring/", "net/", "runtime/", "saving/")


def errors_of_handlers_dropped(module: str, source: str) -> list[str]:
    """One sentence for each place that may drop what a user's signal handler has raised."""
    if module in IN_THREADS or module.startswith(ROOMS_OF_THREADS):
        return []
    dropped = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ExceptHandler) and ast.unparse(node.type or node) == "Exception":
            lines = map(ast.unparse, node.body)
            shown = [line for line in lines if not line.startswith("logger.")]
            keeps = node.name and re.search(rf"\b{node.name}\b", "\n".join(shown))
            if not keeps and not isinstance(node.body[-1], ast.Raise):
                dropped.append(node.lineno)
        elif isinstance(node, ast.Call) and ast.unparse(node) == "contextlib.suppress(Exception)":
            dropped.append(node.lineno)
    return [
        f"{module}:{line}: drops every Exception; ask interrupts.is_of_a_signal_handler"
        for line in dropped
    ]


#: The words with which no summary begins: "The number of steps", and not "How many steps".
QUESTIONS = re.compile(r"(?:What|Who|Whoever|Which|How|Where|When|That)\b")


def summaries_that_ask(module: str, source: str) -> list[str]:
    """One sentence for each summary, of a docstring or an attribute, that begins as a question."""
    found = [
        (node.body[0].lineno, ast.get_docstring(node))
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and ast.get_docstring(node)
    ]
    lines = [(number, line.strip()) for number, line in enumerate(source.splitlines(), 1)]
    before = ["", *(line for _, line in lines)]
    found += [
        (number, line.removeprefix("#: "))
        for (number, line), last in zip(lines, before, strict=False)
        if line.startswith("#: ") and not last.startswith("#: ")
    ]
    return [
        f"{module}:{number}: begins with {words.split()[0]!r}; name the thing that it is"
        for number, words in found
        if QUESTIONS.match(words)
    ]


def complaints_of(rule: Callable[[str, str], list[str]]) -> list[str]:
    """What a rule has to say of all modules."""
    return [each for name in modules() for each in rule(name, (PACKAGE / name).read_text())]


@pytest.mark.parametrize(
    "rule",
    [
        upward_imports,
        private_jax_imports,
        network_of_its_own,
        made_elsewhere,
        renames_of_its_own,
        traces_of_its_own,
        errors_of_handlers_dropped,
        summaries_that_ask,
    ],
)
def test_every_module_keeps_the_rule(rule):
    assert complaints_of(rule) == []


def test_every_module_lies_on_a_floor():
    elsewhere = [module for module in modules() if room_of(module) not in FLOORS]
    assert elsewhere == [], "Place their rooms in FLOORS."


def test_no_files_import_each_other_in_a_circle():
    sources = {name: (PACKAGE / name).read_text() for name in modules()}
    assert circles(file_imports(sources)) == {}, "Move what both need to a file that both import."


@pytest.mark.parametrize(
    "sources",
    [
        {"a.py": "from unison import b", "b.py": "def late():\n    from unison.a import name"},
        {"a.py": "import unison.b", "b.py": "import unison.c", "c.py": "from unison import a"},
        {
            "a/__init__.py": "",
            "a/__init__.pyi": "from unison.a.one import One as One",
            "a/one.py": "from unison.b import name",
            "b.py": "from unison.a import One",
        },
    ],
)
def test_a_circle_of_imports_is_found(sources):
    outside = {"d.py": "import unison.a", "e.py": ""}
    found = circles(file_imports(sources | outside))
    assert found.keys() == {name for name in sources if "__init__" not in name}


def test_what_is_imported_for_types_only_makes_no_circle():
    for_types = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from unison.a import A"
    assert circles(file_imports({"a.py": "import unison.b", "b.py": for_types})) == {}


def test_a_rename_elsewhere_is_found():
    source = "import os\nos.replace(aside, path)"
    assert len(renames_of_its_own("train/archive.py", source)) == 1
    assert renames_of_its_own("storage/atomic.py", source) == []


@pytest.mark.parametrize(
    "source",
    ['"""What is here."""', 'def f():\n    """How many there are."""', "#: Who is late.\nx = 1"],
)
def test_a_summary_that_asks_is_found(source):
    (complaint,) = summaries_that_ask("cells.py", source)
    assert "name the thing that it is" in complaint


def test_a_summary_may_ask_later():
    source = '"""The number of steps.\n\nWhat follows explains it."""\n#: A number of\n#: What.\n'
    assert summaries_that_ask("cells.py", source) == []


def test_a_trace_elsewhere_is_found():
    source = "import jax\njaxpr = jax.make_jaxpr(function)(1.0)"
    assert len(traces_of_its_own("keras/step.py", source)) == 1
    assert traces_of_its_own("program/tracing.py", source) == []


@pytest.mark.parametrize(
    "caught",
    [
        "try: run()\nexcept Exception: pass",
        "try: run()\nexcept Exception as error:\n    logger.debug('%s', error)",
        "with contextlib.suppress(Exception): run()",
    ],
)
def test_a_place_that_drops_what_a_handler_raises_is_found(caught):
    assert len(errors_of_handlers_dropped("program/cache.py", caught)) == 1
    assert errors_of_handlers_dropped("net/pump.py", caught) == []


@pytest.mark.parametrize(
    "then", ["raise", "if is_of_a_signal_handler(error): raise", "failure = error"]
)
def test_a_place_that_keeps_what_a_handler_raises_is_none(then):
    caught = f"try: run()\nexcept Exception as error:\n    {then}"
    assert errors_of_handlers_dropped("program/cache.py", caught) == []


@pytest.mark.parametrize(
    "source",
    [
        "import threading\nheld = threading.local()",
        "class Held(threading.local): pass",
        "from threading import local",
        "from concurrent.futures import ThreadPoolExecutor",
        "import concurrent.futures\npool = concurrent.futures.ThreadPoolExecutor(2)",
    ],
)
def test_what_one_module_makes_is_found_elsewhere(source):
    assert len(made_elsewhere("program.py", source)) == 1


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


#: How many lines a file has at most, and those that have more, with what they hold.
LONGEST = 600
LONGER = {
    "cells.py": "all that a cell does, read beside its table of annotations",
    "data/dataset.py": "one class, whose methods are what users call, each with its docstring",
    "data/distribution/replica_batches.py": "a batch's way from workers to replicas",
    "keras/lookup.py": "three layers of Keras that differ in a line or two",
    "keras/step.py": "a step of Keras: its programs, what waits, and what has taken effect",
    "parameter_server/programs.py": "a scheduled function's way to programs of two machines",
    "parameter_server/splitting.py": "one algorithm over a program's equations",
    "program/cache.py": "a program of `run`, from its signature to its results",
    "runtime/elastic/group.py": "an elastic group: view, launches, resumption and hooks",
    "runtime/elastic/roster.py": "the rules of membership, which a model explores as one",
    "runtime/private_jax.py": "all private names of JAX, each with its reason",
    "tf/data/functions.py": "functions of elements, traced once",
    "tf/image.py": "TensorFlow's functions of a module",
    "tf/math.py": "TensorFlow's functions of a module",
    "tf/selecting.py": "TensorFlow's functions of indices",
    "variables.py": "one class, whose methods are what users call, each with its docstring",
}


def test_a_file_is_short_enough_to_be_read_as_one():
    lengths = {name: len((PACKAGE / name).read_text().splitlines()) for name in modules()}
    long = {name for name, length in lengths.items() if length > LONGEST and name.endswith(".py")}
    assert sorted(long - LONGER.keys()) == [], "Divide them where they hold two ideas."
    assert sorted(LONGER.keys() - long) == [], "They are short now: take them off the list."


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
