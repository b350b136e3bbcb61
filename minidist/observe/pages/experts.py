"""Tokens travel to experts on other ranks, under k, capacity and balance (lesson 15).

Each of N ranks has one example of 12 tokens, and a run of the E experts. A gate prefers the first
experts more and more with `skew`. nn.MixtureOfExperts and its router decide; the rows of each pair
of ranks come from expert_parallel/dispatch.py.
"""

from itertools import pairwise, product

import numpy as np

from minidist.errors import WrongInput, plural
from minidist.expert_parallel.dispatch import routes
from minidist.nn.mixture_of_experts import MixtureOfExperts
from minidist.nn.router import Routing, rows_of_capacity
from minidist.pieces import split_ends
from minidist.rng import generator

TOKENS, WIDTH, BALANCE = 12, 64, 0.01  # positions of an example, C, alpha of the balancing loss
GRID: dict[str, tuple] = {"ranks": (2, 4), "experts": (4, 8), "k": (1, 2)}
GRID |= {"capacity": ("0.5", "1", "2", "none"), "skew": (0, 1, 2, 3, 4, 5)}
FIRST = {"ranks": 4, "experts": 8, "k": 1, "capacity": "1", "skew": 2}


def questions() -> list[dict]:
    return [dict(zip(GRID, values, strict=True)) for values in product(*GRID.values())]


def gate(ranks: int, experts: int, skew: int) -> np.ndarray:
    """Return P[B, T, E], what a gate's softmax gives to each expert; 0: no expert is preferred."""
    logits = generator(1958, "experts page").standard_normal((4, TOKENS, 8))[:ranks, :, :experts]
    p = np.exp(logits + 0.8 * skew * np.linspace(1.0, -1.0, experts))
    return p / p.sum(axis=-1, keepdims=True)


def answer(ranks: int, experts: int, k: int, capacity: str, skew: int) -> dict:
    """Return each token's experts, the rows of each expert and pair of ranks, bytes and loss."""
    question = {"ranks": ranks, "experts": experts, "k": k, "capacity": capacity, "skew": skew}
    for name, value in question.items():
        if value not in GRID[name]:
            raise WrongInput(f"{name} is one of {str(GRID[name])[1:-1]}, not {value!r}")
    bound = None if capacity == "none" else float(capacity)
    mixture = MixtureOfExperts(WIDTH, experts, k, bound, BALANCE, dtype="float64")
    routing, _ = mixture.decide(gate(ranks, experts, skew), None)
    report, ends = mixture.report, split_ends(experts, ranks)
    assert report is not None
    parts = zip(routing.chosen, routing.kept, strict=True)  # an example each
    counted = np.ones(TOKENS, bool)
    rows = np.array([Routing(experts, *part, counted).load for part in parts])  # [N, E]
    runs = list(enumerate(pairwise(ends)))  # the run of experts of each rank
    away = int(rows.sum()) - sum(int(rows[r, a:b].sum()) for r, (a, b) in runs)  # of one block
    result = question | {
        "tokens": routing.chosen.tolist(),
        "kept": routing.kept.tolist(),
        "home": [r for r, (a, b) in runs for _ in range(a, b)],
        "takes": rows_of_capacity(bound, k, TOKENS, experts),
        "load": report.load.tolist(),
        "dropped": report.dropped.tolist(),
        "passed_by": int((~routing.kept.any(axis=-1)).sum()),
        "matrix": [routes(rows[r], rows[:, a:b], ends).sent for r, (a, b) in runs],
        "away": away,
        "bytes": away * WIDTH * 8,
        "balance": report.balance / BALANCE,
    }
    return result | {"words": as_text(result)}


def as_text(answer: dict) -> str:
    sent = [f"rank {r}: {', '.join(map(str, row))}" for r, row in enumerate(answer["matrix"])]
    dropped = plural(sum(answer["dropped"]), "choice")
    takes = "any number" if answer["takes"] is None else answer["takes"]
    return f"""{TOKENS} tokens on each of {answer["ranks"]} ranks, each to {answer["k"]} of \
{answer["experts"]} experts, which take {takes} of a rank's tokens.
Rows of each expert: {", ".join(map(str, answer["load"]))}; {dropped} dropped.
Rows from each rank to each rank: {"; ".join(sent)}.
{plural(answer["away"], "row")} leave their rank: {answer["bytes"]:,} bytes there, as many back,
and as many each way for the gradients.
The balancing loss is {answer["balance"]:.2f} times that of even routing."""
