"""The two branches of a siamese network on two ranks at once.

Model parallelism where the graph forks: neither branch waits for the other, so both ranks compute
from the start, without micro-batches. They meet at the join, on rank 0:

    rank 0   H_0 = branch(x_0)   recv H_1   join, loss, dH_0, dH_1   send dH_1   backward from dH_0
    rank 1   H_1 = branch(x_1)   send H_1            waits           recv dH_1   backward from dH_1

Both ranks hold the shared weights W. Each computes the contribution of its own branch,

    dL/dW  =  dL/dH_0 dH_0/dW  +  dL/dH_1 dH_1/dW,

and the sum over the ranks is the gradient. The join and its gradient belong to rank 0 alone: rank
1 never uses the join, so its copy does not change. Give optimizers `own_parameters(model, group)`.

Layouts: x[B, 2, C0], of which rank i reads x[:, i]; H_i[B, E] on rank i; dW{+ranks} -> all_reduce
-> dW on both.

Bytes, on two ranks: B E numbers each way for every batch, and 2 S for the S bytes of the shared
parameters for every update. On one rank the same code runs both branches and moves nothing.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from minidist.autograd import Tensor
from minidist.backend import Array
from minidist.comm import Group
from minidist.errors import WrongInput
from minidist.nn import Parameter, Siamese
from minidist.nn.siamese import check_pairs
from minidist.replicas import sum_gradients, sum_squares_over
from minidist.rng import Randomness

JOIN = 0  # the rank that compares
BRANCHES = (
    "two branches, and a join that one rank has: "
    "pass sum_squares=partial(branch_placement.sum_squares, model, group)"
)


def forward_backward(
    model: Siamese,
    x: Tensor | Array,
    targets: Array,
    group: Group,
    loss: Callable[..., Tensor] | None = None,
    reduction_size: float | None = None,
    randomness: Randomness | None = None,
) -> Tensor | None:
    """Add this rank's part of the gradient of one batch; return the loss on rank 0, else None.

    Several micro-batches may follow each other before `all_reduce_shared`. If x[B, 2, C0] is a
    tensor that requires a gradient, the rank adds the gradient of the half that it reads.
    """
    check_ranks(group)
    check_model(model)
    check_pairs(x)
    for p in model.parameters():
        p.spread = BRANCHES
    embeddings = {}
    gradients: Sequence[Array] | dict[int, Array]
    for i in own_branches(group):
        with _span(group, f"forward branch {i}"):
            embeddings[i] = model.embed(x[:, i], randomness)
    if group.rank == JOIN:
        value, gradients = _join(
            model, embeddings, targets, group, loss or model.loss, reduction_size
        )
    else:
        value = None
        gradients = _ask_for_gradients(embeddings, group)
    for i, h in embeddings.items():
        with _span(group, f"backward branch {i}"):
            if h.requires_grad:
                h.backward(gradients[i])
    return value


def _join(model, embeddings, targets, group, loss, reduction_size) -> tuple[Tensor, list[Array]]:
    """Compare the two embeddings; send dH_1 if it belongs to rank 1; return loss, [dH_0, dH_1].

    Both embeddings are leaves here: backward stops at them, so the other rank does not have to
    wait for this rank's branch.
    """
    data = [embeddings[i].data if i in embeddings else group.recv(i) for i in range(2)]
    leaves = [Tensor(h, requires_grad=True) for h in data]
    with _span(group, "join"):
        value = loss(model.compare(*leaves), targets, reduction_size=reduction_size)
        value.backward()
    for i, h in enumerate(leaves):
        if i not in embeddings:
            group.send(h.grad, to=i)
    return value, [h.grad for h in leaves]


def _ask_for_gradients(embeddings: dict[int, Tensor], group: Group) -> dict[int, Array]:
    for h in embeddings.values():
        group.send(h.data, to=JOIN)
    return {i: group.recv(JOIN) for i in embeddings}


def all_reduce_shared(model: Siamese, group: Group) -> None:
    """Give both ranks the sum of each shared parameter's gradient; None adds zero."""
    check_ranks(group)
    sum_gradients(shared_parameters(model), group)


def shared_parameters(model: Siamese) -> list[Parameter]:
    check_model(model)
    return [p for layer in model.branch for p in layer.parameters()]


def own_parameters(model: Siamese, group: Group) -> list[Parameter]:
    """Return what this rank updates: the shared parameters, and on rank 0 the join's."""
    return shared_parameters(model) + (model.join.parameters() if group.rank == JOIN else [])


def sum_squares(model: Siamese, group: Group, own: float | None = None) -> float:
    """Return the sum of the squares of the whole gradient, which is complete on rank 0.

    Pass `partial(sum_squares, model, group)` to Optimizer.clip_global_norm.

    own  the optimizer's sum, used only as a check: on rank 1 it lacks the join
    """
    held = own_parameters(model, group)
    return sum_squares_over(held if group.rank == JOIN else [], held, own, group)


def own_branches(group: Group) -> list[int]:
    """Return the branches that this rank runs: one of them on two ranks, both on one rank."""
    return [i for i in range(2) if i % group.size == group.rank]


def check_model(model: Siamese) -> None:
    if not isinstance(model, Siamese):
        raise WrongInput(f"{type(model).__name__} has no two branches; use an nn.Siamese")


def check_ranks(group: Group) -> None:
    if group.size > 2:
        raise WrongInput(
            f"a pair has 2 branches, so {group.size - 2} of {group.size} ranks would have nothing "
            "to run; use 1 or 2 ranks, or split the batch over pairs of them: group.split"
        )


def _span(group: Group, name: str) -> AbstractContextManager[None]:
    return nullcontext() if group.log is None else group.log.span(name)
