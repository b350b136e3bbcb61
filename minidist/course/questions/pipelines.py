"""What the pipelines lab asks.

Gradients, weights and their versions are the package's own. Programs have many right forms: they
are judged by what they do, validated and simulated here, and compared with the papers' formulas.
"""

from collections.abc import Iterator
from fractions import Fraction
from functools import partial
from typing import Any

from minidist import nn
from minidist.course.probes import pipelines as probes
from minidist.course.question import Answer, Question, Questions, Random
from minidist.course.questions.arrays import ask, by_rank, like_the_package
from minidist.course.questions.schedules import Promise, fault, scheduled, times
from minidist.errors import Deadlock, plural
from minidist.pipeline_parallel import add_communication, programs
from minidist.pipeline_parallel.actions import SendActivation, SendGradient, Transfer, other_end
from minidist.pipeline_parallel.partition import cut_of
from minidist.pipeline_parallel.placement import Programs
from minidist.planning import simulate


def rows(made: Programs) -> dict:
    """Return programs as the probes take them."""
    return {
        "rows": [[probes.row(a) for a in own] for own in made],
        "placement": [list(own) for own in made.placement],
    }


def with_transfers(made: Programs) -> Programs:
    return Programs(add_communication(made), made.placement)


# Schedules: of p ranks, m micro-batches, v chunks, with the times TF, TI, TW of a stage.


def sizes(rng: Random) -> Iterator[tuple[int, int]]:
    """Yield (p, m): one rank, one micro-batch, fewer than ranks, as many, and many more."""
    p = int(rng.integers(3, 6))
    yield 1, int(rng.integers(2, 6))
    yield p, 1
    yield p, int(rng.integers(2, p))
    yield p, p
    yield int(rng.integers(2, 5)), int(rng.integers(9, 14))


def gpipe(rng: Random) -> Questions:
    for p, m in sizes(rng):
        t = times(rng)
        idle = (p - 1) * sum(t), "(p - 1)(TF + TI + TW)"
        yield scheduled("gpipe", p, m, t, Promise(*idle, [m] * p, "m", exactly=True))


def one_f_one_b(rng: Random) -> Questions:
    for p, m in sizes(rng):
        t = times(rng)
        idle = (p - 1) * sum(t), "(p - 1)(TF + TI + TW)"
        stash = [min(m, p - r) for r in range(p)], "min(m, p - r)"
        yield scheduled("1f1b", p, m, t, Promise(*idle, *stash))


def interleaved(rng: Random) -> Questions:
    rounds = [int(n) for n in rng.integers(2, 5, 4)]
    several, chunks = int(rng.integers(3, 6)), int(rng.integers(2, 4))
    for p, turns, v in (
        (1, rounds[0], 2),
        (several, 1, 2),
        (2, 1 + rounds[1], 3),
        (3, rounds[2], chunks),
        (4, rounds[3], 2),
    ):
        t, m = times(rng), p * turns
        idle = (p - 1) * sum(t) / v, "(p - 1)(TF + TI + TW)/v"
        stash = [Fraction(min(m * v, 2 * (p - 1 - r) + (v - 1) * p + 1), v) for r in range(p)]
        promise = Promise(*idle, stash, "min(mv, 2 (p - 1 - r) + (v - 1) p + 1)/v")
        yield scheduled("interleaved", p, m, t, promise, v)
    p = int(rng.integers(3, 6))
    m = p * int(rng.integers(1, 4)) + int(rng.integers(1, p))  # which make no groups of p
    about = f"{plural(p, 'rank')}, {plural(m, 'micro-batch')}, 2 chunks"
    yield ask(about, probes.refusal, name="interleaved", p=p, m=m, chunks=2)


def zero_bubble(rng: Random) -> Questions:
    for p, m in [*sizes(rng), (4, 11)]:
        f, i, w = t = times(rng)
        idle: tuple[Fraction | float, str] = (p - 1) * (f + i - w), "(p - 1)(TF + TI - TW)"
        if m < p:  # outside of the formula's domain: no more than 1F1B
            idle = (p - 1) * sum(t), "(p - 1)(TF + TI + TW), m < p"
        yield scheduled("zb_h1", p, m, t, Promise(*idle, [min(m, p)] * p, "min(m, p)"))
        idle = (p - 1) * (f + i - 2 * w), "(p - 1)(TF + TI - 2 TW) from its own start"
        if m < 2 * p - 1:
            idle = (p - 1) * sum(t), "(p - 1)(TF + TI + TW), m < 2p - 1"
        stash = [min(m, 2 * p - 1)] * p, "min(m, 2p - 1)"
        yield scheduled("zb_h2", p, m, t, Promise(*idle, *stash, span=True))


# Transfers, and their execution.


def some_programs(rng: Random) -> Iterator[tuple[str, Programs, int]]:
    """Yield (what, programs, m): looped, V-shaped and replicated stages."""
    p, m = (int(n) for n in rng.integers(2, 5, 2))
    yield "1f1b", programs("1f1b", p, m), m
    yield "gpipe", programs("gpipe", 1, m), m
    yield "interleaved", programs("interleaved", p, 2 * p, 2), 2 * p
    yield "interleaved", programs("interleaved", 2, 4, 3), 4
    yield "zb_v", programs("zb_v", p, m), m
    yield "zb_h2", programs("zb_h2", p, m), m
    replicas = [int(rng.integers(2, 4)), 1, 2]
    total, m = sum(replicas), int(rng.integers(4, 9))
    yield f"{replicas} replicas", programs("pipedream", total, m, replicas=replicas), m


def described(what: str, made: Programs, m: int) -> str:
    return f"{what}, {plural(len(made), 'rank')}, {plural(m, 'micro-batch')}"


def transfers(rng: Random) -> Questions:
    for what, made, m in some_programs(rng):
        for safe in (False, True):
            latency = int(rng.integers(1, 4))
            about = described(what, made, m) + (", rendezvous" if safe else "")
            judge = partial(no_later, made=made, m=m, safe=safe, latency=latency)
            yield ask(about, probes.transfers, judge, **rows(made), rendezvous_safe=safe)
    once = with_transfers(programs("1f1b", 2, 3))
    yield ask("programs with transfers", probes.transfers_twice, **rows(once))


def no_later(
    answer: Answer, want: Answer, made: Programs, m: int, safe: bool, latency: int
) -> str | None:
    """Judge transfers: all compute actions as before, no deadlock, and no action later."""
    got = probes.read(by_rank(answer, "the program"), made.placement)
    for r, (own, before) in enumerate(zip(got, made, strict=True)):
        if [a for a in own if not isinstance(a, Transfer)] != before:
            return f"rank {r} has other compute actions, or in another order, than before"
    if message := fault(got, m):
        return message
    try:
        simulate(got, buffer=0 if safe else 1)
    except Deadlock as error:
        waits = "that waits for its receive" if safe else "with room for one message"
        return f"{error}, each send {waits}"
    took, least = (simulate(x, latency=latency).makespan for x in (got, made))
    if not safe and took > least:
        return (
            f"with a latency of {latency} the makespan is {took}, not {least}: "
            "a receive is earlier, or a send later, than it need be"
        )
    return None


def execute(rng: Random) -> Questions:
    for what, made, m in some_programs(rng):
        if len(made) > 1:
            full = with_transfers(made)
            judge = partial(one_tag_per_transfer, full=full)
            yield ask(f"tags, {described(what, made, m)}", probes.tags, judge, **rows(full))
    for what, made, m in some_programs(rng):
        yield trained(rng, what, made, m)


def trained(rng: Random, what: str, made: Programs, m: int) -> Question:
    stages = 1 + max(k for own in made.placement for k in own)
    widths = [int(n) for n in rng.integers(2, 6, stages + int(rng.integers(1, 3)) + 1)]
    model = nn.MLP(widths, "gelu", dtype="float64")
    state = {n: rng.standard_normal(q.shape) for n, q in model.named_parameters().items()}
    B = int(rng.integers(m // 2, 2 * m + 1)) or 1  # some micro-batches may be empty
    return ask(
        f"{described(what, made, m)}, {plural(B, 'example')}",
        probes.train,
        **rows(with_transfers(made)),
        sizes=widths,
        cut=[(part.start, part.stop) for part in cut_of(len(model.layers), stages)],
        state=state,
        inputs=rng.standard_normal((B, widths[0])),
        targets=rng.integers(0, widths[-1], B),
        m=m,
    )


def one_tag_per_transfer(answer: Answer, want: Answer, full: Programs) -> str | None:
    """Judge tags: the two ends of a transfer have one, which no other of these ranks has."""
    ends: dict[tuple[int, Transfer], int] = {}
    taken: dict[tuple[int, int, int], Transfer] = {}
    for r, tags in enumerate(by_rank(answer, "the tags")):
        own = [a for a in full[r] if isinstance(a, Transfer)]
        ends |= {(r, a): tag for a, tag in zip(own, tags.tolist(), strict=True)}
    for (r, a), tag in ends.items():
        other = ends[a.peer, other_end(a, r)]
        if other != tag:
            pair = f"{a} on rank {r} and {other_end(a, r)} on rank {a.peer}"
            return f"{pair} are two ends of one transfer, with the tags {tag} and {other}"
        if isinstance(a, SendActivation | SendGradient):
            same = taken.setdefault((r, a.peer, tag), a)
            if same is not a:
                return f"{same} and {a} of rank {r} to rank {a.peer} have one tag, {tag}"
    return None


# Versions of the weights.


def weight_versions(rng: Random) -> Questions:
    for scheme in ("newest", "vertical_sync", "double_buffered"):
        every, p = int(rng.integers(3, 6)), int(rng.integers(2, 5))
        given = {"scheme": scheme, "p": p, "every": every}
        numbers = {"minibatches": list(range(12)), "newest": [0, 3, 20]}
        yield ask(f"which version, {scheme}", probes.chosen, **given, **numbers)
        for n, s, m in ((p, 0, 12), (p, p - 1, 13), (1, 0, 11), (4, 1, 3)):
            yield stream(rng, scheme, (n, s), m, every)
    yield stream(rng, "newest", (3, 0), 8, 1, stash=False)


def stream(
    rng: Random, scheme: str, place: tuple[int, int], m: int, every: int, stash: bool = True
) -> Question:
    """Ask for the weights in two streams of m minibatches; place: p, and the stage of it."""
    p, s = place
    name, options = "pipedream", dict[str, Any]()
    if scheme == "double_buffered":
        name, options = "pipedream_2bw", {"update_every": every}
    few = m < 9  # too few minibatches for all buffers that the formula counts
    about = f"{scheme if stash else 'no stash'}, stage {s} of {p}, {m} minibatches"
    return ask(
        about,
        probes.versions,
        partial(like_the_package, free=(probes.MOST,) if few and stash else ()),
        scheme=scheme,
        p=p,
        every=every,
        events=[(a.sign, a.micro_batch) for a in programs(name, p, m, **options)[s]],
        weights=(rng.standard_normal((2, 3)), rng.standard_normal(3)),
        gradients=rng.standard_normal((m, 2, 3)),
        lr=0.1 * (1 + rng.random()),
        stash=stash,
        streams=2,
    )


QUESTIONS = {
    "4.1": gpipe,
    "4.2": one_f_one_b,
    "4.3": transfers,
    "4.4": execute,
    "4.5": interleaved,
    "4.6": zero_bubble,
    "4.7": weight_versions,
}
