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
from minidist.verify.strategies import Case, one_device
from minidist.verify.strategies.cases import padded, random_weights
from minidist.verify.strategies.parameter_server import equal_to
from tests import causes
from tests.strategies import arrays, seeds

MLP = random_weights(nn.MLP([4, 5, 6, 3], "gelu", seed=1, dtype="float64"))
CASE = Case("MLP", MLP, arrays(7, 4), np.arange(7) % 3)
NAMES = list(MLP.named_parameters())
TOKENS, NEXTS = np.random.default_rng(0).integers(0, 7, (2, 5, 6))


def transformer_case():
    model = nn.Transformer(7, 12, 6, 2, 6, dtype="float64", dropout=0.2, tied=True)
    return Case("Transformer", random_weights(model), TOKENS, NEXTS)


def found(got, ranks=2, case=CASE):
    """Return the cause of these gradients: one dictionary for all ranks, or one per rank."""
    got = got if isinstance(got, list) else [got] * ranks
    first, *_ = [*reasons(Finding(got, one_device(case), case, ranks)), UNKNOWN]
    return None if first == UNKNOWN else first


def scaled(gradients, factor, names=None):
    return {n: g * (factor if names is None or n in names else 1) for n, g in gradients.items()}


def summed(parts, factors=None):
    factors = factors or [1] * len(parts)
    return {n: sum(f * p[n] for p, f in zip(parts, factors, strict=True)) for n in parts[0]}


def shares(ranks, examples=7):
    return np.array_split(np.arange(examples), ranks)


def parts_of(ranks, case=CASE):
    return [of_examples(case, rows) for rows in shares(ranks)]


FACTORS = {
    3: "ratio 3 = number of ranks: a missing 1/N",
    1 / 3: "ratio 0.3333 = 1 / number of ranks: 1/N applied twice",
    9: "ratio 9 = the square of the number of ranks: a missing 1/N^2",
    1 / 9: "ratio 0.1111 = 1 / the square of the number of ranks: 1/N^2",
    **dict.fromkeys([1.7, 3.001, 2.999, -3, 27]),
}


@pytest.mark.parametrize("factor, words", FACTORS.items())
def test_a_factor_is_a_power_of_the_number_of_ranks(factor, words):
    assert found(scaled(one_device(CASE), factor), 3) == words


def test_a_factor_in_biases_alone_says_so():
    said = found(scaled(one_device(CASE), 2, [n for n in NAMES if "bias" in n]))
    assert said.startswith("ratio 2 = number of ranks: a missing 1/N, only in bias")


EVEN = [7 / (3 * n) for n in (3, 2, 2)]  # factors of parts of 3, 2 and 2 examples
OWN = "each divided by its own number of targets"
SUMS = [  # of the gradients of three ranks' examples, each times a factor
    ([0, 3, 0], "equals 3 times the gradient of rank 1's examples: all had the same batch"),
    (EVEN, f"equals the mean of the ranks' means: {OWN}"),
    ([3 * f for f in EVEN], f"equals the sum of the ranks' means: {OWN}"),
    *[(f, None) for f in ([1, 1.4, 1], [1, 1, 1e-3], [0, 1, 2], [1.0001, 1, 0])],
]


@pytest.mark.parametrize("factors, words", SUMS)
def test_sums_of_parts_of_the_batch(factors, words):
    assert found(summed(parts_of(3), factors), 3) == words


def test_where_two_of_four_ranks_share_examples_their_sums_are_found():
    first, second = parts_of(2)
    own = "equals the local gradient: the all_reduce is missing"
    assert found([first, first, second, second], 4) == own
    said = "equals 2 times the gradient of rank 1's examples: all had the same batch"
    assert found(summed([second], [2]), 4) == said


def test_parts_of_the_batch_that_stay_where_they_are():
    parts, own = parts_of(3), "equals the local gradient: the all_reduce is missing"
    assert found(parts, 3) == own
    one = [{**one_device(CASE), NAMES[0]: part[NAMES[0]]} for part in parts]
    assert found(one, 3) == f"{own}, only in {NAMES[0]}"


def test_means_over_the_targets_that_count():
    case = transformer_case()
    case = replace(case, targets=padded(case.targets))
    got = scaled(one_device(case), case.total / case.targets.size)
    said = f"ratio 0.8 = {case.total} targets that count / all 30: padding was counted"
    assert found(got, 3, case) == said
    rows_of = shares(3, 5)  # 2, 2 and 1 of the 5 examples
    parts = [of_examples(case, rows) for rows in rows_of]
    means = [case.total / nn.counted(case.targets[rows]) for rows in rows_of]
    said = "equals the {}: each divided by its own number of targets"
    for how, weights in {
        "mean of the ranks' means": [1 / 3] * 3,
        "sum of the ranks' means": [1, 1, 1],
        "sum of the ranks' means, weighted by examples": [2 / 5, 2 / 5, 1 / 5],
    }.items():
        factors = [mean * weight for mean, weight in zip(means, weights, strict=True)]
        assert found(summed(parts, factors), 3, case) == said.format(how)


def test_a_part_in_which_nothing_counts_hides_no_cause():
    targets = NEXTS.copy()
    targets[2] = nn.IGNORED
    case = replace(transformer_case(), targets=targets)
    parts = [of_examples(case, rows) for rows in shares(5, 5)]
    assert found(parts, 5, case) == "equals the local gradient: the all_reduce is missing"


def test_parts_that_are_still_to_be_added_up():
    case = transformer_case()
    want = one_device(case)
    norms = [n for n in want if ".norm" in n]
    other = {n: arrays(*want[n].shape, seed=7) for n in norms}
    got = [{**want, **other}, {**want, **{n: want[n] - other[n] for n in norms}}]
    said = found(got, 2, case)
    assert said.startswith(
        "the ranks' parts add up to the gradient: an all_reduce is missing, only in norms"
    )


def test_nothing_infinity_rounding_and_other_weights():
    want = one_device(CASE)
    assert found(scaled(want, 0)) == "every gradient is zero: nothing was computed"
    got = {**want, NAMES[1]: np.full(5, np.nan)}
    assert found(got) == f"{NAMES[1]} is not finite on rank 0, but is on one device"
    got = {n: g.astype("float32").astype("float64") for n, g in want.items()}
    assert found(got).startswith("right, except for rounding to float32")


@given(
    seed=seeds,
    wrong=st.sets(st.sampled_from(NAMES), min_size=1),
    size=st.sampled_from([1e-6, 1e-2, 1.0]),
    ranks=st.sampled_from([2, 3, 4]),
)
def test_random_errors_and_sound_gradients_have_no_cause(seed, wrong, size, ranks):
    want = one_device(CASE)
    assert found(want, ranks) is None
    got = {n: g + size * arrays(*g.shape, seed=seed) * (n in wrong) for n, g in want.items()}
    assert found(got, ranks) is None


def test_what_a_known_mistake_almost_leaves_has_no_cause():
    want = one_device(CASE)
    assert found(scaled(want, 1.7, NAMES), 4) is None
    assert found([scaled(want, 2), scaled(want, 3)]) is None  # not on all ranks
    assert found([scaled(want, 2), want]) is None
    single = {n: (g + 0.1).astype("float32").astype("float64") for n, g in want.items()}
    assert found(single) is None  # of few digits, but wrong
    noise = {n: 1e-6 * arrays(*g.shape, seed=5) for n, g in want.items()}
    parts = parts_of(3)
    assert found(summed([*parts[:2], noise]), 3) is None
    noisy = [summed([part, noise]) for part in parts]
    assert found(noisy, 3) is None and found(noisy[:2]) is None
    assert found([want, scaled(want, 0)]) is None  # one rank has all of it


def test_where_one_device_has_infinity_the_ranks_are_not_to_blame():
    want = {n: g.copy() for n, g in one_device(CASE).items()}
    want[NAMES[1]][0] = np.inf
    said, *_ = reasons(Finding([want] * 2, want, CASE, 2))
    assert said == f"{NAMES[1]} is not finite on one device either"


def test_where_backward_goes_wrong_is_said_if_all_behind_it_is_right():
    want = one_device(CASE)
    got = {**want, **{n: arrays(*want[n].shape) for n in NAMES[:3]}}
    finding = Finding([got], want, CASE, 1)
    assert reasons(finding) == [UNKNOWN, f"all from {NAMES[3]} on are right"]
    for wrong in ([2], [0, 2]):
        got = {**want, **{NAMES[i]: want[NAMES[i]] + 1 for i in wrong}}
        assert reasons(replace(finding, got=[got])) == [UNKNOWN]


def test_what_is_in_a_sum():
    inputs = [arrays(7, seed=r) for r in range(3)]
    sound = [np.sum(inputs, axis=0)] * 3
    assert causes.of_sums(inputs, sound) is None
    wrong = sound[1].copy()
    wrong[3:5] = inputs[0][3:5] + 2 * inputs[2][3:5]
    said = "rank 1, elements 3 to 4: the sum is one without rank 1 and with rank 2 twice"
    assert causes.of_sums(inputs, [sound[0], wrong, sound[2]]) == said
    assert "no sum" in causes.of_sums(inputs, [sound[0] + 0.1] * 3)


def test_norms_of_parts_and_of_copies():
    assert causes.of_norms([5.0, 5.0], 5.0) is None
    assert "0.6, 0.8 of one device's; their squares add up" in causes.of_norms([3.0, 4.0], 5.0)
    assert "2 times too large: every element was counted 2 times" in causes.of_norms(
        [2**0.5] * 2, 1.0
    )
    assert causes.of_norms([1.3, 1.2], 1.0) == "the ranks' norms are 1.3, 1.2 of one device's"


def test_versions_that_two_passes_or_a_formula_do_not_agree_on():
    used = [[("F", 0, 0), ("F", 1, 0), ("B", 0, 0), ("B", 1, 1)]]
    said = "minibatch 1: forward with version {}, backward with version {}"
    assert said.format(0, 1) in causes.of_versions(used)
    used = [[("F", 0, 0), ("F", 1, 1), ("B", 0, 0), ("B", 1, 0)]]
    assert said.format(1, 0) in causes.of_versions(used)
    used = [[("F", 0, 0), ("B", 0, 0), ("F", 1, 0), ("B", 1, 0)]]
    assert causes.of_versions(used) is None
    said = causes.of_versions(used, lambda stage, b: 2 * b)
    assert said.endswith("F with version 0, by the formula 2: 2 updates older than it should be")


def test_replays_and_bytes():
    a, b = {"w": arrays(3)}, {"w": arrays(3, seed=1)}

    def impossible():
        raise ValueError("no run can leave these logs")

    others = {"that is impossible": impossible, "of b": lambda: b}
    assert equal_to(b, others) == "equals, bit for bit, a replay of b"
    assert equal_to(a, others) is None
    said = causes.of_bytes_held({"state": 8}, {"state": 4}, {"state": 8})
    assert said == "state: 8 bytes, not 4; as much as if it were not split"
    said = "send: by the ledger rank 1 sent 5 bytes, not 4"
    assert causes.of_bytes_moved([4, 5], [4, 4], "send") == said
