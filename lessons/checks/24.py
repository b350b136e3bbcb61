"""Lesson 24's exercises: checks, worked solutions, hints, tempting wrong answers."""

import math

import numpy as np

from minidist.pipeline_parallel import programs
from minidist.planning import TransformerSize, simulate

PEAK = 312e12  # FLOP/s of an A100 in 16 bits


def is_number(found):
    kinds = int | float | np.integer | np.floating
    return isinstance(found, kinds) and not isinstance(found, bool) and abs(found) < 1e300


def check_1(attempt):
    for given, printed in (
        ((450e9, 1008e9, 3072, 163e12), 84),
        ((300e9, 175e9, 1024, 140e12), 34),
    ):
        found, what = attempt(*given), f"tokens, parameters, GPUs, FLOP/s = {given}"
        if not is_number(found):
            return f"{what}: {found!r:.60} is no number of days"
        if round(found) != printed:
            return f"{what}: the paper says {printed} days, not {found:.1f}"


def solution_1(tokens, parameters, gpus, rate):
    return 8 * tokens * parameters / (gpus * rate) / 86400


hints_1 = (
    "In how many products does a parameter take part, per token? And how many FLOPs has each?",
    "Forward, forward again, and backward for the input and for the weight: 4 passes of 2 FLOPs.",
    "8 tokens parameters FLOPs, over gpus x rate a second; a day has 86,400 seconds.",
)


def without_recomputation(tokens, parameters, gpus, rate):
    return 6 * tokens * parameters / (gpus * rate) / 86400


def hours(tokens, parameters, gpus, rate):
    return 8 * tokens * parameters / (gpus * rate) / 3600


tempting_1 = [without_recomputation, hours]


def check_2(attempt):
    for p, d, b, share in ((12, 8, 2, 0.75), (4, 2, 1, 0.5), (8, 4, 2, 0.875), (1, 3, 2, 0.5)):
        work = {m: float(1 - simulate(programs("1f1b", p, m)).bubble) for m in range(1, 60)}
        least = d * b * min(m for m, own in work.items() if own >= share - 1e-9)
        found, what = attempt(p, d, b, share), f"p = {p}, d = {d}, b = {b}, share = {share}"
        if not is_number(found):
            return f"{what}: {found!r:.60} is no number of examples"
        if found != least:
            m = found / (d * b)
            words = f": at work {work[int(m)]:.1%}" if m in work else ""
            return f"{what}: not {found} examples, m = {m:g}{words}"


def solution_2(p, d, b, share):
    return d * b * max(1, int(np.ceil(share * (p - 1) / (1 - share) - 1e-9)))


hints_2 = (
    "With m micro-batches and p equal stages, a rank works for m of m + p - 1 units of time.",
    "m / (m + p - 1) >= share. Solve for m, and round up; m is 1 or more.",
    "One m of all d replicas is d b examples.",
)


def as_many_as_stages(p, d, b, share):
    return d * b * p


def of_one_replica(p, d, b, share):
    return b * max(1, math.ceil(share * (p - 1) / (1 - share)))


tempting_2 = [as_many_as_stages, of_one_replica]

PRINTED = (  # blocks, width, examples, ranks, MFU; seconds
    (48, 6144, 4, 8, 0.415, 1.10),
    (96, 12288, 64, 64, 0.514, 13.75),
    (105, 20480, 280, 280, 0.560, 37.83),
    (128, 25600, 512, 512, 0.563, 71.49),
)


def check_3(attempt):
    for *given, printed in PRINTED:
        found, what = attempt(*given), f"L, C, B, ranks, MFU = {given}"
        if not is_number(found):
            return f"{what}: {found!r:.60} is no number of seconds"
        if abs(found / printed - 1) > 0.01:
            return f"{what}: {printed} s are printed, not {found:.2f}"


def solution_3(L, C, B, ranks, mfu):
    own = 72 * B * 2048 * L * C**2 * (1 + 2048 / (6 * C) + 51200 / (12 * L * C))
    return own / (ranks * 312e12 * mfu)


hints_3 = (
    "A second forward is work for the hardware, but not the model's own. What is left of the 96?",
    "TransformerSize(...).flops(B) counts the model's own FLOPs of a step.",
    "flops / (ranks x 312e12 x mfu).",
)


def with_recomputation(L, C, B, ranks, mfu):
    size = TransformerSize(L, C, 1, 2048, 51200)
    return size.flops(B, recompute=True) / (ranks * PEAK * mfu)


def six_per_parameter(L, C, B, ranks, mfu):
    parameters = TransformerSize(L, C, 1, 2048, 51200).parameters
    return 6 * B * 2048 * parameters / (ranks * PEAK * mfu)


tempting_3 = [with_recomputation, six_per_parameter]
