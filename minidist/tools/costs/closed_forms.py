"""What one step under each strategy should cost each rank, as closed forms; exact, to the byte.

The other half of `measured.py`, which measures the same. A strategy is two questions: which
layers does a rank run, in which split (`layers`), and how many examples are in flight through them
(`predict`)? Letters: N ranks, r one of them; B examples, T positions, C width, H heads, V tokens,
L blocks; X = T C numbers of one example; e bytes a number.

    predict("zero_2", case, 4)[0] == measure("zero_2", case, cluster)[0]    # but for `sent`

Domain: an untied nn.Transformer without dropout, an nn.MLP with gelu, or an nn.Siamese with relu,
in float64, under AdamW; N divides what a strategy splits. Activations of zero-bubble schedules are
an upper bound: between I and W a pass holds less than before I.
"""

from collections import Counter
from dataclasses import replace
from math import ceil
from typing import NamedTuple

import numpy as np

from minidist import nn
from minidist.pipeline_parallel import programs
from minidist.pipeline_parallel.actions import Backward, BackwardWeight, Forward, last_stage
from minidist.pipeline_parallel.partition import cut_of
from minidist.planning import simulate
from minidist.tools.costs.measured import Cost
from minidist.tools.equivalence import find
from minidist.tools.strategies import Case
from minidist.tools.strategies.parameter_server import servers_among
from minidist.tools.strategies.pipeline_parallel import chosen
from minidist.tools.volume import block_activation_bytes, block_parameters, zero_bytes_held

PIPELINES = ("layer_split", "gpipe", "1f1b", "interleaved", "zb_h1", "zb_h2", "zb_v")
STREAMS = ("pipedream", "pipedream_2bw")
SERVERS = ("parameter_server", "downpour", "ssp")
TENSOR = ("column", "row", "attention", "vocab", "sequence")


class Layer(NamedTuple):
    """Numbers of parameters on a rank; per example, bytes of activations and multiply-adds."""

    parameters: int
    activations: int
    work: int


def layers(case: Case, N: int = 1, split: str = "none") -> list[Layer]:
    """Return the layers of a model as one of N ranks holds them.

    split  "column" or "row", of an MLP; "attention", "vocab", "matrices" or "sequence", of a
           Transformer; "none"
    """
    if isinstance(case.model, nn.Transformer):
        return _transformer_layers(case, N, split)
    return _mlp_layers([layer.weight.shape for layer in case.model.layers], N, split)


def _mlp_layers(shapes: list[tuple[int, int]], N: int, split: str) -> list[Layer]:
    """A layer keeps X[C], gelu's input and its tanh; the loss keeps its probabilities."""
    result = []
    for i, (C, F) in enumerate(shapes):
        kept = F if i == len(shapes) - 1 else 2 * F // (N if split == "column" else 1)
        weight, bias = C * F // N, F // (1 if split == "row" else N)
        result.append(Layer(weight + bias, 8 * (C // (N if split == "row" else 1) + kept), weight))
    return result


def _transformer_layers(case: Case, N: int, split: str) -> list[Layer]:
    _, *blocks, head = case.model.layers
    V, C, H = case.model.vocab, head.norm.gain.size, blocks[0].attention.heads
    T, e = case.inputs.shape[1], 8
    X, scores = T * C, H * T * T
    vocabulary = N if split in ("vocab", "matrices", "sequence") else 1
    looked_up = e * (X + T) if split in ("vocab", "matrices", "sequence") else 0  # rows, and whose
    if split in ("matrices", "sequence"):
        sequence = split == "sequence"
        kept = block_activation_bytes(1, T, C, H, e, N, sequence, dropout=False)
        block = Layer(block_parameters(C, N), kept, (12 * T * C * C + 2 * T * X) // N)
    else:
        n = N if split == "attention" else 1
        own = 8 * C * C + 10 * C + (4 * C * C + 3 * C) // n
        kept = e * (16 * X + 2 * T + (4 * X + scores) // n)
        block = Layer(own, kept, 8 * T * C * C + (4 * T * C * C + 2 * T * X) // n)
    ends = e * (2 * X + T) // (N if split == "sequence" else 1) + e * T * V // vocabulary
    return [
        Layer(V * C // vocabulary + T * C, looked_up, 0),
        *[block] * len(blocks),
        Layer(2 * C + V * C // vocabulary, ends, X * V // vocabulary),
    ]


def predict(name: str, case: Case, N: int) -> list[Cost]:
    """Return what one step should cost each rank; of `sent`, the mean over the ranks."""
    if name == "siamese":
        costs = _siamese(case, N)
    elif name in SERVERS:
        costs = _servers(case, N)
    elif name in (*PIPELINES, *STREAMS, "hybrid"):
        costs = _pipeline(name, case, N)
    elif name in TENSOR:
        own = layers(case, N, name)
        positions = _positions(case) // (N if name == "sequence" else 1)
        costs = [_cost(own, len(case.inputs), positions)] * N
    else:
        costs = [_replica(name, case, N, r) for r in range(N)]
    return [replace(cost, sent=find(name).bytes(case, N) / N) for cost in costs]


def _cost(own: list[Layer], examples: int, positions: int, held=None, flight=None) -> Cost:
    """Return the cost of layers that so many examples enter.

    held    elements of parameters, gradients, optimizer state; by default P, P and 2 P
    flight  bytes of activations at their peak; by default those of all examples at once
    """
    P = sum(layer.parameters for layer in own)
    held = (P, P, 2 * P) if held is None else held
    kept = examples * sum(layer.activations for layer in own) if flight is None else flight
    kinds = ("parameters", "gradients", "optimizer state")
    return Cost(
        examples,
        positions,
        len(own),
        0,
        {kind: 8 * n for kind, n in zip(kinds, held, strict=True)} | {"activations": kept},
        examples * sum(layer.work for layer in own),
    )


def _positions(case: Case) -> int:
    return case.inputs.shape[1] if isinstance(case.model, nn.Transformer) else 1


def _replica(name: str, case: Case, N: int, r: int) -> Cost:
    """Data parallelism: all layers, a share of the examples; of ZeRO, a share of what is held."""
    own, B, held = layers(case), len(case.inputs), None
    if name.startswith("zero"):
        by_kind = zero_bytes_held(int(name[-1]), [layer.parameters for layer in own], N, r)
        held = [nbytes // 4 for nbytes in by_kind.values()]
    return _cost(own, len(np.array_split(np.arange(B), N)[r]), _positions(case), held)


def _servers(case: Case, N: int) -> list[Cost]:
    """A server has the model, its gradient, and of its slice 1 + 1 + 2; a worker a push buffer."""
    own, S = layers(case), servers_among(N)
    P = sum(layer.parameters for layer in own)
    slices = [len(part) for part in np.array_split(np.arange(P), S)]
    parts = np.array_split(np.arange(len(case.inputs)), N - S)
    servers = [_cost(own, 0, 0, (P + s, P + s, 2 * s)) for s in slices]
    servers = [replace(cost, layers=0) for cost in servers]
    return servers + [_cost(own, len(part), _positions(case), (P, 2 * P, 0)) for part in parts]


def _siamese(case: Case, N: int) -> list[Cost]:
    """Both branches keep the pairs; the join keeps H_0 - H_1 and its square."""
    shapes = [layer.weight.shape for layer in case.model.branch]
    E, classes = case.model.join.weight.shape
    B, pairs = len(case.inputs), 2 * shapes[0][0]
    shared = sum(C * F + F for C, F in shapes)
    join, outputs = E * classes + classes, sum(F for _, F in shapes)
    mine, costs = 2 // N, []
    for r in range(N):
        joins = r == 0
        whole = (shared + join, shared + join, 2 * (shared + joins * join))
        kept = 8 * B * (pairs + mine * outputs + joins * 2 * E)
        work = B * (mine * sum(C * F for C, F in shapes) + joins * E * classes)
        own = [Layer(0, 0, 0)] * (len(shapes) + joins)
        costs.append(replace(_cost(own, B, 1, whole, kept), work=work))
    return costs


def _stages(name: str, case: Case, N: int) -> tuple[list[list[Layer]], list, int]:
    """Return the layers of each virtual stage, the programs of one pipeline, and m."""
    dp, p = case.options.get("dp", 1), case.options.get("pp", 1) if name == "hybrid" else N
    if name in STREAMS:
        m, chunks = case.options["minibatches"], 1
    else:
        m, chunks = chosen(case, p, name, case.options.get("micro_batches"))
    tp = N // (dp * p) if name == "hybrid" else 1
    own = layers(case, tp, "matrices" if name == "hybrid" else "none")
    order = programs("1f1b" if name == "hybrid" else name, p, m, chunks)
    cut = cut_of(len(own), 1 + last_stage(order.placement))
    return [[own[i] for i in part] for part in cut], order, m


def _pipeline(name: str, case: Case, N: int) -> list[Cost]:
    """A rank has its stages' layers; what it keeps, its program tells; old versions of weights."""
    stages, order, m = _stages(name, case, N)
    p, dp = len(order), case.options.get("dp", 1) if name == "hybrid" else 1
    examples = len(case.inputs) // dp
    result = []
    for r, program in enumerate(order):
        mine = [stages[k] for k in order.placement[r]]
        own = [layer for stage in mine for layer in stage]
        largest = ceil(examples / m)  # examples of a micro-batch
        each = [sum(layer.activations for layer in stage) * largest for stage in mine]
        flight, peak = Counter(), 0
        for a in program:
            flight[a.chunk] += isinstance(a, Forward) - isinstance(a, Backward | BackwardWeight)
            peak = max(peak, sum(n * each[c] for c, n in flight.items()))
        P = sum(layer.parameters for layer in own)
        versions = {"pipedream": p - r, "pipedream_2bw": 2}.get(name, 1)
        held = (versions * P, P, 2 * P)
        result.append(_cost(own, examples, _positions(case), held, peak))
    tp = N // (dp * p)
    return [result[i // tp % p] for i in range(N)]


def one_device(case: Case) -> Cost:
    """Return what one device holds and computes; it sends nothing."""
    if isinstance(case.model, nn.Siamese):
        return _siamese(case, 1)[0]
    return _replica("naive", case, 1, 0)


def useful_share(name: str, case: Case, N: int) -> float:
    """Return one device's work over N times that of the slowest rank, as if links were free.

    What is missing: ranks that compute less than the busiest one, work that is done N times, and
    the bubble; of an asynchronous pipeline, that of a long stream.
    """
    if name not in (*PIPELINES, *STREAMS, "hybrid"):
        return one_device(case).work / (N * max(cost.work for cost in predict(name, case, N)))
    stages, order, m = _stages(name, case, N)
    work = [sum(layer.work for layer in stage) for stage in stages]
    whole = sum(layer.work for layer in layers(case))
    dp = case.options.get("dp", 1) if name == "hybrid" else 1
    each = ceil(ceil(len(case.inputs) / dp) / m)  # examples of the largest micro-batch
    rounds = 20 if name in STREAMS else 1
    order = programs(name, N, rounds * m) if name in STREAMS else order
    busiest = each * simulate(order, work, work, work).makespan / 3 / rounds
    return float(whole * len(case.inputs) / (N * busiest))
