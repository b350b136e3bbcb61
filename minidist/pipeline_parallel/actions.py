"""Actions: what a pipeline's rank does, one after the other. A program is a list of them per rank.

    F3  Forward(3)          y[3] = stage(x[3]); what backward needs is stashed
    B3  Backward(3)         dx[3], dW += stage.backward(dy[3]): I3 and W3 at once
    I3  BackwardInput(3)    dx[3]; every product that only dW needs is left for later
    W3  BackwardWeight(3)   dW += what I3 has left; the stash is free
    U3  Update(3)           W <- optimizer(W, dW)                      (asynchronous schedules)
    >F3, <F3                the activation of micro-batch 3 is sent, is received
    >B3, <B3                its gradient

Letters: p ranks, m micro-batches, v chunks per rank; S virtual stages, k one of them; F3.1 is F3 of
chunk 1. A program is a value: executor.py runs it, validate.py checks it, planning/simulator.py
replays it on virtual clocks, tools/timeline.py draws it. None of them knows a schedule's name.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from minidist.errors import Deadlock


@dataclass(frozen=True, slots=True)
class Action:
    """Something that a rank does for one micro-batch, with one of its chunks of the model."""

    micro_batch: int
    chunk: int = 0
    sign: ClassVar[str] = "?"

    def __str__(self):
        return f"{self.sign}{self.micro_batch}" + (f".{self.chunk}" if self.chunk else "")


class Forward(Action):
    """outputs[m] = stage(inputs[m])."""

    __slots__, sign = (), "F"


class Backward(Action):
    """BackwardInput, then BackwardWeight; the gradient leaves at the end of both."""

    __slots__, sign = (), "B"


class BackwardInput(Action):
    """input_gradients[m] = outputs[m].backward(output_gradients[m], deferred=weights[m])."""

    __slots__, sign = (), "I"


class BackwardWeight(Action):
    """Compute what weights[m] has put off, and add it to the parameters' gradients."""

    __slots__, sign = (), "W"


class Update(Action):
    """optimizer.step(), with the gradients up to this micro-batch's."""

    __slots__, sign = (), "U"


@dataclass(frozen=True, slots=True)
class Transfer(Action):
    """One end of a transfer; the other end is on rank `peer`, for its chunk `peer_chunk`."""

    peer: int = 0
    peer_chunk: int = 0


class SendActivation(Transfer):
    """group.send(outputs[m], peer)."""

    __slots__, sign = (), ">F"


class RecvActivation(Transfer):
    """inputs[m] = group.recv(peer)."""

    __slots__, sign = (), "<F"


class SendGradient(Transfer):
    """group.send(input_gradients[m], peer)."""

    __slots__, sign = (), ">B"


class RecvGradient(Transfer):
    """output_gradients[m] = group.recv(peer)."""

    __slots__, sign = (), "<B"


COMPUTE = (Forward, Backward, BackwardInput, BackwardWeight, Update)
SENDS = {SendActivation: RecvActivation, SendGradient: RecvGradient}
RECEIVES = {receive: send for send, receive in SENDS.items()}


def other_end(transfer: Transfer, rank: int) -> Transfer:
    """Return what the peer does while `rank` does this."""
    kind = SENDS.get(type(transfer)) or RECEIVES[type(transfer)]
    return kind(transfer.micro_batch, transfer.peer_chunk, rank, transfer.chunk)


class Programs(list):
    """One list of actions per rank.

    placement  placement[r][c] is the virtual stage that rank r holds as its chunk c. By default
               stages go round: number k is on rank k mod p. Two ranks may hold one stage: replicas
               of it, each of which takes some of the micro-batches.
    """

    def __init__(self, programs, placement: list[list[int]] | None = None):
        super().__init__(list(program) for program in programs)
        self.placement = placement or placement_of(self[:])


def looped(p: int, chunks: int) -> list[list[int]]:
    """Return the placement in which virtual stage k is on rank k mod p."""
    return [[c * p + r for c in range(chunks)] for r in range(p)]


def placement_of(programs: list[list[Action]]) -> list[list[int]]:
    if isinstance(programs, Programs):
        return programs.placement
    chunks = [a.chunk for program in programs for a in program if isinstance(a, Action)]
    return looped(len(programs), 1 + max(chunks, default=0))


def last_stage(placement: list[list[int]]) -> int:
    return max(k for stages in placement for k in stages)


def communicates(programs: list[list[Action]]) -> bool:
    """Say whether the transfers of these programs have been added."""
    return any(isinstance(a, Transfer) for program in programs for a in program)


def passes_backward(action: Action) -> bool:
    """Say whether a gradient leaves the stage when this action ends."""
    return isinstance(action, Backward | BackwardInput)


def neighbours(programs: list[list[Action]]) -> Callable:
    """Return a function (rank, action) -> (the receive it needs, the send it allows), or None's."""
    placement = placement_of(programs)
    last = last_stage(placement)
    holder = {
        (placement[r][a.chunk], a.micro_batch): (r, a.chunk)
        for r, program in enumerate(programs)
        for a in program
        if isinstance(a, Forward)
    }

    def transfers(rank: int, action: Action) -> tuple[Transfer | None, Transfer | None]:
        def end(kind, stage):
            return kind(m, c, *holder[stage, m]) if 0 <= stage <= last else None

        m, c = action.micro_batch, action.chunk
        k = placement[rank][c]
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

    rendezvous_safe  for sends that wait for their receiver: all transfers stand in both programs in
                     the order of one global replay, so that the earliest unfinished one can always
                     take place
    """
    if communicates(programs):
        raise ValueError("these programs have their transfers already; add them once")
    transfers, result = neighbours(programs), [[] for _ in programs]
    for actions in in_order(programs) if rendezvous_safe else _one_by_one(programs):
        for rank, action in actions:
            receive, _ = transfers(rank, action)
            if receive and not rendezvous_safe:
                result[rank].append(receive)
            result[rank].append(action)
        for rank, action in actions:
            _, send = transfers(rank, action)
            if send:
                result[rank].append(send)
                if rendezvous_safe:
                    result[send.peer].append(other_end(send, rank))
    return Programs(result, placement_of(programs))


def _one_by_one(programs) -> Iterator[list[tuple[int, Action]]]:
    for rank, program in enumerate(programs):
        for action in program:
            yield [(rank, action)]


def in_order(programs: list[list[Action]]) -> Iterator[list[tuple[int, Action]]]:
    """Yield (rank, action) pairs, round by round, so that each comes after what it needs.

    In a round every rank that can takes one step. When none can: Stuck.
    """
    needs, gives = dependencies(programs)
    done, ahead = set(), [iter(program) for program in programs]
    waiting = {r: first for r, rest in enumerate(ahead) if (first := next(rest, None))}
    while waiting:
        ready = [(r, action) for r, action in waiting.items() if needs(r, action) <= done]
        if not ready:
            raise Stuck.at(waiting)
        yield ready
        for r, action in ready:
            done.add(gives(r, action))
            if (following := next(ahead[r], None)) is None:
                del waiting[r]
            else:
                waiting[r] = following


class Stuck(Deadlock, ValueError):
    """Programs that deadlock: `waiting` has the action at which each unfinished rank stands."""

    def __init__(self, message: str, waiting: dict[int, Action] | None = None):
        super().__init__(message)
        self.waiting = waiting or {}

    @classmethod
    def at(cls, waiting: dict[int, Action]) -> "Stuck":
        rows = ", ".join(f"rank {r} before {action}" for r, action in waiting.items())
        return cls(f"deadlock: all ranks that have not finished wait, {rows}", waiting)


def dependencies(programs: list[list[Action]]) -> tuple[Callable, Callable]:
    """Return needs(rank, action), a set of facts, and gives(rank, action), a fact.

    A fact is (kind, virtual stage, micro-batch), or what crosses between two ranks. An update needs
    all replicas of its stage to have come to it, since they sum their gradients.
    """
    placement, explicit = placement_of(programs), communicates(programs)
    last, arrived = last_stage(placement), defaultdict(set)

    def gives(rank, action):
        if isinstance(action, Transfer):
            return message(rank, action)
        kind = "backward" if passes_backward(action) else type(action)
        return kind, placement[rank][action.chunk], action.micro_batch

    def needs(rank, action):
        m, k = action.micro_batch, placement[rank][action.chunk]
        if type(action) in RECEIVES:
            return {message(action.peer, other_end(action, rank))}
        if isinstance(action, Forward):
            return {(Forward, k - 1, m)} if k > 0 and not explicit else set()
        if passes_backward(action):
            before = {("backward", k + 1, m)} if k < last and not explicit else set()
            return before | {(Forward, k, m)}
        if isinstance(action, Update):
            return arrived[k, m]
        return {("backward", k, m)} if isinstance(action, BackwardWeight) else set()

    for rank, program in enumerate(programs):
        for before, action in pairwise(program):
            if isinstance(action, Update):
                stage = placement[rank][action.chunk]
                arrived[stage, action.micro_batch].add(gives(rank, before))
    return needs, gives


def message(sender: int, send: Transfer) -> tuple:
    """Return what tells a message from every other one."""
    return type(send), sender, send.peer, send.peer_chunk, send.micro_batch
