"""Functions as bytes: a worker that is defined in a script or a notebook, sent to another process.

cloudpickle does it. From version 3.1.3 on it forgets the file of such a function, which tracebacks
and the call sites of Deadlock and CollectiveMismatch show; here a function keeps it. What cannot be
sent is named: `worker's lock`, `args[0]['log'].file`, `result[2]`.
"""

import inspect
import io
import pickle
from collections import ChainMap
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import CodeType, FunctionType
from typing import Any, ClassVar, TypeVar

import cloudpickle

from minidist.errors import WrongInput

T = TypeVar("T")


def dumps(value: Any) -> bytes:
    """Return `value` as bytes, for pickle.loads in a process that has the same packages.

    ValueError, which names the part of it that cannot be sent.
    """
    try:
        return _dumps(value)
    except MemoryError:
        raise
    except Exception as error:
        path, part, reason = _obstacle("", value, error, [value])
        name = f"{path.lstrip('.') or 'this'}, of type {type(part).__name__},"
        raise WrongInput(
            f"{name} cannot be sent to another process: {reason}; send what it is made from, and "
            "make it there"
        ) from error


def _dumps(value: Any) -> bytes:
    with io.BytesIO() as file:
        _Pickler(file).dump(value)
        return file.getvalue()


def copied(value: T) -> T:
    """Return what another process would get: also a copy of what a function's closure holds."""
    return pickle.loads(dumps(value))


def _obstacle(path: str, value: Any, error: Exception, above: list) -> tuple[str, Any, Exception]:
    """Return where in `value`, which is at `path`, the innermost part is that cannot be sent."""
    for place, part in _parts(path, value):
        if len(above) < 20 and not any(part is outer for outer in above):
            try:
                _dumps(part)
            except Exception as reason:
                return _obstacle(place, part, reason, [*above, part])
    return path, value, error


def _parts(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what pickle takes `value` apart into, and what to call it."""
    match value:
        case FunctionType():
            used = inspect.getclosurevars(value)
            arguments = inspect.signature(value).parameters
            names = {name: argument.default for name, argument in arguments.items()}
            names.update({**used.globals, **used.nonlocals})
            yield from ((f"{path}'s {name}", part) for name, part in names.items())
        case dict():
            yield from ((f"{path}[{key!r}]", part) for key, part in value.items())
        case tuple() if hasattr(value, "_fields"):
            yield from ((f"{path}.{name}", getattr(value, name)) for name in value._fields)
        case list() | tuple() | set():
            yield from ((f"{path}[{i}]", part) for i, part in enumerate(value))
        case _:
            with suppress(Exception):  # it cannot be taken apart, and says why
                _, arguments, *state = value.__reduce_ex__(5)
                for part in (*arguments, *state):
                    fields = part if isinstance(part, dict) else {}
                    yield from ((f"{path}.{name}", one) for name, one in fields.items())
                    yield path, part


def _of_code(code: CodeType) -> tuple:
    make, arguments = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return _written_in, (code.co_filename, make, arguments)


def _written_in(file: str, make: Callable[..., CodeType], arguments: tuple) -> CodeType:
    return make(*arguments).replace(co_filename=file)


class _Pickler(cloudpickle.Pickler):
    dispatch_table: ClassVar = ChainMap({CodeType: _of_code}, cloudpickle.Pickler.dispatch_table)
