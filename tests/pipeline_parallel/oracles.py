"""What is right, said a second time and as plainly as possible: graphs of actions and clocks.

A node is a place in the programs, (rank, position). Nothing here is shared with the library but the
actions themselves.
"""

from collections import Counter, defaultdict

from minidist.pipeline_parallel.actions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    RecvActivation,
    RecvGradient,
    Reduce,
    SendActivation,
    SendGradient,
    Transfer,
    Update,
)

GRADIENT = (Backward, BackwardInput)


def nodes(programs):
    return [(r, at) for r, program in enumerate(programs) for at in range(len(program))]


def pairs_of(programs):
    """Return {node of a pair's backward: the node of its forward}."""
    found = {(r, programs[r].index(forward)) for r, forward, _ in programs.pairs}
    return {(r, at + 1): (r, at) for r, at in found}


def key_of(programs, r, a):
    """Return what a send and its receive have in common, and no other transfer."""
    if isinstance(a, SendActivation | SendGradient):
        ends = (r, a.chunk, a.peer, a.peer_chunk)
    else:
        ends = (a.peer, a.peer_chunk, r, a.chunk)
    return isinstance(a, SendGradient | RecvGradient), a.micro_batch, *ends


def edges(programs, delay=0, buffer=None):
    """Yield (earlier node, later node, time between the end of one and the start of the other)."""
    stages = max(k for own in programs.placement for k in own)
    passes, sends, receives, lanes = {}, {}, {}, defaultdict(lambda: ([], []))
    updates = defaultdict(list)
    explicit = any(isinstance(a, Transfer) for program in programs for a in program)
    for r, at in nodes(programs):
        a = programs[r][at]
        before = [b for b in range(at) if not isinstance(programs[r][b], Reduce)]
        summed = [b for b in range(at) if b not in before] if isinstance(a, Reduce) else []
        for earlier in before[-1:] + summed[-1:]:  # an R waits for the one before it; nothing else
            yield (r, earlier), (r, at), 0
        if isinstance(a, Reduce):
            continue
        if isinstance(a, Transfer):
            key = key_of(programs, r, a)
            gives = isinstance(a, SendActivation | SendGradient)
            (sends if gives else receives)[key] = (r, at)
            if key[2] != key[4]:
                lanes[key[0], key[2], key[3], key[4]][0 if gives else 1].append((r, at))
        else:
            k = programs.placement[r][a.chunk]
            if isinstance(a, Update):
                updates[k, a.micro_batch].append((r, at))
            elif not isinstance(a, BackwardWeight):
                passes[isinstance(a, GRADIENT), k, a.micro_batch] = (r, at)
    for node in receives:
        if node in sends:
            yield sends[node], receives[node], delay if node[2] != node[4] else 0
        else:
            yield receives[node], receives[node], 0  # it waits for ever: a cycle
    for (back, k, i), node in passes.items() if not explicit else ():
        before = (back, k + 1 if back else k - 1, i)
        if 0 <= before[1] <= stages:
            source = passes.get(before, node)
            yield source, node, delay if source[0] != node[0] else 0
    for group in updates.values():
        for q, at in group:
            for other in group:
                if at:
                    yield (q, at - 1), other, 0
    if buffer:
        for given, taken in lanes.values():
            for n in range(buffer, len(given)):
                yield (taken[n - buffer] if n - buffer < len(taken) else given[n]), given[n], 0


def ends(programs, duration, delay=0, buffer=None, pair=None):
    """Return {node: when it ends}, or None if there is a cycle: the longest path to each node.

    pair  how long a pair takes, if its two run at once: they start together, and end together. The
          node of a pair is its forward's
    """
    before, after, missing = defaultdict(list), defaultdict(set), {}
    paired = {} if pair is None else pairs_of(programs)
    for a, b, between in edges(programs, delay, buffer):
        if paired.get(b) != a:
            a, b = paired.get(a, a), paired.get(b, b)
            before[b].append((a, between))
            after[a].add(b)
    for node in (node for node in nodes(programs) if node not in paired):
        missing[node] = {a for a, _ in before[node]}
    ready, result, together = [node for node in missing if not missing[node]], {}, paired.values()
    while ready:
        node = ready.pop()
        start = max((result[a] + between for a, between in before[node]), default=0)
        alone = duration(node[0], programs[node[0]][node[1]])
        result[node] = start + (pair if node in together else alone)
        for b in after[node]:
            missing[b].discard(node)
            if not missing[b] and b not in result:
                ready.append(b)
    return result if len(result) == len(missing) else None


def is_valid(programs, m):
    """Return whether programs do all there is to do, once, and can be executed."""
    stages = sorted({k for own in programs.placement for k in own})
    seen = defaultdict(list)  # (stage, micro-batch) -> the ranks and signs of its passes, in order
    for r, at in nodes(programs):
        a = programs[r][at]
        if isinstance(a, Reduce):
            continue
        if not (0 <= a.micro_batch < m and 0 <= a.chunk < len(programs.placement[r])):
            return False
        if not isinstance(a, Transfer | Update):
            seen[programs.placement[r][a.chunk], a.micro_batch].append((r, a.sign))
    for k in stages:
        for i in range(m):
            ranks, signs = {r for r, _ in seen[k, i]}, "".join(sign for _, sign in seen[k, i])
            if len(ranks) != 1 or signs not in ("FB", "FIW"):
                return False
    return (
        _updates_are_right(programs, m, stages)
        and _sums_are_right(programs)
        and _transfers_are_right(programs)
        and ends(programs, lambda r, a: 0) is not None
    )


def _updates_are_right(programs, m, stages):
    if not any(isinstance(a, Update) for program in programs for a in program):
        return True
    for k in stages:
        lists = set()
        for r, own in enumerate(programs.placement):
            for c in (c for c, held in enumerate(own) if held == k):
                mine = [a for a in programs[r] if a.chunk == c and not isinstance(a, Transfer)]
                applied = [a.micro_batch for a in mine if isinstance(a, Update)]
                if applied != sorted(set(applied)):
                    return False
                for i in applied:
                    later = mine[mine.index(Update(i, c)) :]
                    if any(
                        isinstance(a, Backward | BackwardWeight)
                        for a in later
                        if a.micro_batch <= i
                    ):
                        return False
                lists.add(tuple(applied))
        if len(lists) != 1 or not max(lists) or max(max(lists)) != m - 1:
            return False
    return True


def _sums_are_right(programs):
    everything = [a for program in programs for a in program]
    if not any(isinstance(a, Reduce) for a in everything):
        return True
    for program, own in zip(programs, programs.placement, strict=True):
        if sorted(a.chunk for a in program if isinstance(a, Reduce)) != list(range(len(own))):
            return False
        for c in range(len(own)):
            mine = [a for a in program if a.chunk == c and not isinstance(a, Transfer)]
            if not isinstance(mine[-1], Reduce):
                return False
    return not any(isinstance(a, Update) for a in everything)


def _transfers_are_right(programs):
    if not any(isinstance(a, Transfer) for program in programs for a in program):
        return True
    last = max(k for own in programs.placement for k in own)
    holds = {}
    for r, at in nodes(programs):
        a = programs[r][at]
        if isinstance(a, Forward):
            holds[programs.placement[r][a.chunk], a.micro_batch] = (r, a.chunk)
    for r, program in enumerate(programs):
        due = Counter()
        for at, a in enumerate(program):
            if not isinstance(a, (Forward, *GRADIENT)):
                continue
            k, i, c = programs.placement[r][a.chunk], a.micro_batch, a.chunk
            gets, gives, way = RecvActivation, SendActivation, 1
            if isinstance(a, GRADIENT):
                gets, gives, way = RecvGradient, SendGradient, -1
            if 0 <= k - way <= last:
                due[gets(i, c, *holds[k - way, i])] += 1
                if gets(i, c, *holds[k - way, i]) not in program[:at]:
                    return False
            if 0 <= k + way <= last:
                due[gives(i, c, *holds[k + way, i])] += 1
                if gives(i, c, *holds[k + way, i]) not in program[at:]:
                    return False
        if due != Counter(a for a in program if isinstance(a, Transfer)):
            return False
    return True


def ticks(programs, duration, delay, buffer):
    """Return when each rank ends, by walking through time in steps of 1; None for a deadlock.

    Durations and delay are whole numbers. A message is in a lane's buffer from its send until its
    receive; if `buffer` are, the sender waits. 0: both ends stand at the transfer for `delay`.
    """
    at, free, done = [0] * len(programs), [0] * len(programs), [0] * len(programs)
    there, fill, asked, now, summed = {}, Counter(), {}, 0, [0] * len(programs)
    while any(at[r] < len(program) for r, program in enumerate(programs)):
        moved = True
        while moved:
            moved = False
            for r, program in enumerate(programs):
                if at[r] == len(program) or free[r] > now:
                    continue
                a = program[at[r]]
                if isinstance(a, Reduce):
                    summed[r] = max(summed[r], now) + duration(r, a)
                elif not isinstance(a, Transfer):
                    free[r] = now + duration(r, a)
                elif buffer == 0 and r != a.peer:
                    key = key_of(programs, r, a)
                    asked[r] = key
                    if asked.get(a.peer) != key:
                        continue
                    free[r] = free[a.peer] = now + delay
                    at[a.peer] += 1
                    done[a.peer] = free[r]
                    del asked[r], asked[a.peer]
                else:
                    key = key_of(programs, r, a)
                    lane = (key[0], *key[2:5])
                    within = key[2] == key[4]
                    if isinstance(a, SendActivation | SendGradient):
                        if not within and buffer is not None and fill[lane] == buffer:
                            continue
                        fill[lane] += not within
                        there[key] = now + (0 if within else delay)
                    elif there.get(key, now + 1) > now:
                        continue
                    else:
                        fill[lane] -= not within
                at[r], moved, done[r] = at[r] + 1, True, free[r] if free[r] > now else now
        later = [t for t in [*free, *there.values()] if t > now]
        if not later:
            stuck = any(at[r] < len(program) for r, program in enumerate(programs))
            return None if stuck else [*done, *summed]
        now = min(later)
    return [*done, *summed]


def assert_same(got, want):
    """Compare all that programs are: lists compare equal without placement and pairs."""
    assert got.placement == want.placement, f"placement {got.placement}, not {want.placement}"
    for r, (mine, theirs) in enumerate(zip(got, want, strict=True)):
        for at, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            assert a == b, f"rank {r}, action {at} is {a}, not {b}"
    lost = [f"{f} and {b} on rank {r}" for r, f, b in want.pairs - got.pairs]
    assert not lost, f"pairs that were lost: {', '.join(lost)}"
    assert got.pairs == want.pairs
