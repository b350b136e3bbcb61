"""Mistakes of the register, in the functions of the running interpreter."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from inspect import unwrap
from operator import attrgetter
from types import CodeType

from minidist.errors import WrongInput
from minidist.mistakes.register import Mistake, find


@contextmanager
def planted(*wrong: str | Mistake) -> Iterator[None]:
    """Let the functions of mistakes have their code, in this process, until the context ends.

    To be entered in each rank that is a process; around the run, where ranks are threads.
    ValueError: the mistake changes more than bodies of functions.
    """
    mistakes = [find(each) if isinstance(each, str) else each for each in wrong]
    with ExitStack() as stack:
        for mistake, path, source in [(m, *file) for m in mistakes for file in m.files().items()]:
            module = import_module(module_of(path))
            codes = dict(_codes(compile(source, str(module.__file__), "exec")))
            for name in {edit.name for edit in mistake.edits if edit.path == path}:
                function = unwrap(attrgetter(name)(module))
                if codes[name] == function.__code__:
                    raise WrongInput(f"{mistake.name} changes more than the body of {name}")
                stack.callback(setattr, function, "__code__", function.__code__)
                function.__code__ = codes[name]
        yield


def module_of(path: str) -> str:
    """Return the name of the module that is this file of the package."""
    return f"minidist/{path}".removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _codes(code: CodeType) -> Iterator[tuple[str, CodeType]]:
    """Yield (qualified name, code) of all functions below a code."""
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield inner.co_qualname, inner
            yield from _codes(inner)
