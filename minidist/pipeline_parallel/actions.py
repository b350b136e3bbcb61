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
of chunk 1, R.1 its R. A program is a value: placement.py says which stages its ranks hold,
communication.py adds its transfers, reduction.py its R, executor.py runs it, validation.py checks
it, planning/simulator.py replays it on virtual clocks, observe/timeline/ draws it. None of these
files knows a schedule by name.
"""

from dataclasses import dataclass, field
from typing import ClassVar


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
    """Return what the peer does while `rank` does this."""
    kind = SENDS.get(type(transfer)) or RECEIVES[type(transfer)]
    return kind(transfer.micro_batch, transfer.peer_chunk, rank, transfer.chunk)


def passes_backward(action: Action) -> bool:
    """Return whether the stage's input gradient is ready when this action ends."""
    return isinstance(action, Backward | BackwardInput)
