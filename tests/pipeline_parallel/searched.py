"""Durations, limits on memory and searched orders, drawn for tests of the searched schedule."""

from minidist.pipeline_parallel.actions import Programs, looped
from minidist.pipeline_parallel.zb_auto import actions_of

TIMES = "forward", "backward_input", "backward_weight"


def drawn(random, max_p=8, memories=None):
    """Return (p, m, options): equal stages half of the time; some latency; any limit on memory."""
    p = random.randint(1, max_p)
    equal, latency = random.random() < 0.5, random.choice([0, 0, 1, 3])
    times = {}
    for name in TIMES:
        each = [random.randint(1, 9) for _ in range(p)]
        times[name] = each[0] if equal else each
    memory = random.choice(memories(p) if memories else [1, 2, max(1, p // 2), p, 2 * p - 1, None])
    return p, random.choice([1, 2, 4, p, 2 * p, 3 * p]), times, latency, memory


def programs_of(ranks):
    return Programs([actions_of(rank.order) for rank in ranks], looped(len(ranks), 1))
