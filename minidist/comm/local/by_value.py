"""Functions as bytes: a worker that is defined in a script or a notebook, sent to another process.

cloudpickle does it. From version 3.1.3 on it forgets the file of such a function, which tracebacks
and the call sites of Deadlock and CollectiveMismatch show; here a function keeps it.
"""

import io
import pickle
from collections import ChainMap
from collections.abc import Callable
from types import CodeType
from typing import Any, ClassVar, TypeVar

import cloudpickle

T = TypeVar("T")


def dumps(value: Any) -> bytes:
    """Return `value` as bytes, for pickle.loads in a process that has the same packages."""
    with io.BytesIO() as file:
        _Pickler(file).dump(value)
        return file.getvalue()


def copied(value: T) -> T:
    """Return what another process would get: also a copy of what a function's closure holds."""
    return pickle.loads(dumps(value))


def _of_code(code: CodeType) -> tuple:
    make, arguments = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return _written_in, (code.co_filename, make, arguments)


def _written_in(file: str, make: Callable[..., CodeType], arguments: tuple) -> CodeType:
    return make(*arguments).replace(co_filename=file)


class _Pickler(cloudpickle.Pickler):
    dispatch_table: ClassVar = ChainMap({CodeType: _of_code}, cloudpickle.Pickler.dispatch_table)
