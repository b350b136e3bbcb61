"""What the race asks: orders for times and memory that are drawn.

An order is right that is valid and short enough: it is simulated here. Its score is its makespan
over a bound that no order beats, so nothing that student's code computes counts but the order.
"""

from dataclasses import replace
from functools import partial

from minidist import nn
from minidist.course.answers import Answer
from minidist.course.labs.pipelines.schedules import fields
from minidist.course.labs.race import probes
from minidist.course.question import Question, Questions, Random, ask, ints
from minidist.errors import WrongInput, plural
from minidist.observe import timeline
from minidist.pipeline_parallel import programs, validate
from minidist.pipeline_parallel.actions import KINDS, Programs, looped
from minidist.planning import simulate
from minidist.planning.simulator import Simulation

TIMES = "forward", "backward_input", "backward_weight"


def race(rng: Random) -> Questions:
    """Ask for orders with a place for one micro-batch, with few, with p, with more."""
    p, few, ranks = int(rng.integers(3, 6)), int(rng.integers(2, 5)), ints(rng, 3, 6, 4)
    for N, memory in ((1, 1), (p, 1), (p, few)):
        yield of(drawn(rng, N, memory), valid, "any memory")
    for N, memory in ((2, 1), (p, few)):
        yield trained(rng, drawn(rng, N, memory))
    for N in (2, p):
        yield timed(drawn(rng, N, N), "as good as 1F1B", "1f1b")
    for N, memory, name in ((p, p, "zb_h1"), (4, 4, "zb_h1"), (p, 2 * p - 1, "zb_h2")):
        yield timed(drawn(rng, N, memory, equal=N == p), "as good as zero bubble", name)
    for at, N in enumerate(ranks):
        little, more = int(rng.integers(2, N)), int(rng.integers(N + 1, 2 * N - 1))
        yield timed(drawn(rng, N, little, equal=at == 0), "memory < p", slack=1.1)
        yield timed(drawn(rng, N, more), "memory > p, unequal stages", slack=1.05)


def drawn(rng: Random, p: int, memory: int, equal: bool = False) -> dict:
    """Draw what `zb_auto` is given."""
    times = {name: ints(rng, 3, 10, 1) * p if equal else ints(rng, 3, 10, p) for name in TIMES}
    m, latency = 2 * p + int(rng.integers(0, 4)), int(rng.integers(0, 4))
    return {"p": p, "m": m, **times, "latency": latency, "memory": memory}


def of(problem: dict, judge, group: str) -> Question:
    about = f"{plural(problem['p'], 'rank')}, {problem['m']} micro-batches"
    about += f", memory for {problem['memory']}"
    return ask(about, probes.order, partial(judge, problem=problem), group, **problem)


def timed(problem: dict, group: str, name: str = "", slack: float = 1) -> Question:
    """Ask for an order as short as the one with this name, or up to a slack as the package's."""
    judge = partial(short, name=name, slack=slack)
    return replace(of(problem, judge, group), score=partial(over_bound, problem=problem))


def trained(rng: Random, problem: dict) -> Question:
    """Ask for gradients: any valid order has one device's, and so has the package's."""
    sizes = ints(rng, 2, 6, problem["p"] + 2)
    state = nn.MLP(sizes, dtype="float64").named_parameters()
    more = {
        "sizes": sizes,
        "state": {name: rng.standard_normal(q.shape) for name, q in state.items()},
        "inputs": rng.standard_normal((problem["m"] + 1, sizes[0])),
        "targets": rng.integers(0, sizes[-1], problem["m"] + 1),
    }
    about = f"gradients, {problem['p']} ranks, memory for {problem['memory']}"
    return ask(about, probes.gradients, group="any memory", **problem, **more)


def replayed(made: Programs, problem: dict) -> Simulation:
    return simulate(made, **{name: problem[name] for name in (*TIMES, "latency")})


def read(answer: Answer, problem: dict) -> tuple[Programs, Simulation]:
    """Return the programs of an answer, and their replay; ValueError if they are not valid."""
    p, memory = problem["p"], problem["memory"]
    rows = [answer[f"the program on rank {r}"].tolist() for r in range(p)]
    own = [[KINDS[probes.SIGNS[sign]](number) for sign, number in actions] for actions in rows]
    made = Programs(own, looped(p, 1))
    validate(made, p, problem["m"])
    found = replayed(made, problem)
    if max(found.peak_stash) > memory:
        held = ", ".join(map(str, found.peak_stash))
        raise WrongInput(f"the ranks hold {held} at their peaks, with memory for {memory}")
    return made, found


def valid(answer: Answer, want: Answer, problem: dict) -> str | None:
    try:
        read(answer, problem)
    except ValueError as error:
        first, *picture = str(error).splitlines()
        return "\n".join([*picture, first])
    return None


def short(answer: Answer, want: Answer, problem: dict, name: str, slack: float) -> str | None:
    """Judge an order: its makespan, against that of a named schedule or the package's."""
    if message := valid(answer, want, problem):
        return message
    made, found = read(answer, problem)
    known = programs(name, problem["p"], problem["m"]) if name else read(want, problem)[0]
    best = replayed(known, problem).makespan
    if found.makespan <= slack * best:
        return None
    given = {time: ",".join(map(str, problem[time])) for time in TIMES}
    given |= {"latency": problem["latency"], "limit": problem["memory"]}
    link = f"to try it, `minidist explore`, and there\nschedules.html#{fields(made, given)}"
    whose = f"{name} has" if name else f"{slack:g} times what the package has"
    wanted = f"{slack * best:g} or less, {whose}; the bound is {bound(**problem)}"
    return f"{timeline.text(found.timeline)}\n{link}\nmakespan {found.makespan}, not {wanted}"


def over_bound(answer: Answer, problem: dict) -> float:
    """Return makespan over bound; ValueError if the order is not valid."""
    return read(answer, problem)[1].makespan / bound(**problem)


def bound(p: int, m: int, memory: int, latency: int, **times: list[int]) -> int:
    """Return a time that no order beats; see the handout. For the trips: Little's law.

    While a rank has its m micro-batches, at most `memory` of them at once, each for a trip or more,
    some place has m / memory of them, rounded up, one after the other.
    """
    F, I, W = (times[name] for name in TIMES)
    least = 0
    for r in range(p):
        head = sum(F[:r]) + r * latency
        work, way = m * (F[r] + I[r]), [sum(I[k:r]) + (r - k) * latency + W[k] for k in range(r)]
        trip = F[r] + I[r] + W[r] + sum(F[k] + I[k] + 2 * latency for k in range(r + 1, p))
        each = work + m * W[r], work + max(way, default=0), -(-m // memory) * trip
        least = max(least, head + max(each))
    return least


QUESTIONS = {"11.1": race}
