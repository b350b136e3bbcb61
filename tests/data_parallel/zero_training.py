"""The training that ZeRO's tests share: AdamW, weight decay, clipping, micro-batches, dropout."""

from minidist import nn, optim
from minidist.data_parallel.naive import all_reduce_gradients
from minidist.data_parallel.zero import Zero
from minidist.nn.datasets import Sampler
from minidist.rng import Randomness


def losses(model, inputs, targets, step, share, loss):
    """Yield (loss, whether it is the step's last one) of this rank's micro-batches."""
    for i, examples in enumerate(share.micro_batches):
        logits = model(inputs[examples], Randomness(1, step, examples))
        total = share.total * targets[0].size
        yield loss(logits, targets[examples], total), i == len(share.micro_batches) - 1


def train(
    group,
    stage,
    model,
    inputs,
    targets,
    steps=5,
    micro_batches=1,
    shards=None,
    loss=nn.cross_entropy,
):
    """Take some steps; return the weights, and the bytes of optimizer state on this rank.

    stage  0: plain data parallelism (on one rank, a single device); 1, 2, 3: ZeRO. Batches
           have 5 examples, and an epoch's last one has what is left.
    """
    model.flatten(group.empty)
    zero = Zero(model, group, stage, shards) if stage else None
    parameters = zero.parameters() if stage else model.parameters()
    optimizer = optim.AdamW(parameters, 0.01, weight_decay=0.1)
    shares = iter(Sampler(len(inputs), 5, 3, group.rank, group.size, micro_batches))
    for step in range(steps):
        for l, last in losses(model, inputs, targets, step, next(shares), loss):
            if stage:
                zero.accumulate(l, last)
            else:
                l.backward()
        if stage:
            optimizer.clip_global_norm(0.5, zero.sum_squares)
            zero.step(optimizer)
        else:
            all_reduce_gradients(model, group)
            optimizer.clip_global_norm(0.5)
            optimizer.step()
            optimizer.zero_grad()
    held = sum(array.nbytes for state in optimizer.state for array in state)
    return (zero.state() if stage else model.state()), held
