"""What is said of a reader's wrong function; and that a different error is not said to be that."""

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
from minidist.verify.strategies.cases import random_weights, trained
from tests.strategies import arrays, seeds

N = 4
MLP = random_weights(nn.MLP([4, 5, 6, 3], "gelu", seed=1, dtype="float64"))
CASE = Case("MLP", MLP, arrays(7, 4), np.arange(7) % 3)
SHARES = np.array_split(np.arange(7), N)  # 0, 1; 2, 3; 4, 5; 6


def only_trained(gradients, case=CASE):
    return {name: gradients[name] for name in trained(case.model)}


def transformer_case(**options):
    tokens, nexts = np.random.default_rng(0).integers(0, 7, (2, 8, 6))
    model = nn.Transformer(7, 8, 2, 2, 6, dtype="float64", **options)
    return Case("Transformer", random_weights(model), tokens, nexts)


WANT = only_trained(one_device(CASE))
NAMES = list(WANT)
OWN = [only_trained(of_examples(CASE, rows)) for rows in SHARES]  # of ranks
SINGLE = [only_trained(of_examples(CASE, np.array([i]))) for i in range(7)]  # of examples


def said(got, case=CASE, promise="exact", want=None):
    """Return what is said of these gradients: one dictionary for all ranks, or one per rank."""
    got = got if isinstance(got, list) else [got] * N
    want = only_trained(one_device(case), case) if want is None else want
    finding = Finding(got, want, case, N, promise)
    return "; ".join(reasons(finding))


def summed(parts, factors=None):
    factors = factors or [1] * len(parts)
    return {n: sum(f * p[n] for p, f in zip(parts, factors, strict=True)) for n in parts[0]}


def flat(gradients):
    return np.concatenate([g.reshape(-1) for g in gradients.values()])


def from_flat(vector):
    ends = np.cumsum([g.size for g in WANT.values()])[:-1]
    return {n: v.reshape(WANT[n].shape) for n, v in zip(NAMES, np.split(vector, ends), strict=True)}


COUNTS = [
    ([2, 2, 1, 1, 1, 0, 1], "the sum counts examples 0, 1 twice, example 5 not at all"),
    ([1, 1, 1, 1, 1, 1, 0], "the sum counts example 6 not at all"),
    ([1, 1, 1, 3, 1, 1, 0.5], "the sum counts example 3 3 times, example 6 0.5 times"),
    (
        [0.2, 0.2, 0.3, 0.3, 0.4, 0.4, 0.1],
        "the sum counts examples 0, 1 0.2 times, examples 2, 3 0.3 times, examples 4, 5 0.4 times,"
        " example 6 0.1 times; as if each rank had scaled its share before the sum (clipped it?)",
    ),
]


@pytest.mark.parametrize("factors, words", COUNTS)
def test_how_often_each_example_counts(factors, words):
    assert said(summed(SINGLE, factors)) == words


@given(st.lists(st.sampled_from([0, 0.3, 1, 2]), min_size=7, max_size=7).filter(np.ptp), seeds)
def test_weights_are_said_of_sums_of_examples_alone(factors, seed):
    got = summed(SINGLE, factors)
    words = said(got)
    assert "the sum counts" in words or "the ranks'" in words or "all had" in words
    noise = {n: g + 1e-5 * arrays(*g.shape, seed=seed) for n, g in got.items()}
    assert said(noise) == UNKNOWN


def test_a_share_with_two_weights_was_not_scaled_as_a_whole():
    assert "clipped" not in said(summed(SINGLE, [0.2, 0.25, 0.3, 0.3, 0.4, 0.4, 0.1]))


def test_a_part_of_a_sum_says_in_which_elements_and_on_which_rank():
    got = flat(WANT).copy()
    got[10:40] = flat(summed(OWN[:3]))[10:40]
    words = said([WANT, from_flat(got), WANT, WANT])
    assert words.startswith(
        "on rank 1 the sum counts example 6 not at all, in elements 10 to 39 of all 82"
    )


def among(*sets):
    return [summed([OWN[k] for k in next(s for s in sets if r in s)]) for r in range(N)]


AMONG = [
    (among({0, 1}, {2, 3}), "ranks {0, 1} and {2, 3} are summed among themselves, never across"),
    (among({0, 2}, {1, 3}), "ranks {0, 2} and {1, 3} are summed among themselves, never across"),
    ([WANT, *OWN[1:]], "only rank 0 has the sum, the others their own: reduce, not all_reduce"),
    ([OWN[2]] * N, "every rank has only the gradient of rank 2's examples: broadcast, not summed"),
]


@pytest.mark.parametrize("got, words", AMONG)
def test_sums_among_some_ranks_are_named(got, words):
    assert said(got) == words
    bent = {n: 1.01 * g for n, g in got[3].items()}
    assert words not in said([*got[:3], bent])
    noisy = {n: g + 1e-6 * arrays(*g.shape, seed=3) for n, g in got[3].items()}
    assert said([*got[:3], noisy]) == UNKNOWN


def cnn_case():
    model = random_weights(nn.CNN(2, classes=3, widths=(3, 4), dtype="float64"))
    for norm in model.modules(nn.BatchNorm):
        norm.running_var.data[...] = 1
    return Case("CNN", model, arrays(8, 2, 6, 6), np.arange(8) % 3)


def test_a_batch_norm_with_statistics_of_a_rank_is_named_and_its_examples_are_not_counted():
    case = cnn_case()
    own = [only_trained(of_examples(case, rows), case) for rows in np.split(np.arange(8), N)]
    assert (
        said(summed(own), case)
        == "each rank's batch norms used its own examples' statistics, not the batch's"
    )
    assert said(summed(own, [2, 1, 1, 0.5]), case) == UNKNOWN


def test_masks_by_local_numbers_are_named_and_others_are_not():
    case = transformer_case(dropout=0.3)
    shares = np.split(np.arange(8), N)

    def drawn(numbers):
        return summed([only_trained(of_examples(case, x, numbers(x)), case) for x in shares])

    local = "each rank's masks of dropout were drawn by its own numbers of examples, from 0"
    assert said(drawn(lambda rows: np.arange(len(rows))), case) == local
    assert said(drawn(lambda rows: (rows + 3) % 8), case) == UNKNOWN


def test_right_numbers_in_another_order():
    words = said(from_flat(np.roll(flat(WANT), 9)))
    assert words == "the right numbers at other places, most of them 9 elements later"
    backwards = flat(WANT)[::-1].copy()
    assert said(from_flat(backwards)) == "the right numbers at other places"
    backwards[3] *= 1 + 1e-6
    assert said(from_flat(backwards)) == UNKNOWN
    lost = flat(WANT).copy()
    lost[-6:] = 0  # not moved
    assert said(from_flat(lost)).startswith(UNKNOWN)


def test_parts_that_are_added_at_other_places():
    reverse = [from_flat(flat(part)[::-1]) for part in OWN]
    got = [summed([*OWN[:3], reverse[3]]), *[summed([*reverse[:3], OWN[3]])] * 3]
    words = "on rank 0 the parts of rank 3 are added at other places than the rest"
    assert said(got) == words
    reverse[3] = {n: 1.01 * g for n, g in reverse[3].items()}
    assert said([summed([*OWN[:3], reverse[3]]), *got[1:]]) == UNKNOWN


def test_parameters_that_are_exchanged_or_transposed():
    case = transformer_case()
    want = only_trained(one_device(case), case)
    a, b = "blocks.0.norm_1.gain", "blocks.1.norm_1.gain"
    got = {**want, a: want[b], b: want[a]}
    assert f"{a} has the gradient of {b}, {b} has the gradient of {a}" in said(got, case)
    name = "blocks.0.attention.output.weight"
    assert said({**want, name: want[name].T}, case) == f"{name} is transposed"
    assert "transposed" not in said({**want, name: -want[name].T}, case)


@pytest.mark.parametrize("kind, digits", [("float16", 11), ("bfloat16", 8), ("float32", 24)])
def test_numbers_of_a_smaller_type(kind, digits):
    def rounded(g):
        mantissa, exponent = np.frexp(g)
        return np.ldexp(np.round(mantissa * 2.0**digits), exponent - digits)

    got = {n: rounded(g) for n, g in WANT.items()}
    words = f"right, except for rounding to {kind}: numbers lost digits on the way"
    assert said(got) == words
    assert "rounding to" not in said({n: g + 1e-9 for n, g in got.items()})
    assert "rounding to" not in said({n: rounded(1.1 * g) for n, g in WANT.items()})


FACTORS = [
    (2, "ratio 2: added 2 times, or 2 micro-batches that were not averaged"),
    (3, "ratio 3: added 3 times, or 3 micro-batches that were not averaged"),
    (
        4,
        "ratio 4 = number of data-parallel ranks: a missing 1/N, or a sum summed again, "
        "or 4 micro-batches that were not averaged",
    ),
    (0.25, "ratio 0.25 = 1 / number of data-parallel ranks: 1/N applied twice"),
    (-1, "ratio -1: the sign is wrong"),
    (0.031, "ratio 0.031: scaled after the sum (clipped?)"),
]


@pytest.mark.parametrize("factor, words", FACTORS)
def test_one_factor_has_several_causes(factor, words):
    got = {n: factor * g for n, g in WANT.items()}
    assert said(got) == words
    got[NAMES[2]] = got[NAMES[2]] * 1.01
    assert words not in said(got)


def test_a_few_numbers_are_not_told_as_a_multiple():
    assert said({**WANT, NAMES[-1]: 1.3 * WANT[NAMES[-1]]}) == UNKNOWN


def test_a_weight_of_two_layers_may_be_summed_for_each_or_for_one_alone():
    case = transformer_case(tied=True)
    want = only_trained(one_device(case), case)
    tied, other = "embedding.token.weight", "embedding.position.weight"
    words = "ratio 4, in a weight that 2 layers have: summed again for each of them"
    assert said({**want, tied: 4 * want[tied]}, case) == f"{words}, only in {tied}"
    assert "2 layers" not in said({**want, other: 4 * want[other]}, case)
    first = arrays(*want[tied].shape)
    uses = [{**want, tied: first}, want, want, {**want, tied: want[tied] - first}]
    assert "or the sum over its uses" in said(uses, case)
    uses[3] = {**want, tied: 1.001 * (want[tied] - first)}
    assert said(uses, case).startswith(UNKNOWN)


def test_a_replay_is_right_but_for_rounding_or_differs_in_one_value():
    votes = {n: np.sign(g) * (np.abs(g) > 0.1) for n, g in WANT.items()}
    near = {n: g * (1 + 1e-15) for n, g in WANT.items()}
    rounding = "right but for rounding, not bit for bit: the sum was taken in another order"
    assert said(near, promise="replay") == rounding
    far = {n: g + 1e-8 * arrays(*g.shape) for n, g in WANT.items()}
    assert said(far, promise="replay") == UNKNOWN
    got = {n: np.where(v == 0, 1.0, v) for n, v in votes.items()}
    count = sum((v == 0).sum() for v in votes.values())
    words = f"{N * count} of {N * 82} elements differ: 0 is promised, 1 is there"
    assert said(got, promise="replay", want=votes) == words
    got = {n: -v for n, v in got.items()}
    assert "is promised" not in said(got, promise="replay", want=votes)


def test_one_side_of_an_identity_counts_parts_less():
    words = said([summed(OWN, [2 / 3, 1, 1, 2 / 3])], promise="identity")
    assert words.startswith("the sum counts examples 0, 1, 6 0.6667 times")
    noise = [summed([WANT, {n: 0.1 * arrays(*g.shape) for n, g in WANT.items()}])]
    assert said(noise, promise="identity") == UNKNOWN


def test_a_missing_gradient_is_said_first_and_nothing_of_the_right_ones():
    got = {n: 2 * g for n, g in WANT.items() if n != NAMES[3]}
    assert str(compare([got], WANT)) == f"{NAMES[3]} is missing on rank 0"
    right = {n: g for n, g in WANT.items() if n != NAMES[3]}
    assert said(right) == "" and said(right, promise="replay") == ""


def test_examples_are_named_where_a_reader_deals_them_out():
    finding = Finding([summed(OWN[:3])] * N, WANT, CASE, N)
    assert "example 6 not at all" in reasons(replace(finding, promise="exact"))[0]
    assert reasons(finding) == [UNKNOWN]  # a strategy of the package may cut something else
