"""Small wrong changes of the package, drawn at random: how many do the tests find?

    python -m tests.kill_matrix DIR --random 200 --seed 1 --first

A mutant is one change in the body of one function: a comparison, an operator or a constant is
another one, a condition is its opposite, a statement is left out. What only words an error is no
place for one: messages and names are not what the tests are for, and some changes are none (a
faster path left out, an equal bound), so that not every mutant can be found.
"""

import ast
import random
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from itertools import islice

from minidist.verify.mistakes.overlay import PACKAGE
from minidist.verify.mistakes.register import bodies_of, source

PLACES = [
    *("autograd", "comm", "nn/optim", "checkpoint", "data_parallel", "tensor_parallel"),
    *("pipeline_parallel", "context_parallel", "expert_parallel", "parallel", "hybrid.py"),
]
OTHER = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.USub: ast.UAdd,
}


@dataclass(frozen=True)
class Mutant:
    """The change of one node, the `place`-th of a file in `ast.walk`'s order."""

    path: str
    function: str
    line: int
    place: int
    change: str

    @property
    def function_of_file(self) -> str:
        return f"{self.path}:{self.function}"

    @contextmanager
    def planted(self) -> Iterator[None]:
        """Let the function have the mutant's code, in this process, until the context ends."""
        tree = ast.parse(source(self.path))
        changed(list(ast.walk(tree))[self.place])
        with bodies_of(self.path, tree, {self.function}):
            yield


def changed(node: ast.AST) -> str:
    """Change a node in place; return how, or "" if it is of no kind that is changed."""
    if not isinstance(node, ast.expr | ast.stmt):
        return ""
    was = "" if isinstance(node, ast.If) else ast.unparse(node)
    match node:
        case ast.Compare(ops=[op]) if type(op) in OTHER:
            node.ops = [OTHER[type(op)]()]
        case ast.BinOp(op=op) | ast.BoolOp(op=op) | ast.UnaryOp(op=op) if type(op) in OTHER:
            node.op = OTHER[type(op)]()
        case ast.Constant(value=bool() as value):
            node.value = not value
        case ast.Constant(value=int() | float() as value):
            node.value = value + 1
        case ast.If(test=test) | ast.IfExp(test=test):
            node.test = ast.UnaryOp(ast.Not(), test)
            was = ast.unparse(test)
            ast.fix_missing_locations(node)
            return f"not ({was})"
        case ast.Assign() | ast.AugAssign() | ast.Expr(value=ast.Call()):
            for field in ("targets", "target", "op"):
                vars(node).pop(field, None)
            node.__class__ = ast.Expr
            node.value = ast.Constant(None)
            ast.fix_missing_locations(node)
            return f"without {was}"
        case _:
            return ""
    return f"{ast.unparse(node)}, not {was}"


def mutants_of(path: str) -> Iterator[Mutant]:
    """Yield every mutant of a file of the package."""
    tree = ast.parse(source(path))
    inside = {node: name for name, function in functions(tree) for node in walk_body(function)}
    for place, node in enumerate(ast.walk(tree)):
        if node in inside:
            if change := changed(deepcopy(node)):
                yield Mutant(path, inside[node], getattr(node, "lineno", 0), place, change)


def functions(tree: ast.AST, names: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield (qualified name, function) of all that stand in a module or its classes."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield names + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, f"{names}{node.name}.")


def walk_body(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function's body but for what is raised, asserted, or a text."""
    for statement in node.body if isinstance(node, ast.FunctionDef) else [node]:
        if not isinstance(statement, ast.Raise | ast.Assert | ast.JoinedStr):
            yield statement
            for child in ast.iter_child_nodes(statement):
                yield from walk_body(child)


def draw(count: int, seed: int) -> dict[str, Mutant]:
    """Return {name: mutant} of `count` that differ, each place of a change as likely as another."""
    files = [
        path.relative_to(PACKAGE).as_posix()
        for place in PLACES
        for path in (
            [PACKAGE / place] if place.endswith(".py") else (PACKAGE / place).rglob("*.py")
        )
    ]
    every = [mutant for path in sorted(files) for mutant in mutants_of(path)]
    random.Random(seed).shuffle(every)
    chosen = islice(filter(can_be_planted, every), count)
    return {f"{m.path.replace('/', '-')}-{m.line}-{m.place}": m for m in chosen}


def can_be_planted(mutant: Mutant) -> bool:
    """Whether a function can have its code: one without `super` has another closure."""
    try:
        with mutant.planted():
            return True
    except ValueError:
        return False
