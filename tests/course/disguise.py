"""How a copied solution is disguised: other names, another order, comments, statements between."""

import ast
import random


def renamed(source: str, rng: random.Random) -> str:
    """Give all arguments and local names of functions another name."""
    tree = ast.parse(source)
    for function in _functions(tree):
        names = {arg.arg for arg in ast.walk(function) if isinstance(arg, ast.arg)} - {"self"}
        for node in ast.walk(function):
            if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
                names.add(node.id)
            if isinstance(node, ast.FunctionDef) and node is not function:
                names.add(node.name)
        others = {name: f"v{rng.randrange(10**6)}" for name in sorted(names)}
        for node in ast.walk(function):
            for field in {"id", "arg", "name"} & set(node._fields):
                if not isinstance(node, ast.keyword) and node is not function:
                    setattr(node, field, others.get(getattr(node, field), getattr(node, field)))
    return ast.unparse(tree)


def reordered(source: str, rng: random.Random) -> str:
    """Shuffle the functions of the module and the methods of each class."""
    tree = ast.parse(source)
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    holders: list[ast.Module | ast.ClassDef] = [tree, *classes]
    for holder in holders:
        functions = [node for node in holder.body if isinstance(node, ast.FunctionDef)]
        if functions:
            first = holder.body.index(functions[0])
            others = [node for node in holder.body[first:] if node not in functions]
            rng.shuffle(functions)
            holder.body[first:] = functions + others
    return ast.unparse(tree)


def commented(source: str, rng: random.Random) -> str:
    """Replace docstrings, and write comments above a third of the lines."""
    tree = ast.parse(source)
    for function in _functions(tree):
        mine = ast.Expr(ast.Constant(f"In my words: {rng.random()}."))
        function.body[: ast.get_docstring(function) is not None] = [mine]
    lines = []
    for line in ast.unparse(tree).splitlines():
        if rng.random() < 0.3 and line.startswith("    "):
            lines.append(f"{line[: len(line) - len(line.lstrip())]}# then {rng.random()}\n")
        lines.append(line)
    return "\n".join(lines)


def widened(source: str, rng: random.Random) -> str:
    """Put statements that do nothing in front of a third of the statements of functions."""
    tree = ast.parse(source)
    for function in _functions(tree):
        for node in ast.walk(function):
            for field in ("body", "orelse"):
                if isinstance(block := getattr(node, field, None), list):
                    setattr(node, field, [new for old in block for new in _with_idle(old, rng)])
    return ast.unparse(ast.fix_missing_locations(tree))


def _with_idle(statement: ast.stmt, rng: random.Random) -> list[ast.stmt]:
    if ast.unparse(statement).startswith(("'", '"')) or rng.random() > 0.3:  # a docstring is first
        return [statement]
    n = rng.randrange(10**6)
    texts = [f"t{n} = len(str({n}))", f"w{n} = [0] * 3", f"assert {n} + 1 > {n}", f"u{n} = {n} - 1"]
    return [*ast.parse(rng.choice(texts)).body, statement]


def _functions(tree: ast.Module) -> list[ast.FunctionDef]:
    """Return the functions of a module and of its classes, but not those in functions."""
    found = [tree.body, *(node.body for node in tree.body if isinstance(node, ast.ClassDef))]
    return [node for body in found for node in body if isinstance(node, ast.FunctionDef)]


def all_at_once(source: str, rng: random.Random) -> str:
    for disguise in (renamed, reordered, widened, commented):
        source = disguise(source, rng)
    return source


DISGUISES = [renamed, reordered, commented, widened, all_at_once]
