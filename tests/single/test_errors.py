"""`unison.errors`: TensorFlow's names, Python's exceptions."""

import ast
import pathlib
import pickle

import pytest

import unison.tf as tf
from unison import errors


@pytest.mark.parametrize(
    ("error", "python"),
    [
        (errors.InvalidArgumentError, ValueError),
        (errors.NotFoundError, FileNotFoundError),
        (errors.AlreadyExistsError, FileExistsError),
        (errors.PermissionDeniedError, PermissionError),
        (errors.DeadlineExceededError, TimeoutError),
        (errors.OutOfRangeError, EOFError),
        (errors.UnavailableError, ConnectionError),
        (errors.UnimplementedError, NotImplementedError),
        (errors.ResourceExhaustedError, MemoryError),
        (errors.AbortedError, RuntimeError),
        (errors.InternalError, RuntimeError),
        (errors.DataLossError, OSError),
    ],
)
def test_an_error_is_the_python_exception_that_says_the_same(error, python):
    with pytest.raises(python, match="what happened") as raised:
        raise error(None, None, "what happened")
    assert isinstance(raised.value, errors.OpError)
    assert raised.value.message == str(raised.value) == "what happened"


def test_an_error_has_tensorflows_code():
    codes = [tf.errors.NotFoundError(None, None, "").error_code, tf.errors.NOT_FOUND, tf.errors.OK]
    assert codes == [5, 5, 0]
    assert tf.errors.OpError(None, None, "", tf.errors.ABORTED).error_code == 10


def test_an_error_travels_between_processes():
    error = pickle.loads(pickle.dumps(errors.NotFoundError("node", None, "gone")))
    assert (type(error), error.node_def, error.message) == (errors.NotFoundError, "node", "gone")


def test_the_face_has_the_same_classes():
    assert tf.errors.OutOfRangeError is errors.OutOfRangeError


def errors_without_a_message(source):
    """Lines that make one of these errors whose message is taken for the node of a graph."""
    names = {name for name in vars(errors) if name.endswith("Error")}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            called = getattr(node.func, "id", getattr(node.func, "attr", None))
            if called in names and len(node.args) in (1, 2):
                yield node.lineno


def test_no_message_is_given_as_the_node_of_a_graph():
    package = pathlib.Path(errors.__file__).parent
    wrong = [
        f"{path.relative_to(package)}:{line}"
        for path in sorted(package.rglob("*.py"))
        for line in errors_without_a_message(path.read_text())
    ]
    assert wrong == []
