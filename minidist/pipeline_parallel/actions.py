"""Actions: the steps that a pipeline's rank takes, one by one. A program lists them, per rank.

Forward and backward of a micro-batch are GPipe's (Huang et al. 2019, section 2.2); the halves of a
backward are zero bubble's (Qi et al. 2024, section 2, whose B is I here).

    F3  Forward(3)          y[3] = stage(x[3]); what backward needs is stashed
    B3  Backward(3)         dx[3], dW += stage.backward(dy[3]): I3 and W3 at once
    I3  BackwardInput(3)    dx[3]; every product that only dW needs is deferred
    W3  BackwardWeight(3)   dW += what I3 has deferred; the stash is freed
    U3  Update(3)           W <- optimizer(W, dW)                      (asynchronous schedules)
    R   Reduce()            dW <- sum of dW over the copies of W: begins here, runs beside the rest
    >F3, <F3                the activation of micro-batch 3 is sent, is received
    >B3, <B3                its gradient

Letters: p ranks, m micro-batches, v chunks per rank; p v virtual stages, k one of them; F3.1 is F3
of chunk 1, R.1 its R. A program is a value:
communication.py adds its transfers and its R, executor.py runs it, validation.py checks it,
planning/simulator.py replays it on virtual clocks, observe/timeline/ draws it. None of these files
knows a schedule by name.

Its placement says which virtual stages each rank holds. Stage k is on rank k mod p, as in
interleaved 1F1B (Narayanan et al. 2021, section 2.2), or where the schedule says: zb_v lays two
chunks out as a V.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import ClassVar

from minidist.errors import WrongInput
from minidist.pieces import split_sizes


@dataclass(frozen=True, slots=True)  # no __dict__: programs have up to a million actions
class Action:
    """What a rank does for micro-batch i, with one of its chunks of the model: a `Stage`."""

    micro_batch: int
    chunk: int = 0
    sign: ClassVar[str] = "?"

    def __str__(self):
        return f"{self.sign}{self.micro_batch}" + (f".{self.chunk}" if self.chunk else "")


class Forward(Action):
    """outputs[i] = layers(inputs[i]); after the first stage, inputs[i] is received[i]."""

    __slots__, sign = (), "F"


class Backward(Action):
    """BackwardInput, then BackwardWeight; the gradient is sent when both have ended."""

    __slots__, sign = (), "B"


class BackwardInput(Action):
    """outputs[i].backward(output_gradients[i], deferred=deferred[i]): dX, and no dW."""

    __slots__, sign = (), "I"


class BackwardWeight(Action):
    """Compute what is in deferred[i]: dW is added to the parameters' gradients."""

    __slots__, sign = (), "W"


class Update(Action):
    """optimizer.step(), with the gradients of all micro-batches up to this one."""

    __slots__, sign = (), "U"


@dataclass(frozen=True, slots=True)
class Reduce(Action):
    """sums.begin(stage): let a second thread sum its gradients over the ranks (reduction.py).

    It comes once per stage, after the backward of all micro-batches; so it names none.
    """

    micro_batch: int = field(default=-1, init=False, repr=False)
    sign: ClassVar[str] = "R"

    def __str__(self):
        return self.sign + (f".{self.chunk}" if self.chunk else "")


@dataclass(frozen=True, slots=True)
class Transfer(Action):
    """One end of a transfer; the other end is on rank `peer`, for its chunk `peer_chunk`."""

    peer: int = 0
    peer_chunk: int = 0


class SendActivation(Transfer):
    """group.send(outputs[i], peer)."""

    __slots__, sign = (), ">F"


class RecvActivation(Transfer):
    """received[i] = group.recv(peer)."""

    __slots__, sign = (), "<F"


class SendGradient(Transfer):
    """group.send(inputs[i].grad, peer)."""

    __slots__, sign = (), ">B"


class RecvGradient(Transfer):
    """output_gradients[i] = group.recv(peer)."""

    __slots__, sign = (), "<B"


COMPUTE = (Forward, Backward, BackwardInput, BackwardWeight, Update)
KINDS: dict[str, type[Action]] = {kind.sign: kind for kind in COMPUTE}
SENDS = {SendActivation: RecvActivation, SendGradient: RecvGradient}
RECEIVES = {receive: send for send, receive in SENDS.items()}


def other_end(transfer: Transfer, rank: int) -> Transfer:
    """Return the peer's end of this transfer of `rank`."""
    kind = SENDS.get(type(transfer)) or RECEIVES[type(transfer)]
    return kind(transfer.micro_batch, transfer.peer_chunk, rank, transfer.chunk)


def passes_backward(action: Action) -> bool:
    """Return whether the stage's input gradient is ready when this action ends."""
    return isinstance(action, Backward | BackwardInput)


Pair = tuple[int, Action, Action]  # (rank, forward, backward)
MOST_STAGES = 1_000_000  # that a placement has by default


class Programs(list):
    """One list of actions per rank.

    placement  placement[r][c] is the virtual stage that rank r holds as its chunk c. By default
               virtual stage k is on rank k mod p. Several ranks may hold the same stage: they are
               its replicas, and each takes some of the micro-batches.
    pairs      {(rank, forward, backward)}: neighbours in a rank's program that may overlap, as in
               DualPipe. Our ranks have one stream and run the forward first; `write` keeps pairs.

    TypeError if a rank's program is None, for example because a schedule forgot its `return`.
    """

    def __init__(
        self,
        programs,
        placement: list[list[int]] | None = None,
        pairs: Iterable[Pair] = (),
    ):
        super().__init__()
        for rank, program in enumerate(programs):
            if program is None:
                raise TypeError(
                    f"the program of rank {rank} is None, not a list of actions; "
                    "does the schedule return it?"
                )
            self.append(list(program))
        self.placement = placement or placement_of(self[:])
        self.pairs = frozenset(pairs)


def from_turns(
    turns: list[list[list[Action]]], placement: list[list[int]] | None = None
) -> Programs:
    """Return programs, given the turns of every rank: one action, or a pair that may overlap."""
    pairs = [(r, turn[0], turn[1]) for r, own in enumerate(turns) for turn in own if len(turn) == 2]
    return Programs([chain.from_iterable(own) for own in turns], placement, pairs)


def looped(p: int, chunks: int = 1) -> list[list[int]]:
    """Return the placement in which virtual stage k is on rank k mod p."""
    return [[c * p + r for c in range(chunks)] for r in range(p)]


def placement_of(programs: list[list[Action]]) -> list[list[int]]:
    if isinstance(programs, Programs):
        return programs.placement
    used = [a.chunk for program in programs for a in program if isinstance(a, Action)]
    chunks = 1 + max(used, default=0)
    if len(programs) * chunks > MOST_STAGES:
        raise WrongInput(f"chunk {chunks - 1} would be of more than {MOST_STAGES} stages")
    return looped(len(programs), chunks)


def pairs_of(programs: list[list[Action]]) -> frozenset[Pair]:
    return programs.pairs if isinstance(programs, Programs) else frozenset()


def last_stage(placement: list[list[int]]) -> int:
    if not any(placement):
        raise WrongInput("there is no program for any rank, so there are no stages")
    return max(k for stages in placement for k in stages)


def micro_batches_of(programs: list[list[Action]]) -> int:
    """Return the number of micro-batches that these programs name."""
    numbers = [a.micro_batch for program in programs for a in program if isinstance(a, Action)]
    return 1 + max(numbers, default=-1)


def kinds_of(programs: list[list[Action]]) -> set[type]:
    return set(map(type, chain.from_iterable(programs)))


def updates(programs: list[list[Action]]) -> bool:
    """Return whether these programs update the weights themselves, that is, are asynchronous."""
    return Update in kinds_of(programs)


def reduces(programs: list[list[Action]]) -> bool:
    """Return whether gradients are summed inside these programs."""
    return Reduce in kinds_of(programs)


def communicates(programs: list[list[Action]]) -> bool:
    """Return whether the transfers of these programs have been added."""
    return any(issubclass(kind, Transfer) for kind in kinds_of(programs))


def equal_lengths(n: int, p: int) -> list[int]:
    """Return the lengths of p stages of n layers, as equal as can be: the first are the shorter."""
    check_lengths(n, p)
    return split_sizes(n, p)[::-1]


def check_lengths(n: int, p: int) -> None:
    """Raise ValueError if n layers do not make p stages, none of them empty."""
    if p < 1:
        raise WrongInput(f"cannot cut layers into {p} stages; use 1 or more")
    if p > n:
        raise WrongInput(f"cannot cut {n} layers into {p} stages; use at most {n}")
