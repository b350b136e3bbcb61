"""What the pipelines lab asks.

Gradients, weights and their versions are the package's own. Programs have many right forms: they
are validated and simulated here, and have to be as good as the package's. Their sizes come from
schedules.py.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

from minidist import nn
from minidist.course.answers import Answer, by_rank, like_the_package
from minidist.course.labs.pipelines import probes
from minidist.course.labs.pipelines.schedules import fault, scheduled
from minidist.course.question import Question, Questions, Random, ask, ints
from minidist.errors import Deadlock, plural
from minidist.observe import timeline
from minidist.pipeline_parallel import add_communication, programs
from minidist.pipeline_parallel.actions import Programs, Transfer
from minidist.pipeline_parallel.holders import cut_of
from minidist.planning import simulate


def rows(made: Programs) -> dict:
    """Return programs as the probes take them."""
    return {
        "rows": [[probes.row(a) for a in own] for own in made],
        "placement": [list(own) for own in made.placement],
    }


def with_transfers(made: Programs) -> Programs:
    return Programs(add_communication(made), made.placement)


# Schedules.


def sizes(rng: Random) -> Iterator[tuple[str, int, int]]:
    """Yield (group, p, m)."""
    p, few = int(rng.integers(3, 6)), "one rank, or no more micro-batches than ranks"
    yield few, 1, int(rng.integers(2, 6))
    yield few, p, 1
    yield few, p, int(rng.integers(2, p))
    yield few, p, p
    yield "more micro-batches than ranks", int(rng.integers(2, 5)), int(rng.integers(9, 14))


def gpipe(rng: Random) -> Questions:
    for group, p, m in sizes(rng):
        yield scheduled(rng, group, "gpipe", p, m, exactly=True)
    for p, m, v in ((1, 3, 2), (2, int(rng.integers(3, 6)), 3), (4, int(rng.integers(2, 7)), 2)):
        yield scheduled(rng, "several chunks", "looped_bfs", p, m, v, exactly=True)


def one_f_one_b(rng: Random) -> Questions:
    for group, p, m in sizes(rng):
        yield scheduled(rng, group, "1f1b", p, m)
    for replicas in ([2, 1], [1, int(rng.integers(2, 4))], [2, 3, 1], [1]):
        m = int(rng.integers(6, 12))
        given = {"name": "pipedream", "p": sum(replicas), "m": m, "replicas": replicas}
        about = f"without an end, {replicas} replicas, {m} minibatches"
        yield ask(about, probes.schedule, group="replicated stages", **given)


def interleaved(rng: Random) -> Questions:
    rounds, several, chunks = ints(rng, 2, 5, 4), int(rng.integers(3, 6)), int(rng.integers(2, 4))
    cases = [(1, rounds[0], 2), (several, 1, 2), (2, 1 + rounds[1], 3)]
    for p, turns, v in [*cases, (3, rounds[2], chunks), (4, rounds[3], 2)]:
        group = "one group of micro-batches" if 1 in (p, turns) else "several groups"
        yield scheduled(rng, group, "interleaved", p, p * turns, v)
    p = int(rng.integers(3, 6))
    m = p * int(rng.integers(1, 4)) + int(rng.integers(1, p))  # which make no groups of p
    about = f"{plural(p, 'rank')}, {plural(m, 'micro-batch')}, 2 chunks"
    given = {"name": "interleaved", "p": p, "m": m, "chunks": 2}
    yield ask(about, probes.refusal, group="several groups", **given)


def zero_bubble(rng: Random) -> Questions:
    for _, p, m in [*sizes(rng), ("", 4, 11)]:
        for name, least in (("zb_h1", p), ("zb_h2", 2 * p - 1)):
            slow = programs("1f1b", p, m) if m < least else None  # outside of the formula's domain
            yield scheduled(rng, name, name, p, m, idles_like=slow, span=name == "zb_h2")


# Transfers, and their execution.


def some_programs(rng: Random) -> Iterator[tuple[str, str, Programs, int]]:
    """Yield (group, what, programs, m): looped, V-shaped and replicated stages."""
    p, m = ints(rng, 2, 5, 2)
    replicas, many = [int(rng.integers(2, 4)), 1, 2], int(rng.integers(4, 9))
    cases: list[tuple[str, str, int, int, dict]] = [
        ("a chunk per rank", "1f1b", p, m, {}),
        ("a chunk per rank", "gpipe", 1, m, {}),
        ("a chunk per rank", "zb_h2", p, m, {}),
        ("several chunks", "interleaved", p, 2 * p, {"chunks": 2}),
        ("several chunks", "interleaved", 2, 4, {"chunks": 3}),
        ("several chunks", "zb_v", p, m, {}),
        ("replicas", "pipedream", sum(replicas), many, {"replicas": replicas}),
    ]
    for group, name, ranks, count, options in cases:
        what = f"{name}, {replicas} replicas" if group == "replicas" else name
        what += f", {plural(ranks, 'rank')}, {plural(count, 'micro-batch')}"
        yield group, what, programs(name, ranks, count, **options), count


def transfers(rng: Random) -> Questions:
    for group, what, made, m in some_programs(rng):
        for safe in (False, True):
            judge = partial(no_later, made=made, m=m, safe=safe, latency=int(rng.integers(1, 4)))
            given = rows(made) | {"rendezvous_safe": safe}
            if safe:
                group, what = "every send waits for its receive", f"{what}, rendezvous"
            yield ask(what, probes.transfers, judge, group, **given)
    once = with_transfers(programs("1f1b", 2, 3))
    yield ask("programs with transfers", probes.transfers_twice, group="replicas", **rows(once))


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
    mine, best = (simulate(x, latency=latency) for x in (got, made))
    if not safe and mine.makespan > best.makespan:
        why = "a receive is earlier, or a send later, than it need be"
        end = f"with a latency of {latency} the makespan is {mine.makespan}, not {best.makespan}"
        return f"{timeline.text(mine.timeline)}\n{end}: {why}"
    return None


def execute(rng: Random) -> Questions:
    unique = partial(like_the_package, free=("the tags",))
    for _, what, made, _ in some_programs(rng):
        if len(made) > 1:
            given = rows(with_transfers(made))
            yield ask(f"tags, {what}", probes.tags, unique, "tags", **given)
    for group, what, made, m in some_programs(rng):
        yield trained(rng, group, what, made, m)


def trained(rng: Random, group: str, what: str, made: Programs, m: int) -> Question:
    stages = 1 + max(k for own in made.placement for k in own)
    widths = ints(rng, 2, 6, stages + int(rng.integers(1, 3)) + 1)
    model = nn.MLP(widths, "gelu", dtype="float64")
    B = int(rng.integers(m // 2, 2 * m + 1)) or 1  # some micro-batches may be empty
    return ask(
        f"{what}, {plural(B, 'example')}",
        probes.train,
        group=group,
        **rows(with_transfers(made)),
        sizes=widths,
        cut=[(part.start, part.stop) for part in cut_of(len(model.layers), stages)],
        state={n: rng.standard_normal(q.shape) for n, q in model.named_parameters().items()},
        inputs=rng.standard_normal((B, widths[0])),
        targets=rng.integers(0, widths[-1], B),
        m=m,
    )


# Versions of the weights.


def weight_versions(rng: Random) -> Questions:
    for scheme in ("newest", "vertical_sync", "double_buffered"):
        every, p = int(rng.integers(3, 6)), int(rng.integers(2, 5))
        given = {"scheme": scheme, "p": p, "every": every}
        numbers = {"minibatches": list(range(12)), "newest": [0, 3, 20]}
        yield ask(f"which version, {scheme}", probes.chosen, group=scheme, **given, **numbers)
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
    return ask(
        f"{scheme if stash else 'no stash'}, stage {s} of {p}, {m} minibatches",
        probes.versions,
        partial(like_the_package, free=(probes.MOST,) if few and stash else ()),
        group=scheme,
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
