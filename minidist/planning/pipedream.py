"""PipeDream's planner: from a profile of the layers to stages, each with its number of replicas.

Narayanan et al., PipeDream: Generalized Pipeline Parallelism for DNN Training (SOSP 2019), section
3.1. A full pipeline finishes a minibatch in the time of its slowest stage. The k replicas of a
stage take turns, so a stage that takes T seconds counts T / k; the price is the sum of their
gradients. The best pipeline is a best shorter pipeline and one more stage: dynamic programming.

    layers   0  1 | 2  3  4 | 5        4 ranks:  T(0, 2, 1)   transfer after layer 1
    ranks      0  | 1 and 2 | 3                  T(2, 5, 2)   transfer after layer 4   T(5, 6, 1)

    T(i, j, k) = max(C, 2 (k - 1) w / bandwidth) / k                              cost="paper"
               = (C + 4 (k - 1) / k w / bandwidth) / k                            cost="released"
    A(i, j, N) = min(T(i, j, N),
                     min over s, k of max(A(i, s, N - k), 2 a / bandwidth, T(s, j, k)))

C seconds and w parameter bytes of layers i to j - 1; a the bytes of the activation after layer
s - 1, whose gradient comes back. "released" is the optimizer that the authors published
(msr-fiddle/pipedream, optimizer_graph_hierarchical.py): there the sum waits for the computation,
and transfers are free. On a machine of several levels a unit of a level, for example a node of 8
ranks, is a whole pipeline of the level below: its A takes the place of C. (There the released code
divides the sum of the first stage, and of no other, by the units of the level below; ours divides
none.)

Letters: n layers, N ranks (or units) of a level, k replicas, i to j - 1 the layers of a stage.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from numbers import Integral, Rational

from minidist.errors import WrongInput, check_name
from minidist.planning.plans.plan import is_amount

COSTS = "paper", "released"
MOST_UNITS = 1_000  # of a level
Seconds = int | float | Fraction
Profile = Sequence[
    tuple[Seconds, Seconds, Seconds]
]  # seconds, activation bytes, parameter bytes per layer


@dataclass(frozen=True)
class ReplicatedStage:
    """Layers first to stop - 1 on several replicas; each is a pipeline, or, without one, a rank."""

    first: int
    stop: int
    replicas: int
    inside: tuple["ReplicatedStage", ...] = ()

    def flat(self, copies: int = 1) -> list[tuple[int, int, int]]:
        """Return (first, stop, ranks) of the stages that ranks have."""
        if not self.inside:
            return [(self.first, self.stop, copies * self.replicas)]
        return [flat for stage in self.inside for flat in stage.flat(copies * self.replicas)]


def pipedream(
    profile: Profile, ranks: int, bandwidth, cost: str = "paper"
) -> tuple[list[tuple[int, int, int]], Seconds]:
    """Return ([(first layer, last + 1, replicas) of each stage], seconds per minibatch).

    All ranks are used. The seconds are what the slowest stage or transfer takes, divided by its
    replicas: what a long stream takes per minibatch. On virtual clocks it may take more where a
    stage has replicas: one waits for its own next minibatch, although it would have time for
    another one's. Ints and Fractions stay exact. Time n^3 N^2 per level, n^2 N^2 for the highest.

    profile    per layer: seconds of forward and backward, bytes of its output, of its parameters
    bandwidth  bytes per second; or [(ranks per node, bytes per second inside), (nodes, bytes per
               second between them)], or more levels. Where a node is replicated, replica i of a
               stage belongs to node i mod nodes: so minibatches do not change the node.
    cost       "paper" or "released", see above
    """
    stages, seconds = nested(profile, ranks, bandwidth, cost)
    return [flat for stage in stages for flat in stage.flat()], seconds


def options_of(stages: list[tuple[int, int, int]]) -> dict:
    """Return the options with which `PipeDream(model, group, optimizer, ...)` runs such stages."""
    return {
        "cut": [range(first, stop) for first, stop, _ in stages],
        "replicas": [replicas for _, _, replicas in stages],
    }


def nested(profile: Profile, ranks: int, bandwidth, cost: str = "paper") -> tuple:
    """Return (the stages of the highest level, seconds); a stage knows what is inside of it.

    Of equally fast pipelines, of all ranks or of some inside of them, it takes the one whose last
    stage begins with the earliest layer, then the one whose last stage has the fewest replicas.
    """
    layers, levels = _checked(profile, ranks, bandwidth, cost)
    n = len(layers)
    seconds = [layer[0] for layer in layers]
    spans = [(i, j) for i in range(n) for j in range(i + 1, n + 1)]
    best = {(i, j): (sum(seconds[i:j]), ()) for i, j in spans}  # on one rank
    for level, (units, rate) in enumerate(levels, 1):
        starts = range(1 if level == len(levels) else n)
        best = _level(layers, best, units, rate, cost, starts)
    seconds, stages = best[0, n]
    return stages, seconds


def _level(layers, below: dict, units: int, rate, cost: str, starts: range) -> dict:
    """Return {(i, j): (seconds, stages)} of the best pipeline of layers i to j - 1 on all units.

    below   {(i, j): (seconds, stages)} of the best pipeline on one unit, for all i < j
    starts  the i that are asked for
    """
    n = len(layers)
    turns = {
        (i, j, k): stage_seconds(layers[i:j], seconds, k, rate, cost)
        for (i, j), (seconds, _) in below.items()
        for k in range(1, units + 1)
    }
    moves = [transfer_seconds(layer, rate, cost) for layer in layers]
    best: dict = {}
    for i in starts:
        for j in range(i + 1, n + 1):
            for N in range(1, units + 1):
                slowest, s, k = turns[i, j, N], i, N  # one stage
                for at in range(i + 1, j):
                    for last in range(1, N):
                        seconds = max(best[i, at, N - last][0], moves[at - 1], turns[at, j, last])
                        if seconds < slowest:
                            slowest, s, k = seconds, at, last
                before = best[i, s, N - k][1] if s > i else ()
                best[i, j, N] = slowest, (*before, ReplicatedStage(s, j, k, below[s, j][1]))
    return {(i, j): pipeline for (i, j, N), pipeline in best.items() if N == units}


def stage_seconds(layers: Profile, seconds: Seconds, k: int, rate: Seconds, cost: str) -> Seconds:
    """Return T: seconds per minibatch of k replicas, of which one alone takes `seconds`."""
    both = seconds, sum_seconds(layers, k, rate, cost)
    return (max(both) if cost == "paper" else sum(both)) / k


def sum_seconds(layers: Profile, k: int, rate: Seconds, cost: str) -> Seconds:
    """Return the seconds charged to k replicas for the sum of their gradients, a minibatch each.

    A ring sends 2 (k - 1) / k times the parameters' bytes from each replica; the paper charges k
    times that, the released optimizer twice.
    """
    w = sum(layer[2] for layer in layers)
    return (2 if cost == "paper" else Fraction(4, k)) * (k - 1) * w / rate


def transfer_seconds(layer: tuple, rate: Seconds, cost: str) -> Seconds:
    """Return the seconds that a layer's output and its gradient take to the next stage."""
    return 2 * layer[1] / rate if cost == "paper" else Fraction(0)


def _checked(profile: Profile, ranks: int, bandwidth, cost: str) -> tuple[list, list]:
    """Return the layers and the levels, in exact numbers where they are given so."""
    if not isinstance(ranks, Integral) or ranks < 1:
        raise WrongInput(f"there is no pipeline on {ranks!r} ranks; use 1 or more")
    check_name("cost", cost, COSTS)
    if not len(profile):
        raise WrongInput("the profile has no layer, so there is no stage; profile one or more")
    for i, layer in enumerate(profile):
        if len(layer) != 3 or not all(map(is_amount, layer)):
            raise WrongInput(
                f"layer {i} has the profile {layer}; give seconds, activation bytes and parameter "
                "bytes, finite numbers from 0"
            )
    levels = list(bandwidth) if isinstance(bandwidth, Sequence) else [(ranks, bandwidth)]
    pairs = all(isinstance(level, tuple | list) and len(level) == 2 for level in levels)
    counts = pairs and all(isinstance(n, Integral) and n > 0 for n, _ in levels)
    rates = pairs and all(rate == math.inf or (is_amount(rate) and rate) for _, rate in levels)
    if not counts or not rates or math.prod(units for units, _ in levels) != ranks:
        raise WrongInput(
            f"{levels} are no levels of {ranks} ranks; give (units, bytes per second above 0) from "
            f"the lowest level up, with units whose product is {ranks}"
        )
    if (units := max(units for units, _ in levels)) > MOST_UNITS:
        raise WrongInput(
            f"{units} ranks or nodes on one level are too many, for each number of replicas is "
            f"tried; use {MOST_UNITS:,} or less"
        )
    return (
        [tuple(map(_exact, layer)) for layer in profile],
        [(units, _exact(rate)) for units, rate in levels],
    )


def _exact(number: Seconds) -> Seconds:
    if isinstance(number, Rational):
        return Fraction(int(number.numerator), int(number.denominator))
    return number
