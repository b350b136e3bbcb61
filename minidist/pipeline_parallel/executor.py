"""Execute one rank's program: one `match` over actions, which knows no schedule."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import groupby

from minidist.comm import Group
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


def execute(program: list[Action], group: Group, stages: list[Stage]) -> None:
    """Run this rank's program, with one stage per chunk.

    Consecutive BackwardWeights of one chunk are computed together. Compute actions become events of
    the group's log, named like the action; the group itself logs transfers, the thread that sums R.
    """
    for action, run in steps(program):
        stage, i = stages[action.chunk], action.micro_batch
        with computing(group.log, run):
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
                    stage.backward_weights([a.micro_batch for a in run])
                case Update():
                    stage.update(i)
                case Reduce():
                    stage.reduce()
                case _:
                    raise ValueError(f"{action!r} is no action")


def steps(program: list[Action]) -> Iterator[tuple[Action, list[Action]]]:
    """Yield (first, all) of the actions run together: consecutive W of a chunk, or one action."""
    for (kind, _), run in groupby(program, key=lambda action: (type(action), action.chunk)):
        run = list(run)
        for done_at_once in [run] if kind is BackwardWeight else ([action] for action in run):
            yield done_at_once[0], done_at_once


def computing(log: EventLog | None, run: list[Action]) -> AbstractContextManager[None]:
    """Return a context that logs the compute actions run together; others are logged elsewhere."""
    if log is None or isinstance(run[0], Transfer | Reduce):
        return nullcontext()
    return log.span(" ".join(map(str, run)))


def tag(transfer: Transfer) -> int:
    """Return a number that both ends compute, different for every transfer between two ranks."""
    receives = isinstance(transfer, RecvActivation | RecvGradient)
    chunk = transfer.chunk if receives else transfer.peer_chunk
    gradient = isinstance(transfer, SendGradient | RecvGradient)
    return (transfer.micro_batch << 16) + (chunk << 1) + gradient
