"""The pipelines as workers: every rank holds some of the layers, and gets the whole batch."""

import copy
from dataclasses import replace
from functools import partial

import numpy as np

from minidist import nn, optim
from minidist.autograd import Tensor, no_grad
from minidist.comm import Group
from minidist.pipeline_parallel import PipeDream, Pipeline
from minidist.pipeline_parallel.actions import Programs, Update, last_stage
from minidist.pipeline_parallel.holders import from_holders, holders
from minidist.pipeline_parallel.partition import cut_of
from minidist.pipeline_parallel.schedules import programs
from minidist.pipeline_parallel.stage import MicroBatch, micro_batches
from minidist.rng import generator
from minidist.tools.causes import cause_of
from minidist.tools.replay import replay
from minidist.tools.strategies.cases import INPUT, Case, Outcome, Split, as_input, bill, collect


def chosen(case: Case, ranks: int, schedule: str, micro_batches=None, chunks=None) -> tuple:
    """Return (micro-batches, chunks): those given; by default 2 per rank, and 2 where possible."""
    many = {"interleaved": min(2, max(1, len(case.model.layers) // ranks)), "zb_v": 2}
    m = 2 * ranks if micro_batches is None else micro_batches
    return m, many.get(schedule, 1) if chunks is None else chunks


def pipeline_worker(
    group: Group, case: Case, schedule: str, micro_batches=None, chunks=None, **options
) -> Outcome:
    """Run one batch through a synchronous pipeline."""
    m, chunks = chosen(case, group.size, schedule, micro_batches, chunks)
    pipeline = Pipeline(case.model, group, schedule, m, chunks, case.loss, **options)
    batch = _cut_with_leaves(case, m)
    pipeline.run(batch)
    groups = [group, *(g for g in pipeline.shared.values() if g is not None)]
    moved = bill(*groups)
    mine = collect(pipeline.model) | _input_gradient(batch)
    return Outcome(everyones(group, mine, case), moved.total(), operations=dict(moved))


def _cut_with_leaves(case: Case, m: int) -> list[MicroBatch]:
    """Return micro-batches whose floating inputs are leaves, so that their gradients are kept."""
    cut = micro_batches(case.inputs, case.targets, m, case.seed)
    return [replace(part, inputs=as_input(part.inputs)) for part in cut]


def _input_gradient(batch: list[MicroBatch]) -> dict[str, np.ndarray]:
    """Return what the first stage has left in the inputs, if they are floats."""
    rows = [getattr(part.inputs, "grad", None) for part in batch]
    return {} if any(row is None for row in rows) else {INPUT: np.concatenate(rows)}


def everyones(group: Group, mine: dict[str, np.ndarray], case: Case) -> dict[str, np.ndarray]:
    """Return all gradients of a case, the input's too, or all weights, on every rank."""
    names = [*case.model.named_parameters(), *([INPUT] if case.inputs.dtype.kind == "f" else [])]
    return from_holders(mine, names, group)


def by_layers(case: Case, ranks: int, schedule: str) -> Split:
    m, chunks = chosen(case, ranks, schedule, **case.options)
    cut, _, _ = layout(case.model, programs(schedule, ranks, m, chunks))
    return Split(micro_batches=m, stages=names_of(case, cut))


def by_layers_of_a_stream(case: Case, ranks: int) -> Split:
    return Split(stages=names_of(case, cut_of(len(case.model.layers), ranks)))


def layout(
    model: nn.Sequential, programs: Programs
) -> tuple[list[range], list[int], dict[str, int]]:
    """Return where the layers are under these programs: (cut, crossed, copies).

    cut      the layers of each virtual stage
    crossed  the stages whose output goes to another rank
    copies   {parameter name: the ranks that hold it}; of a tied one there may be several
    """
    last = last_stage(programs.placement)
    cut = cut_of(len(model.layers), 1 + last)
    rank_of = {k: r for r, own in enumerate(programs.placement) for k in own}
    crossed = [k for k in range(last) if rank_of[k] != rank_of[k + 1]]
    held = holders(model, cut).items()
    return cut, crossed, {name: len({rank_of[k] for k in stages}) for name, stages in held}


def names_of(case: Case, cut: list[range]) -> tuple[list[str], ...]:
    """Return the names of the parameters that each stage holds."""
    layers = case.model.layers
    return tuple([n for i in part for n in layers[i].named_parameters()] for part in cut)


def pipedream_worker(
    group: Group, case: Case, scheme: str, minibatches: int | None = None, **options
) -> Outcome:
    """Train on a stream of minibatches and replay it; by default, one minibatch's gradient.

    With `minibatches` the batch is cut into so many, and the outcome is the weights at the end.
    """
    every = options.get("update_every") or max(1, group.size - 1)
    batch = _cut_with_leaves(case, minibatches or 1)
    per_update = every if scheme == "2bw" else 1
    if minibatches:
        batch = [replace(part, total=part.total / minibatches * per_update) for part in batch]
    model = copy.deepcopy(case.model)
    pipe = PipeDream(model, group, momentum, scheme, case.loss, **options)
    pipe.train(batch)
    moved = group.ledger.total + (pipe.stage.replicas.ledger.total if pipe.stage.replicas else 0)
    if not minibatches:
        flat = pipe.stage.weights.flat
        views = flat.views(flat.gradient)
        mine = collect(pipe.model)  # zeros, of what is frozen, too: the updates dropped the rest
        mine |= {p.name: g.copy() for p, g in zip(flat.parameters, views, strict=True)}
        return Outcome(everyones(group, mine | _input_gradient(batch), case), moved)
    weights = everyones(group, pipe.model.state(), replace(case, inputs=np.zeros(0, int)))
    bare = pipe.programs_for(group.size, minibatches, **pipe.options)
    versions, updates = _versions(group, pipe, bare.placement), _updates(bare)
    want = replay(case.model, pipe.cut, batch, versions, updates, momentum, case.loss)
    said = None
    if any(not np.array_equal(weights[name], w) for name, w in want.items()):
        said = cause_of.replays(weights, _others(case, pipe, batch, versions, updates))
    return Outcome(weights, moved, want, used=pipe.used, said=said)


def _others(case: Case, pipe: PipeDream, batch, versions, updates) -> dict:
    """Return {what is different about it: a replay that is not the one that should be}."""

    def shifted(by: int) -> list[dict[int, int]]:
        return [{b: max(0, v + by) for b, v in mine.items()} for mine in versions]

    start = case.model, pipe.cut, batch
    return {
        f"with versions {by:+d} of those recorded": partial(
            replay, *start, shifted(by), updates, momentum, case.loss
        )
        for by in (-1, 1)
    } | {"that updates twice": partial(replay, *start, versions, updates, twice, case.loss)}


def twice(parameters: list[nn.Parameter]) -> optim.Optimizer:
    """Return an optimizer that takes every step twice."""
    rule = momentum(parameters)
    step = rule.step
    rule.step = lambda: (step(), step())
    return rule


def momentum(parameters: list[nn.Parameter]) -> optim.Optimizer:
    return optim.SGD(parameters, lr=0.1, momentum=0.9)


def _versions(group: Group, pipe: PipeDream, placement) -> list[dict[int, int]]:
    """Return, per stage, the version that each minibatch's forward pass has used."""
    used = np.array([(b, version) for letter, b, version in pipe.used if letter == "F"])
    counts = group.all_gather(np.array([len(used)]))
    everyones = np.split(group.all_gather(used.reshape(-1, 2)), np.cumsum(counts)[:-1])
    result = [{} for _ in range(1 + last_stage(placement))]
    for (stage,), rows in zip(placement, everyones, strict=True):
        result[stage].update({int(b): int(version) for b, version in rows})
    return result


def _updates(programs: Programs) -> list[list[int]]:
    """Return, per stage, the minibatches with which it updates."""
    found = {stage: program for (stage,), program in zip(programs.placement, programs, strict=True)}
    return [[a.micro_batch for a in found[s] if isinstance(a, Update)] for s in sorted(found)]


def boundary_bytes(case: Case) -> list[int]:
    """Return the bytes of the whole batch's activation after each layer."""
    x, sizes = case.inputs, []
    with no_grad():
        for layer in case.model.layers:
            x = layer(x if not isinstance(x, np.ndarray) or x.dtype.kind in "iu" else Tensor(x))
            sizes.append(x.data.nbytes)
    return sizes


def pipeline_bytes(case: Case, ranks: int, schedule: str) -> int:
    """Return 2 B T C itemsize per boundary between ranks, and an all_reduce of what is tied."""
    m, chunks = chosen(case, ranks, schedule, **case.options)
    cut, crossed, copies = layout(case.model, programs(schedule, ranks, m, chunks))
    sizes, named = boundary_bytes(case), case.model.named_parameters()
    moved = sum(2 * sizes[cut[k][-1]] for k in crossed)
    return moved + sum(
        2 * (copies[name] - 1) * p.data.nbytes for name, p in named.items() if p.requires_grad
    )


def stream_bytes(case: Case, ranks: int) -> int:
    """Return 2 B T C itemsize per boundary, of all minibatches together."""
    return sum(
        2 * boundary_bytes(case)[part[-1]] for part in cut_of(len(case.model.layers), ranks)[:-1]
    )


def pipeline_cases(ranks: int, schedule: str) -> list[Case]:
    """An MLP of uneven stages on uneven micro-batches, a Transformer with dropout, one example."""
    random = generator(0, "pipeline cases")
    stages = ranks * (2 if schedule in ("interleaved", "zb_v") else 1)
    widths = [6, *(5 + i % 3 for i in range(stages)), 3]
    mlp = nn.MLP(widths, activation="gelu", seed=1, dtype="float64")
    transformer = nn.Transformer(
        11, 8, 2, max(1, stages - 1), 5, seed=2, dtype="float64", dropout=0.2, tied=True
    )
    images, labels = random.standard_normal((9, 6)), random.integers(0, 3, 9)
    tokens, nexts = random.integers(0, 11, (2, 7, 5))
    return [
        Case("MLP, 9 examples", mlp, images, labels),
        Case("Transformer, 7 examples", transformer, tokens, nexts),
        Case("MLP, 1 example", mlp, images[:1], labels[:1]),
    ]


def stream_cases(ranks: int) -> list[Case]:
    """Minibatches of uneven sizes in a row, with momentum; and one alone, at version 0."""
    random = generator(0, "stream cases")
    mlp = nn.MLP(
        [6, *(5 + i % 3 for i in range(ranks)), 3], activation="gelu", seed=1, dtype="float64"
    )
    transformer = nn.Transformer(11, 8, 2, ranks, 5, seed=2, dtype="float64", dropout=0.2)
    images, labels = random.standard_normal((26, 6)), random.integers(0, 3, 26)
    tokens, nexts = random.integers(0, 11, (2, 12, 5))
    return [
        Case("MLP, 11 minibatches", mlp, images, labels, options={"minibatches": 11}),
        Case("Transformer, 6 minibatches", transformer, tokens, nexts, options={"minibatches": 6}),
        Case("MLP, 1 minibatch", mlp, images, labels),
    ]
