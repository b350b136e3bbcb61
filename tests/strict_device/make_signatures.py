"""Write down the signatures of all names of the stand-in, as an installed CuPy wheel has them.

    <an environment with CuPy>/bin/python tests/strict_device/make_signatures.py

writes signatures/cupy-14.txt, or 13. It needs neither a GPU nor a driver: CuPy's Cython functions
have their signature in the first line of the docstring. A ufunc's line has its loops (`ff->f`)
instead, in the order in which CuPy tries them. A name that the wheel does not have is an error. It
needs the NCCL library, too (pip install nvidia-nccl-cu12), or CuPy has no names for it.
"""

import importlib
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parent
MODULES = "cupy", "cupy.cuda", "cupy.cuda.nccl", "cupy.cuda.runtime"
# Not `cupy.cuda.cublas`, which only a machine with that library can import.


def names() -> list[str]:
    """Return the public names of the stand-in, which must be the cupy that is imported here."""
    found = []
    for path in MODULES:
        try:
            module = importlib.import_module(path)
        except ModuleNotFoundError:
            continue
        for name, value in vars(module).items():
            if name.startswith("_") or isinstance(value, ModuleType):
                continue
            found.append(f"{path}.{name}")
            ours = [base for base in getattr(value, "__mro__", ()) if "cupy" in base.__module__]
            own = {attribute for base in ours for attribute in vars(base)}
            found += [f"{path}.{name}.{a}" for a in own if not a.startswith("_")]
    return sorted(set(found))


def frozen(version: int) -> dict[str, str]:
    """Return name -> the rest of its line: a signature, a ufunc's loops, or nothing."""
    text = (FOLDER / "signatures" / f"cupy-{version}.txt").read_text()
    return dict(re.match(r"([\w.]+)(.*)", line).groups() for line in text.splitlines())


def find(path: str):
    """Return the object of this name; AttributeError if there is none."""
    module = max((m for m in MODULES if path.startswith(f"{m}.")), key=len)
    value = importlib.import_module(module)
    for part in path.removeprefix(f"{module}.").split("."):
        value = getattr(value, part)
    return value


def line(path: str) -> str:
    """Return the name and its signature, if it has one, or its value, if it is a whole number."""
    value = find(path)
    if type(value) is int:
        return f"{path} = {value}"
    if isinstance(getattr(value, "types", None), list):
        return f"{path} {' '.join(value.types)}"
    if isinstance(value, type) and value.__module__ == "numpy":
        return path
    return path + signature(value) if callable(value) else path


def signature(function) -> str:
    """Return `(names=defaults)` without types, from the object or from its docstring; or ""."""
    try:
        found = inspect.signature(function)
        bare = [p.replace(annotation=p.empty) for p in found.parameters.values()]
        return str(inspect.Signature(bare)).replace("<class 'float'>", "float")
    except (ValueError, TypeError):
        return _from_docstring(function.__doc__ or "")


def _from_docstring(text: str) -> str:
    """Return the parameters in a docstring's first line: names and defaults, no Cython types."""
    found = re.search(r"\((.*)\)", text.strip().partition("\n")[0])
    if not found:
        return ""
    parts = found.group(1).replace("\\", "").split(", ")
    typeless = [re.sub(r"^[\w.]+(?: \w+)* (?=\w)", "", part.strip()) for part in parts]
    return (
        f"({', '.join(typeless)})".replace("u'", "'").replace("(self, ", "(").replace("(self", "(")
    )


def main() -> None:
    command = [sys.executable, __file__, "--names"]
    env = os.environ | {"PYTHONPATH": str(FOLDER)}
    of_stand_in = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    sys.path.remove(str(FOLDER))  # where this file is, and the stand-in
    import cupy

    lines = [line(path) for path in of_stand_in.stdout.split()]
    version = cupy.__version__.partition(".")[0]
    (FOLDER / "signatures" / f"cupy-{version}.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    print(*names(), sep="\n") if "--names" in sys.argv else main()
