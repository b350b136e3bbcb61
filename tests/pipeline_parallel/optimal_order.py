"""The least makespan of all orders of F, I and W within a limit on memory: every order is tried.

Micro-batches are alike, so every rank may take them in order; then a limit of M in flight means
that F of micro-batch i comes after W of micro-batch i - M. So this is a job shop: one of its best
schedules has no gap into which a later action of the rank would fit. Of the action that can end
first, and of those of its rank that could begin before that end, one is next (Giffler and Thompson,
1960); each is tried. Given up is what cannot beat the best found so far, or is no better than what
has been tried with the same actions done.
"""

F, I, W = range(3)


class Search:
    def __init__(self, m, times, latency, memory, beaten):
        self.p, self.m, self.times = len(times), m, times
        self.latency, self.memory, self.best = latency, memory, beaten
        self.tried = {}

    def possible(self, counts, clocks, ends):
        """Yield (start, rank, kind) of every action whose needs are done or under way."""
        for r, (f, i, w) in enumerate(counts):
            if f < self.m and f - w < self.memory and (r == 0 or f < counts[r - 1][F]):
                arrival = ends[r - 1][F][f] + self.latency if r else 0
                yield max(clocks[r], arrival), r, F
            if i < f and (r == self.p - 1 or i < counts[r + 1][I]):
                arrival = ends[r + 1][I][i] + self.latency if r < self.p - 1 else 0
                yield max(clocks[r], arrival), r, I
            if w < i:
                yield clocks[r], r, W

    def least(self, counts, clocks):
        """Return a bound: each rank's work that is left; its last I must still reach rank 0."""
        left, way = [], self.times[0][W]
        for r, done in enumerate(counts):
            f, i, w = (
                n * t for n, t in zip((self.m - n for n in done), self.times[r], strict=True)
            )
            left.append(clocks[r] + f + i + w)
            if done[I] < self.m:
                left.append(clocks[r] + f + i + way)
            way += self.latency + self.times[r][I]
        return max(left)

    def go_on(self, counts, clocks, ends):
        state = clocks + tuple(
            end
            for r in range(self.p)
            for kind, taker in ((F, r + 1), (I, r - 1))
            if 0 <= taker < self.p
            for end in ends[r][kind][counts[taker][kind] :]
        )
        others = self.tried.setdefault(counts, [])
        if any(all(a <= b for a, b in zip(other, state, strict=True)) for other in others):
            return
        others.append(state)
        if (bound := self.least(counts, clocks)) >= self.best:
            return
        options = list(self.possible(counts, clocks, ends))
        if not options:
            self.best = bound  # all is done: this is the makespan
            return
        soonest, rank = min((start + self.times[r][kind], r) for start, r, kind in options)
        for start, r, kind in sorted(options):
            end = start + self.times[r][kind]
            if r == rank and (start < soonest or end == soonest):
                mine = list(counts[r])
                mine[kind] += 1
                more = list(ends[r])
                more[kind] += (end,)
                self.go_on(
                    (*counts[:r], tuple(mine), *counts[r + 1 :]),
                    (*clocks[:r], end, *clocks[r + 1 :]),
                    (*ends[:r], tuple(more), *ends[r + 1 :]),
                )


def least_makespan(m, times, latency, memory, known):
    """Return the least makespan; `known` is one that some order has.

    times  per stage (TF, TI, TW)
    """
    search, p = Search(m, times, latency, memory, known + 1), len(times)
    search.go_on(((0, 0, 0),) * p, (0,) * p, (((), (), ()),) * p)
    return search.best
