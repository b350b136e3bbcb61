"""Experts over ranks: every rank has other examples and other experts, and all else whole."""

from dataclasses import replace
from functools import partial

from minidist import nn
from minidist.comm import Group
from minidist.expert_parallel import ExpertParallel
from minidist.rng import generator
from minidist.verify.strategies.cases import (
    Case,
    collect,
    of_kind,
    random_weights,
    transformer_example,
)
from minidist.verify.strategies.data_parallel import Replicas
from minidist.verify.strategies.job import Arrays
from minidist.verify.strategies.record import EXPERTS, Costs, Strategy


class Experts(Replicas):
    """Every rank has some of the examples and of the experts."""

    model: ExpertParallel

    def __init__(self, group: Group, case: Case, micro_batches: int = 1, dispatch: str = "rows"):
        super().__init__(group, case, lambda *_: self.model.sum_gradients(), micro_batches)
        whole = of_kind(nn.Transformer, case.model)
        self.model = ExpertParallel(whole, group, dispatch=dispatch)

    def result(self) -> Arrays:
        return self.model.whole(collect(self.model))


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
    for block in (of_kind(nn.ExpertBlock, layer) for layer in model.layers[1:-1]):
        block.norm_2.gain.data += 2  # else all positions choose the same experts
        of_kind(nn.BiasBalance, block.mixture.bias).bias.data *= 0.05
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
        for block in (of_kind(nn.ExpertBlock, layer) for layer in model.layers[1:-1]):
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


STRATEGIES = [
    Strategy(
        name="expert",
        idea="experts over ranks: rows travel to them and back",
        term="专家并行, MoE专家",
        paper="Lepikhin et al. 2020, sections 3.2 and 3.3.2",
        family="experts",
        files=(
            "expert_parallel/dispatch.py",
            "expert_parallel/once_per_rank.py",
            "expert_parallel/sharded_experts.py",
            "nn/router.py",
            "nn/router.py",
            "nn/mixture_of_experts.py",
        ),
        lesson="15_experts",
        start=Experts,
        cases=expert_cases,
        costs=Costs(
            limit=lambda case, ranks: (min(case.model.experts, len(case.inputs)), "experts"),
            cuts="examples and experts",
            example=partial(transformer_example, experts=4),
        ),
        models=EXPERTS,
        tests=(
            "expert_parallel/test_dispatch.py",
            "expert_parallel/test_once_per_rank.py",
            "expert_parallel/test_sharded_experts.py",
            "hybrid/test_experts_on_every_split.py",
        ),
    )
]
