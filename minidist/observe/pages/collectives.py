"""Collectives, step by step: who sends which slice to whom, and whose numbers are in it.

The algorithms that train run here, on channels that record. Rank r has 1 << r in every element, so
a sum shows which ranks are in it. In a step a rank sends one message and takes one.
"""

from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise
from queue import SimpleQueue

import numpy as np

from minidist.comm import collectives as on
from minidist.comm.communicator import Ledger
from minidist.comm.hierarchical import hierarchical, levels_of
from minidist.errors import WrongInput
from minidist.planning.costs.collectives import all_reduce_bytes

ELEMENTS = 840  # which 2 to 8 ranks cut into equal slices
FIRST = {"ranks": 4}


class Rank:
    """One rank: its array x, its clock, what it took, and x after each step."""

    def __init__(self, number: int, ranks: int):
        self.x, self.clock, self.taken = np.full(ELEMENTS, 1 << number), 0, 0
        self.mail = [SimpleQueue[tuple]() for _ in range(ranks)]  # by source
        self.messages, self.states = list[tuple](), {0: self.x.copy()}


class Recorder:
    """Some ranks, as one of them, `me`, sees them: what `hierarchical` and a channel need."""

    def __init__(self, world: list[Rank], me: int, members: list[int]):
        self.world, self.me, self.members, self.ledger = world, me, members, Ledger()
        self.rank, self.size = members.index(me), len(members)

    def send(self, array, to: int) -> None:
        mine = self.world[self.me]
        mine.clock += 1
        start = (array.ctypes.data - mine.x.ctypes.data) // mine.x.itemsize
        self.world[self.members[to]].mail[self.me].put((start, array.copy(), mine.clock))

    def recv(self, source: int):
        mine = self.world[self.me]
        mine.states[mine.taken] = mine.x.copy()
        start, array, sent = mine.mail[self.members[source]].get(timeout=60)
        mine.taken = max(mine.taken + 1, sent)
        mine.clock = max(mine.clock, mine.taken)
        mine.messages.append((mine.taken, self.members[source], self.me, start, start + array.size))
        return array.copy()

    def all_reduce(self, x, op: str, *, out):
        return on.in_rank_order(self, out, np.add)

    def reduce_scatter(self, x, sizes: list[int], op: str):
        pieces = [x[a:b] for a, b in pairwise(accumulate(sizes, initial=0))]
        return on.reduce_pieces(on.all_to_all(self, pieces), np.add)

    def all_gather(self, x, *, out, sizes: list[int]):
        return on.gather_into(self, out, [*accumulate(sizes, initial=0)])


def reduce(algorithm: str, world: list[Rank], me: int, hosts: list[int]) -> None:
    x, inside, between, k = world[me].x, *levels_of(hosts, me)
    if algorithm == "hierarchical":
        level = Recorder(world, me, between) if me in between else None
        hierarchical(Recorder(world, me, inside), level, k, x, "sum")
    else:
        on.ON_MESSAGES[algorithm](Recorder(world, me, [*range(len(world))]), x, np.add)
    world[me].states[world[me].taken] = x


def recorded(algorithm: str, N: int, hosts: list[int]) -> dict:
    """Return an all_reduce's slices and steps, in elements, and the closed form of what is sent."""
    world = [Rank(r, N) for r in range(N)]
    with ThreadPoolExecutor(N) as ranks:
        list(ranks.map(lambda r: reduce(algorithm, world, r, hosts), range(N)))
    messages = sorted(message for rank in world for message in rank.messages)
    cuts, sent, steps = sorted({0, ELEMENTS}.union(*(m[3:] for m in messages))), [0] * N, []
    for step in range(messages[-1][0] + 1):
        now = [message for message in messages if message[0] == step]
        for _, source, _, start, stop in now:
            sent[source] += stop - start
        states = [rank.states[max(t for t in rank.states if t <= step)] for rank in world]
        holds = [x[cuts[:-1]].tolist() for x in states]
        shown = [[source, to, cuts.index(a), cuts.index(b)] for _, source, to, a, b in now]
        steps.append({"messages": shown, "holds": holds, "sent": [*sent]})
    closed = all_reduce_bytes(algorithm, ELEMENTS, 1, N, hosts)
    return {"slices": [b - a for a, b in pairwise(cuts)], "steps": steps, "closed": closed}


def questions() -> list[dict]:
    return [{"ranks": N} for N in range(2, 9)]


def answer(ranks: int) -> dict:
    """Record each algorithm on 2 to 8 ranks; for the hierarchical one, half of them per host."""
    if ranks not in range(2, 9):
        raise WrongInput(f"this page has 2 to 8 ranks, not {ranks}")
    hosts, algorithms = [0] * (ranks - ranks // 2) + [1] * (ranks // 2), {}
    for algorithm in on.ALGORITHMS:
        try:
            algorithms[algorithm] = recorded(algorithm, ranks, hosts)
        except ValueError as error:  # halving and doubling, unless the ranks are a power of two
            algorithms[algorithm] = {"error": str(error)}
    return {"ranks": ranks, "elements": ELEMENTS, "hosts": hosts, "algorithms": algorithms}


def as_text(answer: dict) -> str:
    lines, N = [], answer["ranks"]
    for algorithm, record in answer["algorithms"].items():
        lines.append(f"{algorithm}, {N} ranks; then step, ranks, slice {{whose numbers}}")
        lines += [record["error"]] if "error" in record else []
        for number, (before, step) in enumerate(pairwise(record.get("steps", [])), 1):
            for source, to, start, stop in step["messages"]:
                held = {c: before["holds"][source][c] for c in range(start, stop)}
                sums = [f"{c} { {r for r in range(N) if held[c] >> r & 1} }" for c in held]
                lines.append(f"  {number}: {source} -> {to}: {', '.join(sums) or 'nothing'}")
    return "\n".join(lines)
