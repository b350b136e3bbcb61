"""What is of the whole batch, also where ranks hold parts of it.

The statistics of batch norms, the loads of routers, and the scales of whole arrays in eight bits.
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

from minidist.autograd.number_format import EightBits, own_scale
from minidist.comm import Group, Mesh
from minidist.errors import WrongInput
from minidist.nn import BatchNorm, BiasBalance, Module, Parameter, mixtures
from minidist.parallel.gradients import summed_ranks


def check_all_share(name: str, ranks: Iterable[int], group: Group, call: str) -> None:
    """Raise ValueError if the group leaves out ranks that have one statistic with this one."""
    if left_out := set(ranks) - set(group.members):
        raise WrongInput(
            f"{name} is shared by the ranks {list(ranks)}, and this group leaves out "
            f"{sorted(left_out)}; call {call} last, with a group of all ranks that hold parts of "
            "the batch or of the array"
        )


def sum_statistics(norm: BatchNorm, group: Group) -> None:
    """Let a norm add up its statistics over ranks that hold parts of every batch."""
    check_all_share(norm.name, norm.ranks, group, "sync_batch_norm")
    norm.sum_over_ranks, norm.ranks = partial(group.all_reduce, label=norm.name), group.members


def sum_loads(model: Module, group: Group) -> None:
    """Give every rank the loads of all: how often each expert was chosen in the whole batch.

    Once for each batch, as its gradients are summed (nn/router.py); ValueError if they would
    be summed again.
    """
    for balance in model.modules(BiasBalance):
        load, ranks = balance.load, summed_ranks(balance, group)
        balance.choices = group.all_reduce(load, label="loads of experts")
        balance.summed_over = ranks


def one_scale_each(parameters: Iterable[Parameter]) -> list[tuple[Parameter, EightBits]]:
    """Return those whose products have one scale for each array, EightBits(block=None), and it."""
    products = [(p, p.format.product) for p in parameters]
    return [(p, how) for p, how in products if how is not None and how.block is None]


def share_scales(parameters: Iterable[Parameter], group: Group) -> None:
    """Let these ranks have one scale for each array, where the product is EightBits(block=None).

    group  all ranks that hold parts of the arrays, or other examples: those of one stage. It is
           used by the thread that computes, and by no other one
    """
    share = partial(group.all_reduce, op="max", label="scale")
    for p, product in one_scale_each(parameters):
        if not set(group.members) <= set(product.ranks):
            check_all_share(f"the scale of {p.name}", product.ranks, group, "share_scales")
            product = replace(product, share=share, ranks=tuple(group.members))
            p.format = replace(p.format, product=product)


def share_scales_of_stage(model: Module, mesh: Mesh) -> list[Group]:
    """Let the ranks of a stage share scales, if there are any to share; return their group."""
    if not one_scale_each(model.parameters()):
        return []
    stage = mesh.over("dp", "cp", "tp").split(0)  # for the thread that computes
    share_scales(model.parameters(), stage)
    return [stage]


def check_balance(model: Module, ranks: int) -> None:
    """Raise ValueError if the balancing loss of the last pass was of a part of the batch alone."""
    for mixture in mixtures(model) if ranks > 1 else ():
        if mixture.balance and mixture.report is not None and not mixture.report.knows_batch:
            raise WrongInput(
                f"each of {ranks} ranks has a part of the batch, and the balancing loss of "
                f"{mixture.gate.weight.name} is divided by all of it; pass Randomness(seed, step, "
                "examples, batch=B), with the B of all ranks, and with counted= their total="
            )


def norms_that_train(model: Module) -> list[BatchNorm]:
    """Return the batch norms that use, and move, the statistics of a batch."""
    return [norm for norm in model.modules(BatchNorm) if norm.training]


def check_statistics(
    model: Module, ranks: int = 1, micro_batches: int = 1, loads: bool = False
) -> None:
    """Raise ValueError if a model would use the statistics of a part of the batch.

    The gradient would then be another one, and a router's bias would move by a part of the loads.

    loads  whether the caller sums the loads of experts (sum_loads), or has a rank with all of them
    """
    for balance in () if loads else model.modules(BiasBalance):
        raise WrongInput(
            f"{balance.name} moves by the loads of the whole batch, and this strategy does "
            "not sum them; use DataParallel, ExpertParallel, Pipeline or Hybrid, or bias_rate=0"
        )
    if max(ranks, micro_batches) == 1:
        return
    for p, product in one_scale_each(model.parameters()):
        if micro_batches > 1 or product.share is own_scale:
            raise WrongInput(
                f"the scales of {p.name} are of whole arrays, not of the parts on one of {ranks} "
                f"ranks, or in one of {micro_batches} micro-batches; use one micro-batch and call "
                "parallel.share_scales(model.parameters(), group) first, or use EightBits(block)"
            )
    for norm in norms_that_train(model):
        if micro_batches > 1:
            raise WrongInput(
                f"{norm.name} needs the statistics of the whole batch, not of one of "
                f"{micro_batches} micro-batches; sync_batch_norm sums over ranks only, so use one "
                "micro-batch"
            )
        if norm.sum_over_ranks is None:
            raise WrongInput(
                f"{norm.name} needs the statistics of the whole batch, not of the examples on one "
                f"of {ranks} ranks; call sync_batch_norm(model, group) before training "
                "(data_parallel/sync_batch_norm.py)"
            )
