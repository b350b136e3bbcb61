"""The stand-in for CuPy has no name and no parameter that CuPy does not have.

The signatures of CuPy 13 and 14 are frozen in tests/strict_device/signatures. Where one of them is
installed, with or without a GPU, it is compared with what is frozen.
"""

import ast
import importlib
import importlib.util
import inspect
import re
import warnings
from pathlib import Path
from unittest.mock import ANY

import pytest

import minidist
from tests.strict_device import make_signatures

FOLDER = Path(make_signatures.__file__).parent


def cupy():
    """Return what is installed as CuPy, or a stand-in for it; skip if there is neither."""
    if importlib.util.find_spec("cupy") is None:
        pytest.skip("CuPy is not installed")
    return importlib.import_module("cupy")


def is_stand_in(module) -> bool:
    return Path(module.__file__).is_relative_to(FOLDER)


class Constants(dict):
    """Names of constants that are defaults, of which only the wheel knows the values."""

    __missing__ = staticmethod(lambda name: ANY)


def parameters(text: str) -> dict:
    """Return {parameter: default} of "(a, b=1)"."""
    return taken(eval(f"lambda {text[1:-1]}: 0", Constants(float=float)))


def taken(function) -> dict:
    """Return {parameter: default} of a function or class; {} if it has no signature of its own."""
    if inspect.isclass(function) and "__init__" not in vars(function):
        return {}
    every = inspect.signature(function).parameters.values()
    named = (p for p in every if p.kind not in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL))
    return {p.name: p.default for p in named if p.name != "self"}


@pytest.mark.gpu
@pytest.mark.parametrize("version", [13, 14])
def test_the_stand_in_takes_nothing_that_the_wheel_does_not_take(version):
    if not is_stand_in(cupy()):
        pytest.skip("this is CuPy itself")
    frozen = make_signatures.frozen(version)
    for path in make_signatures.names():
        assert path in frozen, f"{path}: run make_signatures.py with CuPy {version}"
        if frozen[path].startswith(" = "):
            assert make_signatures.line(path) == path + frozen[path]
        known = frozen[path].startswith("(") and "**kwargs" not in frozen[path]
        if known and path != "cupy.ufunc":  # which only the stand-in itself makes
            wide = parameters(frozen[path])
            for name, default in taken(make_signatures.find(path)).items():
                assert name in wide, f"{path} has no parameter {name!r}: {frozen[path]}"
                assert default == wide[name], f"{path}: {name}={default}, but {frozen[path]}"


def test_what_is_frozen_is_what_the_installed_wheel_has():
    if is_stand_in(installed := cupy()):
        pytest.skip("this is the stand-in")
    version = int(installed.__version__.partition(".")[0])
    with warnings.catch_warnings(action="ignore"):  # where there is no NCCL, CuPy warns
        nccl = importlib.import_module("cupy.cuda.nccl")
    for path, rest in make_signatures.frozen(version).items():
        if nccl.available or not path.startswith("cupy.cuda.nccl."):
            assert make_signatures.line(path) == path + rest


def test_both_versions_are_frozen_with_the_same_names():
    of_13, of_14 = make_signatures.frozen(13), make_signatures.frozen(14)
    assert list(of_13) == list(of_14) == sorted(of_14) and len(of_14) > 100


def asked_of_a_module(path: Path) -> set[str]:
    """Return the functions that a file asks of the module of an array: `array_module(x).exp`."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    names = [ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)]
    found = [re.fullmatch(r"(?:xp|array_module\([^()]*\))\.(\w+)", name) for name in names]
    return {name[1] for name in found if name}


def test_the_stand_in_has_every_function_that_the_package_asks_of_an_arrays_module():
    """So that a day's tests say which are missing, not the slow ones on the stand-in alone."""
    package = Path(minidist.__file__).parent
    asked = {name for path in package.rglob("*.py") for name in asked_of_a_module(path)}
    paths = {f"cupy.{name}" for name in asked} - set(make_signatures.MODULES)
    assert {"cupy.exp", "cupy.where"} <= paths <= set(make_signatures.frozen(14))
