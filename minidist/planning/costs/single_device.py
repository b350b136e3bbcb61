"""What one device holds and computes, against which strategies are compared."""

from minidist import nn
from minidist.planning.costs.branch_placement import siamese_costs
from minidist.planning.costs.cost import Cost, Workload
from minidist.planning.costs.data_parallel import replica_cost
from minidist.planning.costs.expert_parallel import expert_costs


def single_device_cost(case: Workload) -> Cost:
    """Return what one device holds and computes with the same model and batch."""
    if isinstance(case.model, nn.Siamese):
        return siamese_costs(case, 1)[0]
    if getattr(case.model, "experts", 0):
        return expert_costs(case, 1)[0]
    return replica_cost(case, 1, 0)
