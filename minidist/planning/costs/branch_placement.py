"""What two branches on one or two ranks move and hold."""

from dataclasses import replace

from minidist.pipeline_parallel import branch_placement
from minidist.planning.costs.cost import ITEMSIZE, Cost, Workload, cost_of
from minidist.planning.costs.layers import Layer


def siamese_bytes(case: Workload, N: int) -> int:
    """Return 0 on one rank; on two: an embedding, its gradient, and 2 S to add up S bytes.

    The embedding has B E numbers of the parameters' dtype; S is the size of the branch's parameters
    that are not frozen.
    """
    weight = case.model.join.weight
    embedding = len(case.inputs) * weight.shape[0] * weight.dtype.itemsize
    shared = branch_placement.shared_parameters(case.model)
    return (N - 1) * 2 * (embedding + sum(p.data.nbytes for p in shared if p.requires_grad))


def siamese_costs(case: Workload, N: int) -> list[Cost]:
    """Both branches keep the pairs; the join keeps H_0 - H_1 and its square."""
    shapes = [layer.weight.shape for layer in case.model.branch]
    E, classes = case.model.join.weight.shape
    B, pairs = len(case.inputs), 2 * shapes[0][0]
    shared = sum(C * F + F for C, F in shapes)
    join, outputs = E * classes + classes, sum(F for _, F in shapes)
    mine, costs = 2 // N, []
    for r in range(N):
        joins = r == branch_placement.JOIN
        whole = (shared + join, shared + join, 2 * (shared + joins * join))
        kept = ITEMSIZE * B * (pairs + mine * outputs + joins * 2 * E)
        work = B * (mine * sum(C * F for C, F in shapes) + joins * E * classes)
        own = [Layer(0, 0, 0)] * (len(shapes) + joins)
        costs.append(replace(cost_of(own, B, 1, whole, kept), work=work))
    return costs


def branches_limit(case: Workload, ranks: int) -> tuple[int, str]:
    return 2, "branches"
