"""Causes, on numbers that are made up; and that sound and randomly wrong gradients have none."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist import nn
from minidist.verify.causes.examples import of_examples
from minidist.verify.causes.finding import Finding
from minidist.verify.causes.reasons import UNKNOWN, reasons
from minidist.verify.compare import compare
from minidist.verify.strategies import Case, one_device
from minidist.verify.strategies.cases import padded, random_weights, trained
from minidist.verify.strategies.parameter_server import equal_to
from tests.strategies import arrays, seeds

N = 4
MLP = random_weights(nn.MLP([4, 5, 6, 3], "gelu", seed=1, dtype="float64"))
CASE = Case("MLP", MLP, arrays(7, 4), np.arange(7) % 3)
TOKENS, NEXTS = np.random.default_rng(0).integers(0, 7, (2, 8, 6))


def only_trained(gradients, case=CASE):
    return {name: gradients[name] for name in trained(case.model)}


def of_rows(case, shares, numbers=None):
    """Return the gradients of parts of a batch; numbers: what their examples are called."""
    given = [(rows,) if numbers is None else (rows, numbers(rows)) for rows in shares]
    return [only_trained(of_examples(case, *each), case) for each in given]


WANT = only_trained(one_device(CASE))
NAMES = list(WANT)
OWN = of_rows(CASE, np.array_split(np.arange(7), N))  # of ranks: 0, 1; 2, 3; 4, 5; 6
SINGLE = of_rows(CASE, np.split(np.arange(7), 7))  # of examples


def said(got, case=CASE, promise="exact", want=None):
    """Return what is said of these gradients: one dictionary for all ranks, or one per rank."""
    got = got if isinstance(got, list) else [got] * N
    want = only_trained(one_device(case), case) if want is None else want
    return "; ".join(reasons(Finding(got, want, case, len(got), promise)))


def times(factor, names=NAMES):
    return {n: g * factor if n in names else g for n, g in WANT.items()}


def summed(parts, factors=None):
    factors = factors or [1] * len(parts)
    return {n: sum(f * p[n] for p, f in zip(parts, factors, strict=True)) for n in parts[0]}


def flat(gradients):
    return np.concatenate([g.reshape(-1) for g in gradients.values()])


def from_flat(vector):
    ends = np.cumsum([g.size for g in WANT.values()])[:-1]
    return {n: v.reshape(WANT[n].shape) for n, v in zip(NAMES, np.split(vector, ends), strict=True)}


def rounded(g, digits):
    mantissa, exponent = np.frexp(g)
    return np.ldexp(np.round(mantissa * 2.0**digits), exponent - digits)


def among(*sets):
    return [summed([OWN[k] for k in next(s for s in sets if r in s)]) for r in range(N)]


def in_elements(begin, end, gradients, others):
    """Return gradients whose elements begin to end - 1, of all, are those of others."""
    vector = flat(gradients).copy()
    vector[begin:end] = flat(others)[begin:end]
    return from_flat(vector)


BACKWARDS = [from_flat(flat(part)[::-1]) for part in OWN]
MEANS = [7 / (N * len(rows)) for rows in np.array_split(np.arange(7), N)]
OF_A_STRATEGY = [  # of the package: it may cut something else than examples
    (times(4), "ratio 4 = number of ranks: a missing 1/N"),
    (times(1 / 4), "ratio 0.25 = 1 / number of ranks: 1/N applied twice"),
    (times(16), "ratio 16 = the square of the number of ranks: a missing 1/N^2"),
    (times(1 / 16), "ratio 0.0625 = 1 / the square of the number of ranks: 1/N^2"),
    (times(4, [n for n in NAMES if "bias" in n]), "a missing 1/N, only in biases"),
    (times(0), "every gradient is zero: nothing was computed"),
    (summed(OWN, [0, 4, 0, 0]), "equals 4 times the gradient of rank 1's examples: all had"),
    (summed(OWN, MEANS), "equals the mean of the ranks' means: each divided by its own number"),
    (summed(OWN, [4 * m for m in MEANS]), "equals the sum of the ranks' means: each divided"),
    (OWN, "equals the local gradient: the all_reduce is missing"),
    ([WANT | {NAMES[0]: part[NAMES[0]]} for part in OWN], f"is missing, only in {NAMES[0]}"),
    (among({0, 1}, {2, 3}), "equals the local gradient: the all_reduce is missing"),  # of pairs
    (summed(OWN, [0, 0, 2, 2]), "equals 2 times the gradient of rank 1's examples: all had"),
]
OF_A_READER = [
    (summed(SINGLE, [2, 2, 1, 1, 1, 0, 1]), "counts examples 0, 1 twice, example 5 not at all"),
    (summed(SINGLE, [1, 1, 1, 3, 1, 1, 0.5]), "counts example 3 3 times, example 6 0.5 times"),
    (
        summed(OWN, [0.2, 0.3, 0.4, 0.1]),
        "example 6 0.1 times; as if each rank had scaled its share before the sum (clipped it?)",
    ),
    (
        [WANT, in_elements(10, 40, WANT, summed(OWN[:3])), WANT, WANT],
        "on rank 1 the sum counts example 6 not at all, in elements 10 to 39 of all 82",
    ),
    (among({0, 1}, {2, 3}), "ranks {0, 1} and {2, 3} are summed among themselves, never across"),
    (among({0, 2}, {1, 3}), "ranks {0, 2} and {1, 3} are summed among themselves, never across"),
    ([WANT, *OWN[1:]], "only rank 0 has the sum, the others their own: reduce, not all_reduce"),
    ([OWN[2]] * N, "every rank has only the gradient of rank 2's examples: broadcast, not summed"),
    (from_flat(np.roll(flat(WANT), 9)), "the right numbers at other places, most of them 9 elem"),
    (from_flat(flat(WANT)[::-1]), "the right numbers at other places"),
    (
        [summed([*OWN[:3], BACKWARDS[3]]), *[summed([*BACKWARDS[:3], OWN[3]])] * 3],
        "on rank 0 the parts of rank 3 are added at other places than the rest",
    ),
    (times(3), "ratio 3: added 3 times, or 3 micro-batches that were not averaged"),
    (
        times(4),
        "ratio 4 = number of data-parallel ranks: a missing 1/N, or a sum summed again, "
        "or 4 micro-batches that were not averaged",
    ),
    (times(-1), "ratio -1: the sign is wrong"),
    (times(0.031), "ratio 0.031: scaled after the sum (clipped?)"),
    *[
        ({n: rounded(g, digits) for n, g in WANT.items()}, f"right, except for rounding to {kind}:")
        for kind, digits in [("float16", 11), ("bfloat16", 8), ("float32", 24)]
    ],
]


@pytest.mark.parametrize("promise, table", [("", OF_A_STRATEGY), ("exact", OF_A_READER)])
def test_a_cause_is_named_by_arithmetic_and_what_almost_fits_has_none(promise, table):
    for got, words in table:
        assert words in said(got, promise=promise)
        ranks = got if isinstance(got, list) else [got] * N
        for size in (1e-6, 1e-2):
            noise = {n: size * arrays(*g.shape, seed=3) for n, g in WANT.items()}
            noisy = [summed([one, noise]) for one in ranks]
            assert said(noisy, promise=promise).startswith(UNKNOWN), words


def test_what_has_no_cause():
    for factor in (1.7, 4.001, 3.999, -4, 64):
        assert said(times(factor), promise="") == UNKNOWN
    for factors in ([1, 1.4, 1, 1], [1, 1, 1, 1e-3], [0, 1, 2, 1], [1.0001, 1, 0, 1]):
        assert said(summed(OWN, factors), promise="") == UNKNOWN
    assert said([WANT, times(0)], promise="") == UNKNOWN  # one rank has all of it
    assert said([times(2), times(3)], promise="") == UNKNOWN  # not one factor
    two = summed(SINGLE, [0.2, 0.25, 0.3, 0.3, 0.4, 0.4, 0.1])  # a share with two weights
    assert "clipped" not in said(two)
    assert said(in_elements(76, 82, WANT, times(0))).startswith(UNKNOWN)  # lost, not moved
    assert said(times(1.3, NAMES[-1:])) == UNKNOWN  # few numbers are no multiple
    rounded_too_much = {n: rounded(1.1 * g, 11) for n, g in WANT.items()}
    assert "rounding to" not in said(rounded_too_much)


@given(
    seed=seeds,
    wrong=st.sets(st.sampled_from(NAMES), min_size=1),
    size=st.sampled_from([1e-6, 1e-2, 1.0]),
    ranks=st.sampled_from([2, 3, 4]),
)
def test_random_errors_and_sound_gradients_have_no_cause(seed, wrong, size, ranks):
    assert said([WANT] * ranks, promise="") == said(WANT) == ""
    got = {n: g + size * arrays(*g.shape, seed=seed) * (n in wrong) for n, g in WANT.items()}
    assert said([got] * ranks, promise="").startswith(UNKNOWN)


@given(st.lists(st.sampled_from([0, 0.3, 1, 2]), min_size=7, max_size=7).filter(np.ptp), seeds)
def test_weights_are_said_of_sums_of_examples_alone(factors, seed):
    got = summed(SINGLE, factors)
    words = said(got)
    assert "the sum counts" in words or "the ranks'" in words or "all had" in words
    noise = {n: g + 1e-5 * arrays(*g.shape, seed=seed) for n, g in got.items()}
    assert said(noise) == UNKNOWN


def transformer_case(**options):
    model = nn.Transformer(7, 8, 2, 2, 6, dtype="float64", **options)
    return Case("Transformer", random_weights(model), TOKENS, NEXTS)


def test_means_over_the_targets_that_count():
    case = transformer_case(dropout=0.2, tied=True)
    case = replace(case, targets=padded(case.targets))
    want = one_device(case)
    part = case.total / case.targets.size
    got = {n: part * g for n, g in want.items()}
    ratio = f"ratio {part:.4g} = {case.total} targets that count / all 48: padding was counted"
    assert said(got, case, "") == ratio
    rows_of = np.array_split(np.arange(8), 3)  # 3, 3 and 2 examples
    parts = of_rows(case, rows_of)
    means = [case.total / nn.counted(case.targets[rows]) for rows in rows_of]
    for how, weights in {
        "mean of the ranks' means": [1 / 3] * 3,
        "sum of the ranks' means": [1, 1, 1],
        "sum of the ranks' means, weighted by examples": [3 / 8, 3 / 8, 2 / 8],
    }.items():
        factors = [mean * weight for mean, weight in zip(means, weights, strict=True)]
        words = f"equals the {how}: each divided by its own number of targets"
        assert said([summed(parts, factors)] * 3, case, "") == words
    targets = case.targets.copy()
    targets[6:] = nn.IGNORED  # a part in which nothing counts
    case = replace(case, targets=targets)
    local = "equals the local gradient: the all_reduce is missing"
    assert said(of_rows(case, np.split(np.arange(8), N)), case, "") == local


def test_a_batch_norm_with_statistics_of_a_rank_is_named_and_its_examples_are_not_counted():
    model = random_weights(nn.CNN(2, classes=3, widths=(3, 4), dtype="float64"))
    for norm in model.modules(nn.BatchNorm):
        norm.running_var.data[...] = 1
    case = Case("CNN", model, arrays(8, 2, 6, 6), np.arange(8) % 3)
    own = of_rows(case, np.split(np.arange(8), N))
    words = "each rank's batch norms used its own examples' statistics, not the batch's"
    assert said(summed(own), case) == words
    assert said(summed(own, [2, 1, 1, 0.5]), case) == UNKNOWN


def test_masks_by_local_numbers_are_named_and_others_are_not():
    case = transformer_case(dropout=0.3)
    shares = np.split(np.arange(8), N)
    local = "each rank's masks of dropout were drawn by its own numbers of examples, from 0"
    assert said(summed(of_rows(case, shares, lambda rows: np.arange(len(rows)))), case) == local
    assert said(summed(of_rows(case, shares, lambda rows: (rows + 3) % 8)), case) == UNKNOWN


def test_parameters_of_a_transformer_that_are_exchanged_transposed_or_added_up_too_often():
    case = transformer_case(tied=True)
    want = only_trained(one_device(case), case)
    a, b = "blocks.0.norm_1.gain", "blocks.1.norm_1.gain"
    got = {**want, a: want[b], b: want[a]}
    assert f"{a} has the gradient of {b}, {b} has the gradient of {a}" in said(got, case)
    name = "blocks.0.attention.output.weight"
    assert said({**want, name: want[name].T}, case) == f"{name} is transposed"
    assert "transposed" not in said({**want, name: -want[name].T}, case)
    tied, other = "embedding.token.weight", "embedding.position.weight"
    words = "ratio 4, in a weight that 2 layers have: summed again for each of them"
    assert said({**want, tied: 4 * want[tied]}, case) == f"{words}, only in {tied}"
    assert "2 layers" not in said({**want, other: 4 * want[other]}, case)
    first = arrays(*want[tied].shape)
    uses = [{**want, tied: first}, want, want, {**want, tied: want[tied] - first}]
    assert "or the sum over its uses" in said(uses, case)
    uses[3] = {**want, tied: 1.001 * (want[tied] - first)}
    assert said(uses, case).startswith(UNKNOWN)
    norms = [n for n in want if ".norm" in n]
    part = {n: arrays(*want[n].shape, seed=7) for n in norms}
    got = [want | part, want | {n: want[n] - part[n] for n in norms}]
    words = "the ranks' parts add up to the gradient: an all_reduce is missing, only in norms"
    assert said(got, case, "").startswith(words)


def test_what_is_infinite_missing_or_wrong_up_to_a_layer_says_where():
    got = WANT | {NAMES[1]: np.full(5, np.nan)}
    assert said(got, promise="") == f"{NAMES[1]} is not finite on rank 0, but is on one device"
    assert said(got, want=got) == f"{NAMES[1]} is not finite on one device either"
    got = WANT | {n: arrays(*WANT[n].shape) for n in NAMES[:3]}
    assert said([got], promise="") == f"{UNKNOWN}; all from {NAMES[3]} on are right"
    for wrong in ([2], [0, 2]):
        got = WANT | {NAMES[i]: WANT[NAMES[i]] + 1 for i in wrong}
        assert said([got], promise="") == UNKNOWN
    right = {n: g for n, g in WANT.items() if n != NAMES[3]}
    assert str(compare([right], WANT)) == f"{NAMES[3]} is missing on rank 0"
    assert said(right) == said(right, promise="replay") == ""


def test_a_replay_is_right_but_for_rounding_or_differs_in_one_value():
    rounding = "right but for rounding, not bit for bit: the sum was taken in another order"
    assert said(times(1 + 1e-15), promise="replay") == rounding
    far = {n: g + 1e-8 * arrays(*g.shape) for n, g in WANT.items()}
    assert said(far, promise="replay") == UNKNOWN
    votes = {n: np.sign(g) * (np.abs(g) > 0.1) for n, g in WANT.items()}
    got = {n: np.where(v == 0, 1.0, v) for n, v in votes.items()}
    count = sum((v == 0).sum() for v in votes.values())
    words = f"{N * count} of {N * 82} elements differ: 0 is promised, 1 is there"
    assert said(got, promise="replay", want=votes) == words
    got = {n: -v for n, v in got.items()}
    assert "is promised" not in said(got, promise="replay", want=votes)
    a, b = {"w": arrays(3)}, {"w": arrays(3, seed=1)}
    assert equal_to(b, {"of b": lambda: b}) == "equals, bit for bit, a replay of b"
    assert equal_to(a, {"of b": lambda: b}) is None


def test_one_side_of_an_identity_counts_parts_less():
    one_of_four = Finding([summed(OWN, [2 / 3, 1, 1, 2 / 3])], WANT, CASE, N, "identity")
    assert reasons(one_of_four)[0].startswith("the sum counts examples 0, 1, 6 0.6667 times")
    noise = {n: g + 0.1 * arrays(*g.shape) for n, g in WANT.items()}
    assert reasons(replace(one_of_four, got=[noise])) == [UNKNOWN]
