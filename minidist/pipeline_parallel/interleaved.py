"""Interleaved 1F1B: several small stages per rank, for a smaller bubble and more transfers.

Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM
(SC 2021), section 2.2.2. Rank r holds the virtual stages r, p + r, 2p + r, ... as its chunks 0 to
v - 1. Micro-batches go in groups of p; each group passes all chunks before the next one starts:

    p = 2, v = 2, rank 0   F0 F1 F0.1 F1.1 F2 ...       forward number i is micro-batch
                                                        i mod p + p floor(i / pv) of chunk
                                                        floor(i / p) mod v

A rank idles (p - 1)(TF + TB) / v, 1/v of 1F1B's bubble, because filling takes p - 1 chunks, each
1/v of a stage. The price: pv - 1 boundaries between ranks instead of p - 1; and on rank 0, if
m >= 2p, a stash worth (2 (p - 1) + (v - 1) p + 1) / v stages instead of p.
"""

from collections.abc import Iterator

from minidist.errors import WrongInput
from minidist.pipeline_parallel.actions import Action, Backward, Forward


def interleaved(rank: int, p: int, m: int, chunks: int) -> Iterator[Action]:
    """1F1B over chunks: warm up 2 (p - 1 - rank) + (v - 1) p forwards, then one by one."""
    if m % p:
        nearest = max(p, p * round(m / p))
        raise WrongInput(
            f"interleaving needs micro-batches in groups of {p}, one per rank: "
            f"{m} of them do not divide into such groups; use {nearest}"
        )
    total = m * chunks
    ahead = min(total, 2 * (p - 1 - rank) + (chunks - 1) * p)

    def place(i: int) -> tuple[int, int]:
        return i % p + i // (p * chunks) * p, i // p % chunks

    def forward(i: int) -> Action:
        return Forward(*place(i))

    def backward(i: int) -> Action:
        micro_batch, chunk = place(i)
        return Backward(micro_batch, chunks - 1 - chunk)

    yield from map(forward, range(ahead))
    for i in range(ahead, total):
        yield forward(i)
        yield backward(i - ahead)
    yield from map(backward, range(total - ahead, total))
