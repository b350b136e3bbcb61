"""The house has one direction of imports; this walks through it and looks."""

import ast
import functools
import importlib
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import minidist
import minidist.context_parallel
import minidist.pipeline_parallel
import minidist.planning

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "minidist"
FILES = sorted(PACKAGE.rglob("*.py"))

BASE = {"backend", "rng", "errors", "events", "on_first_use", "pieces"}
AXES = {f"{axis}_parallel" for axis in ("data", "tensor", "pipeline", "context", "expert")}
BELOW_AXES = BASE | {"autograd", "comm", "nn", "parallel"}
LIBRARY = BELOW_AXES | AXES | {"checkpoint", "hybrid", "planning", "training"}

MAY_IMPORT = {
    "backend": {"events", "errors"},
    "pieces": {"errors"},
    "rng": {"backend", "errors", "pieces"},
    "errors": set(),
    "events": {"errors"},
    "autograd": {"backend", "errors", "pieces", "rng"},
    "comm": {"backend", "events", "errors", "pieces"},
    "nn": {"autograd", "backend", "pieces", "rng", "errors"},
    "parallel": BASE | {"autograd", "comm", "nn"},
    **dict.fromkeys(AXES, BELOW_AXES),
    "checkpoint": BELOW_AXES,
    "hybrid": BELOW_AXES | AXES,
    "planning": BELOW_AXES | {"context_parallel", "pipeline_parallel", "hybrid"},
    "verify": LIBRARY,
}  # whatever is not named may import everything; only those may be imported by nothing below


def room(path):
    """Return the part of the package that a file belongs to: its folder, or its own name."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[0]


@functools.cache
def imports(path):
    """Return the full names of the modules, and names in them, that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively; write the full name"
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def rooms_imported(path):
    names = [name.split(".") for name in imports(path)]
    rooms = {name[1] for name in names if name[0] == "minidist" and len(name) > 1}
    return {"nn" if room in ("optim", "datasets") else room for room in rooms}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_every_file_imports_only_what_lies_below_it(path):
    own = room(path)
    if own in MAY_IMPORT:
        assert rooms_imported(path) - {own} <= MAY_IMPORT[own]


def modules_imported(path):
    """Return the files of the package that a file imports when it is imported itself."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    found = set()
    for node in body:
        if isinstance(node, ast.ImportFrom):
            for name in (f"{node.module}.{alias.name}" for alias in node.names):
                place = ROOT.joinpath(*name.split("."))
                candidates = (place.with_suffix(".py"), place / "__init__.py")
                parent = (place.parent.with_suffix(".py"), place.parent / "__init__.py")
                found.update([f for f in (*candidates, *parent) if f.is_file()][:1])
    return found


PUBLIC = ["flexflow", "pipedream", "tofu"]
NAMED_LIKE_ITS_FILE = [f"planning.{name}" for name in PUBLIC]  # functions


def test_no_name_of_a_package_hides_one_of_its_modules():
    """`import minidist.pipeline_parallel.programs as P` would bind the function of that name."""
    for path in FILES:
        package = ".".join(path.parent.relative_to(ROOT).parts)
        name = f"{package}.{path.stem}"
        known = name.removeprefix("minidist.") in NAMED_LIKE_ITS_FILE
        if path.stem != "__init__" and "inside" not in path.parts and not known:
            found = getattr(importlib.import_module(package), path.stem, None)
            assert found is None or isinstance(found, ModuleType), name


@pytest.mark.parametrize("name", NAMED_LIKE_ITS_FILE)
def test_a_public_function_is_not_hidden_by_its_module(name):
    """The first import of a module sets its name in the package: whatever was imported before."""
    package, _, function = f"minidist.{name}".rpartition(".")
    code = f"import {package}.{function}; from {package} import {function}; {function}.__code__"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def test_no_files_import_each_other():
    waiting = {path: modules_imported(path) & set(FILES) for path in FILES}
    while ready := [path for path, needs in waiting.items() if not needs & set(waiting)]:
        for path in ready:
            del waiting[path]
    assert not waiting, sorted(str(path.relative_to(ROOT)) for path in waiting)


def test_the_three_claims_are_not_vacuous():
    assert {room(path) for path in FILES} >= {"autograd", "nn", "comm", "data_parallel"}
    assert not any("comm" in allowed for allowed in (MAY_IMPORT["autograd"], MAY_IMPORT["nn"]))
    assert "autograd" not in MAY_IMPORT["comm"]
    assert all(not AXES & MAY_IMPORT[axis] for axis in AXES)
    naive = PACKAGE / "data_parallel" / "naive.py"
    assert rooms_imported(naive) == {"comm", "nn", "parallel"}


def test_only_the_backend_and_nccl_import_cupy():
    importers = {
        path.relative_to(PACKAGE).as_posix()
        for path in FILES
        if any(name.split(".")[0] in ("cupy", "cupyx") for name in imports(path))
    }
    assert importers <= {"backend.py", "comm/nccl.py"} and "backend.py" in importers


OF_ARRAYS = ["autograd", "nn", *sorted(AXES), "comm/group.py", "comm/collectives.py"]
OF_ARRAYS += ["hybrid.py", "parallel", "training/loop.py"]
NO_ARRAYS = {"dtype", "errstate", "finfo", "iinfo", "promote_types", "random", "uint64"}
ON_THE_HOST = {  # what is of the host there: tokens, positions, sizes, numbers that are sent
    "autograd/operators.py": "argsort cumsum",
    "autograd/products.py": "array ascontiguousarray matmul",
    "comm/group.py": "array",
    "context_parallel/transformer.py": "argsort concatenate",
    "data_parallel/parameter_server.py": """arange array concatenate diff flatnonzero logical_or
        repeat searchsorted unique zeros""",
    "data_parallel/zero.py": "array",
    "expert_parallel/dispatch.py": "arange argsort cumsum repeat stack tile",
    "expert_parallel/once_per_rank.py": "append concatenate cumsum stack unique",
    "hybrid.py": "array",
    "nn/flat_parameters.py": "empty",
    "nn/generate.py": """arange argsort array asarray concatenate divmod exp flatnonzero full
        isfinite nonzero pad partition take_along_axis where zeros""",
    "nn/key_value_cache.py": "arange array_equal pad",
    "nn/mixture_of_experts.py": "arange bincount cumsum maximum",
    "nn/module.py": "full",
    "nn/rotary.py": "arange clip",
    "nn/router.py": """arange argsort bincount cumsum flatnonzero ones sign sort take_along_axis
        where zeros""",
    "nn/shard.py": "arange divmod flatnonzero full unique where",
    "nn/optim/rules.py": "sqrt",  # in the texts of NumPy
    "pipeline_parallel/branch_placement.py": "array",
    "pipeline_parallel/pipeline.py": "array",
    "parallel/gradients.py": "array",
    "parallel/mixed_precision.py": "array asarray",
    "parallel/whole_matrices.py": "arange frombuffer",
    "parallel/weights.py": "array ascontiguousarray",
    "tensor_parallel/column_parallel.py": "arange",
    "tensor_parallel/parallel_attention.py": "arange unique",
    "tensor_parallel/vocab_parallel.py": "arange flatnonzero where",
}


def called_on_numpy(path):
    """Return which functions of NumPy a file calls by name: `np.exp(x)`, `np.add.reduceat(x)`."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    calls = [ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)]
    names = [re.fullmatch(r"np\.(\w+)[.\w]*", call) for call in calls]
    return {name[1] for name in names if name} - NO_ARRAYS


def test_arrays_that_may_be_on_a_gpu_meet_the_functions_of_their_own_module():
    """`array_module(x).exp(x)`, not `np.exp(x)`. What is surely on the host is listed by name.

    In autograd/kernels every function has a text in NumPy for the host, and one in C for a GPU.
    Data is made on the host.
    """
    files = [path for path in FILES for part in OF_ARRAYS if path.is_relative_to(PACKAGE / part)]
    files = [path for path in files if not path.is_relative_to(PACKAGE / "autograd" / "kernels")]
    files = [path for path in files if not path.is_relative_to(PACKAGE / "nn" / "datasets")]
    found = {path.relative_to(PACKAGE).as_posix(): called_on_numpy(path) for path in files}
    listed = {path: set(names.split()) for path, names in ON_THE_HOST.items()}
    for path, names in found.items():
        assert names == listed.get(path, set()), f"{path}: functions of NumPy on arrays"
    assert set(listed) <= set(found)


OPTIONAL = {"torch", "jax", "matplotlib", "mpi4py", "numpitron", "hypothesis", "pytest", "scipy"}


def test_only_development_time_files_import_what_is_not_a_core_dependency():
    importers = {
        path.relative_to(PACKAGE).as_posix(): {name.split(".")[0] for name in imports(path)}
        & OPTIONAL
        for path in FILES
    }
    assert {p for p, found in importers.items() if found} <= {
        "course/grading.py",
        "course/inside.py",
        *(path for path in importers if path.startswith("course/labs/")),  # tests, of pytest
        "observe/bench/jax_peers.py",
        "observe/bench/mpi.py",
        "observe/bench/torch_peers.py",
        "observe/style.py",
        "observe/timeline/figure.py",
        *(path for path in importers if path.startswith(("comm/mpi/", "verify/interop/"))),
    }


def test_importing_the_package_loads_no_optional_module_and_prints_nothing():
    code = (
        "import sys, minidist, minidist.nn, minidist.cli;"
        "print(sorted({'cupy', 'torch', 'matplotlib', 'mpi4py'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")


@pytest.mark.parametrize(
    "code",
    [
        "from minidist import pipeline_parallel",
        "from minidist.pipeline_parallel import SCHEDULES, actions, add_communication, programs",
        "from minidist.pipeline_parallel import grid, validate",
        "from minidist.planning import simulate",
        "from minidist.observe.timeline import text",
        "from minidist.pipeline_parallel import programs, validate; "
        "from minidist.planning import simulate; from minidist.observe.timeline import text; "
        "made = programs('zb_v', 2, 4); validate(made, 2, 4); text(simulate(made).timeline)",
    ],
)
def test_schedules_simulations_and_their_text_need_only_the_standard_library(code):
    """They are to run in a browser."""
    after = f"import sys; before = set(sys.modules); {code}; print(*set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", after], capture_output=True, text=True)
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    assert done.returncode == 0, done.stderr
    assert "minidist" in loaded and loaded - {"minidist"} <= sys.stdlib_module_names


@pytest.mark.parametrize(
    "package", [minidist, minidist.context_parallel, minidist.pipeline_parallel, minidist.planning]
)
def test_a_package_that_imports_its_names_on_first_use_has_all_of_them(package):
    tree = ast.parse(Path(package.__file__).read_text(encoding="utf-8"))
    (shown,) = (node.body for node in tree.body if isinstance(node, ast.If))  # if TYPE_CHECKING
    modules = {alias.name: node.module for node in shown for alias in node.names}
    assert set(modules) == set(package.__all__) <= set(dir(package))
    for name, module in modules.items():
        assert getattr(package, name) is getattr(importlib.import_module(module), name)
    with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no .* 'magic'"):
        _ = package.magic


def test_no_class_keeps_a_partial_function_as_an_attribute():
    """Python 3.14 makes a method of it, which gets the object; staticmethod(...) stays as it is."""
    for path in FILES:
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if "inside" in path.parts or path.stem == "__main__":  # scripts of another process
            continue
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            assert error.name in OPTIONAL, f"{name}: {error}"
            continue
        for owner in [kind for kind in vars(module).values() if isinstance(kind, type)]:
            for key, value in vars(owner).items():
                assert not isinstance(value, functools.partial), f"{name}.{owner.__name__}.{key}"


def test_every_package_says_what_it_is():
    for path in FILES:
        assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), path


def test_modules_are_attributes_of_their_package_before_anything_is_used():
    code = (
        "import minidist, minidist.pipeline_parallel as p;"
        "print(minidist.comm.Group.__name__, minidist.backend.__name__, p.actions.__name__,"
        " hasattr(minidist, 'nothing'), hasattr(p, '_nothing'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names = "Group minidist.backend minidist.pipeline_parallel.actions False False"
    assert done.stdout.strip() == names


def test_public_names_are_there():
    from minidist import errors, nn
    from minidist.verify import equivalence

    for name in ("Tensor", "no_grad", "Group", "Mesh", "Cluster", "run"):
        assert hasattr(minidist, name)
    for name in (
        "CommError",
        "CollectiveMismatch",
        "Deadlock",
        "RankDied",
        "RankFailed",
        "CommTimeout",
    ):
        assert issubclass(getattr(errors, name), errors.CommError)
    for name in ("MLP", "Transformer", "Linear", "cross_entropy", "squared_error"):
        assert hasattr(nn, name)
    for name in ("strategies", "gradients", "certificate"):
        assert callable(getattr(equivalence, name))
