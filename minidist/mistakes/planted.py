"""Mistakes of the register, in the functions of the running interpreter."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from inspect import unwrap
from operator import attrgetter
from types import CodeType

from minidist.mistakes.register import find


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Let the functions of a mistake have its code, in this process, until the context ends.

    To be entered in each rank that is a process; around the run, where ranks are threads.
    ValueError: the mistake changes more than bodies of functions.
    """
    mistake = find(name)
    with ExitStack() as stack:
        for path, source in mistake.files().items():
            module = import_module(module_of(path))
            wrong = dict(_codes(compile(source, str(module.__file__), "exec")))
            for function_name in {edit.name for edit in mistake.edits if edit.path == path}:
                function = unwrap(attrgetter(function_name)(module))
                if wrong[function_name] == function.__code__:
                    raise ValueError(f"{name} changes more than the body of {function_name}")
                stack.callback(setattr, function, "__code__", function.__code__)
                function.__code__ = wrong[function_name]
        yield


def module_of(path: str) -> str:
    """Return the name of the module that is this file of the package."""
    return "minidist." + path.removesuffix(".py").replace("/", ".")


def _codes(code: CodeType) -> Iterator[tuple[str, CodeType]]:
    """Yield (qualified name, code) of all functions below a code."""
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield inner.co_qualname, inner
            yield from _codes(inner)
