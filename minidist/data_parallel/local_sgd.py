"""Fewer meetings: every rank trains alone for h steps, then all meet.

Letters: h local steps per round; x the weights that all ranks begin a round with, x_r rank r's
weights at its end; g its gradients; N ranks.

Stich 2019, Local SGD Converges Fast and Communicates Little, algorithm 1: h steps of plain SGD, and
then the average of the weights,

    x' = 1/N sum_r x_r        with  x_r = x - lr N (g_r1 + ... + g_rh).

Rank r's loss is its part of a mean over the whole batch (naive.py: `reduction_size`), about 1/N of
the mean over its own examples. So it steps with N lr. Put x_r into x', and N cancels out:

    x' = x - lr sum_r (g_r1 + ... + g_rh).

This is what `LocalSGD` computes: it adds up its gradients, and the all_reduce sums gradients, not
weights. The two differ in rounding alone. But with h = 1 the second one does, in the same order,
what naive.py does: sum the gradients over the ranks, multiply by lr, subtract. So it has the
weights of `naive` with SGD bit for bit, which no average of weights would have.

Douillard et al. 2023, DiLoCo, algorithm 1: any optimizer inside (theirs is AdamW; its state stays
on the rank), and outside a step with Nesterov momentum m along the averaged difference D:

    D = 1/N sum_r (x - x_r);    m = mu m + D;    x' = x - lr (D + mu m).

Bytes of all ranks: 2 (N - 1) times the parameters' size, once in h steps.
"""

from numbers import Integral

from minidist import optim
from minidist.autograd.recording import Since
from minidist.backend import Array, array_module
from minidist.comm import Group
from minidist.errors import WrongInput, check_number
from minidist.nn import Module
from minidist.nn.flat_parameters import FlatSlice
from minidist.parallel import check_replicas, check_same_weights, summed_ranks


def zeros_like(slices: list[FlatSlice]) -> list[Array]:
    return [array_module(s.data).zeros_like(s.data) for s in slices]


class Rounds:
    """When a round begins: after every h-th step, and where something else changes the weights.

    A round begins with the weights as they are then. load_state may change them at any time, but on
    all ranks alike: ranks that train alone have different weights, and what changes these on each
    rank by itself is a ValueError.

    steps    local steps of this round so far
    weights  whether something else than our own steps has changed them
    """

    def __init__(self, model: Module, group: Group, every: int, optimizer: optim.Optimizer):
        check_number("a round has 1 local step or more", every, lambda n: n >= 1, Integral)
        check_replicas(model, group)
        self.model, self.group, self.every = model, group, every
        self.steps, self.weights = 0, Since(optimizer.last_changed)

    def begins(self) -> bool:
        """Return whether the next step is the first one of a round; every rank calls this."""
        if self.weights.behind():
            check_same_weights(self.model, self.group)
            self.steps = 0
        return self.steps == 0

    def ends(self) -> bool:
        """Count a step; return whether it is the last one of a round."""
        self.steps = (self.steps + 1) % self.every
        return self.steps == 0


class LocalSGD:
    """SGD on each rank alone, and after every h-th step the average of all ranks' weights.

        local = LocalSGD(model, group, lr=0.1, every=8)
        for x, y in batches:
            loss(x, y).backward()                  # my share, divided by the whole batch
            local.step()
            local.zero_grad()

    every  h. The learning rate `lr` stays as it is within a round
    """

    def __init__(self, model: Module, group: Group, lr: float, every: int):
        self.group, self.outside = group, optim.SGD(model.parameters(), lr)
        self.inside = optim.SGD(model.parameters(), lr * group.size)
        self.slices, self.rounds = self.outside.slices, Rounds(model, group, every, self.outside)
        self.start, self.sums = zeros_like(self.slices), zeros_like(self.slices)

    def step(self) -> None:
        """Take a local step; or, if it is the round's last, the step of all gradients of all ranks.

        After the last one `p.grad` is the sum of them all.
        """
        if self.rounds.begins():
            for s, start, total in zip(self.slices, self.start, self.sums, strict=True):
                start[...], total[...] = s.data, 0
        self.inside.collect_gradients()
        for s, total in zip(self.slices, self.sums, strict=True):
            total += s.gradient
        if self.rounds.ends():
            self.meet()
        else:
            self.inside.step()
        self.rounds.weights.follow()

    def meet(self) -> None:
        """Go back to the weights that all began with, and take one step with the sum."""
        for s, start, total in zip(self.slices, self.start, self.sums, strict=True):
            s.data[...] = start
            self.group.all_reduce(total, out=s.gradient, label="gradients of a round")
        for p in self.outside.parameters:
            ranks = summed_ranks(p, self.group)
            p.grad = p.grad_buffer
            p.summed_over = ranks
        self.outside.step()

    def zero_grad(self) -> None:
        self.inside.zero_grad()


class DiLoCo:
    """h steps of an inner optimizer on each rank alone, then one of Nesterov's for all.

    inner     an optimizer of the model's parameters, such as AdamW; not MixedPrecision, since the
              outer step is taken in the weights' dtype
    every     h
    lr        of the outer step, and its momentum mu; 0.7 and 0.9 are the paper's
    moments   m, one array per flat slice
    """

    def __init__(
        self,
        model: Module,
        group: Group,
        inner: optim.Optimizer,
        every: int,
        lr: float = 0.7,
        momentum: float = 0.9,
    ):
        if inner.scale is not None:
            raise WrongInput(
                "DiLoCo adds up differences of weights in their own dtype, which 16 bits would "
                "lose; use float32 weights, and an inner optimizer without MixedPrecision"
            )
        optim.check_setting("lr", lr)
        optim.check_setting("momentum", momentum)
        self.group, self.inner, self.lr, self.momentum = group, inner, lr, momentum
        self.rounds = Rounds(model, group, every, inner)
        self.start, self.moments = zeros_like(inner.slices), zeros_like(inner.slices)

    def step(self) -> None:
        """Take a step of the inner optimizer; after the round's last one, the outer step."""
        if self.rounds.begins():
            for s, start in zip(self.inner.slices, self.start, strict=True):
                start[...] = s.data
        self.inner.step()
        if self.rounds.ends():
            self.meet()
        self.rounds.weights.follow()

    def meet(self) -> None:
        """Move all ranks from the weights that they began with, along their mean difference."""
        for s, start, m in zip(self.inner.slices, self.start, self.moments, strict=True):
            difference = (start - s.data) / self.group.size
            difference = self.group.all_reduce(difference, label="differences of a round")
            m *= self.momentum
            m += difference
            s.data[...] = start - self.lr * (difference + self.momentum * m)
        for home in self.inner.homes:
            home.changed()

    def zero_grad(self) -> None:
        self.inner.zero_grad()
