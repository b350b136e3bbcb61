"""Lesson 10b's exercises: checks, worked solutions, hints, tempting wrong answers."""

from itertools import product

import numpy as np

from minidist.pipeline_parallel import programs, read, validate
from minidist.pipeline_parallel.actions import Programs
from minidist.planning import simulate

ROOM = 2


def check_1(attempt):
    made = attempt()
    if isinstance(made, str):
        made = read(made)
    if not isinstance(made, list | tuple) or not all(isinstance(own, list | tuple) for own in made):
        return f"{made!r:.60} is neither a text nor three lists of actions"
    order = Programs(made, [[r] for r in range(len(made))])
    validate(order, 3, 3)  # a ValueError shows where an order cannot be right
    result = simulate(order)
    if max(result.peak_stash) > ROOM:
        return f"the stash of the ranks is {result.peak_stash}; there is room for {ROOM}"
    if result.makespan >= 15:
        return f"there is room, but it takes {result.makespan} units, as long as 1F1B or longer"


def solution_1():
    return """rank 0   F0 F1 I0 W0 F2 I1 W1 I2 W2
              rank 1   F0 F1 I0 W0 I1 W1 F2 I2 W2
              rank 2   F0 I0 F1 I1 W0 W1 F2 I2 W2"""


hints_1 = (
    "With room for 2, when may rank 0 do F2? What does it wait for, and which rank can hurry?",
    "Begin with `split`; give rank 0 F0 F1 I0 W0 F2. On rank 2, let I0 and I1 go before W0 and W1.",
    "Rank 2: F0 I0 F1 I1 W0 W1 F2 I2 W2. What is the order of rank 1, which has I0 and I1 early?",
)


def as_split():
    return """rank 0   F0 F1 F2 I0 W0 I1 W1 I2 W2
              rank 1   F0 F1 I0 W0 F2 I1 W1 I2 W2
              rank 2   F0 I0 W0 F1 I1 W1 F2 I2 W2"""


def one_at_a_time():
    return "\n".join(f"rank {r}   F0 I0 W0 F1 I1 W1 F2 I2 W2" for r in range(3))


def the_librarys():
    return programs("zb_h1", 3, 3)


def a_weight_forgotten():
    return [list(own)[:-1] for own in read(solution_1())]


def as_rows():
    return solution_1().split("\n")


def nothing(*given):
    pass


tempting_1 = [as_split, one_at_a_time, the_librarys, a_weight_forgotten, as_rows, nothing]


def check_2(attempt):
    rng = np.random.default_rng(0)
    xs, dys, w = (rng.standard_normal(shape) for shape in ((8, 6, 5), (8, 6, 3), (5, 3)))
    right = sum(x.T @ dy for x, dy in zip(xs, dys, strict=True))
    for rank in range(4):
        buffers = [np.full((6, 5), np.nan) for _ in range(9)]
        free = list(buffers)
        found = attempt(iter(xs), iter(dys), w, rank, free.pop)
        if not isinstance(found, tuple | list) or len(found) != 2:
            return f"the result is {found!r:.60}, not (the dX of all micro-batches, dW)"
        dxs, dw = found
        if np.shape(dxs) != (8, 6, 5) or not np.allclose(dxs, dys @ w.T):
            return f"rank {rank}: the dX are not right"
        if np.shape(dw) != (5, 3):
            return f"rank {rank}: dW has the shape {np.shape(dw)}, not (5, 3)"
        if not np.allclose(dw, right):
            return f"rank {rank}: dW is off by {abs(dw - right).max() / abs(right).max():.0%}"
        if len(buffers) - len(free) > rank + 1:
            return f"rank {rank}: {len(buffers) - len(free)} buffers, and {rank + 1} would do"
        written = sum(not np.isnan(buffer).all() for buffer in buffers)
        if written < rank + 1:
            return f"rank {rank}: {written} buffers were received into, not {rank + 1}"


def solution_2(inputs, gradients, w, late, allocate):
    buffers, waiting, dxs, dw = [allocate() for _ in range(late + 1)], [], [], 0.0
    for i, (x, dy) in enumerate(zip(inputs, gradients, strict=True)):
        buffer = buffers[i % (late + 1)]
        buffer[...] = x
        dxs.append(dy @ w.T)
        waiting.append((buffer, dy))
        if len(waiting) > late:
            x, dy = waiting.pop(0)
            dw = dw + x.T @ dy
    return dxs, dw + sum(x.T @ dy for x, dy in waiting)


hints_2 = (
    "What does the product of W read, and what has happened to it since the I?",
    "W reads X. While `late` micro-batches wait, their X must stay: how many buffers is that?",
    "Micro-batch i into buffer number i % (late + 1). After its W a buffer is free again.",
)


def one_buffer(inputs, gradients, w, late, allocate):
    buffer, waiting, dxs, dw = allocate(), [], [], 0.0
    for x, dy in zip(inputs, gradients, strict=True):
        buffer[...] = x
        dxs.append(dy @ w.T)
        waiting.append((buffer, dy))
        if len(waiting) > late:
            x, dy = waiting.pop(0)
            dw = dw + x.T @ dy
    return dxs, dw + sum(x.T @ dy for x, dy in waiting)


def a_buffer_each(inputs, gradients, w, late, allocate):
    kept = []
    for x in inputs:
        kept.append(allocate())
        kept[-1][...] = x
    dys = list(gradients)
    return [dy @ w.T for dy in dys], sum(x.T @ dy for x, dy in zip(kept, dys, strict=True))


def the_last_ones_forgotten(inputs, gradients, w, late, allocate):
    buffers, waiting, dxs, dw = [allocate() for _ in range(late + 1)], [], [], np.zeros_like(w)
    for i, (x, dy) in enumerate(zip(inputs, gradients, strict=True)):
        buffers[i % (late + 1)][...] = x
        dxs.append(dy @ w.T)
        waiting.append((buffers[i % (late + 1)], dy))
        if len(waiting) > late:
            x, dy = waiting.pop(0)
            dw += x.T @ dy
    return dxs, dw


tempting_2 = [one_buffer, a_buffer_each, the_last_ones_forgotten, nothing]

CHUNKS = {"1f1b": 1, "zb_h1": 1, "zb_h2": 1, "zb_auto": 1, "interleaved_zb": 2, "zb_v": 2}
CHUNKS |= {"dualpipe_v": 2, "v_half": 2, "v_min": 2}


def those_with_room(m, times, latency, room):
    """Return {name: its makespan}."""
    fits = {}
    for name, v in CHUNKS.items():
        try:
            result = simulate(programs(name, 4, m, v), *times, latency=latency)
        except ValueError:
            continue  # this one refuses m
        if max(result.peak_stash) <= room:
            fits[name] = result.makespan
    return fits


def check_3(attempt):
    for m, times, latency in product((8, 6), ((1, 1, 1), (1, 2, 3)), (0, 1)):
        for room in (3, 4, 7):
            case = m, times, latency, room
            fits, name = those_with_room(*case), attempt(*case)
            if not isinstance(name, str) or name not in CHUNKS:
                return f"best{case} is {name!r:.60}, none of {', '.join(CHUNKS)}"
            if name not in fits:
                return f"best{case} is {name}, which refuses m, or for which there is no room"
            if fits[name] > min(fits.values()):
                took = f"{float(fits[name]):g}, and {float(min(fits.values())):g} is possible"
                return f"best{case} is {name}, which takes {took}"


def solution_3(m, times, latency, room):
    fits = those_with_room(m, times, latency, room)
    return min(fits, key=fits.get)


hints_3 = (
    "An order is a value, and `simulate` tells its makespan and its peak_stash: try them all.",
    "simulate(programs(name, 4, m, v), *times, latency=latency); max(peak_stash) must fit.",
    "Put a `try` around it: dualpipe_v and interleaved_zb refuse some m with a ValueError.",
)


def always_zb_v(m, times, latency, room):
    return "zb_v"


def with_equal_times(m, times, latency, room):
    return solution_3(m, (1, 1, 1), latency, room)


def without_latency(m, times, latency, room):
    return solution_3(m, times, 0, room)


def without_a_limit(m, times, latency, room):
    return solution_3(m, times, latency, 1000)


tempting_3 = [always_zb_v, with_equal_times, without_latency, without_a_limit, nothing]
