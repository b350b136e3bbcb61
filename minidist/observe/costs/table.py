"""One table of all strategies: input per device, bytes moved, memory, balance, limit to scaling.

for name in names:
    costs[name] = measure_costs(name, example(name), clusters[find(name).most_ranks])
print(HEADINGS, *rows(costs), sep="\n")
"""

from minidist.planning.costs.cost import Cost
from minidist.planning.costs.single_device import single_device_cost
from minidist.verify.equivalence import find
from minidist.verify.strategies import Case

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
    """Return the table's cells, a row per strategy, from the costs measured on `example(name)`.

    input    examples x positions x layers of the rank that holds most
    bytes    sent by all ranks, and by the rank that sends most
    memory   of the rank that holds most: what stays, plus activations at their peak; and this sum
             divided by one device's with the same model
    balance  the busiest rank's multiply-adds over the mean
    useful   `Strategy.useful_share`
    """
    result = []
    for name, own in costs.items():
        case, most = example(name), max(own, key=lambda cost: cost.memory)
        sent, work = [cost.sent for cost in own], [cost.work for cost in own]
        activations, (number, what) = most.held["activations"], limit(name, case)
        result.append(
            [
                name,
                f"{most.examples} x {most.positions} x {most.layers}",
                f"{sum(sent) / 1e3:.0f} ({max(sent) / 1e3:.0f})",
                f"{(most.memory - activations) / 1e3:.0f} + {activations / 1e3:.0f}",
                f"{most.memory / single_device_cost(case).memory:.0%}",
                f"{max(work) * len(work) / sum(work):.2f}",
                f"{find(name).useful_share(case, len(own)):.0%}",
                f"{number}: {what}",
            ]
        )
    return result
