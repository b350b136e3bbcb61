"""What an action needs and gives, and an order in which ranks can execute their programs.

    1F1B, p = 2, m = 2     rank 0   F0 F1 B0 B1       rank 1   F0 B0 F1 B1

    in_order, round by round:   0 F0 | 0 F1, 1 F0 | 1 B0 | 0 B0, 1 F1 | 1 B1 | 0 B1

The order depends on facts, not on durations; for durations see planning/simulator.py.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise

from minidist.errors import Deadlock
from minidist.pipeline_parallel.actions import (
    RECEIVES,
    Action,
    BackwardWeight,
    Forward,
    Transfer,
    Update,
    communicates,
    last_stage,
    other_end,
    pairs_of,
    passes_backward,
    placement_of,
)


def in_order(
    programs: list[list[Action]], overlap: bool = False
) -> Iterator[list[tuple[int, Action]]]:
    """Yield (rank, action) pairs, round by round, so that each comes after what it needs.

    In a round every rank that can run takes one step. Stuck if no rank can.

    overlap  the backward of `Programs.pairs` begins with its forward, so the forward waits for what
             both need
    """
    needs, gives = dependencies(programs)
    partner = {(r, f): b for r, f, b in pairs_of(programs)} if overlap else {}
    done: set[tuple] = set()
    ahead = [iter(program) for program in programs]
    waiting = {r: first for r, rest in enumerate(ahead) if (first := next(rest, None))}
    while waiting:
        ready = [
            (r, action)
            for r, action in waiting.items()
            if needs(r, action) <= done
            and (not partner or (r, action) not in partner or needs(r, partner[r, action]) <= done)
        ]
        if not ready:
            raise Stuck.at(waiting)
        yield ready
        for r, action in ready:
            done.add(gives(r, action))
            if (following := next(ahead[r], None)) is None:
                del waiting[r]
            else:
                waiting[r] = following


class Stuck(Deadlock, ValueError):
    """Programs that deadlock: `waiting` has the action before which each unfinished rank waits."""

    def __init__(self, message: str, waiting: dict[int, Action] | None = None):
        super().__init__(message)
        self.waiting = waiting or {}

    @classmethod
    def at(cls, waiting: dict[int, Action]) -> "Stuck":
        rows = ", ".join(f"rank {r} before {action}" for r, action in waiting.items())
        return cls(f"deadlock: all unfinished ranks wait, {rows}", waiting)


def dependencies(programs: list[list[Action]]) -> tuple[Callable, Callable]:
    """Return needs(rank, action), a set of facts, and gives(rank, action), a fact.

    A fact is (kind, virtual stage, micro-batch), or a message between two ranks. An update needs
    all replicas of its stage to have reached it, because they sum their gradients.
    """
    placement, explicit = placement_of(programs), communicates(programs)
    last = last_stage(placement)
    arrived: dict[tuple[int, int], set[tuple]] = defaultdict(set)

    def gives(rank, action):
        if isinstance(action, Transfer):
            return message(rank, action)
        kind = "backward" if passes_backward(action) else type(action)
        return kind, placement[rank][action.chunk], action.micro_batch

    def needs(rank, action):
        m, k = action.micro_batch, placement[rank][action.chunk]
        if type(action) in RECEIVES:
            return {message(action.peer, other_end(action, rank))}
        if isinstance(action, Forward):
            return {(Forward, k - 1, m)} if k > 0 and not explicit else set()
        if passes_backward(action):
            before = {("backward", k + 1, m)} if k < last and not explicit else set()
            return before | {(Forward, k, m)}
        if isinstance(action, Update):
            return arrived[k, m]
        return {("backward", k, m)} if isinstance(action, BackwardWeight) else set()

    for rank, program in enumerate(programs):
        for before, action in pairwise(program):
            if isinstance(action, Update):
                stage = placement[rank][action.chunk]
                arrived[stage, action.micro_batch].add(gives(rank, before))
    return needs, gives


def message(sender: int, send: Transfer) -> tuple:
    """Return a key that is different for every message."""
    return type(send), sender, send.peer, send.peer_chunk, send.micro_batch
