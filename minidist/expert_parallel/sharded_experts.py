"""A model whose experts are spread over ranks, each of which has examples of its own.

Lepikhin et al. 2020, section 3.3.2; Fedus et al. 2021, section 5.4 (data and expert parallelism).
The ranks hold everything else whole, as in data parallelism. Letters: N ranks, E experts.

    an expert's gradient    every rank sent it its rows: the whole sum is on its one rank already
    every other gradient    a partial sum dW{+N}: all_reduce

    model = ExpertParallel(nn.Transformer(..., experts=8), group)
    randomness = Randomness(seed, step, examples, batch=all_examples)         # on all ranks
    loss = nn.cross_entropy(model(x, randomness), y, reduction_size=total)    # own examples
    loss.backward()
    model.sum_gradients()
    optimizer.clip_global_norm(1.0, model.sum_squares)
    update(optimizer, model)        # the weights, and the biases of routers (trainer.py)

Without `batch` a rank divides its part of the balancing loss by its own examples, and gradients are
wrong.
"""

import numpy as np

from minidist import nn
from minidist.backend import Array, to_host
from minidist.comm import Group
from minidist.errors import WrongInput, check_name
from minidist.expert_parallel.dispatch import Dispatch
from minidist.expert_parallel.once_per_rank import OncePerRank
from minidist.pieces import split_ends
from minidist.replicas import (
    check_balance,
    check_replicas,
    from_holders,
    load_own,
    shapes_of,
    share_scales,
    sum_gradients,
    sum_loads,
    sum_squares_over,
)

SPREAD = "ranks that hold different experts: pass sum_squares=model.sum_squares"
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
        own = mixture.experts[ends[group.rank] : ends[group.rank + 1]]
        trained = any(p.requires_grad for expert in mixture.experts for p in expert.parameters())
        for expert in mixture.experts:
            for p in expert.parameters():
                p.elsewhere = None if expert in own else ELSEWHERE
        mixture.experts = own
        if dispatch == "rows":
            mixture.run_experts = Dispatch(group, ends, trained)
        else:
            mixture.run_positions = OncePerRank(group, ends, trained)


class ExpertParallel(nn.Sequential):
    """tokens[B, T] -> logits[B, T, V] of this rank's examples, with experts on all ranks.

    model  a single-device model with experts, the same on every rank. Its layers are taken over: do
           not use it afterwards. Every rank calls forward and backward equally often.
    check_weights
           whether the ranks first compare their weights (see check_same_weights)
    dispatch
           what travels: "rows" or "positions" (see keep_own_experts)
    """

    def __init__(
        self,
        model: nn.Sequential,
        group: Group,
        check_weights: bool = True,
        dispatch: str = "rows",
    ):
        if not any(nn.mixtures(model)):
            raise WrongInput(
                f"this {type(model).__name__} has no experts; use nn.Transformer(..., experts=8)"
            )
        share_scales(model.parameters(), group)
        self.check_group = check_replicas(model, group, check_weights, loads=True)
        self.group, self.shapes = group, shapes_of(model)
        keep_own_experts(model, group, dispatch)
        super().__init__(model.layers)
        for p in self.parameters():
            p.spread = SPREAD

    def sum_gradients(self) -> None:
        """Sum over the ranks what is a partial sum: all gradients but those of experts; loads."""
        check_balance(self, self.group.size)
        experts = expert_parameters(self)
        sum_gradients([p for p in self.parameters() if p not in experts], self.group)
        sum_loads(self, self.group)
        for p in experts:
            p.note_sum(frozenset(self.group.members))

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
        counted = self.parameters() if self.group.rank == 0 else expert_parameters(self)
        return sum_squares_over(counted, self.parameters(), own, self.group)

    def state(self) -> dict[str, np.ndarray]:
        """Return the weights of the whole model, on every rank and on the host, by name."""
        return self.whole(super().state())

    def load_state(self, state: dict[str, np.ndarray]) -> None:
        """Copy the whole model's arrays, the same on every rank, into what this rank holds."""
        # `super()`: into what this rank holds, without the sums of this class.
        load_own(super(), state, self.shapes, self.check_group)  # type: ignore[arg-type]  # a proxy

    def whole(self, own: dict[str, Array]) -> dict[str, np.ndarray]:
        """Return arrays for all parameters, given those of the parameters on this rank."""
        mine = {name: to_host(array) for name, array in own.items()}
        return from_holders(mine, self.shapes, self.group)
