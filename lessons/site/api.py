"""The pages of the API: one per public module, from its docstrings, as they are."""

from pathlib import Path

MODULES = """minidist minidist.nn minidist.nn.optim minidist.nn.datasets minidist.autograd
minidist.comm minidist.errors minidist.parallel.collective_functions minidist.data_parallel
minidist.pipeline_parallel minidist.tensor_parallel minidist.context_parallel
minidist.expert_parallel minidist.hybrid minidist.parallel.mixed_precision minidist.checkpoint
minidist.training minidist.planning minidist.verify minidist.verify.interop.torch""".split()


def write(folder: Path) -> None:
    folder.mkdir(parents=True)
    for module in MODULES:
        once = "   :no-index:\n" if module == "minidist" else ""  # its names are others', too
        options = f"   :members:\n   :exclude-members: ops\n{once}"
        page = f"# `{module}`\n\n```{{eval-rst}}\n.. automodule:: {module}\n{options}```\n"
        (folder / f"{module}.md").write_text(page)
    contents = "\n".join(MODULES)
    (folder / "index.md").write_text(
        "# API\n\nFrom the docstrings: shapes, units, layouts, errors, sources.\n\n"
        f"```{{toctree}}\n:maxdepth: 1\n\n{contents}\n```\n"
    )


def as_it_is(app, what, name, obj, options, lines: list[str]) -> None:
    """Keep a docstring's own lines: the first sentence as text, the rest as it was typed."""
    head = next((i for i, line in enumerate(lines) if not line.strip()), len(lines))
    first, rest = " ".join(lines[:head]), lines[head:]
    for special in "\\*`|_":
        first = first.replace(special, "\\" + special)
    literal = ["", ".. code-block:: text", "", *(f"   {line}" for line in rest), ""]
    lines[:] = [first, *(literal if any(map(str.strip, rest)) else [""])]
