"""What a reader meets: the path to read first, one name for one thing, no circles."""

import ast
import re
from collections import defaultdict

import pytest

from tests.test_architecture import FILES, PACKAGE, ROOT, imports

TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}
READ_FIRST = re.findall(
    r"\[`[\w/]+\.py`\]\((minidist/[\w/]+\.py)\)",
    (ROOT / "README.md").read_text(encoding="utf-8").split("## Read first")[1].split("\n\n[")[0],
)


def name_of(path):
    return path.relative_to(PACKAGE).as_posix()


def test_what_to_read_first_leads_from_a_tensor_to_a_mesh():
    wanted = """autograd/tensor autograd/operators nn/linear data_parallel/naive comm/collectives
    parallel/collective_functions tensor_parallel/column_parallel tensor_parallel/row_parallel
    pipeline_parallel/gpipe pipeline_parallel/one_f_one_b pipeline_parallel/stage
    pipeline_parallel/executor data_parallel/zero hybrid training/loop"""
    assert {f"minidist/{name}.py" for name in wanted.split()} <= set(READ_FIRST)


def test_the_package_tells_the_same_path_as_the_readme():
    text = ast.get_docstring(TREES[PACKAGE / "__init__.py"])
    path = text.split("Read first")[1].split("Then, by subject")[0]
    found = re.findall(r"^    ([\w/]+\.py)", path, re.M)
    assert [f"minidist/{name}" for name in found] == READ_FIRST


@pytest.mark.parametrize("name", READ_FIRST)
def test_what_to_read_first_opens_with_its_source(name):
    """A paper and its year; the loop, which has none, says which of them it uses."""
    assert re.search(r"\b(19|20)\d\d\b", ast.get_docstring(TREES[ROOT / name])), name


@pytest.mark.parametrize(
    "name",
    ["Plan", "Stage", "Split", "Cut", "Cost", "Pipeline", "OverlappedSums", "Watch", "measure"],
)
def test_a_first_class_name_is_one_thing(name):
    kinds = ast.ClassDef | ast.FunctionDef
    homes = [
        name_of(path)
        for path, tree in TREES.items()
        for node in tree.body
        if isinstance(node, kinds) and node.name == name
    ]
    assert len(homes) <= 1, homes


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
    found = set()
    for name in imports(path):
        place = ROOT.joinpath(*name.split("."))
        candidates = [place.with_suffix(".py"), place.parent.with_suffix(".py")]
        found.update([file for file in candidates if file.is_file()][:1])
    return found


def test_what_a_checker_must_ignore_is_little_and_has_its_reason():
    ignored = defaultdict(list)
    for path in FILES:
        for line in path.read_text(encoding="utf-8").splitlines():
            if "# type: ignore" in line:
                ignored[name_of(path)].append(line)
    assert sum(map(len, ignored.values())) <= 40
    for name, lines in ignored.items():
        for line in lines:
            assert re.search(r"# type: ignore\[[\w, -]+\]  # \w", line), f"{name}: {line}"


def test_the_library_imports_none_of_its_observers():
    observers = {"verify", "observe", "course", "cli"}
    for path in FILES:
        if path.relative_to(PACKAGE).parts[0] not in observers | {"__main__.py"}:
            rooms = {name.split(".")[1] for name in imports(path) if name.startswith("minidist.")}
            assert not rooms & observers, name_of(path)
