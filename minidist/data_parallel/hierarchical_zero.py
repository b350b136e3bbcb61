"""ZeRO inside hosts, copies between them: few ranks share a copy, and its sum has two hops.

Zhang et al., MiCS: Near-linear Scaling for Training Gigantic Model on Public Cloud (VLDB 2022), a
partition group and a replication group; PyTorch calls it hybrid sharding (HSDP). Letters: N ranks,
k of them share one copy of W, h = N / k copies, m micro-batches, S bytes of W.

                                        host a        host b      k = h = 2
                                        a0    a1      b0    b1
    W                                   W.0   W.1     W.0   W.1
    in every micro-batch, inside        all_gather W, reduce_scatter dW
    once a step, between                all_reduce of dW.0 over a0, b0, and of dW.1 over a1, b1

    stage   from each rank per step, inside     between, over the slow network
    1       2 S (k-1)/k                         2 S/k (h-1)/h
    2       (m + 1) S (k-1)/k                   2 S/k (h-1)/h
    3       3 m S (k-1)/k                       2 S/k (h-1)/h

A ring of all N ranks would send 3 m S (N-1)/N from each host to the next; here it is 2 S (h-1)/h,
from all k ranks of a host together. The price is memory: S/k, not S/N.
"""

from numbers import Integral

from minidist.comm import Group
from minidist.errors import WrongInput


def two_levels(group: Group, shards: int | None) -> tuple[Group, Group]:
    """Return the ranks that share this rank's copy, and those with the same shard of other copies.

    shards  k: runs of k neighbours share a copy; None: all ranks share one
    """
    k = group.size if shards is None else shards
    if not isinstance(k, Integral) or k < 1 or group.size % k:
        raise WrongInput(
            f"groups of {k} shards do not make up {group.size} ranks; use a divisor of {group.size}"
        )
    return group.split(group.rank // k), group.split(group.rank % k)
