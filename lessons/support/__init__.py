"""What the lessons share: their command line, the verdict on exercises, figures, slow devices.

from support import begin, exercise, figures

begin()                                         # python lessons/14_... --help says what it takes
"""

import argparse
import ast
import inspect
import symtable
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

from minidist.observe.style import in_notebook

from . import exercise


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (--help shows the arguments)\n")


def begin() -> None:
    """Answer a lesson's arguments before it does anything: help, a hint, one exercise alone.

    In a notebook this does nothing: there the arguments are the kernel's.
    """
    if in_notebook():
        return
    lesson = Path(inspect.stack()[1].filename)
    parser = command_line()
    given = parser.parse_args()
    if given.figures is not None:
        try:
            given.figures.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=given.figures).close()
        except OSError as error:
            parser.error(f"cannot write figures into {given.figures}: {error.strerror}")
    try:
        if given.hint:
            number, _, hint = given.hint.partition(".")
            if hint and not hint.isdecimal():
                raise ValueError(f"--hint takes N or N.2, not {given.hint}")
            exercise.hint(f"{exercise.number_of(lesson)}.{number}", int(hint or 1))
            sys.exit()
        if given.exercise:
            needed = exercise_alone(lesson.read_text(encoding="utf-8"), given.exercise)
            exec(compile(needed, str(lesson), "exec"), sys.modules["__main__"].__dict__)
            sys.exit()
    except ValueError as error:
        parser.error(str(error))


def command_line() -> argparse.ArgumentParser:
    description = "Run a lesson: it prints what it finds, draws a figure, and judges your answers."
    parser = _Parser(description=description, allow_abbrev=False)
    parser.add_argument(
        "--figures", type=Path, metavar="DIR", help="where to save the figure (default: a new DIR)"
    )
    parser.add_argument(
        "--exercise", metavar="N", help="judge your answer to exercise N, and run nothing else"
    )
    parser.add_argument("--hint", metavar="N", help="show a hint to exercise N; N.2, N.3: the next")
    return parser


def exercise_alone(source: str, number: str) -> ast.Module:
    """Return the statements of a lesson that exercise `number` needs: those that bind its names.

    ValueError if the lesson has no such exercise.
    """
    body = ast.parse(source).body
    names = [_exercise_judged_by(statement) for statement in body]
    if number not in names:
        raise ValueError(f"no exercise {number}; choose one of {', '.join(filter(None, names))}")
    last = names.index(number)
    kept, needed = [body[last]], _needs(_table(body[last]))
    for statement in reversed(body[:last]):
        if needed & _binds(statement):
            kept.insert(0, statement)
            needed |= _needs(_table(statement))
    return ast.Module(kept, [])


def _exercise_judged_by(statement: ast.stmt) -> str:
    """Return "2" of the statement `exercise.judge("14.2", ...)`, and "" of any other."""
    match statement:
        case ast.Expr(ast.Call(ast.Attribute(ast.Name("exercise"), "judge"), [name, *_])):
            return ast.literal_eval(name).rpartition(".")[2]
    return ""


def _table(statement: ast.stmt) -> symtable.SymbolTable:
    return symtable.symtable(ast.unparse(statement), "lesson", "exec")


def _binds(statement: ast.stmt) -> set[str]:
    """Return the names that a statement gives to the lesson; none that is local to a function."""
    found = _table(statement).get_symbols()
    return {name.get_name() for name in found if name.is_assigned() or name.is_imported()}


def _needs(table: symtable.SymbolTable) -> set[str]:
    """Return the names that a statement takes from the lesson; no parameter, no local variable."""
    whole = table.get_type() == "module"
    used = [name for name in table.get_symbols() if name.is_referenced()]
    found = {name.get_name() for name in used if whole or name.is_global()}
    return found.union(*map(_needs, table.get_children()))
