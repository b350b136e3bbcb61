"""Lesson 10's exercises: checks, worked solutions, hints, tempting wrong answers."""

from itertools import groupby, product
from numbers import Integral, Real

from minidist.pipeline_parallel import add_communication, programs
from minidist.pipeline_parallel.actions import Backward, Forward, Programs, Transfer
from minidist.planning import simulate


def check_1(attempt):
    """Count the ends of all messages in the programs."""
    for p, v in product((2, 3, 4), (1, 2, 3)):
        for m in (p, 3 * p):
            own = add_communication(programs("interleaved", p, m, v))
            ends = sum(isinstance(action, Transfer) for program in own for action in program)
            got = attempt(p, m, v)
            if not isinstance(got, Real) or got != ends // 2:
                where = f"p = {p}, m = {m}, v = {v}"
                return f"{where}: {ends // 2} messages are sent, not {got!r:.60}"


def solution_1(p, m, v):
    return 2 * m * (p * v - 1)


hints_1 = (
    "How many stages has the model, and how many boundaries are between them?",
    "Is there a boundary between two stages of one rank, if p is 2 or more?",
    "p v stages have p v - 1 boundaries. Each micro-batch crosses each of them twice.",
)


def v_times_as_many(p, m, v):
    return 2 * m * (p - 1) * v


def forward_alone(p, m, v):
    return m * (p * v - 1)


def nothing(*given):
    pass


tempting_1 = [v_times_as_many, forward_alone, nothing]


def program(rank, p, sizes):
    """Interleaved 1F1B with two chunks and groups of these sizes."""
    starts = [sum(sizes[:at]) for at in range(len(sizes))]
    order = [
        (start + j, chunk)
        for start, size in zip(starts, sizes, strict=True)
        for chunk in (0, 1)
        for j in range(size)
    ]
    ahead = min(len(order), 2 * (p - 1 - rank) + max(sizes))
    for at in range(len(order) + ahead):
        if at < len(order):
            yield Forward(*order[at])
        if at >= ahead:
            i, chunk = order[at - ahead]
            yield Backward(i, 1 - chunk)


def check_2(attempt):
    for p, m in product((2, 3, 4), (4, 5, 6, 7, 9, 11, 13)):
        found = attempt(p, m)
        sizes = list(found) if hasattr(found, "__iter__") else None
        if not sizes or not all(isinstance(size, Integral) and size > 0 for size in sizes):
            return f"groups({p}, {m}) is {found!r:.60}, not a list of sizes"
        if sum(sizes) != m:
            return f"the groups {sizes} have {sum(sizes)} micro-batches, not {m}"
        order = Programs([program(r, p, sizes) for r in range(p)])
        idle = simulate(order).makespan - 3 * m
        if idle != (p - 1) * 1.5:
            return f"{p} ranks, groups {sizes}: idle for {float(idle)}, not {(p - 1) * 1.5}"
        least = -(-m // (m // p))
        if max(sizes) > least:
            return f"{p} ranks, groups {sizes}: no longer idle, but {least} at most would do"


def solution_2(p, m):
    count = m // p
    return [m // count + (at < m % count) for at in range(count)]


hints_2 = (
    "A group passes chunk 0. When is its first micro-batch back on rank 0, for chunk 1? And what "
    "does rank 0 do until then, if the group has one micro-batch only?",
    "So no group may have fewer than p micro-batches. How many groups can there be?",
    "m // p groups. Divide m among them as evenly as you can.",
)


def a_short_one(p, m):
    return [p] * (m // p) + [m % p] * (m % p > 0)


def all_at_once(p, m):
    return [m]


def one_long(p, m):
    return [p + m % p] + [p] * (m // p - 1)


tempting_2 = [a_short_one, all_at_once, one_long, nothing]


def check_3(attempt):
    orders = ("1f1b", 1), ("interleaved", 2), ("looped_bfs", 2), ("looped_bfs", 3), ("zb_v", 2)
    for name, v in orders:
        for p, m in ((2, 4), (4, 8)):
            for rank, own in enumerate(programs(name, p, m, v)):
                want, got = len(list(groupby(action.chunk for action in own))), attempt(list(own))
                if not isinstance(got, Real) or got != want:
                    where = f"rank {rank} of {p}, {name}, m = {m}, v = {v}"
                    return f"{where}: it gathers {want} times, not {got!r:.60}"


def solution_3(program):
    return sum(
        before is None or action.chunk != before.chunk
        for before, action in zip([None, *program], program, strict=False)
    )


hints_3 = (
    "Write down the chunks of a short program in a row: 0 0 1 1 1 0. How many runs are there?",
    "A gather comes before the first action, and wherever the chunk is another one",
    "itertools.groupby makes the runs: groupby(action.chunk for action in program).",
)


def one_per_chunk(program):
    return len({action.chunk for action in program})


def one_per_chunk_and_direction(program):
    return 2 * len({action.chunk for action in program})


def one_per_action(program):
    return len(program)


tempting_3 = [one_per_chunk, one_per_chunk_and_direction, one_per_action, nothing]
