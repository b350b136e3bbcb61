"""Lesson 7's exercises: checks, worked solutions, hints, tempting wrong answers."""

from fractions import Fraction
from numbers import Real

import numpy as np

from minidist import nn
from minidist.pipeline_parallel import programs, validate
from minidist.pipeline_parallel.actions import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Programs,
)
from minidist.planning import simulate


def check_1(attempt):
    for p in (1, 2, 3, 5):
        for bubble in (Fraction(1, 2), Fraction(1, 5), Fraction(2, 7), Fraction(3, 4)):
            idles = [simulate(programs("gpipe", p, m)).bubble for m in range(1, 25)]
            right = next(m for m, share in enumerate(idles, 1) if share <= bubble)
            found = attempt(p, bubble)
            if not isinstance(found, Real) or found % 1 != 0:
                return f"p = {p}, bubble {bubble}: {found!r:.60} is not a whole number"
            if found != right:
                return f"p = {p}, bubble {bubble}: {right} micro-batches, not {found}"


def solution_1(p, bubble):
    exact = (p - 1) * (1 - bubble) / Fraction(bubble)
    return max(1, -(-exact.numerator // exact.denominator))


hints_1 = (
    "The idle share is (p - 1)/(m + p - 1). Which m makes it equal to bubble?",
    "m = (p - 1)/bubble - (p - 1). And m is a whole number, at least 1.",
    "Round up without floats: -(-a // b) is a/b rounded up; a Fraction has both.",
)


def four_for_each_rank(p, bubble):
    return 4 * p


def rounded_down(p, bubble):
    return max(1, int((p - 1) / bubble) - (p - 1))


def zero_for_one_rank(p, bubble):
    exact = (p - 1) * (1 - bubble) / Fraction(bubble)
    return -(-exact.numerator // exact.denominator)


tempting_1 = [four_for_each_rank, rounded_down, zero_for_one_rank]


def show(program):
    return " ".join(map(str, program))


def check_2(attempt):
    F, I, W = Fraction(2), Fraction(3), Fraction(5)
    for p in (1, 2, 4):
        for m in (1, 3, 6):
            lists = []
            for rank in range(p):
                found = attempt(rank, p, m)
                own = list(found) if hasattr(found, "__iter__") else [found]
                if not all(isinstance(action, Action) for action in own):
                    return f"rank {rank} of {p}, m = {m}: {found!r:.60} is no list of actions"
                lists.append(own)
            value = Programs(lists)
            validate(value, p, m)  # a ValueError shows where a program cannot be right
            for own in value:
                if any(isinstance(action, Backward) for action in own):
                    return f"p = {p}, m = {m}: a B does both halves at once: {show(own)}"
                if not all(isinstance(action, BackwardWeight) for action in own[-m:]):
                    return f"p = {p}, m = {m}: not every W is at the end: {show(own)}"
            took, least = simulate(value, F, I, W).makespan, (m + p - 1) * (F + I) + m * W
            if took != least:
                return f"p = {p}, m = {m} takes {took}, not {least}; who waits for what?"


def solution_2(rank, p, m):
    yield from map(Forward, range(m))
    yield from map(BackwardInput, reversed(range(m)))
    yield from map(BackwardWeight, range(m))


hints_2 = (
    "Begin with fill_and_drain. Which half of a backward must be where its Backward was?",
    "Three lines: all Forward, all BackwardInput, all BackwardWeight.",
    "yield from map(actions.BackwardInput, range(m)), and the other two likewise.",
)


def both_halves_at_once(rank, p, m):
    return programs("gpipe", p, m)[rank]


def each_weight_at_once(rank, p, m):
    yield from map(Forward, range(m))
    for i in reversed(range(m)):
        yield from (BackwardInput(i), BackwardWeight(i))


def one_at_a_time(rank, p, m):
    for i in range(m):
        yield from (Forward(i), BackwardInput(i))
    yield from map(BackwardWeight, range(m))


tempting_2 = [both_halves_at_once, each_weight_at_once, one_at_a_time]


def watched(model):
    """Return a list that gets the number of images of each forward."""
    sizes, forward = [], model.forward

    def counting(x, *more):
        sizes.append(len(x))
        return forward(x, *more)

    model.forward = counting
    return sizes


def check_3(attempt):
    random = np.random.default_rng(0)
    for n, m in ((64, 4), (50, 4), (5, 8)):
        x, y = random.standard_normal((n, 64)), random.integers(10, size=n)
        whole, model = (nn.MLP([64, 24, 10], dtype="float64") for _ in range(2))
        nn.cross_entropy(whole(x), y).backward()
        sizes = watched(model)
        attempt(model, x, y, m)
        if n in sizes:
            return f"{n} images in {m} parts: all of them went forward at once"
        for p, want in zip(model.parameters(), whole.parameters(), strict=True):
            if p.grad is None:
                return (
                    f"{n} images in {m} parts: {p.name} has no gradient; leave one in its `.grad`"
                )
            off = abs(p.grad - want.grad).max() / abs(want.grad).max()
            if off > 1e-9:
                return f"{n} images in {m} parts: the gradient of {p.name} is off by {off:.1%}"


def solution_3(model, x, y, m):
    for part in np.array_split(np.arange(len(x)), m):
        if len(part) > 0:
            nn.cross_entropy(model(x[part]), y[part], reduction_size=len(x)).backward()


hints_3 = (
    "Each loss is a mean over its part. By what does one image's loss get divided in a part of 13?",
    "Let every part divide by the images of the whole batch; backward adds the parts.",
    "nn.cross_entropy(logits, y[part], reduction_size=len(x)), and nothing to do after the sum.",
)


def means_of_parts(model, x, y, m):
    for part in np.array_split(np.arange(len(x)), m):
        if len(part) > 0:
            nn.cross_entropy(model(x[part]), y[part]).backward()
    for p in model.parameters():
        p.grad = p.grad / m


def sum_of_means(model, x, y, m):
    for part in np.array_split(np.arange(len(x)), m):
        if len(part) > 0:
            nn.cross_entropy(model(x[part]), y[part]).backward()


def all_at_once(model, x, y, m):
    nn.cross_entropy(model(x), y).backward()


tempting_3 = [means_of_parts, sum_of_means, all_at_once]
