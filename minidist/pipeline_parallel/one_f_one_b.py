"""1F1B: backward as soon as possible, so that few micro-batches are in flight.

PipeDream-Flush (Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training, ICML 2021,
section 3.2); Megatron-LM's non-interleaved schedule (Narayanan et al. 2021, section 2.2.1).

    rank 0   F0 F1 F2          B0 F3    B1 ...          3 in flight
    rank 1      F0 F1       B0 F2    B1 F3 ...          2
    rank 2         F0    B0 F1    B1 F2 ...             1

Where transfers take no time the bubble is the same as GPipe's. (Otherwise a rank waits for each
gradient to come back; one more micro-batch in flight would hide that.) The stash is smaller: rank r
holds at most p - r micro-batches, not m.
"""

from collections.abc import Iterator

from minidist.pipeline_parallel.actions import Action, Backward, Forward


def one_f_one_b(rank: int, p: int, m: int) -> Iterator[Action]:
    """Warm up with one forward per later stage; then one forward, one backward; then drain."""
    ahead = min(p - 1 - rank, m)
    yield from map(Forward, range(ahead))
    for i in range(ahead, m):
        yield Forward(i)
        yield Backward(i - ahead)
    yield from map(Backward, range(m - ahead, m))
