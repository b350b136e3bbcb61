"""A model whose experts are spread over ranks, each of which has examples of its own.

Lepikhin et al. 2020, section 3.3.2; Fedus et al. 2021, section 5.4 (data and expert parallelism).
The ranks hold everything else whole, as in data parallelism. Letters: N ranks, E experts.

    an expert's gradient    every rank sent it its rows: the whole sum is on its one rank already
    every other gradient    a partial sum dW{+N}: all_reduce

    trainer = ExpertParallel(nn.Transformer(..., experts=8), group)
    loss = trainer.backward(Batch(tokens, targets))     # of this rank's examples, on all experts
    optimizer.clip_global_norm(1.0, trainer.sum_squares)
    trainer.step(optimizer)         # the weights, and the biases of routers

A rank divides its part of the balancing loss by the examples of all ranks, which the parts of a
Batch know.
"""

import numpy as np

from minidist import nn
from minidist.backend import Array
from minidist.comm import Group
from minidist.errors import WrongInput, check_name
from minidist.expert_parallel.dispatch import Dispatch
from minidist.expert_parallel.once_per_rank import OncePerRank
from minidist.parallel import (
    check_balance,
    check_replicas,
    from_holders,
    shapes_of,
    share_scales,
    sum_gradients,
    sum_loads,
    sum_squares_over,
)
from minidist.parallel.trainer import Trainer
from minidist.pieces import split_ends

SPREAD = "ranks that hold different experts: pass sum_squares=trainer.sum_squares"
DISPATCHES = "rows", "positions"
ELSEWHERE = "another rank holds this expert; use state() of the split model"


def expert_parameters(module: nn.Module) -> dict[nn.Parameter, None]:
    """Return the parameters of the experts of this rank, in order; `in` asks by identity."""
    return dict.fromkeys(p for m in nn.mixtures(module) for e in m.experts for p in e.parameters())


def keep_own_experts(model: nn.Module, group: Group, dispatch: str = "rows") -> None:
    """Keep in each mixture the experts of this rank, a run of neighbours; let rows travel.

    The runs are as equal as can be, the larger first; if E < N some ranks have none.

    dispatch  what travels: "rows", one for each expert of a position; or "positions", once to each
              rank (once_per_rank.py)
    """
    check_name("dispatch", dispatch, DISPATCHES)
    for mixture in nn.mixtures(model):
        ends = split_ends(len(mixture.experts), group.size)
        experts_here = mixture.experts[ends[group.rank] : ends[group.rank + 1]]
        trained = any(p.requires_grad for expert in mixture.experts for p in expert.parameters())
        for expert in mixture.experts:
            for p in expert.parameters():
                p.placement.elsewhere = None if expert in experts_here else ELSEWHERE
        mixture.experts = experts_here
        if dispatch == "rows":
            mixture.run_experts = Dispatch(group, ends, trained)
        else:
            mixture.run_positions = OncePerRank(group, ends, trained)


class ExpertParallel(Trainer):
    """This rank's experts of a model, all else of it whole, and a share of every batch.

    model  a single-device model with experts, the same on every rank. Its layers are taken over: do
           not use it afterwards. Every rank calls forward and backward equally often.
    check_weights
           whether the ranks first compare their weights (see check_same_weights)
    dispatch
           what travels: "rows" or "positions" (see keep_own_experts)
    micro_batches
           of each rank's share of a batch
    """

    def __init__(
        self,
        model: nn.Sequential,
        group: Group,
        check_weights: bool = True,
        dispatch: str = "rows",
        micro_batches: int = 1,
    ):
        if not any(nn.mixtures(model)):
            raise WrongInput(
                f"this {type(model).__name__} has no experts; use nn.Transformer(..., experts=8)"
            )
        share_scales(model.parameters(), group)
        same, shapes = check_replicas(model, group, check_weights, loads=True), shapes_of(model)
        keep_own_experts(model, group, dispatch)
        part = nn.Sequential(model.layers)
        part.loss = model.loss
        super().__init__(part, group, shapes, same, micro_batches)
        for p in self.parameters():
            p.placement.spread = SPREAD

    def sum_gradients(self) -> None:
        """Sum over the ranks what is a partial sum: all gradients but the experts', and loads."""
        check_balance(self.model, self.group.size)
        experts = expert_parameters(self.model)
        sum_gradients([p for p in self.parameters() if p not in experts], self.group)
        sum_loads(self.model, self.group)
        for p in experts:
            p.summed_over = frozenset(self.group.members)

    def sum_squares(self, own: float | None = None) -> float:
        """Return the sum of the squares of the whole gradient: every parameter counts once.

        ValueError before `sum_gradients`: a part of a sum has another norm on each rank.

        own  from Optimizer.clip_global_norm, this rank's own sum, used only as a check
        """
        ranks = frozenset(self.group.members)
        for p in self.parameters():
            if p.grad is not None and not ranks <= p.summed_over:
                raise WrongInput(
                    f"the gradient of {p.name} is not yet summed over the {len(ranks)} ranks; "
                    "call sum_gradients() before you clip"
                )
        counted = self.parameters() if self.group.rank == 0 else expert_parameters(self.model)
        return sum_squares_over(counted, self.parameters(), own, self.group)

    def whole(self, own: dict[str, Array]) -> dict[str, np.ndarray]:
        """Return arrays for all parameters, given the arrays of the parameters on this rank."""
        mine = super().whole(own)
        return from_holders(mine, self.shapes, self.group)
