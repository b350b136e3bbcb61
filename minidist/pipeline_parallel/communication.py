"""What is added to a schedule: who sends what to whom, at which place in both programs; and R.

    1F1B, p = 2, m = 2         rank 0: F0 F1 B0 B1                   rank 1: F0 B0 F1 B1
    add_communication          F0 >F0 F1 >F1 <B0 B0 <B1 B1           <F0 F0 B0 >B0 <F1 F1 B1 >B1

If a send waits for its receiver, these programs deadlock: rank 0 is in >F1, rank 1 in >B0.
"""

from collections.abc import Callable

from minidist.errors import WrongInput
from minidist.pipeline_parallel.actions import (
    Action,
    Backward,
    BackwardWeight,
    Forward,
    Programs,
    RecvActivation,
    RecvGradient,
    Reduce,
    SendActivation,
    SendGradient,
    Transfer,
    communicates,
    last_stage,
    other_end,
    pairs_of,
    passes_backward,
    placement_of,
    reduces,
    updates,
)
from minidist.pipeline_parallel.execution_order import in_order


def transfers_of(programs: list[list[Action]]) -> Callable:
    """Return a function (rank, action) -> (receive it needs or None, send it allows or None)."""
    placement = placement_of(programs)
    last = last_stage(placement)
    holder = {
        (placement[r][a.chunk], a.micro_batch): (r, a.chunk)
        for r, program in enumerate(programs)
        for a in program
        if isinstance(a, Forward)
    }

    def transfers(rank: int, action: Action) -> tuple[Transfer | None, Transfer | None]:
        i, c = action.micro_batch, action.chunk
        k = placement[rank][c]

        def end(kind, stage):
            if not 0 <= stage <= last:
                return None
            if (stage, i) not in holder:
                raise WrongInput(f"rank {rank}, {action}: no rank does F{i} of stage {stage}")
            return kind(i, c, *holder[stage, i])

        if isinstance(action, Forward):
            return end(RecvActivation, k - 1), end(SendActivation, k + 1)
        if passes_backward(action):
            return end(RecvGradient, k + 1), end(SendGradient, k - 1)
        return None, None

    return transfers


def add_communication(
    programs: list[list[Action]], rendezvous_safe: bool = False
) -> list[list[Action]]:
    """Return the programs with their transfers: a receive just before, a send just after its use.

    rendezvous_safe  for sends that wait for their receiver: both programs list all transfers in the
                     order of one global replay, so that the earliest unfinished one can always
                     take place
    """
    if communicates(programs):
        raise WrongInput("these programs have their transfers already; add them once")
    transfers = transfers_of(programs)
    result: list[list[Action]] = [[] for _ in programs]
    if rendezvous_safe:
        for actions in in_order(programs):
            for rank, action in actions:
                result[rank].append(action)
            for rank, action in actions:
                _, send = transfers(rank, action)
                if send:
                    result[rank].append(send)
                    result[send.peer].append(other_end(send, rank))
    else:
        for rank, program in enumerate(programs):
            for action in program:
                receive, send = transfers(rank, action)
                result[rank] += [each for each in (receive, action, send) if each]
    return Programs(result, placement_of(programs), pairs_of(programs))


def add_reductions(programs: list[list[Action]]) -> Programs:
    """Return programs without transfers with an R after the last backward part of each chunk.

    R that are there already stay where they are. ValueError if there is an Update, which sums the
    gradients of a stage's replicas itself.
    """
    if updates(programs):
        raise WrongInput(
            "these programs update the weights themselves, and an update sums the gradients of a "
            "stage's replicas; leave out R"
        )
    result = [list(program) for program in programs]
    if not reduces(programs):
        for own in result:
            last = {a.chunk: i for i, a in enumerate(own) if type(a) in (Backward, BackwardWeight)}
            for i in sorted(last.values(), reverse=True):
                own.insert(i + 1, Reduce(own[i].chunk))
    return Programs(result, placement_of(programs), pairs_of(programs))
