"""Parts of a source: a starter's, without the bodies of functions; a sandbox's, without the tests.

The functions are found in the syntax tree, so the source needs no marks.
"""

import ast
import dis
import json
from pathlib import Path
from types import CodeType

from minidist.errors import WrongInput
from minidist.verify.mistakes.edits import functions

GLOBAL = "LOAD_GLOBAL", "LOAD_NAME"  # instructions of Python that read a name of the module


def blank(source: str, messages: dict[str, str]) -> str:
    """Replace bodies by `raise NotImplementedError(message)`; all other lines do not change.

    messages  {qualified name, as "ring_all_reduce" or "Mesh.rank_of": message}

    ValueError if the source has no such function, or the whole function is on one line.
    """
    known = functions(ast.parse(source))
    missing = sorted(messages.keys() - known.keys())
    if missing:
        raise WrongInput(f"there is no function {', '.join(missing)} to blank")
    lines = source.splitlines()
    for name in sorted(messages, key=lambda name: -known[name].lineno):  # from the end
        function = known[name]
        first = function.body[0]
        if first.lineno == function.lineno:
            raise WrongInput(f"{name} is on one line; put its body on separate lines")
        start = first.lineno - 1
        if ast.get_docstring(function) is not None:
            start = first.end_lineno or first.lineno
        while lines[start - 1].lstrip().startswith("#"):  # what stands above the first line
            start -= 1
        lines[start : function.end_lineno] = [
            f"{' ' * first.col_offset}raise NotImplementedError({json.dumps(messages[name])})"
        ]
    return "\n".join(lines) + "\n"


def part_inside(file: Path) -> str:
    """Return the part of a lab's tests that `inside` functions reach, without the decorator."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    waiting: list[ast.stmt] = []
    for function in (node for node in tree.body if isinstance(node, ast.FunctionDef)):
        decorator = ast.unparse(function.decorator_list[0]) if function.decorator_list else ""
        if decorator.partition("(")[0] == "inside":
            function.decorator_list.pop(0)
            waiting.append(function)
    made = [(_made(node), node) for node in tree.body]
    kept: list[ast.stmt] = []
    for node in waiting:
        if node not in kept:
            kept.append(node)
            needed = _globals(compile(ast.Module([node], []), file.name, "exec"))
            waiting += [other for names, other in made if names & needed]
    return "\n\n".join(ast.unparse(node) for node in tree.body if node in kept) + "\n"


def _made(node: ast.stmt) -> set[str]:
    """Return the names that a statement of a module makes."""
    match node:
        case ast.Import(names) | ast.ImportFrom(_, names):
            return {(alias.asname or alias.name).partition(".")[0] for alias in names}
        case ast.FunctionDef(name) | ast.ClassDef(name):
            return {name}
        case ast.Assign(targets):
            return {n.id for each in targets for n in ast.walk(each) if isinstance(n, ast.Name)}
        case ast.AugAssign(ast.Name(name)) | ast.AnnAssign(ast.Name(name)):
            return {name}
    return set()


def _globals(code: CodeType) -> set[str]:
    """Return the names of a module that a code reads, and all codes in it."""
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    reads = (i.argval for i in dis.get_instructions(code) if i.opname in GLOBAL)
    return {*reads}.union(*map(_globals, inner))
