"""Remove the bodies of functions from a source, but keep their signatures and docstrings.

The functions are found in the syntax tree, so the source needs no marks; all other lines do not
change.
"""

import ast
import json

from minidist.errors import WrongInput
from minidist.verify.mistakes.edits import functions


def blank(source: str, messages: dict[str, str]) -> str:
    """Replace bodies by `raise NotImplementedError(message)`.

    messages  {qualified name, as "ring_all_reduce" or "Mesh.rank_of": message}

    ValueError if the source has no such function, or the whole function is on one line.
    """
    known = functions(ast.parse(source))
    missing = sorted(messages.keys() - known.keys())
    if missing:
        raise WrongInput(f"there is no function {', '.join(missing)} to blank")
    lines = source.splitlines()
    for name in sorted(messages, key=lambda name: -known[name].lineno):  # from the end
        function = known[name]
        first = function.body[0]
        if first.lineno == function.lineno:
            raise WrongInput(f"{name} is on one line; put its body on separate lines")
        start = first.lineno - 1
        if ast.get_docstring(function) is not None:
            start = first.end_lineno or first.lineno
        while lines[start - 1].lstrip().startswith("#"):  # what stands above the first line
            start -= 1
        lines[start : function.end_lineno] = [
            f"{' ' * first.col_offset}raise NotImplementedError({json.dumps(messages[name])})"
        ]
    return "\n".join(lines) + "\n"
