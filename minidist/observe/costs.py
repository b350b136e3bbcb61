"""What a step under each strategy costs each rank, measured: input, bytes, memory, multiply-adds.

A step with AdamW runs on real ranks: layers show what enters them, ledgers what is sent, arrays
what is held, and graphs which products were computed (verify/watch.py).

    for rank, cost in enumerate(measure_costs("zero_2", example("zero_2"), cluster)):
        print(rank, cost.sent, cost.held["activations"])

And one table of all strategies, which lesson 20 draws:

    for name in names:
        costs[name] = measure_costs(name, example(name), clusters[find(name).most_ranks])
    print(HEADINGS, *rows(costs), sep="\\n")
"""

from dataclasses import dataclass, replace
from functools import cache

from minidist.comm import Cluster, Group
from minidist.data_parallel.zero_layers import bytes_of
from minidist.pipeline_parallel.actions import last_stage
from minidist.pipeline_parallel.holders import cut_of
from minidist.pipeline_parallel.partition import counted_costs
from minidist.planning.simulator import simulate
from minidist.verify.equivalence import find
from minidist.verify.strategies import Case
from minidist.verify.strategies.cases import as_input
from minidist.verify.strategies.job import watched_step
from minidist.verify.watch import Watch


@dataclass(frozen=True)
class Cost:
    """One step of one rank.

    examples, positions  examples that enter its last layer, in all micro-batches; positions of each
    layers  number of layers that it runs
    sent    payload bytes that it sends to other ranks
    held    bytes of parameters, gradients and optimizer state, which stay from step to step, and
            of activations, at their peak
    work    multiply-adds of its forward passes; backward does twice as many
    """

    examples: int
    positions: int
    layers: int
    sent: int
    held: dict[str, int]
    work: int

    memory = property(lambda self: sum(self.held.values()))


def measure_costs(name: str, case: Case, cluster: Cluster) -> list[Cost]:
    """Run one step under a strategy on the cluster's ranks; return what it cost each of them.

    The case's options are the strategy's, as in `equivalence`. No dropout.
    """
    return cluster.run(_step, name, case)


def alone(case: Case) -> Cost:
    """Return the cost of a step with the whole batch of a case on one device."""
    with Cluster(1, "thread") as device:
        return measure_costs("naive", replace(case, options={}), device)[0]


def _step(group: Group, name: str, case: Case) -> Cost:
    watch = Watch()
    watched_step(find(name).start, group, case, watch)
    entered = list(watch.entered.values())
    return Cost(
        examples=sum(rows for rows, _ in entered[-1]) if entered else 0,
        positions=entered[-1][0][1] if entered else 0,
        layers=len(entered),
        sent=watch.sent,
        held={kind: bytes_of(arrays) for kind, arrays in watch.kept.items()}
        | {"activations": watch.peak},
        work=watch.work,
    )


HEADINGS = (
    "strategy",
    "input per device",
    "bytes moved, kB",
    "memory, kB",
    "of one",
    "balance",
    "useful",
    "limit to scaling",
)


def example(name: str) -> Case:
    """Return a model and a batch: the same Transformer for all strategies that can split it."""
    strategy = find(name)
    return strategy.costs.example(strategy.most_ranks)


def limit(name: str, case: Case) -> tuple[int, str]:
    """Return the largest useful number of ranks, and the name of what each rank then has one of.

    Asynchronous workers may have separate minibatches; they are limited by stale gradients.
    """
    strategy = find(name)
    return strategy.costs.limit(case, strategy.most_ranks)


def rows(costs: dict[str, list[Cost]]) -> list[list[str]]:
    """Return the table's cells, a row per strategy, from what was measured on its example.

    input    examples x positions x layers of the rank that holds most
    bytes    sent by all ranks, and by the rank that sends most
    memory   of the rank that holds most: what stays, plus activations at their peak; and this sum
             divided by one device's with the same model
    balance  the busiest rank's multiply-adds over the mean
    useful   see `useful_share`
    """
    table = []
    one_of = cache(lambda example, ranks: alone(example(ranks)))  # most strategies share one
    for name, ranks in costs.items():
        case, most = example(name), max(ranks, key=lambda cost: cost.memory)
        sent, work = [c.sent for c in ranks], [c.work for c in ranks]
        one = one_of(find(name).costs.example, find(name).most_ranks)
        activations, (number, part) = most.held["activations"], limit(name, case)
        table.append(
            [
                name,
                f"{most.examples} x {most.positions} x {most.layers}",
                f"{sum(sent) / 1e3:.0f} ({max(sent) / 1e3:.0f})",
                f"{(most.memory - activations) / 1e3:.0f} + {activations / 1e3:.0f}",
                f"{most.memory / one.memory:.0%}",
                f"{max(work) * len(work) / sum(work):.2f}",
                f"{useful_share(name, case, ranks, one):.0%}",
                f"{number}: {part}",
            ]
        )
    return table


def useful_share(name: str, case: Case, ranks: list[Cost], one: Cost) -> float:
    """Return one device's work over N times the busiest rank's, including its waiting.

    It is below 1 because of ranks that compute less than the busiest one, of work that is done N
    times, and of a pipeline's bubble (of a long stream, if the pipeline is asynchronous).

    ranks, one  what a step of the case costs each rank, and one device
    """
    work = [cost.work for cost in ranks]
    needed = min(one.work, sum(work))  # a cut sequence has fewer scores to compute
    return needed / (len(ranks) * max(work)) * busy_share(name, case, len(ranks))


def busy_share(name: str, case: Case, ranks: int) -> float:
    """Return the share of time in which a pipeline's busiest rank computes; 1 without a pipeline.

    Its programs are replayed with the multiply-adds of each stage as times.
    """
    programs_of = find(name).costs.programs
    if programs_of is None:
        return 1.0
    programs = programs_of(case, ranks)
    layers = counted_costs(case.model, as_input(case.inputs))
    stages = cut_of(len(layers), 1 + last_stage(programs.placement))
    work = [sum(layers[i] for i in stage) for stage in stages]
    ran = simulate(programs, work, work, work)
    return max(ran.busy) / ran.makespan
