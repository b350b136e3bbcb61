"""The house has one direction of imports, one name for one thing, and a path to read first."""

import ast
import functools
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import minidist
import minidist.context_parallel
import minidist.pipeline_parallel
import minidist.planning
from tests.lessons.pages import letters_of_the_notation

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "minidist"
FILES = sorted(PACKAGE.rglob("*.py"))
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}
OBSERVERS = {"verify", "observe", "course", "cli"}

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


def name_of(path):
    return path.relative_to(PACKAGE).as_posix()


@functools.cache
def imports(path):
    """Return the full names of the modules, and names in them, that a file imports."""
    result = set()
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.Import):
            result.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively; write the full name"
            result.update(f"{node.module}.{alias.name}" for alias in node.names)
    return result


def rooms_imported(path):
    names = [name.split(".") for name in imports(path)]
    rooms = {name[1] for name in names if name[0] == "minidist" and len(name) > 1}
    return {"nn" if room in ("optim", "datasets") else room for room in rooms}


def test_every_file_imports_only_what_lies_below_it_and_the_library_none_of_its_observers():
    for path in FILES:
        room = path.relative_to(PACKAGE).with_suffix("").parts[0]
        if room in MAY_IMPORT:
            assert rooms_imported(path) - {room} <= MAY_IMPORT[room], name_of(path)
        if room not in OBSERVERS | {"__main__"}:
            assert not rooms_imported(path) & OBSERVERS, name_of(path)


def test_no_files_name_each_other_even_where_only_a_checker_looks():
    needs = {path: files_named(path) - {path} for path in FILES if path.name != "__init__.py"}
    while True:  # take away what needs nothing that is left, and what nothing that is left needs
        needed = set().union(*needs.values())
        rest = {
            path: named for path, named in needs.items() if named & set(needs) and path in needed
        }
        if rest == needs:
            break
        needs = {path: named & set(rest) for path, named in rest.items()}
    assert not needs, sorted(map(name_of, needs))


def files_named(path):
    """Return the files of the package that a file imports anywhere, also for annotations alone."""
    result = set()
    for name in imports(path):
        place = ROOT.joinpath(*name.split("."))
        candidates = [place.with_suffix(".py"), place.parent.with_suffix(".py")]
        result.update([file for file in candidates if file.is_file()][:1])
    return result


FUNCTIONS = ["flexflow", "pipedream", "tofu"]  # of planning, each named like its file


def test_no_name_of_a_package_hides_one_of_its_modules():
    """`import minidist.pipeline_parallel.programs as P` would bind the function of that name."""
    for path in FILES:
        package = ".".join(path.parent.relative_to(ROOT).parts)
        known = package == "minidist.planning" and path.stem in FUNCTIONS
        if path.stem != "__init__" and "inside" not in path.parts and not known:
            named = getattr(importlib.import_module(package), path.stem, None)
            assert named is None or isinstance(named, ModuleType), f"{package}.{path.stem}"


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
    nodes = ast.walk(TREES[path])
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
IMPORTERS = """backend.py comm/nccl.py comm/mpi/ course/grading.py course/inside.py course/labs/
    observe/bench/jax_peers.py observe/bench/mpi.py observe/bench/torch_peers.py observe/style.py
    observe/timeline/figure.py verify/interop/""".split()


def test_only_the_backend_nccl_and_development_import_what_is_not_a_core_dependency():
    for path in FILES:
        modules = {name.split(".")[0] for name in imports(path)}
        if modules & OPTIONAL | modules & {"cupy", "cupyx"}:
            assert name_of(path).startswith(tuple(IMPORTERS)), name_of(path)
            assert name_of(path) in ("backend.py", "comm/nccl.py") or not modules & {"cupy"}


def printed_by(code):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout.split()


def test_importing_the_package_loads_no_optional_module_and_its_modules_are_attributes():
    code = (
        "import sys, minidist, minidist.nn, minidist.cli, minidist.pipeline_parallel as p;"
        "print(*{'cupy', 'torch', 'matplotlib', 'mpi4py'} & set(sys.modules));"
        "print(minidist.comm.Group.__name__, minidist.backend.__name__, p.actions.__name__)"
    )
    assert printed_by(code) == ["Group", "minidist.backend", "minidist.pipeline_parallel.actions"]


def test_a_public_function_is_not_hidden_by_its_module():
    """The first import of a module sets its name in the package: whatever was imported before."""
    names = [f"import minidist.planning.{name}" for name in FUNCTIONS]
    code = "; ".join([*names, f"from minidist.planning import {', '.join(FUNCTIONS)}"])
    assert printed_by(f"{code}; [each.__code__ for each in ({', '.join(FUNCTIONS)})]") == []


def test_schedules_simulations_and_their_text_need_only_the_standard_library():
    """They are to run in a browser."""
    code = (
        "import sys; before = set(sys.modules);"
        "from minidist.pipeline_parallel import SCHEDULES, add_communication, programs, validate;"
        "from minidist.planning import simulate; from minidist.observe.timeline import text;"
        "made = programs('zb_v', 2, 4); validate(made, 2, 4); text(simulate(made).timeline);"
        "print(*set(sys.modules) - before)"
    )
    loaded = {name.split(".")[0] for name in printed_by(code)}
    assert "minidist" in loaded and loaded - {"minidist"} <= sys.stdlib_module_names


def test_a_package_that_imports_its_names_on_first_use_has_all_of_them():
    for package in (
        minidist,
        minidist.context_parallel,
        minidist.pipeline_parallel,
        minidist.planning,
    ):
        body = TREES[Path(package.__file__)].body
        (shown,) = (node.body for node in body if isinstance(node, ast.If))  # if TYPE_CHECKING
        modules = {alias.name: node.module for node in shown for alias in node.names}
        assert set(modules) == set(package.__all__) <= set(dir(package))
        for name, module in modules.items():
            assert getattr(package, name) is getattr(importlib.import_module(module), name)
        assert not hasattr(package, "magic")


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


SHAPE = re.compile(r"\b[A-Za-z]\w*\[([^\[\]]*,[^\[\]]*)\]")


def letters_of_shapes(text: str) -> set[str]:
    return {
        x for dims in SHAPE.findall(text) for x in re.findall(r"(?<![\w'])[A-Z](?![\w'])", dims)
    }


def test_the_shapes_in_docstrings_and_labs_have_the_letters_of_the_notation():
    """Or those that a file declares in its first lines; of images, and any axes I and J."""
    known = letters_of_the_notation() | set("HWKIJ")
    for path, tree in TREES.items():
        declared = re.search(r"Letters: (.*)", ast.get_docstring(tree) or "", re.DOTALL)
        own = set(re.findall(r"\b[A-Z]\b", declared[1])) if declared else set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                assert letters_of_shapes(ast.get_docstring(node) or "") <= known | own, path.name
    labs = PACKAGE / "course" / "labs"
    for path in [*labs.glob("*/*.toml"), *labs.glob("*/*.md")]:
        assert letters_of_shapes(path.read_text(encoding="utf-8")) <= known, path.name


def test_a_first_class_name_is_one_thing():
    names = "Plan Stage Split Cut Cost Pipeline OverlappedSums Watch measure".split()
    homes = [
        (node.name, name_of(path))
        for path, tree in TREES.items()
        for node in tree.body
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name in names
    ]
    assert len({name for name, _ in homes}) == len(homes), sorted(homes)


READ_FIRST = re.findall(
    r"\[`[\w/]+\.py`\]\((minidist/[\w/]+\.py)\)",
    (ROOT / "README.md").read_text(encoding="utf-8").split("## Read first")[1].split("\n\n[")[0],
)


def test_what_to_read_first_leads_from_a_tensor_to_a_mesh_and_each_file_names_its_source():
    wanted = """autograd/tensor autograd/operators nn/linear data_parallel/naive comm/collectives
    parallel/collective_functions tensor_parallel/column_parallel tensor_parallel/row_parallel
    pipeline_parallel/gpipe pipeline_parallel/one_f_one_b pipeline_parallel/stage
    pipeline_parallel/executor data_parallel/zero hybrid training/loop"""
    assert {f"minidist/{name}.py" for name in wanted.split()} <= set(READ_FIRST)
    text = ast.get_docstring(TREES[PACKAGE / "__init__.py"])
    path = text.split("Read first")[1].split("Then, by subject")[0]
    names = re.findall(r"^    ([\w/]+\.py)", path, re.M)
    assert [f"minidist/{name}" for name in names] == READ_FIRST
    for name in READ_FIRST:
        assert re.search(r"\b(19|20)\d\d\b", ast.get_docstring(TREES[ROOT / name])), name


def test_every_file_says_what_it_is():
    assert all(map(ast.get_docstring, TREES.values()))


def test_a_trip_opens_no_more_than():
    """A reader who follows one value has little to open; what is counted is in trips.py.

    Whether a rank waits for another one differs from run to run, and waiting has lines of its own;
    so the trips over ranks have room for it.
    """
    command = [sys.executable, "-m", "tests.trips", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    trips = json.loads(done.stdout)
    most = {"gradient": (350, 12), "pipeline": (2080, 41), "train": (5420, 84)}
    for trip, (lines, files) in (most | {"certificate": (3350, 47)}).items():
        assert sum(trips[trip].values()) <= lines and len(trips[trip]) <= files, (trip, trips[trip])
