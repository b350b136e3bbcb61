"""Orders of F, I and W for given times and memory: valid, short, and ranked.

An order is simulated here, and its score is its makespan over a bound that no order beats: nothing
that student's code computes counts but the order.
"""

import pytest

from minidist import nn
from minidist.course.inside import inside, task
from minidist.course.labs.drawn import drawn
from minidist.course.labs.ranks import on_ranks
from minidist.nn.datasets import Batch
from minidist.pipeline_parallel import Pipeline, programs, validate
from minidist.pipeline_parallel.actions import Programs, looped
from minidist.pipeline_parallel.text import read_action
from minidist.pipeline_parallel.zb_auto import zb_auto
from minidist.planning import simulate
from minidist.planning.simulator import Simulation

TIMES = "forward", "backward_input", "backward_weight"


@inside(any_form=True)
def order(**problem):
    """Return each rank's actions, as they print."""
    return [[str(action) for action in own] for own in zb_auto(**problem)]


@inside
def gradients(sizes, state, inputs, targets, **problem):
    """Return per rank the gradients of a model that is trained in this order, and the loss."""
    made = zb_auto(**problem)

    def train(group):
        model = nn.MLP(sizes, "gelu", dtype="float64")
        model.load_state(state)
        pipeline = Pipeline(model, group, made)
        loss = pipeline.backward(Batch(inputs, targets))
        return {p.name: p.grad for p in pipeline.parameters()} | {"the loss": loss}

    return on_ranks(train, problem["p"])


def problem_of(rng, p: int, memory: int, equal: bool = False) -> dict:
    """Draw what `zb_auto` is given."""
    times = {
        name: rng.integers(3, 10, 1).tolist() * p if equal else rng.integers(3, 10, p).tolist()
        for name in TIMES
    }
    m, latency = 2 * p + int(rng.integers(0, 4)), int(rng.integers(0, 4))
    return {"p": p, "m": m, **times, "latency": latency, "memory": memory}


def replayed(made: Programs, problem: dict) -> Simulation:
    return simulate(made, **{name: problem[name] for name in (*TIMES, "latency")})


def read(words: list[list[str]], problem: dict) -> tuple[Programs, Simulation]:
    """Return the programs of an answer, and their replay; AssertionError if they are not valid."""
    p, memory = problem["p"], problem["memory"]
    made = Programs([[read_action(word) for word in own] for own in words], looped(p, 1))
    try:
        validate(made, p, problem["m"])
    except ValueError as error:
        first, *picture = str(error).splitlines()
        raise AssertionError("\n".join([*picture, first])) from None
    replay = replayed(made, problem)
    peaks = ", ".join(map(str, replay.peak_stash))
    fits = max(replay.peak_stash) <= memory
    assert fits, f"the ranks hold {peaks} at their peaks, with memory for {memory}"
    return made, replay


def check_short(problem: dict, record_property, name: str = "", slack: float = 1) -> None:
    """Ask for an order as short as the one with this name, or up to a slack as the package's."""
    made, replay = read(order(**problem), problem)
    record_property("score", replay.makespan / bound(**problem))
    known = programs(name, problem["p"], problem["m"]) if name else None
    best = replayed(known or read(order.package(**problem), problem)[0], problem).makespan
    given = {time: ",".join(map(str, problem[time])) for time in TIMES}
    given |= {"latency": problem["latency"], "limit": problem["memory"]}
    whose = f"{name} has" if name else f"{slack:g} times what the package has"
    wanted = f"{slack * best:g} or less, {whose}; the bound is {bound(**problem)}"
    assert replay.makespan <= slack * best, (
        f"{drawn(made, replay, given)}\nmakespan {replay.makespan}, not {wanted}"
    )


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


@task("11.1")
@pytest.mark.parametrize("p, memory", [(1, 1), (2, 1), (4, 1), (5, 3)])
def test_an_order_for_any_memory_is_valid_and_has_one_devices_gradients(p, memory, rng):
    problem = problem_of(rng, p, memory)
    read(order(**problem), problem)
    sizes = rng.integers(2, 6, p + 2).tolist()
    state = nn.MLP(sizes, dtype="float64").named_parameters()
    gradients.check(
        sizes,
        {name: rng.standard_normal(parameter.shape) for name, parameter in state.items()},
        rng.standard_normal((problem["m"] + 1, sizes[0])),
        rng.integers(0, sizes[-1], problem["m"] + 1),
        **problem,
    )


@task("11.1")
@pytest.mark.parametrize("p", [2, 4])
def test_it_is_as_good_as_1f1b(p, rng, record_property):
    check_short(problem_of(rng, p, p), record_property, "1f1b")


@task("11.1")
@pytest.mark.parametrize(
    "p, memory, equal, name",
    [(3, 3, True, "zb_h1"), (4, 4, False, "zb_h1"), (4, 7, True, "zb_h2"), (3, 5, True, "zb_h2")],
)
def test_it_is_as_good_as_zero_bubble(p, memory, equal, name, rng, record_property):
    check_short(problem_of(rng, p, memory, equal), record_property, name)


@task("11.1")
@pytest.mark.parametrize(
    "p, memory, equal", [(3, 2, True), (4, 2, False), (5, 3, False), (4, 3, False)]
)
def test_little_memory_takes_at_most_a_tenth_longer(p, memory, equal, rng, record_property):
    check_short(problem_of(rng, p, memory, equal), record_property, slack=1.1)


@task("11.1")
@pytest.mark.parametrize("p, memory", [(3, 4), (4, 5), (4, 6), (5, 7)])
def test_unequal_stages_use_more_memory(p, memory, rng, record_property):
    check_short(problem_of(rng, p, memory), record_property, slack=1.05)
