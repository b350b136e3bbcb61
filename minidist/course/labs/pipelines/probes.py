"""What the pipelines lab asks of a student's code; it runs beside that code, and judges nothing.

Actions travel as rows [kind, micro-batch, chunk, peer, chunk of the peer].
"""

from collections import Counter
from functools import partial

import numpy as np

from minidist import nn, optim
from minidist.course.labs.ranks import each_rank, refused
from minidist.nn.datasets import Batch
from minidist.pipeline_parallel import add_communication, executor, programs, weight_stashing
from minidist.pipeline_parallel.actions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Programs,
    RecvActivation,
    RecvGradient,
    SendActivation,
    SendGradient,
    Transfer,
    Update,
    other_end,
)
from minidist.pipeline_parallel.stage import Stage

MOST = "the buffers kept at once"
KINDS = [Forward, Backward, BackwardInput, BackwardWeight, Update]
KINDS += [SendActivation, RecvActivation, SendGradient, RecvGradient]


def row(action):
    if type(action) not in KINDS:
        raise TypeError(f"a program has {action!r:.80} in it, which is no action")
    ends = (action.peer, action.peer_chunk) if isinstance(action, Transfer) else (0, 0)
    return KINDS.index(type(action)), action.micro_batch, action.chunk, *ends


def action(numbers):
    kind, micro_batch, chunk, *ends = map(int, numbers)
    return KINDS[kind](micro_batch, chunk, *(ends if kind > 4 else ()))


def written(made):
    """Return each rank's actions as rows."""
    return {
        f"the program on rank {r}": np.array([row(a) for a in actions], np.int64).reshape(-1, 5)
        for r, actions in enumerate(made)
    }


def read(rows, placement):
    return Programs([[action(numbers) for numbers in own] for own in rows], placement)


def schedule(name, p, m, chunks=1, **options):
    return written(programs(name, p, m, chunks, **options))


def refusal(name, p, m, chunks):
    """Return whether programs that cannot be are refused."""
    return {"refused": refused(programs, name, p, m, chunks)}


def transfers(rows, placement, rendezvous_safe):
    return written(add_communication(read(rows, placement), rendezvous_safe))


def transfers_twice(rows, placement):
    return {"refused": refused(add_communication, read(rows, placement))}


def tags(rows, placement):
    """Return the tags of each rank's transfers, in the order of its program, and what is wrong."""
    made, different, taken = read(rows, placement), [], Counter()
    moves = [[a for a in own if isinstance(a, Transfer)] for own in made]
    for r, own in enumerate(moves):
        for a in own:
            if isinstance(a, SendActivation | SendGradient):
                taken[r, a.peer, executor.tag(a)] += 1
                if executor.tag(other_end(a, r)) != executor.tag(a):
                    different.append(f"{a} of rank {r}")
    twice = [f"{tag} from rank {r} to {s}" for (r, s, tag), n in taken.items() if n > 1]
    found = {f"the tags on rank {r}": [executor.tag(a) for a in own] for r, own in enumerate(moves)}
    return {name: np.array(own, np.int64) for name, own in found.items()} | {
        "the sends whose receive has another tag": np.array(different[:3], str),
        "the tags that two sends have": np.array(twice[:3], str),
    }


class Counted(Stage):
    """A stage that writes down when it was asked to update."""

    def begin(self, batch):
        super().begin(batch)
        self.updates = []

    def update(self, i):
        self.updates.append(i)


@each_rank("rows", len)
def train(group, rows, placement, sizes, cut, state, inputs, targets, m):
    """Return per rank the gradients, the loss, the bytes sent, and the updates."""
    made, last = read(rows, placement), len(cut) - 1
    model = nn.MLP(sizes, "gelu", dtype="float64")
    model.load_state(state)
    own = [model.layers[a:b] for a, b in cut]
    stages = [Counted(own[k], k == 0, k == last) for k in made.placement[group.rank]]
    for stage in stages:
        stage.begin(Batch(inputs, targets).micro_batches(m))
    executor.execute(made[group.rank], group, stages)
    found = {p.name: p.grad for stage in stages for p in stage.parameters()}
    found["the loss"] = sum(sum(stage.losses.values()) for stage in stages)
    found["sent"] = group.ledger.total
    found["the updates"] = np.array([i for stage in stages for i in stage.updates], int)
    return found


def chosen(scheme, p, every, minibatches, newest):
    """Return the version that a forward pass chooses, for each minibatch and newest version."""
    choose = getattr(weight_stashing, scheme)
    return {
        f"the versions of minibatch {b}, newest {newest}": [choose(b, v, p, every) for v in newest]
        for b in minibatches
    }


def versions(scheme, p, every, events, weights, gradients, lr, stash, streams):
    """Return the weights that each event found, those that its graph held, and the records.

    events  [kind, minibatch]: "F", "B" or "U"; the same ones in each of `streams` streams
    """
    model = nn.MLP([len(weights[0]), len(weights[1])], dtype="float64")
    w, b = model.parameters()
    w.data[...], b.data[...] = weights[0], weights[1]
    choose = partial(getattr(weight_stashing, scheme), p=p, every=every)
    kept = weight_stashing.WeightVersions([w, b], partial(optim.SGD, lr=lr), choose, stash)
    graphs, found = {}, {}
    for stream in range(streams):
        kept.begin(1 + max(i for _, i in events))
        for kind, i in events:
            event = f"{kind}{i} of stream {stream}"
            if kind == "F":
                kept.forward(i)
                graphs[i] = w.data
            elif kind == "B":
                kept.backward(i)
                found[f"what F{i} was given, at {event},"] = graphs.pop(i).copy()
                w.grad = gradients[i] if w.grad is None else w.grad + gradients[i]
            else:
                kept.update()
            found[f"the weights at {event}"] = w.data.copy()
    letters = np.array([letter for letter, *_ in kept.used], str)
    numbers = np.array([rest for _, *rest in kept.used], np.int64).reshape(-1, 2)
    used = {"the letters of `used`": letters, "minibatch and version in `used`": numbers}
    return {**found, **used, MOST: kept.most}
