"""Lesson 0's exercises: checks, worked solutions, hints, tempting wrong answers."""

import numbers

import numpy as np

from minidist import nn
from minidist.autograd.recomputation import kept_bytes
from minidist.rng import generator


def held(sizes, batch):
    """Return the bytes of a step: measured."""
    model = nn.MLP(sizes)
    x, y = np.zeros((batch, sizes[0]), "float32"), np.zeros(batch, int)
    fixed = sum(16 * p.size for p in model.parameters())
    return fixed + (kept_bytes(nn.cross_entropy(model(x), y)) if batch else 0)


def check_1(attempt):
    for sizes, memory in (
        ([64, 32, 10], 100_000),
        ([64, 512, 512, 10], 9_000_000),
        ([5, 4], 999),
        ([9, 9], 9),
    ):
        batch = attempt(sizes, memory)
        where = f"{sizes} in {memory:,} bytes"
        if not isinstance(batch, numbers.Real) or batch < 0 or not float(batch).is_integer():
            return f"{where}: {batch!r:.60} is not a number of examples"
        batch = int(batch)
        if batch > 10_000 or (batch and held(sizes, batch) > memory):
            return f"{where}: a batch of {batch} does not fit"
        if held(sizes, batch + 1) <= memory:
            return f"{where}: a batch of {batch} fits, but so does one more"


def solution_1(sizes, memory):
    parameters = sum((sizes[i] + 1) * sizes[i + 1] for i in range(len(sizes) - 1))
    return max(0, (memory - 16 * parameters) // (4 * sum(sizes) + 16))


hints_1 = (
    "First pay for what does not depend on the batch; then divide what is left.",
    "A layer from a to b numbers has a b + b parameters, and each of them costs 16 bytes.",
    "An example costs 4 sum(sizes) + 16 bytes. Use // and max(0, ...).",
)


def forgets_adam(sizes, memory):
    return memory // (4 * sum(sizes) + 16)


def forgets_the_biases(sizes, memory):
    weights = sum(sizes[i] * sizes[i + 1] for i in range(len(sizes) - 1))
    return max(0, (memory - 16 * weights) // (4 * sum(sizes) + 16))


tempting_1 = [forgets_adam, forgets_the_biases, lambda sizes, memory: None]


def check_2(attempt):
    P = 1e9
    for tokens, speed, link in ((3.2e6, 1e14, 12.5e9), (5e5, 1e14, 12.5e9), (3.2e6, 3e14, 5e10)):
        N = attempt(tokens, speed, link)
        if not isinstance(N, numbers.Real) or not N > 0:
            return f"{N!r:.60} is not a number of devices"
        computing, sending = 6 * P * tokens / speed / N, 2 * 4 * P / link
        if not np.isclose(computing, sending, rtol=1e-6):
            return f"{N:,.0f} devices compute for {computing:.3g} s and send for {sending:.3g} s"


def solution_2(tokens, speed, link):
    return 6 * tokens * link / (8 * speed)


hints_2 = (
    "Write both times for P parameters and set them equal. P drops out.",
    "N devices compute for 6 P tokens / (speed N) seconds.",
    "Each device sends 2 S = 2 x 4 P bytes: 8 P / link seconds, for any N.",
)


def sends_one_copy(tokens, speed, link):
    return 6 * tokens * link / (4 * speed)


tempting_2 = [sends_one_copy, lambda tokens, speed, link: None]


def gradient_by(way, x, y):
    """Return the gradient as one vector, and the most examples that waited for their backward."""
    model, waiting, most = nn.MLP([64, 32, 10], dtype="float64"), [], []
    forward = model.forward

    def watched(x, *more):
        waiting.append(len(x))
        most.append(sum(waiting))
        return forward(x, *more)

    model.forward = watched
    model.parameters()[0].add_hook(lambda p: waiting.clear())  # backward calls it
    way(model, x, y, np.split(np.arange(100), [48, 96]))
    gradients = [np.zeros(p.shape) if p.grad is None else p.grad for p in model.parameters()]
    return np.concatenate([np.ravel(g) for g in gradients]), max(most, default=0)


def check_3(attempt):
    random = generator(0, "pieces")
    x, y = random.standard_normal((100, 64)), random.integers(0, 10, 100)
    (want, _), (got, most) = gradient_by(all_at_once, x, y), gradient_by(attempt, x, y)
    if not got.any():
        return "p.grad has no gradient"
    if (error := abs(got - want).max() / abs(want).max()) > 1e-12:
        return f"off by {error:.0%} of the largest gradient"
    if most > 48:
        return f"the gradient is right, but the activations of {most} examples were kept"


def solution_3(model, x, y, pieces):
    B = sum(map(len, pieces))
    for piece in pieces:
        nn.cross_entropy(model(x[piece]), y[piece], reduction_size=B).backward()


hints_3 = (
    "Each micro-batch's mean counts 1/3. How much does one example of the 48 count, and one of 4?",
    "The batch's loss divides every example's loss by 100, wherever the example is.",
    "reduction_size=100 in each call; then p.grad only has to add up.",
)


def mean_of_means(model, x, y, pieces):
    for piece in pieces:
        nn.cross_entropy(model(x[piece]), y[piece]).backward()
    for p in model.parameters():
        p.grad = p.grad / len(pieces)


def all_at_once(model, x, y, pieces):
    nn.cross_entropy(model(x), y).backward()


tempting_3 = [mean_of_means, all_at_once, lambda model, x, y, pieces: None]
