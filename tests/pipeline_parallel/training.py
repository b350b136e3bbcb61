"""A pipeline on real ranks beside one device: losses, all gradients, weights after some steps."""

import copy

import numpy as np

from minidist import nn, optim
from minidist.nn.datasets import Batch
from minidist.pipeline_parallel import Pipeline
from minidist.rng import Randomness
from minidist.verify.compare import compare
from minidist.verify.strategies import INPUT, Case, collect
from minidist.verify.strategies.cases import as_input
from tests.strategies import arrays

STEPS = 3


def mlp_case(widths, examples, seed, activation="gelu", dtype="float64"):
    model = nn.MLP(widths, activation, seed=seed % 100, dtype=dtype)
    targets = np.random.default_rng(seed).integers(0, widths[-1], examples)
    return Case("MLP", model, arrays(examples, widths[0], seed=seed, dtype=dtype), targets)


def transformer_case(depth, examples, seed, tied, dropout, dtype="float64"):
    model = nn.Transformer(
        7, 4, 2, depth, 3, seed=seed % 100, dtype=dtype, tied=tied, dropout=dropout
    )
    tokens, targets = np.random.default_rng(seed).integers(0, 7, (2, examples, 3))
    return Case("Transformer", model, tokens, targets, seed=seed)


def adamw(parameters):
    """AdamW with a large eps: some gradients are zero but for rounding, which 1e-8 would raise."""
    return optim.AdamW(parameters, lr=0.01, weight_decay=0.1, eps=1e-4)


def pipeline_worker(group, case, steps, options, optimizer=adamw):
    """Train some steps; return per step the loss and this rank's gradients; and its weights."""
    pipeline = Pipeline(case.model, group, loss=case.loss, **options)
    own = [p for p in pipeline.parameters() if p.requires_grad]
    rule, found = optimizer(own) if own else None, []
    for step in range(steps):
        batch = micro_batches_of(case, pipeline.m, step)
        loss = pipeline.run(batch)
        rows = [getattr(part.inputs, "grad", None) for part in batch]
        mine = collect(pipeline.model)
        if not any(row is None for row in rows):
            mine[INPUT] = np.concatenate(rows)
        found.append((loss, mine))
        if rule:
            rule.step(), rule.zero_grad()
    return found, pipeline.model.state()


def micro_batches_of(case, m, step):
    """Cut the batch without the library: uneven, some empty, inputs as leaves."""
    cut, start = [], 0
    for i in range(m):
        stop = start + len(case.inputs) // m + (i < len(case.inputs) % m)
        examples = np.arange(start, stop)
        inputs = as_input(case.inputs[start:stop])
        cut.append(
            Batch(
                inputs,
                case.targets[start:stop],
                case.seed,
                step,
                examples,
                total=case.total,
            )
        )
        start = stop
    return cut


def single_device(case, steps, optimizer=adamw):
    """Do the same on one device, with one batch."""
    model = copy.deepcopy(case.model)
    own = [p for p in model.parameters() if p.requires_grad]
    rule, found = optimizer(own) if own else None, []
    for step in range(steps):
        x = as_input(case.inputs)
        loss = case.loss(model(x, Randomness(case.seed, step, np.arange(len(x)))), case.targets)
        if loss.requires_grad:
            loss.backward()
        found.append((loss.item(), collect(model, x)))
        if rule:
            rule.step(), rule.zero_grad()
    return found, model.state()


def everyones(parts):
    """Merge what the ranks have into one complete dictionary per rank.

    What a rank does not hold it gets from the first one that does. What nobody has is missing.
    """
    merged = {}
    for part in parts:
        for name, array in part.items():
            merged.setdefault(name, array)
    return [{name: part.get(name, merged.get(name)) for name in merged} for part in parts]


def judge(ranks, case, steps=1, bound=1e-9, optimizer=adamw, **options):
    """Yield (what, is it right, how far off) of every step: losses, gradients; then the weights."""
    found = ranks.run(pipeline_worker, case, steps, options, optimizer)
    want, weights = single_device(case, steps, optimizer)
    for step, (loss, gradients) in enumerate(want):
        off = abs(sum(mine[step][0] for mine, _ in found) - loss) / max(1, abs(loss))
        yield f"loss of step {step}", off <= max(bound, 1e-12), off
        verdict = compare(everyones([mine[step][1] for mine, _ in found]), gradients, bound)
        yield f"gradients of step {step}", verdict.ok, verdict
    verdict = compare(everyones([state for _, state in found]), weights, bound)
    yield "weights", verdict.ok, verdict


def assert_equals_one_device(ranks, case, steps=1, **more):
    for what, right, off in judge(ranks, case, steps, **more):
        assert right, f"{what}: {off}"
