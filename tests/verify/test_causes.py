"""Causes, on numbers that are made up; and that sound and randomly wrong gradients have none."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist import nn
from minidist.verify.causes import cause_of
from minidist.verify.causes.examples import of_examples
from minidist.verify.causes.finding import Finding
from minidist.verify.causes.gradients import cause, right_from
from minidist.verify.strategies import Case, Division, one_device
from minidist.verify.strategies.cases import padded, random_weights
from tests import causes
from tests.strategies import arrays, seeds

MLP = random_weights(nn.MLP([4, 5, 6, 3], "gelu", seed=1, dtype="float64"))
CASE = Case("MLP", MLP, arrays(7, 4), np.arange(7) % 3)
NAMES = list(MLP.named_parameters())
STAGES = tuple([f"layers.{i}.weight", f"layers.{i}.bias"] for i in range(3))
TOKENS, NEXTS = np.random.default_rng(0).integers(0, 7, (2, 5, 6))


def transformer_case():
    model = nn.Transformer(7, 12, 6, 2, 6, dtype="float64", dropout=0.2, tied=True)
    return Case("Transformer", random_weights(model), TOKENS, NEXTS)


def found(got, split, case=CASE, **more):
    """Return the cause of these gradients: one dictionary for all ranks, or one per rank."""
    got = got if isinstance(got, list) else [got] * max(split.data, split.tensor, 2)
    return cause(Finding(got, one_device(case), case, split, **more))


def scaled(gradients, factor, names=None):
    return {n: g * (factor if names is None or n in names else 1) for n, g in gradients.items()}


def summed(parts, factors=None):
    factors = factors or [1] * len(parts)
    return {n: sum(f * p[n] for p, f in zip(parts, factors, strict=True)) for n in parts[0]}


def parts_of(split, case=CASE):
    return [of_examples(case, rows) for rows in split.parts(7).values()]


FACTORS = {
    4: "ratio 4 = number of micro-batches: a missing 1/m",
    1 / 4: "ratio 0.25 = 1 / number of micro-batches: 1/m applied twice",
    16: "ratio 16 = the square of the number of micro-batches: a missing 1/m^2",
    3: "ratio 3 = number of data-parallel ranks: a missing 1/N",
    1 / 3: "ratio 0.3333 = 1 / number of data-parallel ranks: 1/N applied twice",
    1 / 9: "ratio 0.1111 = 1 / the square of the number of data-parallel ranks: 1/N^2",
    2: "ratio 2 = number of stages: a missing 1/S",
    **dict.fromkeys([1.7, 4.001, 3.999, -4, 64]),
}


@pytest.mark.parametrize("factor, words", FACTORS.items())
def test_a_factor_is_a_power_of_a_number_of_the_case(factor, words):
    split = Division(data=3, micro_batches=4, stages=(NAMES[:2], NAMES[2:]))
    assert found(scaled(one_device(CASE), factor), split) == words


def test_where_two_numbers_are_equal_both_are_named():
    said = found(scaled(one_device(CASE), 3), Division(micro_batches=3, tensor=3))
    assert said == "ratio 3 = number of tensor-parallel ranks or micro-batches: a missing 1/N"


def test_a_factor_in_biases_alone_says_so():
    want = one_device(CASE)
    said = found(scaled(want, 2, [n for n in NAMES if "bias" in n]), Division(tensor=2))
    assert said.startswith("ratio 2 = number of tensor-parallel ranks: a missing 1/N, only in bias")


@pytest.mark.parametrize("sign, how", [(1, "multiplied"), (-1, "divided")])
def test_a_factor_per_stage(sign, how):
    want, split = one_device(CASE), Division(micro_batches=4, stages=STAGES)
    got = {n: g * 4.0 ** (sign * split.behind(n)) for n, g in want.items()}
    said = f"ratio {4.0**sign:g}^(stages behind it): {how} by the 4 micro-batches at every stage"
    assert found(got, split) == said


RANKS, MICRO_BATCHES = Division(data=3), Division(micro_batches=4)
BOTH, UNEVEN = Division(data=2, micro_batches=2), Division(micro_batches=3)
EVEN = [7 / (3 * n) for n in (3, 2, 2)]  # factors of parts of 3, 2 and 2 examples
OWN = "each divided by its own number of targets"
SUMS = [  # of the parts' gradients, each times a factor
    (RANKS, [0, 3, 0], "equals 3 times the gradient of rank 1's examples: all had the same batch"),
    (RANKS, [1, 1, 0], "equals the gradient without the examples of data-parallel rank 2: skipped"),
    (RANKS, [2, 1, 1], "the gradient with the examples of data-parallel rank 0 counted twice"),
    (RANKS, EVEN, f"equals the mean of the ranks' means: {OWN}"),
    (RANKS, [3 * f for f in EVEN], f"equals the sum of the ranks' means: {OWN}"),
    (UNEVEN, EVEN, f"equals the mean of micro-batches' means: {OWN}"),
    (MICRO_BATCHES, [1, 1, 1, 0], "the gradient without micro-batch 3, the last: skipped"),
    (MICRO_BATCHES, [1, 2, 1, 1], "the gradient with micro-batch 1 counted twice"),
    (BOTH, [0, 1, 0, 1], "equals the gradient without micro-batch 0 of every rank: skipped"),
    (BOTH, [1, 1, 0, 1], "equals the gradient without micro-batch 0 of rank 1: skipped"),
    *[(RANKS, f, None) for f in ([1, 1.4, 1], [1, 1, 1e-3], [0, 1, 2], [1.0001, 1, 0])],
]


@pytest.mark.parametrize("split, factors, words", SUMS)
def test_sums_of_parts_of_the_batch(split, factors, words):
    cause_found = found(summed(parts_of(split), factors), split)
    assert cause_found is None if words is None else words in cause_found


def test_parts_of_the_batch_that_stay_where_they_are():
    parts, own = parts_of(RANKS), "equals the local gradient: the all_reduce is missing"
    assert found(parts, RANKS) == own
    assert found(parts, RANKS, right_bytes=True).startswith(own + ", though as many bytes moved")
    one = [{**one_device(CASE), NAMES[0]: part[NAMES[0]]} for part in parts]
    assert found(one, RANKS) == f"{own}, only in {NAMES[0]}"


def test_means_over_the_targets_that_count():
    case, split = transformer_case(), Division(data=3)  # 2, 2 and 1 of the 5 examples
    case = replace(case, targets=padded(case.targets))
    got = scaled(one_device(case), case.total / case.targets.size)
    said = f"ratio 0.8 = {case.total} targets that count / all 30: padding was counted"
    assert found(got, split, case) == said
    shares = list(split.parts(5).values())
    parts = [of_examples(case, rows) for rows in shares]
    means = [case.total / nn.counted(case.targets[rows]) for rows in shares]
    said = "equals the {}: each divided by its own number of targets"
    for how, weights in {
        "mean of the ranks' means": [1 / 3] * 3,
        "sum of the ranks' means": [1, 1, 1],
        "sum of the ranks' means, weighted by examples": [2 / 5, 2 / 5, 1 / 5],
    }.items():
        factors = [mean * weight for mean, weight in zip(means, weights, strict=True)]
        assert found(summed(parts, factors), split, case) == said.format(how)


def test_a_part_in_which_nothing_counts_hides_no_cause():
    targets = NEXTS.copy()
    targets[2] = nn.IGNORED
    case, split = replace(transformer_case(), targets=targets), Division(data=5)
    parts = [of_examples(case, rows) for rows in split.parts(5).values()]
    assert "without the examples of data-parallel rank 4" in found(summed(parts[:4]), split, case)


def test_parts_that_are_still_to_be_added_up():
    case = transformer_case()
    want, split = one_device(case), Division(tensor=2)
    norms = [n for n in want if ".norm" in n]
    other = {n: arrays(*want[n].shape, seed=7) for n in norms}
    got = [{**want, **other}, {**want, **{n: want[n] - other[n] for n in norms}}]
    said = found(got, split, case)
    assert said.startswith(
        "the ranks' parts add up to the gradient: an all_reduce is missing, only in norms"
    )


def test_nothing_infinity_rounding_and_other_weights():
    want = one_device(CASE)
    assert found(scaled(want, 0), Division()) == "every gradient is zero: nothing was computed"
    got = {**want, NAMES[1]: np.full(5, np.nan)}
    assert found(got, Division()) == f"{NAMES[1]} is not finite on rank 0, but is on one device"
    got = {n: g.astype("float32").astype("float64") for n, g in want.items()}
    assert found(got, Division()).startswith("right, except for rounding to float32")
    a, b = arrays(3), arrays(3, seed=1)
    held = ({NAMES[0]: (a, a)}, {NAMES[0]: (a, b)})
    said = f"rank 1's weights in {NAMES[0]} are not its part of the global ones"
    assert found(want, Division(), held=held) == f"{said}; it holds the same numbers as rank 0"


@given(
    seed=seeds,
    wrong=st.sets(st.sampled_from(NAMES), min_size=1),
    size=st.sampled_from([1e-6, 1e-2, 1.0]),
    split=st.sampled_from(
        [Division(data=3), Division(micro_batches=4, stages=STAGES[:2]), Division(tensor=2)]
    ),
)
def test_random_errors_and_sound_gradients_have_no_cause(seed, wrong, size, split):
    want = one_device(CASE)
    assert found(want, split) is None
    got = {n: g + size * arrays(*g.shape, seed=seed) * (n in wrong) for n, g in want.items()}
    assert found(got, split) is None


def test_what_a_known_mistake_almost_leaves_has_no_cause():
    want, split = one_device(CASE), Division(micro_batches=4, stages=(NAMES, NAMES))
    assert found(scaled(want, 2, NAMES), replace(split, micro_batches=1)).startswith(
        "ratio 2 = number of stages that hold it: summed once more"
    )
    assert found(scaled(want, 1.7, NAMES), split) is None
    assert found([scaled(want, 4), scaled(want, 3)], split) is None  # not on all ranks
    assert found([scaled(want, 4), want], split) is None
    single = {n: (g + 0.1).astype("float32").astype("float64") for n, g in want.items()}
    assert found(single, split) is None  # of few digits, but wrong
    noise = {n: 1e-6 * arrays(*g.shape, seed=5) for n, g in want.items()}
    parts = parts_of(RANKS)
    assert found(summed([*parts[:2], noise]), RANKS) is None
    noisy = [summed([part, noise]) for part in parts]
    assert found(noisy, RANKS) is None and found(noisy[:2], Division(tensor=2)) is None
    assert found([want, scaled(want, 0)], Division(tensor=2)) is None  # one rank has all of it


def test_where_one_device_has_infinity_the_ranks_are_not_to_blame():
    want = {n: g.copy() for n, g in one_device(CASE).items()}
    want[NAMES[1]][0] = np.inf
    said = cause(Finding([want] * 2, want, CASE, Division()))
    assert said == f"{NAMES[1]} is not finite on one device either"


def test_where_backward_goes_wrong_is_said_if_all_behind_it_is_right():
    want = one_device(CASE)
    got = {**want, **{n: arrays(*want[n].shape) for n in NAMES[:3]}}
    finding = Finding([got], want, CASE, Division())
    assert right_from(finding) == f"all from {NAMES[3]} on are right"
    for wrong in ([2], [0, 2]):
        got = {**want, **{NAMES[i]: want[NAMES[i]] + 1 for i in wrong}}
        assert right_from(replace(finding, got=[got])) is None


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
    assert "minibatch 1: forward with version 0, backward with version 1" in cause_of.versions(used)
    used = [[("F", 0, 0), ("F", 1, 1), ("B", 0, 0), ("B", 1, 0)]]
    assert "minibatch 1: forward with version 1, backward with version 0" in cause_of.versions(used)
    used = [[("F", 0, 0), ("B", 0, 0), ("F", 1, 0), ("B", 1, 0)]]
    assert cause_of.versions(used) is None
    said = cause_of.versions(used, lambda stage, b: 2 * b)
    assert said.endswith("F with version 0, by the formula 2: 2 updates older than it should be")


def test_replays_and_bytes():
    a, b = {"w": arrays(3)}, {"w": arrays(3, seed=1)}

    def impossible():
        raise ValueError("no run can leave these logs")

    others = {"that is impossible": impossible, "of b": lambda: b}
    assert cause_of.replays(b, others) == "equals, bit for bit, a replay of b"
    assert cause_of.replays(a, others) is None
    said = causes.of_bytes_held({"state": 8}, {"state": 4}, {"state": 8})
    assert said == "state: 8 bytes, not 4; as much as if it were not split"
    said = "send: by the ledger rank 1 sent 5 bytes, not 4"
    assert causes.of_bytes_moved([4, 5], [4, 4], "send") == said
