"""Lesson 23's exercises: checks, worked solutions, hints, tempting wrong answers."""

from itertools import product

import numpy as np

from minidist import nn
from minidist.planning import propagate, tofu, trace
from minidist.planning.graph import Graph, Op, Value
from minidist.planning.gspmd import Split


def is_count(found):
    kinds = int | float | np.integer | np.floating
    return isinstance(found, kinds) and not isinstance(found, bool) and abs(found) < 1e300


def check_1(attempt):
    for widths in ([64, 256, 64], [8, 32, 24], [100, 10, 20]):
        before, between, after = widths
        P = before * between + between + between * after + after
        best = next(B for B in range(1, 10**6) if P < B * (before + after))
        found = attempt(list(widths))
        if not is_count(found):
            return f"widths {widths}: {found!r:.60} is no number of examples"
        if found != best:
            what = f"the batch sends {16 * P:,} bytes of gradients"
            return f"widths {widths}: {what}; the smallest batch that is enough is not {found}"


def solution_1(widths):
    before, between, after = widths
    P = before * between + between + between * after + after
    return P // (before + after) + 1


hints_1 = (
    "The fold has both formulas. 2 (N - 1) 8 cancels.",
    "What is B C + B C if the input and the output have different widths? Biases are parameters.",
    "The least whole B with P < B (input + output).",
)


def without_biases(widths):
    return widths[1] * (widths[0] + widths[2]) // (widths[0] + widths[2]) + 1


def g_alone(widths):
    before, between, after = widths
    return (before * between + between + between * after + after) // after + 1


def where_they_are_equal(widths):
    before, between, after = widths
    return (before * between + between + between * after + after) / (before + after)


tempting_1 = [without_biases, g_alone, where_they_are_equal]


def moves(axes):
    """Return how many values travel in an MLP whose weights are split by these axes."""
    model = nn.MLP([8] * (len(axes) + 1), dtype="float64")
    annotated = {f"layers.{i}.weight": Split(axis) for i, axis in enumerate(axes)}
    graph = trace(model, np.ones((4, 8)), np.zeros(4, int))
    return len(propagate(graph, {"tp": annotated}).collectives)


def check_2(attempt):
    for depth in (2, 4):
        found = attempt(depth)
        if not isinstance(found, list | tuple | np.ndarray) or len(found) != depth:
            return f"{depth} layers: {found!r:.60} is no list of {depth} axes"
        if not all(is_count(axis) and axis in (0, 1) for axis in found):
            return f"{depth} layers: {found!r:.60} has axes that are neither 0 nor 1"
        best = min(moves(axes) for axes in product((0, 1), repeat=depth))
        if (own := moves([int(axis) for axis in found])) != best:
            return f"{depth} layers: {own} values travel; {best} are possible"


def solution_2(depth):
    return [1, 0] * (depth // 2)


hints_2 = (
    "Which letter is the first product cut along, and along which axis does that split its output?",
    "A product that is cut by rows needs X in parts. Which cut of the one before leaves them?",
    "Columns, then rows, makes one sum in forward. Then begin again.",
)


def all_columns(depth):
    return [1] * depth


def rows_first(depth):
    return [0, 1] * (depth // 2)


tempting_2 = [all_columns, rows_first]


def product_of(b, i, o):
    """Return the graph of X W."""
    shapes = {"X": (b, i), "W": (i, o), "Y": (b, o)}
    kinds = {"X": "parameter", "W": "parameter", "Y": "result"}
    values = {name: Value(name, shapes[name], "float64", kinds[name]) for name in shapes}
    return Graph(values, [Op("matmul", ("X", "W"), "Y", "bi,io->bo")])


def check_3(attempt):
    for b, i, o in ((8, 64, 64), (64, 8, 64), (64, 64, 8), (32, 32, 32)):
        for N in (2, 3):
            n = [N * length for length in (b, i, o)]
            _, least = tofu(product_of(*n), N)
            found, what = attempt(*n, N), f"b, i, o = {n}, {N} ranks"
            if not is_count(found):
                return f"{what}: {found!r:.60} is no number of bytes"
            if not np.isclose(found, least, rtol=1e-9):
                return f"{what}: Tofu finds {least:,} bytes, not {found:,.0f}"


def solution_3(b, i, o, N):
    return 3 * (N - 1) * 8 * min(b * i, i * o, b * o)


hints_3 = (
    "Cut the op along b. Which of X, W and Y have the letter b, and which one lacks it?",
    "Keep the two that have the letter by this letter: they cost 0. The third costs S (N - 1).",
    "Each letter is missing in one array, so the smallest array travels, three times.",
)


def once(b, i, o, N):
    return (N - 1) * 8 * min(b * i, i * o, b * o)


def always_the_weight(b, i, o, N):
    return 3 * (N - 1) * 8 * i * o


def as_an_all_reduce(b, i, o, N):
    return 2 * (N - 1) * 8 * min(b * i, i * o, b * o)


tempting_3 = [once, always_the_weight, as_an_all_reduce]
