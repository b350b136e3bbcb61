"""A package's names, each imported when it is first used: what needs no NumPy then loads none."""

import sys
from collections.abc import Callable
from importlib import import_module


def on_first_use(
    package: str, module_of: dict[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package; its own modules are found, too.

    module_of  {name: the module of the package that defines it}
    """
    names = vars(sys.modules[package])

    def get(name: str) -> object:
        if name in module_of:
            value = names[name] = getattr(import_module(f"{package}.{module_of[name]}"), name)
            return value
        try:
            if not name.startswith("_"):
                return import_module(f"{package}.{name}")  # a module of this package
        except ModuleNotFoundError as error:
            if error.name != f"{package}.{name}":
                raise
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def show() -> list[str]:
        return sorted({*names, *module_of})

    return get, show
