"""The two branches of a siamese network on two ranks at once.

Model parallelism where the graph forks: neither branch waits for the other, so both ranks compute
from the start, without micro-batches. They meet at the join, on rank 0:

    rank 0   H_0 = branch(x_0)   recv H_1   join, loss, dH_0, dH_1   send dH_1   backward from dH_0
    rank 1   H_1 = branch(x_1)   send H_1            waits           recv dH_1   backward from dH_1

Both ranks hold the shared weights W. Each computes the contribution of its own branch,

    dL/dW  =  dL/dH_0 dH_0/dW  +  dL/dH_1 dH_1/dW,

and the sum over the ranks is the gradient. The join and its gradient belong to rank 0 alone: rank
1 never uses the join, so its copy does not change. The Trainer `Siamese` updates what a rank has.

Layouts: x[B, 2, C0], of which rank i reads x[:, i]; H_i[B, E] on rank i; dW{+ranks} -> all_reduce
-> dW on both.

Bytes, on two ranks: B E numbers each way for every batch, and 2 S for the S bytes of the shared
parameters for every update. On one rank the same code runs both branches and moves nothing.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import numpy as np

from minidist import nn
from minidist.autograd import Tensor
from minidist.autograd.losses import scaled
from minidist.autograd.recording import is_recording
from minidist.backend import Array
from minidist.comm import Group
from minidist.errors import WrongInput
from minidist.nn import Parameter
from minidist.nn.datasets import Batch
from minidist.nn.siamese import check_pairs
from minidist.parallel import check_replicas, sum_gradients, sum_squares_over
from minidist.parallel.trainer import Trainer, check_scale, evaluating, without_dropout
from minidist.rng import Randomness

JOIN = 0  # the rank that compares
BRANCHES = "two branches, and a join that one rank has: pass sum_squares=trainer.sum_squares"


class Siamese(Trainer):
    """This rank's branch of an nn.Siamese, or both of them on one rank; rank 0 has the join.

    check_weights  whether the ranks first compare their weights (see check_same_weights)
    micro_batches  of every batch
    """

    model: nn.Siamese

    def __init__(
        self, model: nn.Siamese, group: Group, check_weights: bool = True, micro_batches: int = 1
    ):
        check_branches(model, group)
        same = check_replicas(model, group, check_weights, micro_batches=micro_batches)
        super().__init__(model, group, check_group=same, micro_batches=micro_batches)
        for p in model.parameters():
            p.placement.spread = BRANCHES

    def parameters(self) -> list[Parameter]:
        return own_parameters(self.model, self.group)

    def share(self, batch: Batch) -> Batch:
        return batch

    def backward(self, batch: Batch) -> float:
        """Compute the whole batch's gradient, in this rank's parameters; return its loss."""
        check_scale(self.model, batch)
        total = 0.0
        with self.batches.batch():
            for part in self.micro_batches(batch):
                x = part.inputs
                if isinstance(x, Tensor):  # two branches would free one graph below it twice
                    x = Tensor(x.data, requires_grad=True)
                total += self.loss_of(part, x)
                if isinstance(x, Tensor) and part.inputs.requires_grad:
                    part.inputs.backward(x.grad)
            all_reduce_shared(self.model, self.group)
        return self.total(np.array(total))

    def evaluate(self, batch: Batch) -> float:
        """Return the whole batch's loss, without dropout and gradient, in the mode of `eval`."""
        part = without_dropout(batch)
        with evaluating(self.model):
            loss = self.loss_of(part, part.inputs)
        return self.total(np.array(loss))

    def loss_of(self, part: Batch, x: Tensor | Array) -> float:
        """Return this rank's loss of a part of a batch; add its gradient, if it is recorded."""

        def loss(outputs: Tensor, targets: Array, reduction_size: float | None) -> Tensor:
            value = self.model.loss(outputs, targets, reduction_size=reduction_size)
            return scaled(value, part.loss_scale)

        value = forward_backward(self.model, x, part.targets, self.group, loss, part.total, part)
        return 0.0 if value is None else value.item()

    def sum_squares(self, own: float | None = None) -> float:
        """Return the sum of the squares of the whole gradient, which is complete on rank 0.

        own  the optimizer's sum, used only as a check: on rank 1 it lacks the join
        """
        held = self.parameters()
        return sum_squares_over(held if self.group.rank == JOIN else [], held, own, self.group)

    def whole(self, own: dict[str, Array]) -> dict[str, np.ndarray]:
        mine = super().whole(own)
        for name in self.model.join.named_parameters():
            if name in mine:
                mine[name] = self.group.broadcast(mine[name], JOIN)
        return mine


def forward_backward(
    model: nn.Siamese,
    x: Tensor | Array,
    targets: Array,
    group: Group,
    loss: Callable[..., Tensor] | None = None,
    reduction_size: float | None = None,
    randomness: Randomness | None = None,
) -> Tensor | None:
    """Add this rank's part of the gradient of one batch; return the loss on rank 0, else None.

    Several micro-batches may follow each other before `all_reduce_shared`. If x[B, 2, C0] is a
    tensor that requires a gradient, the rank adds the gradient of the half that it reads. Where no
    gradient is recorded, this is the forward pass alone.
    """
    check_branches(model, group)
    check_pairs(x)
    for p in model.parameters():
        p.placement.spread = BRANCHES
    value, embeddings = None, {}
    for i in own_branches(group):
        with _span(group, f"forward branch {i}"):
            embeddings[i] = model.embed(x[:, i], randomness)
    gradients: dict[int, Array] = {}
    if group.rank == JOIN:
        loss = loss or model.loss
        value, gradients = _join(model, embeddings, targets, group, loss, reduction_size)
    else:
        group.send(embeddings[group.rank].data, to=JOIN)
        if is_recording():
            gradients[group.rank] = group.recv(JOIN)
    for i, h in embeddings.items():
        if h.requires_grad:
            with _span(group, f"backward branch {i}"):
                h.backward(gradients[i])
    return value


def _join(
    model, embeddings, targets, group, loss, reduction_size
) -> tuple[Tensor, dict[int, Array]]:
    """Compare the two embeddings; send dH_1 if it belongs to rank 1; return the loss, dH_0, dH_1.

    Both embeddings are leaves here: backward stops at them, so the other rank does not have to
    wait for this rank's branch.
    """
    data = [embeddings[i].data if i in embeddings else group.recv(i) for i in range(2)]
    leaves = [Tensor(h, requires_grad=True) for h in data]
    with _span(group, "join"):
        value = loss(model.compare(*leaves), targets, reduction_size=reduction_size)
        if not is_recording():
            return value, {}
        value.backward()
    for i, h in enumerate(leaves):
        if i not in embeddings:
            group.send(h.grad, to=i)
    return value, {i: h.grad for i, h in enumerate(leaves)}


def all_reduce_shared(model: nn.Siamese, group: Group) -> None:
    """Give both ranks the sum of each shared parameter's gradient; None adds zero."""
    check_branches(model, group)
    sum_gradients(shared_parameters(model), group)


def shared_parameters(model: nn.Siamese) -> list[Parameter]:
    return [p for layer in model.branch for p in layer.parameters()]


def own_parameters(model: nn.Siamese, group: Group) -> list[Parameter]:
    """Return the parameters that this rank updates: the shared ones, and on rank 0 the join's."""
    check_branches(model, group)
    return shared_parameters(model) + (model.join.parameters() if group.rank == JOIN else [])


def own_branches(group: Group) -> list[int]:
    """Return the branches that this rank runs: one of them on two ranks, both on one rank."""
    return [i for i in range(2) if i % group.size == group.rank]


def check_branches(model: nn.Siamese, group: Group) -> None:
    if not isinstance(model, nn.Siamese):
        raise WrongInput(f"{type(model).__name__} has no two branches; use an nn.Siamese")
    if group.size > 2:
        raise WrongInput(
            f"a pair has 2 branches, so {group.size - 2} of {group.size} ranks would have nothing "
            "to run; use 1 or 2 ranks, or split the batch over pairs of them: group.split"
        )


def _span(group: Group, name: str) -> AbstractContextManager[None]:
    return nullcontext() if group.log is None else group.log.span(name)
