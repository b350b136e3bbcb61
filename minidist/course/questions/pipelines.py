"""What the pipelines lab asks, and what the answers must be.

Valid programs with the papers' bubbles and stashes, one device's gradients, and the weights of the
right version. Programs are judged by what they do, not by one order: they are validated and
simulated here.
"""

from collections.abc import Callable, Iterator
from fractions import Fraction

import numpy as np

from minidist import nn
from minidist.course.probes import pipelines
from minidist.course.question import Answer, Question, counted
from minidist.course.questions.ranks import by_rank, ranks_differ
from minidist.errors import Deadlock
from minidist.pipeline_parallel import add_communication, programs, validate
from minidist.pipeline_parallel.actions import (
    Programs,
    SendActivation,
    SendGradient,
    Transfer,
    Update,
    looped,
    other_end,
)
from minidist.pipeline_parallel.holders import holders
from minidist.pipeline_parallel.partition import cut_of
from minidist.planning import simulate


def rows(made: Programs) -> dict:
    """Return programs as the probes take them."""
    return {
        "rows": [[pipelines.row(a) for a in own] for own in made],
        "placement": [list(own) for own in made.placement],
    }


def read(answer: Answer, placement: list[list[int]]) -> Programs:
    return pipelines.read([answer[f"rank {r}"] for r in range(len(placement))], placement)


def fault(made: Programs, p: int, m: int) -> str | None:
    """Return what `validate` says, without its picture."""
    try:
        validate(made, p, m)
    except ValueError as error:
        return str(error).splitlines()[0]
    return None


# Schedules: of p ranks, m micro-batches, v chunks, with the times TF, TI, TW of a stage.


def sizes(rng, least_p: int = 1) -> Iterator[tuple[int, int]]:
    """Yield (p, m): one rank, one micro-batch, fewer than ranks, as many, and many more."""
    p = int(rng.integers(3, 6))
    yield max(1, least_p), int(rng.integers(2, 6))
    yield p, 1
    yield p, int(rng.integers(2, p)) if p > 2 else 2
    yield p, p
    yield int(rng.integers(2, 5)), int(rng.integers(9, 14))


def times(rng) -> tuple[Fraction, Fraction, Fraction]:
    """Draw durations of F, I and W, W the shortest: where all formulas hold."""
    f, i, w = (Fraction(int(n)) for n in rng.integers(3, 9, 3))
    return f, i, min(f, i, w) - Fraction(int(rng.integers(0, 3)))


def scheduled(
    name: str,
    p: int,
    m: int,
    t: tuple,
    idle: tuple[Fraction, str],
    stash: tuple[list, str],
    chunks: int = 1,
    span: bool = False,
    exactly: bool = False,
    known: dict | None = None,
) -> Question:
    """Ask for a schedule whose ranks idle, and hold, no more than its paper says.

    idle, stash  the number, or one per rank, and its formula; `exactly`: nor less of the stash
    span         idle time is counted from each rank's own start
    known        {idle time of another schedule: which one}
    """

    def judge(answer: Answer) -> str | None:
        made = read(answer, looped(p, chunks))
        if said := fault(made, p, m):
            return said
        found = simulate(made, *t)
        whole, busy = found.span if span else found.makespan, m * sum(t)
        if (rest := whole - busy) > idle[0]:
            why = {**{value: f": {what}" for value, what in (known or {}).items()}}.get(rest, "")
            return (
                f"a rank idles {rest} units of {whole}, not {idle[0]} = {idle[1]} "
                f"(TF, TI, TW = {', '.join(map(str, t))}){why}"
            )
        for r, (got, want) in enumerate(zip(found.peak_stash, stash[0], strict=True)):
            if got > want or (exactly and got != want):
                others = {m: "all of them", 1: "one at a time", want + 1: "one forward too early"}
                why = f": {others[got]}" if got in others else ""
                unit = "micro-batches" if chunks == 1 else "stages' worth"
                return f"rank {r} holds {got} {unit} at its peak, not {want} = {stash[1]}{why}"
        return None

    about = f"{counted(p, 'rank')}, {counted(m, 'micro-batch')}"
    about += f", {chunks} chunks" if chunks > 1 else ""
    given = {"name": name, "p": p, "m": m} | ({"chunks": chunks} if chunks > 1 else {})
    return Question(about, "schedule", given, judge)


def one_by_one(p: int, m: int, t: tuple) -> dict:
    return {(p - 1) * m * sum(t): "only one rank works at any time, as in layer_split"}


def gpipe(rng) -> Iterator[Question]:
    for p, m in sizes(rng):
        t = times(rng)
        idle = (p - 1) * sum(t), "(p - 1)(TF + TI + TW)"
        known = one_by_one(p, m, t)
        yield scheduled("gpipe", p, m, t, idle, ([m] * p, "m"), exactly=True, known=known)


def one_f_one_b(rng) -> Iterator[Question]:
    for p, m in sizes(rng):
        t = times(rng)
        idle = (p - 1) * sum(t), "(p - 1)(TF + TI + TW)"
        stash = [min(m, p - r) for r in range(p)], "min(m, p - r)"
        yield scheduled("1f1b", p, m, t, idle, stash, known=one_by_one(p, m, t))


def interleaved(rng) -> Iterator[Question]:
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
        known = one_by_one(p, m, t) | {(p - 1) * sum(t): "that is 1F1B's: a v-th of it is due"}
        most = (
            [Fraction(min(m * v, 2 * (p - 1 - r) + (v - 1) * p + 1), v) for r in range(p)],
            "min(mv, 2 (p - 1 - r) + (v - 1) p + 1)/v",
        )
        yield scheduled("interleaved", p, m, t, idle, most, v, known=known)
    p = int(rng.integers(3, 6))
    m = p * int(rng.integers(1, 4)) + int(rng.integers(1, p))

    def judge(answer):
        if answer["refused"]:
            return None
        return f"{m} micro-batches do not make groups of {p}: a ValueError is due"

    about = f"{counted(p, 'rank')}, {counted(m, 'micro-batch')}, 2 chunks"
    given = {"p": p, "m": m, "chunks": 2}
    yield Question(about, "refusal", {"name": "interleaved", **given}, judge)


def zero_bubble(rng) -> Iterator[Question]:
    for p, m in [*sizes(rng), (4, 11)]:
        f, i, w = t = times(rng)
        late = {
            (p - 1) * sum(t): "that is 1F1B's: W fills nothing",
            (p - 1) * (f + i): "all W come right after their I; on later ranks some should wait",
        }
        idle = (p - 1) * (f + i - w), "(p - 1)(TF + TI - TW)"
        if m < p:  # outside of the formula's domain: no more than 1F1B
            idle = (p - 1) * sum(t), "(p - 1)(TF + TI + TW), m < p"
        yield scheduled("zb_h1", p, m, t, idle, ([min(m, p)] * p, "min(m, p)"), known=late)
        idle = (p - 1) * (f + i - 2 * w), "(p - 1)(TF + TI - 2 TW) from its own start"
        if m < 2 * p - 1:
            idle = (p - 1) * sum(t), "(p - 1)(TF + TI + TW), m < 2p - 1"
        stash = [min(m, 2 * p - 1)] * p, "min(m, 2p - 1)"
        yield scheduled("zb_h2", p, m, t, idle, stash, span=True, known=late)


# Transfers, and their execution.


def some_programs(rng) -> Iterator[tuple[str, Programs, int, int]]:
    """Yield (what, programs, p, m): looped, V-shaped and replicated stages."""
    p, m = (int(n) for n in rng.integers(2, 5, 2))
    yield "1f1b", programs("1f1b", p, m), p, m
    yield "gpipe", programs("gpipe", 1, m), 1, m
    yield "interleaved", programs("interleaved", p, 2 * p, 2), p, 2 * p
    yield "interleaved", programs("interleaved", 2, 4, 3), 2, 4
    yield "zb_v", programs("zb_v", p, m), p, m
    yield "zb_h2", programs("zb_h2", p, m), p, m
    replicas = [int(rng.integers(2, 4)), 1, 2]
    total, m = sum(replicas), int(rng.integers(4, 9))
    yield f"{replicas} replicas", programs("pipedream", total, m, replicas=replicas), total, m


def described(what: str, p: int, m: int) -> str:
    return f"{what}, {counted(p, 'rank')}, {counted(m, 'micro-batch')}"


def transfers(rng) -> Iterator[Question]:
    for what, made, p, m in some_programs(rng):
        for safe in (False, True):
            latency = int(rng.integers(1, 4))
            about = described(what, p, m) + (", rendezvous" if safe else "")
            given = {**rows(made), "rendezvous_safe": safe}
            yield Question(about, "transfers", given, judge_transfers(made, p, m, safe, latency))
    once = add_communication(programs("1f1b", 2, 3))

    def judge(answer):
        return None if answer["refused"] else "transfers that are there are not to be added again"

    yield Question("programs with transfers", "transfers_twice", rows(once), judge)


def judge_transfers(made: Programs, p: int, m: int, safe: bool, latency: int) -> Callable:
    def judge(answer: Answer) -> str | None:
        got = read(answer, made.placement)
        for r in range(p):
            own = [a for a in got[r] if not isinstance(a, Transfer)]
            if own != made[r]:
                return f"rank {r} has other compute actions, or in another order, than before"
        if said := fault(got, p, m):
            return said
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

    return judge


def execute(rng) -> Iterator[Question]:
    for what, made, p, m in some_programs(rng):
        if p == 1:
            continue
        full = add_communication(made)
        given = rows(full)
        yield Question(f"tags, {described(what, p, m)}", "tags", given, judge_tags(full))
    for what, made, p, m in some_programs(rng):
        yield trained(rng, what, made, p, m)


def trained(rng, what: str, made: Programs, p: int, m: int) -> Question:
    full, stages = add_communication(made), 1 + max(k for own in made.placement for k in own)
    widths = [int(n) for n in rng.integers(2, 6, stages + int(rng.integers(1, 3)) + 1)]
    model = nn.MLP(widths, "gelu", dtype="float64")
    model.load_state({n: rng.standard_normal(q.shape) for n, q in model.named_parameters().items()})
    B = int(rng.integers(m // 2, 2 * m + 1)) or 1  # some micro-batches may be empty
    inputs, targets = rng.standard_normal((B, widths[0])), rng.integers(0, widths[-1], B)
    cut = cut_of(len(model.layers), stages)
    given = {
        **rows(full),
        "sizes": widths,
        "cut": [(part.start, part.stop) for part in cut],
        "state": model.state(),
        "inputs": inputs,
        "targets": targets,
        "m": m,
    }
    return Question(
        f"{described(what, p, m)}, {counted(B, 'example')}",
        "train",
        given,
        judge_training(model, cut, full, inputs, targets, widths),
    )


def judge_training(model, cut, full: Programs, inputs, targets, widths) -> Callable:
    loss = nn.cross_entropy(model(inputs), targets)
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters().items()}
    stage_of = {name: stages[0] for name, stages in holders(model, cut).items()}
    parts = np.array_split(np.arange(len(inputs)), 1 + max(a.micro_batch for a in full[0]))

    def judge(answer: Answer) -> str | None:
        found = by_rank(answer, len(full))
        summed: dict[str, np.ndarray] = {}  # replicas have a part of the gradient each
        losses = sum(float(mine.pop("(loss)")) for mine in found)
        moved = [int(mine.pop("(bytes)")) for mine in found]
        updates = [mine.pop("(updates)").tolist() for mine in found]
        for r, mine in enumerate(found):
            for name, grad in mine.items():
                if stage_of.get(name) not in full.placement[r]:
                    return f"rank {r} has {name}, which is not of its stages"
                summed[name] = summed.get(name, 0) + grad
        if said := ranks_differ([summed], [grads], {0.5: "half of the micro-batches are missing"}):
            return said.replace(" on rank 0", "", 1)
        if abs(losses - loss.item()) > 1e-9 * abs(loss.item()):
            return f"the loss is {losses:.9g}, not {loss.item():.9g}"
        for r, program in enumerate(full):
            want = [a.micro_batch for a in program if isinstance(a, Update)]
            if updates[r] != want:
                return f"rank {r} has updated with micro-batches {updates[r]}, not {want}"
            want = 0
            for a in program:
                if isinstance(a, SendActivation | SendGradient) and a.peer != r:
                    k = full.placement[r][a.chunk]
                    edge = cut[k].stop if isinstance(a, SendActivation) else cut[k].start
                    want += 8 * widths[edge] * len(parts[a.micro_batch])
            if moved[r] != want:
                return f"rank {r} has sent {moved[r]} bytes, not {want}"
        return None

    return judge


def judge_tags(full: Programs) -> Callable:
    def judge(answer: Answer) -> str | None:
        ends, taken = {}, {}
        for r, program in enumerate(full):
            own = [a for a in program if isinstance(a, Transfer)]
            for a, tag in zip(own, answer[f"rank {r}"].tolist(), strict=True):
                ends[r, a] = tag
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

    return judge


# Versions of the weights.

SCHEMES = {  # the version of minibatch b on stage s, of p, and the buffers that are kept
    "newest": (lambda b, s, p, every: max(0, b - (p - 1 - s)), lambda s, p: p - s),
    "vertical_sync": (lambda b, s, p, every: max(0, b - (p - 1)), lambda s, p: p),
    "double_buffered": (lambda b, s, p, every: max(0, b // every - 1), lambda s, p: 2),
}


def weight_versions(rng) -> Iterator[Question]:
    for scheme, (version_of, buffers) in SCHEMES.items():
        every, p = int(rng.integers(3, 6)), int(rng.integers(2, 5))
        yield choice(scheme, p, every)
        for n, s, m in ((p, 0, 12), (p, p - 1, 13), (1, 0, 11), (4, 1, 3)):
            most = buffers(s, n) if m > 9 else None
            yield stream(rng, scheme, n, s, m, every, version_of, most)
    yield stream(rng, "newest", 3, 0, 8, 1, None, 1, stash=False)


def choice(scheme: str, p: int, every: int) -> Question:
    minibatches, newest = list(range(12)), [0, 3, 20]
    formulas = {
        "newest": lambda b, v: v,
        "vertical_sync": lambda b, v: max(0, b - (p - 1)),
        "double_buffered": lambda b, v: max(0, b // every - 1),
    }
    cases = [(b, v) for b in minibatches for v in newest]

    def judge(answer: Answer) -> str | None:
        for (b, v), got in zip(cases, answer["versions"].tolist(), strict=True):
            if got != formulas[scheme](b, v):
                return (
                    f"minibatch {b}, the newest version {v}, p = {p}, every = {every}: "
                    f"version {got}, not {formulas[scheme](b, v)}"
                )
        return None

    given = {"scheme": scheme, "p": p, "every": every, "minibatches": minibatches, "newest": newest}
    return Question(f"which version, {scheme}", "chosen", given, judge)


def stream(
    rng, scheme: str, p: int, s: int, m: int, every: int, version_of, buffers, stash=True
) -> Question:
    """Two streams of m minibatches through stage s of p; the weights are followed here, too."""
    name, more = "pipedream", {}
    if scheme == "double_buffered":
        name, more = "pipedream_2bw", {"update_every": every}
    events = [(a.sign, a.micro_batch) for a in programs(name, p, m, **more)[s]]
    start = rng.standard_normal((2, 3)), rng.standard_normal(3)
    gradients, lr = rng.standard_normal((m, 2, 3)), 0.1 * (1 + rng.random())
    streams = 2

    history, summed, first = [start[0]], np.zeros((2, 3)), 0
    seen, held, used, forward = [], [], [], {}
    for _ in range(streams):
        first = len(history) - 1
        for letter, b in events:
            newest = len(history) - 1
            if letter == "U":
                history.append(history[-1] - lr * summed)
                summed = np.zeros((2, 3))
                seen.append(len(history) - 1)
                continue
            if letter == "F":
                forward[b] = first + version_of(b, s, p, every) if stash else newest
            version = forward[b] if stash else newest
            seen.append(version)
            used.append((letter, b, version))
            if letter == "B":
                held.append(version)
                summed = summed + gradients[b]

    def which(w: np.ndarray) -> str:
        close = [n for n, old in enumerate(history) if np.allclose(w, old, rtol=0, atol=1e-9)]
        return f"version {close[0]}" if close else "no version that there ever was"

    def judge(answer: Answer) -> str | None:
        order = [event for _ in range(streams) for event in events]
        backs = [b for letter, b in order if letter == "B"]
        for b, got, want in zip(backs, answer["held"], held, strict=True):
            if np.abs(got - history[want]).max() > 1e-9:
                kept = ": an update has to leave them alone" if stash else ""
                return f"the arrays that F{b} was given hold {which(got)} at B{b}, not {want}{kept}"
        for (letter, b), got, want in zip(order, answer["seen"], seen, strict=True):
            if np.abs(got - history[want]).max() > 1e-9:
                when = "after" if letter == "U" else "in"
                now = ": backward needs what its forward pass has used" if letter == "B" else ""
                return f"{when} {letter}{b} the weights are {which(got)}, not version {want}{now}"
        records = zip(answer["letters"].tolist(), answer["numbers"].tolist(), strict=True)
        if (got := [(letter, *numbers) for letter, numbers in records]) != used:
            if len(got) != len(used):
                return f"`used` has {len(got)} entries, not {len(used)}"
            at = next(i for i in range(len(used)) if got[i] != used[i])
            return f"`used` has {got[at]} at {at}, not {used[at]}"
        if buffers is not None and int(answer["most"]) != buffers:
            return f"{int(answer['most'])} buffers were kept at once, not {buffers}"
        return None

    given = {
        "scheme": scheme,
        "p": p,
        "every": every,
        "events": events,
        "weights": start,
        "gradients": gradients,
        "lr": lr,
        "stash": stash,
        "streams": streams,
    }
    about = f"{scheme if stash else 'no stash'}, stage {s} of {p}, {m} minibatches"
    return Question(about, "versions", given, judge)


QUESTIONS = {
    "4.1": gpipe,
    "4.2": one_f_one_b,
    "4.3": transfers,
    "4.4": execute,
    "4.5": interleaved,
    "4.6": zero_bubble,
    "4.7": weight_versions,
}
