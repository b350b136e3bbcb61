"""Fewer meetings: every rank trains alone for H steps, then all meet.

Letters: H local steps per round; x the weights that all ranks begin a round with, x_k rank k's
weights at its end; g its gradients; N ranks.

Stich 2019, Local SGD Converges Fast and Communicates Little, algorithm 1: H steps of plain SGD, and
then the average of the weights,

    x' = 1/N sum_k x_k        with  x_k = x - lr N (g_k1 + ... + g_kH).

Rank k's loss is its part of a mean over the whole batch (naive.py: `reduction_size`), about 1/N of
the mean over its own examples. So it steps with N lr. Put x_k into x', and N cancels out:

    x' = x - lr sum_k (g_k1 + ... + g_kH).

This is what `LocalSGD` computes: it adds up its gradients, and the all_reduce sums gradients, not
weights. The two differ in rounding alone. But with H = 1 the second one does, in the same order,
what naive.py does: sum the gradients over the ranks, multiply by lr, subtract. So it has the
weights of `naive` with SGD bit for bit, which no average of weights would have.

Douillard et al. 2023, DiLoCo, algorithm 1: any optimizer inside (theirs is AdamW; its state stays
on the rank), and outside a step with Nesterov momentum m along the averaged difference D:

    D = 1/N sum_k (x - x_k);    m = mu m + D;    x' = x - lr (D + mu m).

Bytes of all ranks: 2 (N - 1) times the parameters' size, once in H steps.
"""

from minidist import optim
from minidist.comm import Group
from minidist.nn import Module
from minidist.replicas import check_batch_norm, check_same_weights, summed_ranks


def check_start(model: Module, group: Group, every: int) -> None:
    """Raise ValueError unless all ranks can begin: a round has steps, all weights are alike."""
    if every < 1:
        raise ValueError(f"a round has 1 local step or more, not {every}")
    check_batch_norm(model, group.size)
    check_same_weights(model, group)


class LocalSGD:
    """SGD on each rank alone, and after every H-th step the average of all ranks' weights.

        local = LocalSGD(model, group, lr=0.1, every=8)
        for x, y in batches:
            loss(x, y).backward()                  # my share, divided by the whole batch
            local.step()
            local.zero_grad()

    every  H. The learning rate `lr` stays as it is within a round
    """

    def __init__(self, model: Module, group: Group, lr: float, every: int):
        check_start(model, group, every)
        self.group, self.every, self.steps = group, every, 0
        self.outside = optim.SGD(model.parameters(), lr)
        self.inside = optim.SGD(model.parameters(), lr * group.size)
        self.slices = self.outside.slices
        self.start = [s.data.copy() for s in self.slices]
        self.sums = [0 * s.data for s in self.slices]

    def step(self) -> None:
        """Take a local step; or, if it is the round's last, the step of all gradients of all ranks.

        After the last one `p.grad` is the sum of them all.
        """
        self.inside.collect_gradients()
        for s, total in zip(self.slices, self.sums, strict=True):
            total += s.gradient
        self.steps += 1
        if self.steps % self.every:
            self.inside.step()
        else:
            self.meet()

    def meet(self) -> None:
        """Go back to the weights that all began with, and take one step with the sum."""
        for s, start, total in zip(self.slices, self.start, self.sums, strict=True):
            s.data[...] = start
            self.group.all_reduce(total, out=s.gradient, label="gradients of a round")
        for p in self.outside.parameters:
            ranks = summed_ranks(p, self.group)
            p.grad = p.grad_buffer
            p.note_sum(ranks)
        self.outside.step()
        for s, start, total in zip(self.slices, self.start, self.sums, strict=True):
            start[...] = s.data
            total[...] = 0

    def zero_grad(self) -> None:
        self.inside.zero_grad()


class DiLoCo:
    """H steps of an inner optimizer on each rank alone, then one of Nesterov's for all.

    inner     an optimizer of the model's parameters, such as AdamW
    every     H
    lr        of the outer step, and its momentum; 0.7 and 0.9 are the paper's
    momentum  {per flat slice: m}
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
        check_start(model, group, every)
        self.group, self.inner, self.every, self.steps = group, inner, every, 0
        self.lr, self.momentum = lr, momentum
        self.start = [s.data.copy() for s in inner.slices]
        self.moments = [0 * s.data for s in inner.slices]

    def step(self) -> None:
        """Take a step of the inner optimizer; after the round's last one, the outer step."""
        self.inner.step()
        self.steps += 1
        if self.steps % self.every == 0:
            self.meet()

    def meet(self) -> None:
        """Move all ranks from the weights that they began with, along their mean difference."""
        for s, start, m in zip(self.inner.slices, self.start, self.moments, strict=True):
            difference = (start - s.data) / self.group.size
            difference = self.group.all_reduce(difference, label="differences of a round")
            m *= self.momentum
            m += difference
            start -= self.lr * (difference + self.momentum * m)
            s.data[...] = start
        for home in self.inner.homes:
            home.changed()

    def zero_grad(self) -> None:
        self.inner.zero_grad()
