"""Execute one rank's program: one `match` over actions, which knows no schedule.

Whatever the order, dW is the sum of the micro-batches' dW, for the weights that all of them used
(Huang et al., GPipe, 2019, section 2.2). So a schedule is a value, and this file runs any.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import groupby

from minidist.comm import Group
from minidist.errors import WrongInput
from minidist.events import EventLog
from minidist.pipeline_parallel.actions import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    RecvActivation,
    RecvGradient,
    Reduce,
    SendActivation,
    SendGradient,
    Transfer,
    Update,
)
from minidist.pipeline_parallel.stage import Stage


class Sums:
    """What R begins: nothing, where no other rank has copies of the stages (see reduction.py)."""

    def begin(self, stage: Stage) -> None: ...

    def within(self) -> AbstractContextManager[None]:
        return nullcontext()

    def finish(self) -> None: ...


NO_SUMS = Sums()


def execute(
    program: list[Action], group: Group, stages: Sequence[Stage], sums: Sums = NO_SUMS
) -> None:
    """Run this rank's program, with one stage per chunk.

    sums  of gradients over ranks with copies of the stages, which begin at R (see reduction.py)

    Consecutive BackwardWeights of one chunk are computed together. Compute actions become events of
    the group's log, named like the action. The group logs transfers, the second thread R.
    """
    for action, together in steps(program):
        stage, i = stages[action.chunk], action.micro_batch
        with computing(group.log, together):
            match action:
                case RecvActivation(peer=peer):
                    stage.received[i] = group.recv(peer, tag(action))
                case Forward():
                    stage.forward(i)
                case SendActivation(peer=peer):
                    group.send(stage.output(i), peer, tag(action))
                case RecvGradient(peer=peer):
                    stage.output_gradients[i] = group.recv(peer, tag(action))
                case Backward():
                    stage.backward(i)
                case BackwardInput():
                    stage.backward_input(i)
                case SendGradient(peer=peer):
                    group.send(stage.input_gradient(i), peer, tag(action))
                case BackwardWeight():
                    stage.backward_weights([a.micro_batch for a in together])
                case Update():
                    stage.update(i)
                case Reduce():
                    sums.begin(stage)
                case _:
                    raise WrongInput(f"{action!r} is no action")


def steps(program: list[Action]) -> Iterator[tuple[Action, list[Action]]]:
    """Yield (first, all) of the actions run together: consecutive W of a chunk, or one action."""
    for (kind, _), alike in groupby(program, key=lambda action: (type(action), action.chunk)):
        together = list(alike)
        if kind is BackwardWeight:
            yield together[0], together
        else:
            yield from ((action, [action]) for action in together)


def computing(log: EventLog | None, together: list[Action]) -> AbstractContextManager[None]:
    """Return a context that logs the compute actions run together; others are logged elsewhere."""
    if log is None or isinstance(together[0], Transfer | Reduce):
        return nullcontext()
    return log.span(" ".join(map(str, together)))


def tag(transfer: Transfer) -> int:
    """Return a number that both ends compute, different for every transfer between two ranks."""
    receives = isinstance(transfer, RecvActivation | RecvGradient)
    chunk = transfer.chunk if receives else transfer.peer_chunk
    gradient = isinstance(transfer, SendGradient | RecvGradient)
    return (transfer.micro_batch << 16) + (chunk << 1) + (1 if gradient else 0)
