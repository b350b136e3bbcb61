"""Experts over ranks: every rank has other examples and other experts, and all else whole."""

from dataclasses import replace
from functools import partial

from minidist import nn
from minidist.expert_parallel import ExpertParallel
from minidist.rng import generator
from minidist.verify.strategies.cases import (
    Case,
    random_weights,
    transformer_example,
)
from minidist.verify.strategies.record import EXPERTS, Costs, record


def todays_experts(width: int = 8, heads: int = 2) -> nn.Transformer:
    """Return a Transformer whose experts are DeepSeek-V3's, small: many, narrow, shared, biased.

    A position chooses 4 of 8 experts, in at most 2 of 4 groups, and none is dropped.
    """
    model = nn.Transformer(
        *(11, width, heads, 2, 8, 2, "float64", 0.2),
        experts=8,
        top_k=4,
        capacity=None,
        balance=0.1,
        expert_width=width,
        shared=2,
        bias_rate=0.1,
        groups=4,
        most_groups=2,
    )
    random_weights(model)
    for block in model.modules(nn.ExpertBlock):
        block.norm_2.gain.data += 2  # else all positions choose the same experts
        block.mixture.bias.bias.data *= 0.05
    return model


def expert_cases(ranks: int) -> list[Case]:
    """One choice and two, with drops and without, an uneven split, an idle expert, few examples."""
    tokens, nexts = generator(0, "expert cases").integers(0, 11, (2, 5, 6))
    options: dict[str, dict] = {
        "2 of 4 experts, capacity 0.75, dropout": {"experts": 4, "capacity": 0.75, "dropout": 0.2},
        "1 of 4 experts, capacity 0.5": {"experts": 4, "top_k": 1, "capacity": 0.5},
        "2 of 3 experts, no capacity, tied": {"experts": 3, "capacity": None, "tied": True},
        "1 of 5 experts, 1 without rows": {"experts": 5, "top_k": 1},
    }
    cases = []
    for name, more in options.items():
        model = nn.Transformer(11, 8, 2, 2, 6, 2, "float64", **{"balance": 0.1} | more)
        random_weights(model)
        for block in model.modules(nn.ExpertBlock):
            block.norm_2.gain.data += 2  # else all positions choose the same experts
            if "without rows" in name:
                gate = block.mixture.gate.weight.data
                gate[:, 1] = (gate[:, 0] + gate[:, 2]) / 2  # one of these two has more
        cases.append(Case(name, model, tokens, nexts))
    first = cases[0]
    few = Case("2 examples, 2 micro-batches", first.model, tokens[:2], nexts[:2])
    few.options["micro_batches"] = 2
    todays = Case("4 of 8, 2 shared, biases", todays_experts(), tokens, nexts)
    once = {"dispatch": "positions", "micro_batches": 2}
    return [*cases, few, todays, replace(todays, name="4 of 8, once per rank", options=once)]


def experts_limit(case: Case, ranks: int) -> tuple[int, str]:
    assert isinstance(case.model, nn.Transformer)
    return min(case.model.experts, len(case.inputs)), "experts"


STRATEGIES = [
    record(
        "expert",
        make=ExpertParallel,
        cases=expert_cases,
        costs=Costs(
            limit=experts_limit,
            cuts="examples and experts",
            example=partial(transformer_example, experts=4),
        ),
        models=EXPERTS,
    )
]
