"""Every kernel of the library, found where the modules define it."""

import importlib
import pkgutil

from minidist.autograd import kernels
from minidist.autograd.kernels import launch


def all_kernels() -> list[launch.Elementwise | launch.Reduction]:
    """Return every Elementwise and Reduction of the library."""
    names = [found.name for found in pkgutil.iter_modules(kernels.__path__)]
    modules = [importlib.import_module(f"{kernels.__name__}.{name}") for name in names]
    kinds = launch.Elementwise | launch.Reduction
    return [x for module in modules for x in vars(module).values() if isinstance(x, kinds)]
