"""Lesson 8's exercises: checks, worked solutions, hints, tempting wrong answers."""

from collections.abc import Iterable
from itertools import product
from numbers import Real

from minidist.pipeline_parallel import actions, add_communication, programs, validate
from minidist.pipeline_parallel.actions import Backward, Forward, Programs
from minidist.planning import simulate


def actions_of(found, where):
    if not isinstance(found, Iterable):
        raise ValueError(f"{where}: the result is {found!r:.60}, not actions")
    return list(found)


def check_1(attempt):
    for p, m in product((1, 2, 4), (1, 3, 4, 9)):
        own = [actions_of(attempt(r, p, m), f"rank {r} of {p}, m = {m}") for r in range(p)]
        value = Programs(own, [[r] for r in range(p)])
        validate(value, p, m)  # a ValueError shows where a program cannot be right
        got, want = simulate(value), simulate(programs("1f1b", p, m))
        if got.peak_stash != want.peak_stash:
            return f"p = {p}, m = {m}: the stash is {got.peak_stash}, not {want.peak_stash}"
        if got.makespan > want.makespan:
            took = f"that stash, but {got.makespan} units, not {want.makespan}"
            return f"p = {p}, m = {m}: {took}: rank 0 does {' '.join(map(str, value[0]))}"


def solution_1(rank, p, m):
    ahead = min(p - 1 - rank, m)
    yield from map(Forward, range(ahead))
    for i in range(ahead, m):
        yield Forward(i)
        yield Backward(i - ahead)
    yield from map(Backward, range(m - ahead, m))


hints_1 = (
    "How many forwards does the last rank do before B0? And the rank before it, whose B0 comes "
    "when F0 has been on the last rank and its gradient is back?",
    "A rank warms up with one forward per later rank; m may be smaller. Then it takes turns.",
    "After p - 1 - rank forwards to warm up: F and B in turn, of different micro-batches, until "
    "no forward is left. Then the backwards that are left.",
)


def all_forwards_first(rank, p, m):
    return programs("gpipe", p, m)[rank]


def late(rank, p, m):
    """As many in flight as in 1F1B, but only of the last p micro-batches."""
    early = max(0, m - p)
    for i in range(early):
        yield from (Forward(i), Backward(i))
    for action in programs("1f1b", p, m - early)[rank]:
        yield type(action)(action.micro_batch + early)


def a_backward_lost(rank, p, m):
    return list(solution_1(rank, p, m))[:-1]


def only_made(rank, p, m):
    list(solution_1(rank, p, m))


tempting_1 = [all_forwards_first, late, a_backward_lost, only_made]


def check_2(attempt):
    for p, m in product((2, 3, 4, 5), (1, 5, 8)):
        naive = add_communication(programs("1f1b", p, m))
        own = [
            actions_of(attempt(list(program), r), f"rank {r} of {p}, m = {m}")
            for r, program in enumerate(naive)
        ]
        value = Programs(own, naive.placement)
        validate(value, p, m)
        simulate(value, buffer=0)  # a Deadlock says who waits where


def solution_2(program, rank):
    program = list(program)
    for at in range(len(program) - 1):
        one, other = program[at : at + 2]
        crosses = type(one) in actions.SENDS and type(other) in actions.RECEIVES
        if rank % 2 and crosses and one.peer == other.peer:
            if one.micro_batch != other.micro_batch:
                program[at : at + 2] = other, one
    return program


hints_2 = (
    "Look for two neighbouring actions, a send and then a receive, that have one peer.",
    "On odd ranks exchange the two. But one such pair must stay: which receive cannot come first?",
    "A gradient that answers the activation just sent has its micro-batch: leave that pair alone.",
)


def as_it_is(program, rank):
    return program


def exchange_all(program, rank):
    for at in range(len(program) - 1) if rank % 2 else ():
        if type(program[at]) in actions.SENDS and type(program[at + 1]) in actions.RECEIVES:
            program[at : at + 2] = program[at + 1], program[at]
    return program


def on_every_rank(program, rank):
    return solution_2(program, 1)


def in_place(program, rank):
    program[:] = solution_2(program, rank)


tempting_2 = [as_it_is, exchange_all, on_every_rank, in_place]


def check_3(attempt):
    """Follow what is in the buffers."""
    for p, m in product((2, 3, 4), (2, 6)):
        order = programs("1f1b", p, m)
        for rank, most in list(enumerate(simulate(order).peak_stash))[1:]:
            count, where = attempt(rank, p, m), f"rank {rank} of {p}, m = {m}"
            if not isinstance(count, Real) or not count >= 1 or count % 1 != 0:
                return f"{where}: {count!r:.60} is no number of buffers"
            buffers = {}
            for action in order[rank]:
                i = action.micro_batch
                if isinstance(action, Forward):
                    buffers[i % count] = i
                elif (there := buffers[i % count]) != i:
                    return f"{where}, buffers: {count}: {action} reads the activation of {there}"
            if count > most:
                return f"{where}, buffers: {count}: right, but {most} would do"


def solution_3(rank, p, m):
    return min(m, p - rank)


hints_3 = (
    "Until when is a received activation needed? Which action reads it last?",
    "dW = X^T dY: backward reads X. So a buffer is free when backward of its micro-batch is done.",
    "How many micro-batches are there between their forward and their backward on this rank?",
)


def one_buffer(rank, p, m):
    return 1


def one_each(rank, p, m):
    return m


def as_on_rank_0(rank, p, m):
    return min(m, p)


def nothing(*numbers):
    pass


tempting_3 = [one_buffer, one_each, as_on_rank_0, nothing]
