"""Edits of a function that find their place in its syntax tree.

An edit does not depend on the exact text: layout, comments and quotes do not count, nor what a
function calls its arguments and other local names. `f(part)` in an edit is `f(rows)` in the source,
if `rows` is local there; then `part` is `rows` in all of the edit. Names of modules, attributes,
keywords and `self` are what they are.
"""

import ast
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from minidist.errors import WrongInput

# Where a syntax tree holds a name that may be local.
NAMES = {
    ast.Name: "id",
    ast.arg: "arg",
    ast.FunctionDef: "name",
    ast.ExceptHandler: "name",
    ast.MatchAs: "name",
}
Node = ast.stmt | ast.expr
NO_MATTER = {"ctx", "kind", "type_comment"}
ATOMS = ast.Name | ast.Attribute | ast.Subscript | ast.Call | ast.Constant | ast.List | ast.ListComp


@dataclass(frozen=True)
class Edit:
    """In a function of the package, the one place that reads `replace` becomes `by`.

    function  "data_parallel/zero.py:Zero.sum_squares"; "pipeline_parallel/gpipe.py:gpipe(rank, p)"
              also says what the edit calls the first arguments
    replace   an expression or statements; if empty, the whole body, without its docstring
    by        an expression or statements, in the names of the arguments and of `replace`
    """

    function: str
    by: str
    replace: str = ""

    @property
    def path(self) -> str:
        """The file, as a path in the package."""
        return self.function.partition(":")[0]

    @property
    def name(self) -> str:
        """The function's qualified name."""
        return self.function.partition(":")[2].partition("(")[0]

    def apply(self, source: str) -> str:
        """Return the file's source with the edit made.

        ValueError: there is no such function; the place is not there, or more than once; `by` uses
        a local name that nothing else in the edit names; a text is not valid Python.
        """
        function = functions(ast.parse(source)).get(self.name)
        if function is None:
            raise WrongInput(f"{self.path} has no function {self.name}; name the one it is now")
        arguments = [argument.arg for argument in _arguments(function)]
        called = filter(None, self.function.partition("(")[2].rstrip(")").split(","))
        names = dict(zip(map(str.strip, called), arguments, strict=False))
        by = self._parsed(self.by)
        if self.replace:
            local = _bound(function)
            places = list(self._places(function, by, names, local))
            if len(places) != 1:
                raise WrongInput(
                    f"{self.replace.strip()!r} is {len(places)} times in {self.path}:{self.name}, "
                    "not once; let `replace` be what the function says now"
                )
            ((parent, place, names),) = places
        else:
            local, parent = set(arguments) - {"self"}, None
            place = function.body[ast.get_docstring(function) is not None :]
        return _spliced(source, parent, place, self._text(by, names, local))

    def _parsed(self, text: str) -> list[ast.stmt]:
        try:
            return ast.parse(textwrap.dedent(text)).body
        except SyntaxError as error:
            raise WrongInput(
                f"{self.function}: {text!r} is not valid Python: {error.msg}"
            ) from None

    def _places(self, function, by, names, local):
        """Yield (parent, nodes in a row, {name in the edit: name in the function})."""
        pattern = self._parsed(self.replace)
        if all(len(block) == 1 and isinstance(block[0], ast.Expr) for block in (pattern, by)):
            candidates = ((parent, [child]) for parent, child in _expressions(function))
            pattern = [pattern[0].value]
        else:
            candidates = _blocks(function, len(pattern))
        for parent, place in candidates:
            if _alike(pattern, place, bound := dict(names), local):
                yield parent, place, bound

    def _text(self, by: list[ast.stmt], names: dict[str, str], local: set[str]) -> str:
        """Return `by` in the names of the function."""
        for block in by:
            for node in ast.walk(block):
                if (field := NAMES.get(type(node))) and (name := getattr(node, field)):
                    if name not in names and name in local:
                        raise WrongInput(
                            f"{self.path}:{self.name}: {name} is local there, and the edit names "
                            "it in `by` alone; widen `replace`, or name the arguments"
                        )
                    setattr(node, field, names.get(name, name))
        same = all(name == other for name, other in names.items())
        return textwrap.dedent(self.by).strip() if same else "\n".join(map(ast.unparse, by))


def functions(tree: ast.AST, prefix: str = "") -> dict[str, ast.FunctionDef]:
    """Return {qualified name: node} of the functions of a module and the methods of its classes."""
    named = {}
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            named[prefix + node.name] = node
        elif isinstance(node, ast.ClassDef):
            named |= functions(node, f"{prefix}{node.name}.")
    return named


def _arguments(function: ast.FunctionDef) -> list[ast.arg]:
    a = function.args
    return [*filter(None, [*a.posonlyargs, *a.args, a.vararg, *a.kwonlyargs, a.kwarg])]


def _bound(function: ast.FunctionDef) -> set[str]:
    """Return the names that are local to a function, or to a function or comprehension in it."""
    bound = {
        getattr(node, NAMES.get(type(node), ""), None)
        for node in ast.walk(function)
        if node is not function and not isinstance(getattr(node, "ctx", None), ast.Load)
    }
    return {name for name in bound if name} - {"self"}


def _expressions(parent: ast.AST):
    """Yield (parent, expression); none inside an f-string, where Python 3.11 has no positions."""
    for child in ast.iter_child_nodes(parent):
        if isinstance(child, ast.expr):
            yield parent, child
        if not isinstance(child, ast.JoinedStr):
            yield from _expressions(child)


def _blocks(function: ast.FunctionDef, length: int):
    """Yield (parent, `length` statements in a row) of every block."""
    for parent in ast.walk(function):
        for field in ("body", "orelse", "finalbody"):
            block = getattr(parent, field, None)
            if isinstance(block, list):
                for k in range(len(block) - length + 1):
                    yield parent, block[k : k + length]


def _alike(pattern, node, names: dict[str, str], local: set[str]) -> bool:
    """Return whether a node is a pattern; add to `names` what its local names are in the node."""
    if type(pattern) is not type(node):
        return False
    if isinstance(pattern, list):
        pairs = zip(pattern, node, strict=False)
        return len(pattern) == len(node) and all(_alike(a, b, names, local) for a, b in pairs)
    if not isinstance(pattern, ast.AST):
        return pattern == node
    for field in pattern._fields:
        a, b = getattr(pattern, field, None), getattr(node, field, None)
        if NAMES.get(type(node)) == field and isinstance(a, str) and b in local and a != "self":
            if names.setdefault(a, b) != b or list(names.values()).count(b) > 1:
                return False
        elif field not in NO_MATTER and not _alike(a, b, names, local):
            return False
    return True


def _spliced(
    source: str, parent: ast.AST | None, place: Sequence[ast.stmt | ast.expr], text: str
) -> str:
    """Return a source with the text of some nodes in a row replaced."""
    lines = source.encode().splitlines(keepends=True)
    starts = [0, *accumulate(map(len, lines))]
    first, last = place[0], place[-1]
    begin = starts[first.lineno - 1] + first.col_offset  # offsets are of bytes
    end = starts[(last.end_lineno or 0) - 1] + (last.end_col_offset or 0)
    if isinstance(first, ast.stmt):
        text = textwrap.indent(text, " " * first.col_offset).lstrip(" ")
    else:
        (new,) = ast.parse(text).body
        argument = isinstance(parent, ast.Call) and parent.func is not first
        alone = argument or isinstance(parent, ast.stmt | ast.keyword)
        if not alone and not (isinstance(new, ast.Expr) and isinstance(new.value, ATOMS)):
            text = f"({text})"
    data = source.encode()
    return (data[:begin] + text.encode() + data[end:]).decode()
