"""PipeDream's order: no flush. A stage updates its weights after every minibatch.

Narayanan et al., PipeDream: Generalized Pipeline Parallelism for DNN Training (SOSP 2019), sections
3.2 and 3.3; PipeDream-2BW: Narayanan et al. 2021 (ICML), section 3.1. Which version of the weights
a pass uses is the question of `weight_stashing.py`.

    rank 0   F0 F1 F2          B0 U0 F3       B1 U1 F4 ...        there is no bubble after the fill;
    rank 1      F0 F1    B0 U0 F2    B1 U1 F3 ...                 the price: gradients are stale
    rank 2         F0 B0 U0 F1 B1 U1 F2 ...
"""

from collections.abc import Iterator
from math import ceil
from numbers import Integral

from minidist.errors import WrongInput
from minidist.pipeline_parallel.actions import Action, Backward, Programs, Update, looped
from minidist.pipeline_parallel.one_f_one_b import one_f_one_b


def pipedream(rank: int, m: int, replicas: list[int]) -> Iterator[Action]:
    """1F1B without an end to each batch, and an update per round of a stage's replicas.

    replicas  ranks per stage: minibatch b is taken by replica b mod k of k, forward and backward
              (section 3.2: 1F1B-RR); an update applies the sum of k minibatches
    """
    stage, replica = stage_and_replica(rank, replicas)
    k = replicas[stage]
    mine = range(replica, m, k)
    in_flight = ceil(sum(replicas[stage:]) / k)  # the paper's NOAM, for every stage
    last_of_round = [min(start + k, m) - 1 for start in range(0, m, k)]
    for action in one_f_one_b(0, in_flight, len(mine)):
        yield type(action)(mine[action.micro_batch])
        if isinstance(action, Backward):
            yield Update(last_of_round[action.micro_batch])
    yield from map(Update, last_of_round[len(mine) :])  # rounds in which it has no minibatch


def pipedream_2bw(rank: int, p: int, m: int, update_every: int | None = None) -> Iterator[Action]:
    """1F1B over all micro-batches; an update after every `update_every` backwards, and at the end.

    update_every  by default as few as are allowed: p - 1, but at least 1
    """
    every = max(1, p - 1) if update_every is None else update_every
    if not isinstance(every, Integral) or every < max(1, p - 1):
        raise WrongInput(
            f"two versions of the weights are enough for {p} stages only with {max(1, p - 1)} or "
            f"more micro-batches per update, not update_every={every}"
        )
    for action in one_f_one_b(rank, p, m):
        yield action
        i = action.micro_batch
        if isinstance(action, Backward) and ((i + 1) % every == 0 or i == m - 1):
            yield Update(i)


def pipedream_programs(p: int, m: int, replicas: list[int] | None = None) -> Programs:
    """Return the programs of p ranks; `replicas[s]` of them in a row hold stage s."""
    replicas = [1] * p if replicas is None else list(replicas)
    if sum(replicas) != p or min(replicas) < 1:
        raise WrongInput(
            f"replicas {replicas} of the stages are {sum(replicas)} ranks, there are {p}; "
            f"give every stage one or more, {p} in all"
        )
    placement = [[stage] for stage, k in enumerate(replicas) for _ in range(k)]
    return Programs([pipedream(r, m, replicas) for r in range(p)], placement)


def pipedream_2bw_programs(p: int, m: int, update_every: int | None = None) -> Programs:
    return Programs([pipedream_2bw(r, p, m, update_every) for r in range(p)], looped(p, 1))


def stage_and_replica(rank: int, replicas: list[int]) -> tuple[int, int]:
    """Return the stage of a rank, and which of the stage's replicas it is."""
    for stage, k in enumerate(replicas):
        if rank < k:
            return stage, rank
        rank -= k
    raise WrongInput(f"replicas {replicas} have no rank {rank + sum(replicas)}")
