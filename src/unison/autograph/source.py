"""Functions with their source rewritten: statements as calls of operators.

The code that is made of a function has the function's file and lines, so errors show the user's.
"""

from __future__ import annotations

import ast
import copy
import types
from collections.abc import Iterator, Mapping
from typing import Any

from malt.converters import (
    asserts,
    break_statements,
    call_trees,
    conditional_expressions,
    continue_statements,
    control_flow,
    functions,
    logical_expressions,
    return_statements,
    variables,
)
from malt.converters.directives import STATIC_VALUE, DirectivesTransformer
from malt.core import converter, unsupported_features_checker
from malt.impl import api
from malt.lang import directives
from malt.pyct import (
    anno,
    errors,
    inspect_utils,
    naming,
    origin_info,
    parser,
    transformer,
    transpiler,
)

from unison.autograph.directives import set_loop_options

#: Of the optional features of the converters: the others change what Python means by `==` and by
#: lists.
_OPTIONS = converter.ConversionOptions(
    recursive=True,
    user_requested=True,
    optional_features=converter.Feature.ASSERT_STATEMENTS,
)

#: The converters that come after the directives, in order: each relies on those before it.
_CONVERTERS = (
    break_statements,
    asserts,
    continue_statements,
    return_statements,
    call_trees,
    control_flow,
    conditional_expressions,
    logical_expressions,
    variables,
)

#: More columns than a line has.
_WIDEST_LINE = 10_000


class Transpiler(api.PyToPy):
    """Rewrites functions, each code object once.

    Args:
        operators: What the names in the rewritten code stand for.
    """

    def __init__(self, operators: Mapping[str, Any]):
        super().__init__()
        self._operators = types.SimpleNamespace(**operators)

    def convert(self, function: types.FunctionType) -> types.FunctionType:
        """Returns the function as rewritten, with the same closure, globals and defaults.

        Raises:
            Exception: It cannot be rewritten; for any reason.
        """
        with self._cache_lock:
            if not self._cache.has(function, _OPTIONS):
                self._cache[function][_OPTIONS] = self._rewritten(function)
            factory = self._cache[function][_OPTIONS]
        made = factory.instantiate(
            function.__globals__,
            function.__closure__ or (),
            function.__defaults__,
            function.__kwdefaults__,
        )
        made.__qualname__, made.__module__ = function.__qualname__, function.__module__
        made.__doc__ = function.__doc__
        return made

    def _rewritten(self, function: types.FunctionType) -> _Factory:
        features = inspect_utils.getfutureimports(function)
        node, source = parser.parse_entity(function, future_features=features)
        code = function.__code__
        if not _is_source_of(node, code):
            raise errors.InaccessibleSourceCodeError(
                f"its file, {code.co_filename}, has been changed since it was imported"
            )
        node = _WithReturn().visit(node)
        origin_info.resolve(node, source, code.co_filename, code.co_firstlineno, 0)
        namespace = inspect_utils.getnamespace(function)
        namer = naming.Namer(namespace)
        name = namer.new_symbol(self.get_transformed_name(node), ())
        entity = transformer.EntityInfo(name, source, "<fragment>", features, namespace)
        context = transformer.Context(entity, namer, converter.ProgramContext(_OPTIONS))
        rewritten = self.transform_ast(self._erase_arg_defaults(node), context)
        return _Factory(function, rewritten, context, {"ag__": self._operators})

    def transform_ast(self, node: Any, ctx: Any) -> Any:
        _Checker().visit(node)
        unsupported_features_checker.verify(node)
        node = functions.transform(self.initial_analysis(node, ctx), ctx)
        node = _Directives(ctx).visit(node)
        for module in _CONVERTERS:
            node = module.transform(node, ctx)
        return node


def _is_source_of(node: Any, code: types.CodeType) -> bool:
    """Whether a function's source is that from which its code was made, as far as names tell.

    The code may have more: pytest rewrites assertions.
    """
    function = copy.deepcopy(node)
    ast.increment_lineno(function, code.co_firstlineno - 1)  # Python 3.13 stores those of classes
    if isinstance(function, ast.Lambda):
        function = ast.Expr(function)
    else:
        function.decorator_list = []
    names = "".join(f"  {name} = None\n" for name in code.co_freevars)
    outer = ast.parse(f"def outer():\n{names}  0")
    outer.body[0].body.append(function)  # type: ignore[attr-defined]
    compiled = compile(ast.fix_missing_locations(outer), code.co_filename, "exec")
    made = next(each for each in _codes_in(compiled) if each.co_name == code.co_name)
    return _words(made) <= _words(code)


def _codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from _codes_in(constant)


def _words(code: types.CodeType) -> set[str]:
    """Returns the names, the numbers and the bytes in code."""
    words: set[str] = set()
    for each in (code, *_codes_in(code)):
        words |= {each.co_name, *each.co_names, *each.co_varnames}
        words |= {repr(c) for c in each.co_consts if isinstance(c, int | float | complex | bytes)}
    return words


#: The reason for which generators and coroutines are not rewritten.
WHY_SUSPENDED = (
    "a branch or a loop of the compiled program cannot stop at a `yield` or an `await`. Return a "
    "list or a tensor instead, or use tf.where there"
)


class _Checker(ast.NodeVisitor):
    """Raises for what the rewritten code would not do as Python does."""

    def visit_Yield(self, node: ast.expr) -> None:
        raise errors.UnsupportedLanguageElementError(f"line {node.lineno} of it: {WHY_SUSPENDED}")

    visit_YieldFrom = visit_Await = visit_Yield  # noqa: N815

    def visit_Match(self, node: ast.Match) -> None:
        raise errors.UnsupportedLanguageElementError(
            f"line {node.lineno} of it has a `match` statement: use `if` and `elif`, or put the "
            "control flow over tensors into a function of its own, and call that"
        )

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        names = [n.id for n in ast.walk(node.type) if isinstance(n, ast.Name)] if node.type else []
        if not node.type or "BaseException" in names:
            raise errors.UnsupportedLanguageElementError(
                f"line {node.lineno} of it catches every exception: name the classes"
            )
        self.generic_visit(node)

    def _refuse_assignments(self, node: ast.AST) -> None:
        if any(isinstance(each, ast.NamedExpr) for each in ast.walk(node)):
            raise errors.UnsupportedLanguageElementError(
                "it assigns by := in an operand of `and`, `or`, a conditional expression, a chain "
                "of comparisons or the condition of a `while`"
            )
        self.generic_visit(node)

    visit_BoolOp = visit_IfExp = _refuse_assignments  # noqa: N815

    def visit_Compare(self, node: ast.Compare) -> None:
        (self._refuse_assignments if len(node.ops) > 1 else self.generic_visit)(node)

    def visit_While(self, node: ast.While) -> None:
        self._refuse_assignments(node.test)
        self.generic_visit(node)


class _WithReturn(ast.NodeTransformer):
    """Writes down the `return None` with which a function ends that otherwise returns a value.

    A branch that returns nothing is then one that returns None, which an array cannot also be.
    """

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self.generic_visit(node)
        returns = any(isinstance(each, ast.Return) and each.value for each in _own_nodes(node))
        if returns and not _always_returns(node.body):
            last = ast.Return(ast.Constant(None))
            node.body.append(ast.fix_missing_locations(ast.copy_location(last, node.body[-1])))
        return node


def _own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes of a function without those of the functions in it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.Lambda | ast.ClassDef):
            yield child
            yield from _own_nodes(child)


def _always_returns(body: list[ast.stmt]) -> bool:
    match body[-1]:
        case ast.Return() | ast.Raise():
            return True
        case ast.If(body=one, orelse=other):
            return bool(other) and _always_returns(one) and _always_returns(other)
        case ast.With(body=inner):
            return _always_returns(inner)
        case ast.While(test=ast.Constant(value=endless)) if endless:
            return not any(isinstance(each, ast.Break) for each in _nodes_of_loop(body[-1]))
        case ast.Try(body=inner, orelse=orelse, handlers=handlers):
            ends = [orelse or inner, *(handler.body for handler in handlers)]
            return all(map(_always_returns, ends))
    return False


def _nodes_of_loop(loop: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes of a loop without those of the loops and the functions in it."""
    for child in ast.iter_child_nodes(loop):
        if not isinstance(child, ast.For | ast.While | ast.FunctionDef | ast.Lambda | ast.ClassDef):
            yield child
            yield from _nodes_of_loop(child)


class _Directives(DirectivesTransformer):
    """Understands Unison's directives, too."""

    def visit_Name(self, node: ast.Name) -> Any:  # noqa: N802
        return _with_known_directive(super().visit_Name(node))

    def visit_Attribute(self, node: ast.Attribute) -> Any:  # noqa: N802
        return _with_known_directive(super().visit_Attribute(node))


def _with_known_directive(node: Any) -> Any:
    if anno.getanno(node, STATIC_VALUE, default=None) is set_loop_options:
        anno.setanno(node, STATIC_VALUE, directives.set_loop_options)
    return node


class _Factory(transpiler._PythonFnFactory):
    """Makes a rewritten function for a closure, globals and defaults.

    Args:
        function: The function as it was.
        node: Its rewritten syntax tree.
        context: What the rewriting knows of it.
        names: What the code finds under names that are not the user's.
    """

    def __init__(
        self, function: types.FunctionType, node: Any, context: Any, names: dict[str, Any]
    ):
        name = context.info.name
        super().__init__(name, function.__code__.co_freevars, names)
        if isinstance(node, ast.Lambda):
            node = ast.Assign(targets=[ast.Name(name, ctx=ast.Store())], value=node)
        else:
            node.name = name
        inner, outer = (context.namer.new_symbol(root, ()) for root in ("inner", "outer"))
        nodes = transpiler._wrap_into_factory(
            node, name, inner, outer, self._freevars, names, context.info.future_features
        )
        namespace: dict[str, Any] = {}
        exec(_compiled(nodes, function.__code__), namespace)
        self._unbound_factory = namespace[outer]()
        self._displayed = function.__name__

    def instantiate(self, *args: Any, **kwargs: Any) -> types.FunctionType:
        made = super().instantiate(*args, **kwargs)
        made.__code__ = made.__code__.replace(co_name=self._displayed)
        made.__name__ = self._displayed
        return made


def _compiled(nodes: Any, code: types.CodeType) -> types.CodeType:
    """Returns the code of rewritten nodes, with the file and the lines of the user's code."""
    source = parser.unparse(nodes)
    origins = origin_info.create_source_map(nodes, source, code.co_filename)
    lines = {place.lineno: origin.loc.lineno for place, origin in origins.items()}
    tree = ast.parse(source)
    _give_lines(tree, lines, code.co_firstlineno)
    return compile(tree, code.co_filename, "exec", dont_inherit=True)


def _give_lines(node: ast.AST, lines: Mapping[int, int], line: int) -> None:
    """Gives a node and those in it the lines that they have in the user's file.

    Args:
        node: A node with the lines of the rewritten source.
        lines: The user's lines, by those of the rewritten source.
        line: The line where there is none.
    """
    written = getattr(node, "lineno", None)
    if written is not None:
        line = lines.get(written, line)
        node.lineno = node.end_lineno = line  # type: ignore[attr-defined]
        # The whole line: tracebacks then underline nothing in it.
        node.col_offset, node.end_col_offset = 0, _WIDEST_LINE  # type: ignore[attr-defined]
    for child in ast.iter_child_nodes(node):
        _give_lines(child, lines, line)
