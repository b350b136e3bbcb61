"""Lesson 14's exercises: checks, worked solutions, hints, tempting wrong answers."""

import numpy as np

from minidist.context_parallel import plain, zigzag


def draw(*shape):
    return np.random.default_rng(1).standard_normal(shape)


def softmax_over(scores, values):
    log_z = np.logaddexp.reduce(scores, axis=1, keepdims=True)
    return np.exp(scores - log_z) @ values, log_z


def check_1(attempt):
    for scale in (1, 800):
        scores, values = scale * draw(3, 9), draw(9, 2)
        cuts = [slice(0, 2), slice(2, 6), slice(6, 9)]
        with np.errstate(all="ignore"):
            found = attempt([softmax_over(scores[:, keys], values[keys]) for keys in cuts])
        if not isinstance(found, tuple | list) or len(found) != 2:
            return f"the result is {found!r:.60}, not (O, log Z)"
        right = softmax_over(scores, values)
        for got, want, name in zip(found, right, ("O", "log Z"), strict=True):
            if np.shape(got) != want.shape:
                return f"{name} has the shape {np.shape(got)}, not {want.shape}"
            if not np.allclose(got, want, rtol=1e-9):
                return f"{name} is off by {abs(got - want).max():.2g}; scores are about {scale}"


def solution_1(parts):
    o, log_z = zip(*parts, strict=True)
    both = np.logaddexp.reduce(log_z)
    return sum(np.exp(one - both) * o_i for o_i, one in zip(o, log_z, strict=True)), both


hints_1 = (
    "What is O if there are two parts? Equation (join), with the weights Z_1 / Z and Z_2 / Z.",
    "Z_i / Z is exp(log Z_i - log Z), and log Z is the logarithm of a sum of exponentials.",
    "np.logaddexp.reduce([log Z_i]) subtracts the largest before it takes exponentials.",
)


def mean_of_outputs(parts):
    return np.mean([o for o, _ in parts], axis=0), np.logaddexp.reduce([z for _, z in parts])


def without_a_maximum(parts):
    z = sum(np.exp(log_z) for _, log_z in parts)
    return sum(np.exp(log_z) * o for o, log_z in parts) / z, np.log(z)


tempting_1 = [mean_of_outputs, without_a_maximum]


def check_2(attempt):
    for cut, T, N in ((plain, 12, 3), (zigzag, 24, 3), (zigzag, 13, 4)):
        whole, held = draw(2, T, 3), cut(T, N)
        found = attempt([whole[:, own.indices] for own in held], held)
        if not np.array_equal(found, whole):
            return f"{cut.__name__}({T}, {N}) comes out in another order"


def solution_2(pieces, held):
    at = np.concatenate([own.indices for own in held])
    return np.concatenate(pieces, axis=-2)[..., np.argsort(at), :]


hints_2 = (
    "Print held[0].indices for zigzag(24, 3): which positions does rank 0 have?",
    "Row j of the joined pieces belongs at position at[j], at = the joined indices.",
    "Either write result[..., at, :] = joined, or read joined[..., np.argsort(at), :].",
)


def side_by_side(pieces, held):
    return np.concatenate(pieces, axis=-2)


def the_wrong_way_round(pieces, held):
    at = np.concatenate([own.indices for own in held])
    return np.concatenate(pieces, axis=-2)[..., at, :]


tempting_2 = [side_by_side, the_wrong_way_round]


def check_3(attempt):
    """Compare with the pairs that are counted in hops after the first, for 64 positions a rank."""
    c, N, D = 64, 4, 16
    held = [own.indices for own in zigzag(c * N, N)]
    others = [(held[r], held[(r - hop) % N]) for r in range(N) for hop in range(1, N)]
    pairs = max(int((own[:, None] >= at).sum()) for own, at in others)
    for flops, link, size in ((4e14, 5e10, 2), (1e12, 1e10, 4)):
        computing, sending = 2 * 2 * D * pairs / flops, 2 * c * D * size / link
        found, needed = attempt(flops, link, size), c * sending / computing
        if not np.isclose(found, needed, rtol=1e-9):
            return f"{found:g} positions; counted in a run with 64, {needed:g} are needed"


def solution_3(flops, link, size):
    return size * flops / link


hints_3 = (
    "Write both times for c positions on a rank and width D: computing and sending. D cancels.",
    "With c positions on each rank, the mask leaves half of the c^2 pairs after hop 0.",
    "Computing takes 2 x 2 D c^2/2 FLOPs; sending takes 2 c D numbers.",
)


def without_a_mask(flops, link, size):
    return size * flops / (2 * link)


def a_number_is_one_byte(flops, link, size):
    return flops / link


tempting_3 = [without_a_mask, a_number_is_one_byte]
