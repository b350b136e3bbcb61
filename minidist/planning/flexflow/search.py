"""FlexFlow: search the cuts of all ops at once by a random walk over simulated strategies.

    S   h: b in 2 on ranks 0 1    y: b in 2 on ranks 0 1    3.0 ms   data parallelism
        propose for y             y: o in 2 on ranks 0 1    2.6 ms   better: taken
    S'  h: b in 2 on ranks 0 1    y: o in 2 on ranks 0 1    2.6 ms
        propose for h             h: whole, on rank 1       2.9 ms   worse: taken with probability
                                                                     exp(beta (2.6 ms - 2.9 ms))

The walk visits a strategy S with a probability in proportion to exp(-beta cost(S)), if the cost is
the simulated time: fast strategies often, slow ones sometimes, so that it leaves a valley again
(Metropolis and Hastings; Jia, Zaharia, Aiken 2019, section 6, equations 1 and 2). A proposal gives
one op, drawn at random, a cut drawn from all of its cuts (soap.py); so S proposes S' as often as S'
proposes S. There are three walks: from one rank, from data parallelism and from a random strategy.
A walk ends when it has found nothing better for half of its proposals. The best strategy that was
visited is returned.

The paper knows no memory. Here a strategy that does not fit is worse than all that fit.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from operator import itemgetter
from random import Random
from typing import TYPE_CHECKING

from minidist.errors import WrongInput
from minidist.planning.flexflow.simulator import Simulator, Strategy
from minidist.planning.flexflow.soap import Cut, cuts, data_parallel
from minidist.planning.plans.plan import Machine

if TYPE_CHECKING:
    from minidist.planning.graphs.graph import Graph


@dataclass(frozen=True, order=True)
class Score:
    """What a strategy costs: first bytes that the fullest rank lacks, then seconds."""

    lacking: float
    seconds: float


def flexflow(
    graph: "Graph",
    machine: Machine,
    seed: int = 0,
    budget: int = 1000,
    dims: str = "SOAP",
    sharpness: float = 50,
) -> tuple[Strategy, float]:
    """Return the best strategy found, {output of an op: its cut}, and its simulated seconds.

    budget      how many strategies all walks together may visit
    dims        which of S, O, A, P and R (soap.py) may be used
    sharpness   beta times the seconds of a walk's first strategy: at 50, one that takes 2 % of
                these longer is taken with probability 1/e

    The same seed returns the same strategy. ValueError if nothing was found that fits.
    """
    if budget < 3 or not 0 <= sharpness < math.inf:
        raise WrongInput(
            f"a budget of {budget} strategies and a sharpness of {sharpness} make no walks; "
            "use 3 strategies or more, and a sharpness from 0"
        )
    random, simulate = Random(seed), Simulator(graph, machine)
    options = cuts(graph, machine.ranks, dims)

    @cache
    def cost(*chosen: Cut) -> Score:
        found = simulate(dict(zip(options, chosen, strict=True)))
        return Score(max(0, max(found.memory) - machine.memory), found.seconds)

    one_rank = {name: own[0] for name, own in options.items()}
    starts = [one_rank, {name: random.choice(own) for name, own in options.items()}]
    if "S" in dims:
        starts.append(data_parallel(graph, machine.ranks))
    walks = (walk(start, options, cost, random, sharpness) for start in starts)
    least, best = min((best_of(one, budget // len(starts)) for one in walks), key=itemgetter(0))
    if least.lacking:
        raise WrongInput(
            f"none of {budget} strategies fits: the best lacks {least.lacking} bytes of the "
            f"{machine.memory} of a rank; use more ranks, or a larger budget"
        )
    return best, least.seconds


def walk(start: Strategy, options: dict, cost: Callable, random: Random, sharpness: float):
    """Yield (cost, strategy) of the start, and after every proposal of where the walk is then."""
    names, now, here = list(options), start, cost(*start.values())
    beta = sharpness / here.seconds if here.seconds else 0
    while True:
        yield here, now
        name = random.choice(names)
        proposed = {**now, name: random.choice(options[name])}
        there = cost(*proposed.values())
        if accepted(here, there, beta, random.random()):
            now, here = proposed, there


def accepted(here: Score, there: Score, beta: float, chance: float) -> bool:
    """Return whether to go there: if not worse, always; else with probability exp(-beta more)."""
    if here.lacking != there.lacking:
        return there.lacking < here.lacking
    return chance < math.exp(min(0, beta * (here.seconds - there.seconds)))


def best_of(steps: Iterator, budget: int) -> tuple[Score, Strategy]:
    """Return the best of `budget` steps; end when half as many in a row were not better."""
    least, best = next(steps)
    since = 0
    for here, now in islice(steps, budget - 1):
        since += 1
        if here < least:
            least, best, since = here, now, 0
        if 2 * since > budget:
            break
    return least, best
