"""What a step of a strategy was measured to cost on N ranks, kept for the next question."""

from functools import cache

from minidist import Cluster
from minidist.observe.costs import Cost, example, measure_costs


@cache
def costs(name: str, N: int) -> list[Cost]:
    """Return the cost of each of N ranks on the strategy's example."""
    with Cluster(N, "thread") as ranks:
        return measure_costs(name, example(name), ranks)
