"""What one step under each strategy costs each rank: its input, and what it sends, holds, computes.

Measured while a step with AdamW runs on real ranks: layers show what enters them, ledgers what is
sent, arrays what is held, and graphs which products were computed. The closed forms are in
planning/costs/; lesson 20 shows that both agree.

    for rank, cost in enumerate(measure_costs("zero_2", case, cluster)):
        print(rank, cost.sent, cost.held["activations"])
"""

from minidist.backend import clock
from minidist.comm import Cluster, Group
from minidist.planning.costs.cost import Cost
from minidist.tools.costs.watch import Watch, adamw, bytes_of
from minidist.tools.equivalence import find
from minidist.tools.strategies import Case


def measure_costs(name: str, case: Case, cluster: Cluster) -> list[Cost]:
    """Run one step under a strategy on the cluster's ranks; return what it cost each of them.

    The case's options are the strategy's, as in `equivalence`. No dropout.
    """
    return cluster.run(_step, name, case)


def _step(group: Group, name: str, case: Case) -> Cost:
    watch = Watch()
    find(name).costs.step(group, case.to(group.device), watch)
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


def rates(case: Case, cluster: Cluster, rounds: int = 5) -> dict[str, float]:
    """Return a rank's rates while all other ranks do the same work, in the best of some rounds.

    speed   multiply-adds per second, in forward and backward over the whole batch
    update  parameters per second that AdamW updates
    link    bytes per second that it sends, in an all_reduce of 8 MB
    """
    found = cluster.run(_rates, case, rounds)
    return {what: min(rank[what] for rank in found) for what in found[0]}


def _rates(group: Group, case: Case, rounds: int) -> dict[str, float]:
    case, watch, timer = case.to(group.device), Watch(), clock(group.device)
    model = case.model
    optimizer, numbers = adamw(model.parameters()), group.empty((1 << 20,), "float64")
    acts = {
        "speed": lambda: case.loss(model(case.inputs), case.targets).backward(),
        "update": optimizer.step,
        "link": lambda: group.all_reduce(numbers, out=numbers),
    }
    watch.graph(case.loss(model(case.inputs), case.targets))
    taken = {what: [] for what in acts}
    for what in rounds * list(acts):
        group.barrier()
        start = timer.now()
        acts[what]()
        taken[what].append((start, timer.now()))
        if what == "update":
            optimizer.zero_grad()
    P = sum(p.size for p in model.parameters())
    sent = 2 * (group.size - 1) / group.size * numbers.nbytes
    amounts = {"speed": 3 * watch.work, "update": P, "link": sent}
    seconds = {
        what: min(timer.seconds(stop) - timer.seconds(start) for start, stop in spans)
        for what, spans in taken.items()
    }
    return {what: amounts[what] / seconds[what] for what in acts}
