"""Actions: the steps that a pipeline's rank takes, one by one. A program lists them, per rank.

    F3  Forward(3)          y[3] = stage(x[3]); what backward needs is stashed
    B3  Backward(3)         dx[3], dW += stage.backward(dy[3]): I3 and W3 at once
    I3  BackwardInput(3)    dx[3]; every product that only dW needs is deferred
    W3  BackwardWeight(3)   dW += what I3 has deferred; the stash is freed
    U3  Update(3)           W <- optimizer(W, dW)                      (asynchronous schedules)
    R   Reduce()            dW <- sum of dW over the copies of W: begins here, runs beside the rest
    >F3, <F3                the activation of micro-batch 3 is sent, is received
    >B3, <B3                its gradient

Letters: p ranks, m micro-batches, v chunks per rank; S virtual stages, k one of them; F3.1 is F3 of
chunk 1, R.1 its R. A program is a value: communication.py adds its transfers, reduction.py its R,
executor.py runs it, validation.py checks it, planning/simulator.py replays it on virtual clocks,
tools/timeline/ draws it. None of these files knows a schedule by name.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar
from zlib import crc32


@dataclass(frozen=True, slots=True)
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
    """stage.reduce(): let a second thread sum the stage's gradients over the ranks.

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


MOST_STAGES = 1_000_000  # that a placement has by default
COMPUTE = (Forward, Backward, BackwardInput, BackwardWeight, Update)
KINDS = {kind.sign: kind for kind in COMPUTE}
SENDS = {SendActivation: RecvActivation, SendGradient: RecvGradient}
RECEIVES = {receive: send for send, receive in SENDS.items()}


def action_of(sign: str | None, micro_batch: str | None, chunk: int) -> Action:
    """Return the action of a sign; without a micro-batch it is R."""
    return Reduce(chunk) if micro_batch is None else KINDS[sign](int(micro_batch), chunk)


def other_end(transfer: Transfer, rank: int) -> Transfer:
    """Return what the peer does while `rank` does this."""
    kind = SENDS.get(type(transfer)) or RECEIVES[type(transfer)]
    return kind(transfer.micro_batch, transfer.peer_chunk, rank, transfer.chunk)


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
        pairs: Iterable[tuple[int, Forward, Backward | BackwardInput]] = (),
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


def looped(p: int, chunks: int) -> list[list[int]]:
    """Return the placement in which virtual stage k is on rank k mod p."""
    return [[c * p + r for c in range(chunks)] for r in range(p)]


def placement_of(programs: list[list[Action]]) -> list[list[int]]:
    if isinstance(programs, Programs):
        return programs.placement
    own = [a.chunk for program in programs for a in program if isinstance(a, Action)]
    chunks = 1 + max(own, default=0)
    if len(programs) * chunks > MOST_STAGES:
        raise ValueError(f"chunk {chunks - 1} would be of more than {MOST_STAGES} stages")
    return looped(len(programs), chunks)


def pairs_of(programs: list[list[Action]]) -> frozenset[tuple[int, Action, Action]]:
    return programs.pairs if isinstance(programs, Programs) else frozenset()


def last_stage(placement: list[list[int]]) -> int:
    if not any(placement):
        raise ValueError("there is no program for any rank, so there are no stages")
    return max(k for stages in placement for k in stages)


def micro_batches_of(programs: list[list[Action]]) -> int:
    """Return the number of micro-batches that these programs name."""
    numbers = [a.micro_batch for program in programs for a in program if isinstance(a, Action)]
    return 1 + max(numbers, default=-1)


def digest(programs: list[list[Action]]) -> str:
    """Return some letters that differ for different programs, the same on every machine."""
    return f"{crc32(repr((list(programs), placement_of(programs))).encode()):08x}"


def updates(programs: list[list[Action]]) -> bool:
    """Return whether these programs update the weights themselves, that is, are asynchronous."""
    return any(isinstance(a, Update) for program in programs for a in program)


def reduces(programs: list[list[Action]]) -> bool:
    """Return whether gradients are summed inside these programs."""
    return any(isinstance(a, Reduce) for program in programs for a in program)


def communicates(programs: list[list[Action]]) -> bool:
    """Return whether the transfers of these programs have been added."""
    return any(isinstance(a, Transfer) for program in programs for a in program)


def passes_backward(action: Action) -> bool:
    """Return whether the stage's input gradient is ready when this action ends."""
    return isinstance(action, Backward | BackwardInput)
