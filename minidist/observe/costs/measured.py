"""What one step under each strategy costs each rank: its input, and what it sends, holds, computes.

Measured while a step with AdamW runs on real ranks: layers show what enters them, ledgers what is
sent, arrays what is held, and graphs which products were computed. The closed forms are in
planning/costs/; tests/observe/test_costs.py compares them, and lesson 20 draws them.

    for rank, cost in enumerate(measure_costs("zero_2", case, cluster)):
        print(rank, cost.sent, cost.held["activations"])
"""

from minidist.comm import Cluster, Group
from minidist.data_parallel.zero_layers import bytes_of
from minidist.planning.costs.cost import Cost
from minidist.verify.equivalence import find
from minidist.verify.strategies import Case
from minidist.verify.watch import Watch


def measure_costs(name: str, case: Case, cluster: Cluster) -> list[Cost]:
    """Run one step under a strategy on the cluster's ranks; return what it cost each of them.

    The case's options are the strategy's, as in `equivalence`. No dropout.
    """
    return cluster.run(_step, name, case)


def _step(group: Group, name: str, case: Case) -> Cost:
    watch = Watch()
    find(name).step(group, case, watch)
    entered = list(watch.entered.values())
    return Cost(
        examples=sum(rows for rows, _ in entered[-1]) if entered else 0,
        positions=entered[-1][0][1] if entered else 0,
        layers=len(entered),
        sent=watch.sent,
        held={what: bytes_of(arrays) for what, arrays in watch.kept.items()}
        | {"activations": watch.peak},
        work=watch.work,
    )
