"""The register of wrong implementations: each mistake is written once, in a TOML file here.

    [no_all_reduce]                                 its name
    function = "data_parallel/naive.py:all_reduce_gradients"
    replace = "group.all_reduce(grad, label=name)"  an edit, as in edits.py;
    by = "grad"                                     [[no_all_reduce.also]]: another one
    task = "3.2"                                    the task of a lab that it fails,
    says = "each rank keeps its part"               and what the grader says of it
    title, seen, symptom, family                    a mutant (course/mutants.py); says = its title,
    diagnosis                                       and what the test that kills it says, in part;
    killed_by                                       that test, if it is no certificate: comes first;
                                                    without it, a mutant's diagnosis is by default
                                                    NUMBERS and its name
    asks, hint                                      a variant of a task, which course/lab.py reads:
                                                    what its students are asked; their last hint

The labs' tests, `minidist mutants` and the tests of faults (tests/planted.py) take it from here.
"""

import ast
import difflib
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from functools import cache
from importlib import import_module
from inspect import unwrap
from operator import attrgetter
from pathlib import Path
from types import CodeType

from minidist.errors import WrongInput
from minidist.verify.mistakes.edits import Edit
from minidist.verify.mistakes.overlay import PACKAGE

MISTAKES = Path(__file__).parent
NUMBERS = "the numbers are those of"
EDIT = {field.name for field in fields(Edit)}


@dataclass(frozen=True)
class Mistake:
    """A wrong implementation of a few functions; what is not known of it is ""."""

    name: str
    edits: tuple[Edit, ...]
    task: str = ""
    says: str = ""
    title: str = ""
    seen: str = ""
    symptom: str = ""
    family: str = ""
    diagnosis: str = ""
    killed_by: str = ""
    asks: str = ""
    hint: str = ""

    def files(self) -> dict[str, str]:
        """Return {path in the package: wrong source}. ValueError: an edit does not apply."""
        sources: dict[str, str] = {}
        for edit in self.edits:
            if not (PACKAGE / edit.path).is_file():
                raise WrongInput(f"mistake {self.name}: minidist has no {edit.path}")
            try:
                sources[edit.path] = edit.apply(sources.get(edit.path) or source(edit.path))
            except ValueError as error:
                raise WrongInput(f"mistake {self.name}: {error}") from None
        return sources

    def diff(self) -> str:
        """Return it as a unified diff of the reference."""
        lines: list[str] = []
        for path, wrong in self.files().items():
            before, after = source(path).splitlines(True), wrong.splitlines(True)
            lines += difflib.unified_diff(before, after, f"a/minidist/{path}", f"b/minidist/{path}")
        return "".join(lines)


def source(path: str) -> str:
    return (PACKAGE / path).read_text(encoding="utf-8")


@cache
def mistakes(folder: Path = MISTAKES) -> dict[str, Mistake]:
    """Return {name: mistake} of a folder. ValueError: as `mistakes_in`; a name is there twice."""
    register: dict[str, Mistake] = {}
    for path in sorted(folder.glob("*.toml")):
        of_file = mistakes_in(path)
        if twice := sorted(register.keys() & of_file.keys()):
            raise WrongInput(f"{path.name}: {', '.join(twice)} is in another file, too")
        register |= of_file
    return register


def mistakes_in(path: Path) -> dict[str, Mistake]:
    """Return {name: mistake} of a TOML file. ValueError: it is none, or something is missing."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise WrongInput(f"{path.name} is not valid TOML: {error}") from None
    return {name: _mistake(name, table, path) for name, table in tables.items()}


def _mistake(name: str, table: dict, path: Path) -> Mistake:
    first = {key: text for key, text in table.items() if key in EDIT}
    texts = {key: text for key, text in table.items() if key not in EDIT | {"also"}}
    right = "asks" in texts and not first  # a variant that is the package itself
    try:
        edits = tuple(Edit(**edit) for edit in ([] if right else [first, *table.get("also", ())]))
        default = {"says": texts.get("title", "")}
        if "family" in texts and "killed_by" not in texts:
            default["diagnosis"] = f"{NUMBERS} {name}"
        return Mistake(name, edits, **default | texts)
    except TypeError as error:
        raise WrongInput(
            f"{path.name}: {name}: an edit has function, by and perhaps replace; {error}"
        ) from None


def find(name: str) -> Mistake:
    """Return a mistake. ValueError: there is none of that name."""
    if name not in mistakes():
        raise WrongInput(f"there is no mistake {name!r} in {MISTAKES}")
    return mistakes()[name]


@contextmanager
def planted(*wrong: str | Mistake) -> Iterator[None]:
    """Let the functions of mistakes have their code, in this process, until the context ends.

    To be entered in each rank that is a process; around the run, where ranks are threads.
    ValueError: the mistake changes more than bodies of functions.
    """
    mistakes = [find(each) if isinstance(each, str) else each for each in wrong]
    with ExitStack() as stack:
        for mistake, path, source in [(m, *file) for m in mistakes for file in m.files().items()]:
            names = {edit.name for edit in mistake.edits if edit.path == path}
            for name in stack.enter_context(bodies_of(path, ast.parse(source), names)):
                raise WrongInput(f"{mistake.name} changes more than the body of {name}")
        yield


@contextmanager
def bodies_of(path: str, source: ast.Module, names: set[str]) -> Iterator[list[str]]:
    """Let functions of a file have their code in another source, until the context ends.

    It gives the names of those whose code is the same there.
    """
    module = import_module(module_of(path))
    codes = dict(_codes(compile(source, str(module.__file__), "exec")))
    same = []
    with ExitStack() as stack:
        for name in names:
            function = attrgetter(name)(module)
            function = unwrap(getattr(function, "fget", function))  # of a property
            function = getattr(function, "__func__", function)  # of a class method
            if codes[name] == function.__code__:
                same.append(name)
            stack.callback(setattr, function, "__code__", function.__code__)
            function.__code__ = codes[name]
        yield same


def module_of(path: str) -> str:
    """Return the name of the module that is this file of the package."""
    return f"minidist/{path}".removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _codes(code: CodeType) -> Iterator[tuple[str, CodeType]]:
    """Yield (qualified name, code) of all functions below a code."""
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield inner.co_qualname, inner
            yield from _codes(inner)
