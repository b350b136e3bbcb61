"""V-Half and V-Min: half and a third of 1F1B's stash, from a building block that repeats.

Qi, Wan, Amar, Lin, Pipeline Parallelism with Controllable Memory (NeurIPS 2024; arXiv 2405.15362):
sections 2 (building blocks) and 3 (V-shapes), appendices C (reordering) and F (tables 8 and 9).

A building block is one micro-batch alone: when each rank does F, I and W of its two chunks, in
units of one chunk's pass. V-Half's for three ranks; lower case is chunk 1, the way up:

    rank 0   F - - - - - - - f i - w - - - - I - - W      An activation is kept from F to the end
    rank 1   - - F - - - - f - - - i w - - I W            of W: for 20 + 4 units, 15 + 6, 14 + 10.
    rank 2   - - - - F - f - - - - - - i I w - W          A sixth of their sum is kept at once.

The next micro-batch does the same 6 units later, because a rank's six passes are 6 units of work;
so the block alone decides about memory. Two of its passes must not be a multiple of 6 apart, or
they would collide. For this reason alone a turn of the V takes longer for some p; each W has the
first free unit after its I. Then each rank goes through this plan, without its gaps:

    squeeze   it does the first pass of the plan that it can do
    reorder   this may be a later one, if the forward passes before it keep their room in the stash
    at last   where no forward pass is left, W waits for all other passes

    rank 0   F F F - - f i w f i w I F W - f i I w F W f i I w W - f i I w W - I W
    rank 1   - F F - f - f i w F I W i w f F I W i w f F I W i w f - I i W w I W
    rank 2   - - F f F f - - i I w F W f i I w F W f i I w F W f i I w W i I w W

    v_half   stash (p + 2) // 2, in full stages of a micro-batch, if m is no less
    v_min    stash (p + 4) // 3

Both idle for 3 (p - stash) - 1/2 forward passes of a full stage (1F1B: 3 (p - 1)), v_min for 3/2
more if p mod 3 is 2; if TF = TI = TW, p > 2 and m > stash. A V-shaped schedule with this stash
cannot idle less than 3 (p - stash) - 1/2 (figure 13): its last rank can fill its stash with
2 stash passes of a chunk before its first I, which starts 3p - 1 units after the first F, and it
has 4 stash I and W to do after its last F, which ends 3p units before the end. With other times
v_half idles no longer for more micro-batches, if 2 TI + TW >= 2 TF and 2 TF + TW >= 2 TI
(figure 5); v_min does.
"""

from bisect import bisect_right
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import NamedTuple

from minidist.errors import WrongInput
from minidist.pipeline_parallel.actions import (
    Action,
    BackwardInput,
    BackwardWeight,
    Forward,
    Programs,
)
from minidist.pipeline_parallel.execution_order import dependencies
from minidist.pipeline_parallel.zero_bubble import v_shaped

INTERVAL = 6  # units from one micro-batch to the next
SWEEPS = (Forward, 0), (Forward, 1), (BackwardInput, 1), (BackwardInput, 0)  # down, up, down, up
PASSES = *SWEEPS, (BackwardWeight, 1), (BackwardWeight, 0)


class BuildingBlock(NamedTuple):
    """A building block, in units of one chunk's pass.

    down, up  from a rank to the next one, in the sweeps that go down the ranks or up
    turns     between the four sweeps: on the last rank, on rank 0, and on the last rank
    stash     the most activations that a rank may keep, in full stages of a micro-batch
    """

    down: int
    up: int
    turns: tuple[int, int, int]
    stash: int


def v_half(p: int, m: int) -> Programs:
    return repeated(BuildingBlock(2, 1, (2, 1 if p % 2 else 4, 1), stash=(p + 2) // 2), p, m)


def v_min(p: int, m: int) -> Programs:
    return repeated(BuildingBlock(1, 1, (1, 1 if p % 3 else 3, 1), stash=(p + 4) // 3), p, m)


def offsets(block: BuildingBlock, p: int) -> list[tuple[int, ...]]:
    """Return, per rank, when it does the PASSES of the first micro-batch."""
    there = [block.down * r for r in range(p)]
    back = [block.up * (p - 1 - r) for r in range(p)]
    sweeps = [there]
    for turn, way in zip(block.turns, (back, there, back), strict=True):
        start = (sweeps[-1][-1] if way is back else sweeps[-1][0]) + turn
        sweeps.append([start + at for at in way])
    return [with_weights(own, r) for r, own in enumerate(zip(*sweeps, strict=True))]


def with_weights(own: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """Add the first units after the two I that are free, too, when the block repeats."""
    taken = {at % INTERVAL for at in own}
    if len(taken) < len(own):
        raise WrongInput(
            f"rank {rank} has passes at {own}; two of them are a multiple of {INTERVAL} apart, so "
            "those of different micro-batches collide; change a turn"
        )
    for at in own[2:]:
        free = next(t for t in count(at + 1) if t % INTERVAL not in taken)
        taken.add(free % INTERVAL)
        own += (free,)
    return own


def repeated(block: BuildingBlock, p: int, m: int) -> Programs:
    """Return p ranks' programs for m micro-batches, each a block, found in steps of one unit."""
    result = Programs([[] for _ in range(p)], v_shaped(p))
    done: set[tuple] = set()
    needs, gives = dependencies(result)
    ranks = [
        Rank(own, m, 2 * block.stash, partial(needs, r)) for r, own in enumerate(offsets(block, p))
    ]
    while any(any(rank.plan.values()) for rank in ranks):
        chosen = [rank.choose(done) for rank in ranks]
        if not any(chosen):
            raise WrongInput(f"a stash of {block.stash} is too small for {block}; give it more")
        for r, action in enumerate(chosen):
            if action is not None:
                ranks[r].do(action)
                result[r].append(action)
                done.add(gives(r, action))
    return result


class Rank:
    """What one rank has still to do.

    plan   {kind and chunk: the planned times of these passes, a range}
    room   how many passes of a chunk the stash has room for
    needs  action -> what must be done before it
    """

    def __init__(self, own: tuple[int, ...], m: int, room: int, needs: Callable):
        self.m, self.room, self.needs = m, room, needs
        starts = zip(PASSES, own, strict=True)
        self.plan = {key: range(at, at + INTERVAL * m, INTERVAL) for key, at in starts}

    def choose(self, done: set[tuple]) -> Action | None:
        """Return the action of this unit of time, or None: wait."""
        forwards = [self.plan[Forward, chunk] for chunk in (0, 1)]
        last = BackwardWeight if not any(forwards) else None  # the kind that waits for all others
        due = sorted((key[0] is last, times[0], key) for key, times in self.plan.items() if times)
        for _, time, (kind, chunk) in due:
            action = kind(self.m - len(self.plan[kind, chunk]), chunk)
            before = sum(bisect_right(times, time) for times in forwards)  # this one included
            if (kind is not Forward or before <= self.room) and self.needs(action) <= done:
                return action
        return None

    def do(self, action: Action) -> None:
        key = type(action), action.chunk
        self.plan[key] = self.plan[key][1:]
        if isinstance(action, Forward):
            self.room -= 1
        elif isinstance(action, BackwardWeight):
            self.room += 1
