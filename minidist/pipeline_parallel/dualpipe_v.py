"""DualPipe-V: the forward of one micro-batch during the backward of another, on a V of two chunks.

DualPipe (DeepSeek-AI, DeepSeek-V3 Technical Report, 2024, section 3.2.1) feeds micro-batches from
both ends of two copies of the model. Cut in half (Qi et al., DualPipe could be better without the
Dual, 2025; the README of deepseek-ai/DualPipe) one copy remains, laid out as the V of `zb_v`. Each
rank has work of both chunks, so most of its steps are a pair, "F3&b1", which needs nothing of each
other: a machine with two streams computes for one half while the other half is on its way.

    p = 2, m = 4; lower case: chunk 1

    rank 0   F0 F1 F2 f0 i0 w0 f1 F3&b1--- f2&B0--- b2--- f3&   B1--- b3--- I2 W2 I3 W3
    rank 1      F0 f0 F1 f1 F2 b0--- f2&B0--- F3&b1--- f3&B1--- b2--- B2--- i3 I3 w3 W3

A rank of ours has one stream: it runs a pair one after the other, and idles
(p - 1)(TF + TI - TW) / 2 if TW <= TI <= TF <= TB. Every rank's stash peaks at p + 1/2 stages. m is
2p or more.

The authors count chunks: PP = 2p of them; F, B and W are the times of one, F&B is the time of a
pair, whose results leave together. So the bubble is (PP/2 - 1)(F&B + B - 3W), where F = B - W and
W <= F, and the stash is PP + 1.
"""

from collections import Counter, deque
from collections.abc import Iterator

from minidist.errors import WrongInput
from minidist.pipeline_parallel.actions import (
    KINDS,
    Action,
    BackwardInput,
    BackwardWeight,
    Programs,
    from_turns,
)
from minidist.pipeline_parallel.zero_bubble import v_shaped


def dualpipe_v(p: int, m: int) -> Programs:
    """Return the programs of all ranks, with their pairs."""
    if m < 2 * p:
        raise WrongInput(
            f"dualpipe_v needs 2 micro-batches per rank to fill its V, {2 * p} for {p} ranks, not "
            f"{m}; use {2 * p}, or zb_v, which takes any number"
        )
    return from_turns([list(turns_of(rank, p, m)) for rank in range(p)], v_shaped(p))


def turns_of(rank: int, p: int, m: int) -> Iterator[list[Action]]:
    """Yield one action, or a pair that may overlap. W: the weight half that has waited longest."""
    later, both = p - 1 - rank, rank + 1
    steady = (m - 2 * p + both) * ["F0&B1", "F1&B0"]
    if rank == p - 1:
        steady[:1] = ["F0", "B1"]  # the first gradient of all, for which every rank waits
    steps = [
        *2 * later * ["F0"],
        *both * ["F0", "F1"],  # until the first micro-batch is back from the bottom of the V
        *later * ["I1", "W", "F1"],
        *steady,
        *later * ["B1", "F1&B0"],  # chunk 0 has done all its forwards
        *(both * ["B1", "B0"])[:both],  # drain: as many whole passes as halves
        *(both * ["I1", "I0"])[both:],
        *later * ["W", "I0"],
        *both * ["W"],
    ]
    begun: Counter[tuple[bool, int]] = Counter()  # passes, by direction and chunk
    halves: deque[Action] = deque()

    def action(step: str) -> Action:
        if step == "W":
            return halves.popleft()
        kind, chunk = KINDS[step[0]], int(step[1])
        direction = step[0] == "F", chunk
        i = begun[direction]
        begun[direction] += 1
        if kind is BackwardInput:
            halves.append(BackwardWeight(i, chunk))
        return kind(i, chunk)

    for step in steps:
        yield [action(word) for word in step.split("&")]
