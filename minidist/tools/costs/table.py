"""One table of all strategies: input per device, bytes moved, memory, balance, limit to scaling.

costs = {name: measure(name, example(name), clusters[ranks(name)]) for name in strategies()}
print(text(rows(costs)))
"""

from minidist import nn
from minidist.rng import generator
from minidist.tools.costs.closed_forms import (
    PIPELINES,
    SERVERS,
    STREAMS,
    TENSOR,
    one_device,
    useful_share,
)
from minidist.tools.costs.measured import Cost
from minidist.tools.equivalence import find
from minidist.tools.strategies import Case
from minidist.tools.strategies.parameter_server import servers_among
from minidist.tools.strategies.pipeline_parallel import chosen

B, T, C, H, L, V = 8, 16, 32, 8, 6, 64  # examples, positions, width, heads, blocks, tokens

OPTIONS = {  # 8 micro-batches of an example; of servers, a minibatch for each of two workers
    **{key: {"minibatches": 8} for key in STREAMS},
    **{key: {"minibatches": 2} for key in ("downpour", "ssp")},
    "hybrid": {"pp": 2, "micro_batches": 8},  # two other ranks split matrices
}

FAMILIES = {  # by what is cut
    "examples": ("naive", "bucketed", "zero_1", "zero_2", "zero_3"),
    "servers": SERVERS,
    "layers": (*PIPELINES, *STREAMS),
    "matrices": TENSOR,
    "layers and matrices": ("hybrid",),
    "branches": ("siamese",),
}

HEADINGS = (
    "strategy",
    "input per device",
    "bytes moved, kB",
    "memory, kB",
    "of one",
    "balance",
    "useful",
    "limit to scaling",
)


def ranks(name: str) -> int:
    """Return how many ranks a strategy is shown on: four, or as many as it can use."""
    return max(size for size in find(name).ranks if size <= 4)


def example(name: str) -> Case:
    """Return a model and a batch: the same Transformer, where a strategy fits it."""
    random = generator(0, "strategy table")
    labels = random.integers(0, 2, B)
    if name == "siamese":
        model = nn.Siamese([64, 128, 64, 32], dtype="float64")
        return Case(name, model, random.standard_normal((B, 2, 64)), labels)
    if name in ("column", "row"):
        model = nn.MLP([16, *[256, 64] * 3, 256, 16], activation="gelu", dtype="float64")
        return Case(name, model, random.standard_normal((B, 16)), labels)
    tokens, nexts = random.integers(0, V, (2, B, T))
    model = nn.Transformer(V, C, H, L, T, dtype="float64")
    return Case(name, model, tokens, nexts, options=OPTIONS.get(name, {}))


def limit(name: str, case: Case) -> tuple[int, str]:
    """Return the most ranks that have something to do, and what there is then one of on each.

    Asynchronous workers may have minibatches of their own; their limit is how old gradients get.
    """
    examples, layers = len(case.inputs), len(case.model.layers)
    if name == "siamese":
        return 2, "branches"
    if name in ("column", "row"):
        shapes = [layer.weight.shape for layer in case.model.layers]
        return min(shape[name == "column"] for shape in shapes), f"{name}s"
    if name in (*PIPELINES, *STREAMS):
        chunks = 1 if name in STREAMS else chosen(case, ranks(name), name)[1]
        return layers // chunks, "layers" if chunks == 1 else f"layers, {chunks} on each"
    if name in SERVERS:
        return examples + servers_among(ranks(name)), "examples and servers"
    if name == "vocab":
        return case.model.vocab, "tokens"
    if name in ("attention", "sequence", "hybrid"):
        heads = case.model.layers[1].attention.heads
        if name == "hybrid":
            return examples * layers * heads, "examples x layers x heads"
        return heads if name == "attention" else min(heads, case.inputs.shape[1]), "heads"
    return examples, "examples"


def rows(costs: dict[str, list[Cost]]) -> list[list[str]]:
    """Return the table's cells, a row per strategy, from the costs measured on `example(name)`.

    input    examples x positions x layers of the rank that holds most
    bytes    of all ranks, and of the one that sends most
    memory   of the rank that holds most: what stays, and activations at their peak; over one
             device's with the same model
    balance  the busiest rank's multiply-adds over the mean
    useful   `useful_share`
    """
    result = []
    for name, own in costs.items():
        case, most = example(name), max(own, key=lambda cost: cost.memory)
        sent, work = [cost.sent for cost in own], [cost.work for cost in own]
        activations, (number, what) = most.held["activations"], limit(name, case)
        result.append(
            [
                name,
                f"{most.examples} x {most.positions} x {most.layers}",
                f"{sum(sent) / 1e3:.0f} ({max(sent) / 1e3:.0f})",
                f"{(most.memory - activations) / 1e3:.0f} + {activations / 1e3:.0f}",
                f"{most.memory / one_device(case).memory:.0%}",
                f"{max(work) * len(work) / sum(work):.2f}",
                f"{useful_share(name, case, len(own)):.0%}",
                f"{number}: {what}",
            ]
        )
    return result


def text(cells: list[list[str]]) -> str:
    """Return the table in aligned columns."""
    lines = [list(HEADINGS), *cells]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(n) for cell, n in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def markdown(cells: list[list[str]]) -> str:
    lines = [list(HEADINGS), ["---"] * len(HEADINGS), *([f"`{row[0]}`", *row[1:]] for row in cells)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
