"""Causes, on numbers that are made up; and that sound and randomly wrong gradients have none."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist import nn
from minidist.tools.causes import cause_of, counterfactuals
from minidist.tools.causes.finding import Finding
from minidist.tools.causes.gradients import cause, right_from
from minidist.tools.strategies import Case, Split, one_device
from minidist.tools.strategies.cases import padded, random_weights, translator_case
from tests.strategies import arrays, seeds

MLP = random_weights(nn.MLP([4, 5, 6, 3], "gelu", seed=1, dtype="float64"))
CASE = Case("MLP", MLP, arrays(7, 4), np.arange(7) % 3)
NAMES = list(MLP.named_parameters())
STAGES = tuple([f"layers.{i}.weight", f"layers.{i}.bias"] for i in range(3))
TOKENS, NEXTS = np.random.default_rng(0).integers(0, 7, (2, 5, 6))


def transformer_case(tied=True, dropout=0.2):
    model = nn.Transformer(7, 12, 6, 2, 6, dtype="float64", dropout=dropout, tied=tied)
    return Case("Transformer", random_weights(model), TOKENS, NEXTS)


def found(got, split, case=CASE, **more):
    """Return the cause of these gradients: one dictionary for all ranks, or one per rank."""
    got = got if isinstance(got, list) else [got] * max(split.data, split.tensor, 2)
    return cause(Finding(got, one_device(case), case, split, **more))


def scaled(gradients, factor, names=None):
    return {n: g * (factor if names is None or n in names else 1) for n, g in gradients.items()}


def summed(parts, factors=None):
    factors = [1] * len(parts) if factors is None else factors
    return {n: sum(f * p[n] for p, f in zip(parts, factors, strict=True)) for n in parts[0]}


def parts_of(split, case=CASE):
    return [counterfactuals.of_examples(case, rows) for rows in split.parts(7).values()]


@pytest.mark.parametrize(
    "factor, words",
    [
        (4, "ratio 4 = number of micro-batches: a missing 1/m"),
        (1 / 4, "ratio 0.25 = 1 / number of micro-batches: 1/m applied twice"),
        (16, "ratio 16 = the square of the number of micro-batches: a missing 1/m^2"),
        (3, "ratio 3 = number of data-parallel ranks: a missing 1/N"),
        (1 / 3, "ratio 0.3333 = 1 / number of data-parallel ranks: 1/N applied twice"),
        (1 / 9, "ratio 0.1111 = 1 / the square of the number of data-parallel ranks: 1/N^2"),
        (2, "ratio 2 = number of stages: a missing 1/S"),
    ],
)
def test_a_factor_is_a_power_of_a_number_of_the_case(factor, words):
    split = Split(data=3, micro_batches=4, stages=(NAMES[:2], NAMES[2:]))
    assert found(scaled(one_device(CASE), factor), split) == words


def test_where_two_numbers_are_equal_both_are_named_and_another_factor_has_no_cause():
    split = Split(micro_batches=3, tensor=3)
    said = found(scaled(one_device(CASE), 3), split)
    assert said == ("ratio 3 = number of tensor-parallel ranks or micro-batches: a missing 1/N")
    assert found(scaled(one_device(CASE), 1.7), split) is None


def test_a_factor_in_biases_alone_says_so():
    want = one_device(CASE)
    said = found(scaled(want, 2, [n for n in NAMES if "bias" in n]), Split(tensor=2))
    assert said.startswith("ratio 2 = number of tensor-parallel ranks: a missing 1/N, only in bias")


@pytest.mark.parametrize("sign, how", [(1, "multiplied"), (-1, "divided")])
def test_a_factor_per_stage(sign, how):
    want, split = one_device(CASE), Split(micro_batches=4, stages=STAGES)
    got = {n: g * 4.0 ** (sign * split.behind(n)) for n, g in want.items()}
    said = f"ratio {4.0**sign:g}^(stages behind it): {how} by the 4 micro-batches at every stage"
    assert found(got, split) == said


def test_parts_of_the_batch_that_are_missing_alone_or_the_same_everywhere():
    split = Split(data=3)
    parts = parts_of(split)
    own = "equals the local gradient: the all_reduce is missing"
    assert found(parts, split) == own
    assert found(parts, split, right_bytes=True).startswith(own + ", though as many bytes moved")
    said = "equals 3 times the gradient of rank 1's examples: all had the same batch"
    assert found(scaled(parts[1], 3), split) == said
    assert "without the examples of data-parallel rank 2" in found(summed(parts[:2]), split)
    assert "rank 0 counted twice" in found(summed(parts, [2, 1, 1]), split)
    one = [{**one_device(CASE), NAMES[0]: part[NAMES[0]]} for part in parts]
    assert found(one, split) == f"{own}, only in {NAMES[0]}"


def test_means_of_means():
    split = Split(data=3)  # of 3, 2 and 2 examples
    parts, even = parts_of(split), [7 / (3 * n) for n in (3, 2, 2)]
    said = "equals the {} of the ranks' means: each divided by its own number of targets"
    assert found(summed(parts, even), split) == said.format("mean")
    assert found(summed(parts, [3 * f for f in even]), split) == said.format("sum")
    split = Split(micro_batches=3)
    said = "equals the mean of micro-batches' means: each divided by its own number of targets"
    assert found(summed(parts_of(split), even), split) == said


def test_means_over_the_targets_that_count():
    case, split = transformer_case(), Split(data=3)  # 2, 2 and 1 of the 5 examples
    case = replace(case, targets=padded(case.targets))
    shares = list(split.parts(5).values())
    parts = [counterfactuals.of_examples(case, rows) for rows in shares]
    means = [case.total / nn.counted(case.targets[rows]) for rows in shares]
    said = "equals the {}: each divided by its own number of targets"
    for how, weights in {
        "mean of the ranks' means": [1 / 3] * 3,
        "sum of the ranks' means": [1, 1, 1],
        "sum of the ranks' means, weighted by examples": [2 / 5, 2 / 5, 1 / 5],
    }.items():
        factors = [mean * weight for mean, weight in zip(means, weights, strict=True)]
        assert found(summed(parts, factors), split, case) == said.format(how)


def test_padding_in_the_divisor():
    case = transformer_case()
    case = replace(case, targets=padded(case.targets))
    got = scaled(one_device(case), case.total / case.targets.size)
    said = f"ratio 0.8 = {case.total} targets that count / all 30: padding was counted"
    assert found(got, Split(data=3), case) == said


def test_a_part_in_which_nothing_counts_hides_no_cause():
    targets = NEXTS.copy()
    targets[2] = nn.IGNORED
    case, split = replace(transformer_case(), targets=targets), Split(data=5)
    parts = [counterfactuals.of_examples(case, rows) for rows in split.parts(5).values()]
    assert "without the examples of data-parallel rank 4" in found(summed(parts[:4]), split, case)


def test_micro_batches_that_are_skipped_or_done_twice():
    split = Split(micro_batches=4)
    parts = parts_of(split)
    assert "without micro-batch 3, the last: skipped" in found(summed(parts[:3]), split)
    assert "with micro-batch 1 counted twice" in found(summed(parts, [1, 2, 1, 1]), split)
    both = Split(data=2, micro_batches=2)
    parts = parts_of(both)
    said = "equals the gradient without micro-batch 0 of every rank: skipped"
    assert found(summed([parts[1], parts[3]]), both) == said
    assert "without micro-batch 0 of rank 1" in found(summed([*parts[:2], parts[3]]), both)


def test_parts_that_are_still_to_be_added_up():
    case = transformer_case()
    want, split = one_device(case), Split(tensor=2)
    norms = [n for n in want if ".norm" in n]
    other = {n: arrays(*want[n].shape, seed=7) for n in norms}
    got = [{**want, **other}, {**want, **{n: want[n] - other[n] for n in norms}}]
    said = found(got, split, case)
    assert said.startswith(
        "the ranks' parts add up to the gradient: an all_reduce is missing, only in norms"
    )


def test_one_use_of_a_tied_weight():
    case, uses = transformer_case(), counterfactuals.without_tying(transformer_case())
    want = one_device(case)
    np.testing.assert_allclose(sum(uses.gradients.values()), want[uses.name], rtol=1e-9)
    got = [{**want, uses.name: g} for g in uses.gradients.values()]
    said = "(rank 0 embedding's, rank 1 head's): not summed"
    assert said in found(got, Split(stages=(["a"], ["b"])), case)
    assert counterfactuals.without_tying(transformer_case(tied=False)) is None


def test_a_first_weight_whose_input_was_overwritten():
    split = Split(micro_batches=3, stages=STAGES)
    firsts = [stage[0] for stage in STAGES[1:]]
    again = counterfactuals.with_overwritten_inputs(CASE, firsts, split)
    said = found(again, split)
    assert said.startswith("differs only in the first weight of stages > 0 (layers.1.weight, ")
    other = {**one_device(CASE), "layers.1.weight": arrays(5, 6)}
    assert found(other, split) is None


def test_overwritten_inputs_behind_a_stage_that_is_frozen():
    case = transformer_case(tied=False)
    names = list(case.model.named_parameters())
    first, *rest = ([n for n in names if n.startswith(part)] for part in ("embedding", "blocks"))
    case.model.freeze(*first)
    split = Split(micro_batches=5, stages=(first, *rest))
    again = counterfactuals.with_overwritten_inputs(case, [stage[0] for stage in rest], split)
    assert again.keys() == one_device(case).keys()


def test_a_seq2seq_whose_columns_or_padding_are_wrong():
    case, split = translator_case(3, width=12, heads=6), Split(tensor=3)
    for how, order in counterfactuals.PERMUTATIONS.items():
        for weight, (names, k) in counterfactuals.BLOCKS.items():
            again = counterfactuals.with_permuted_heads(case, weight, order, 3)
            said = f"equal after permuting {names}: their columns are cut {how.format(k=k)}"
            assert found(again, split, case) == said
    count, again = counterfactuals.with_padding(case, 3)
    assert count == 1 and "1 columns of padding in the softmax" in found(again, split, case)
    assert counterfactuals.without_tying(case) is None


@pytest.mark.parametrize("what", counterfactuals.STATISTICS)
def test_batch_norms_with_wrong_sums(what):
    model = random_weights(nn.CNN(1, 3, (2, 3), dtype="float64"))
    case, split = Case("CNN", model, arrays(7, 1, 4, 4), np.arange(7) % 3), Split(data=3)
    again = counterfactuals.with_statistics(case, 3, counterfactuals.STATISTICS[what])
    assert found(again, split, case) == f"equals the gradient with {what}"
    one_each = replace(case, inputs=case.inputs[:3], targets=case.targets[:3])
    assert counterfactuals.with_statistics(one_each, 3, counterfactuals.STATISTICS[what])
    assert counterfactuals.with_statistics(CASE, 3, counterfactuals.STATISTICS[what]) is None


def test_models_that_do_one_thing_wrong():
    case, split = transformer_case(), Split(tensor=3)
    again = counterfactuals.with_biases_times(case, 3, counterfactuals.BIASES[1])
    assert "biases are added 3 times, once per rank" in found(again, split, case)
    for how, order in counterfactuals.PERMUTATIONS.items():
        again = counterfactuals.with_permuted_heads(case, "qkv", order, 3)
        said = f"equal after permuting Q, K, V: their columns are cut {how.format(k=3)}"
        assert found(again, split, case) == said
        assert counterfactuals.with_permuted_heads(case, "key_value", order, 3) is None
    again = counterfactuals.with_repeated_masks(case, 3)
    assert "first positions' dropout mask" in found(again, split, case)
    count, again = counterfactuals.with_padding(case, 3)
    assert count == 2 and "2 columns of padding in the softmax" in found(again, split, case)
    shares = np.array_split(np.arange(5), 2)
    again = counterfactuals.with_local_masks(case, shares)
    assert found(again, Split(data=2), case).endswith("examples 0, 1, ... of each rank")


def test_nothing_infinity_rounding_and_other_weights():
    want = one_device(CASE)
    assert found(scaled(want, 0), Split()) == "every gradient is zero: nothing was computed"
    got = {**want, NAMES[1]: np.full(5, np.nan)}
    assert found(got, Split()) == f"{NAMES[1]} is not finite on rank 0, but is on one device"
    got = {n: g.astype("float32").astype("float64") for n, g in want.items()}
    assert found(got, Split()).startswith("right, except for rounding to float32")
    a, b = arrays(3), arrays(3, seed=1)
    held = ({NAMES[0]: (a, a)}, {NAMES[0]: (a, b)})
    said = f"rank 1's weights in {NAMES[0]} are not its part of the global ones"
    assert found(want, Split(), held=held) == f"{said}; it holds the same numbers as rank 0"


@given(
    seed=seeds,
    wrong=st.sets(st.sampled_from(NAMES), min_size=1),
    size=st.sampled_from([1e-6, 1e-2, 1.0]),
    split=st.sampled_from(
        [Split(data=3), Split(micro_batches=4, stages=STAGES[:2]), Split(tensor=2)]
    ),
)
def test_random_errors_and_sound_gradients_have_no_cause(seed, wrong, size, split):
    want = one_device(CASE)
    assert found(want, split) is None
    got = {n: g + size * arrays(*g.shape, seed=seed) * (n in wrong) for n, g in want.items()}
    assert found(got, split) is None


def nearly(got, split, case=CASE):
    """Return the cause of these gradients, which a known mistake almost leaves, but not quite."""
    want = one_device(case)
    got = got if isinstance(got, list) else [got] * 2
    finding = Finding([{**want, **g} for g in got], want, case, split)
    assert finding.wrong
    return cause(finding)


def test_what_a_known_mistake_almost_leaves_has_no_cause():
    want, split = one_device(CASE), Split(micro_batches=4, stages=(NAMES, NAMES))
    assert found(scaled(want, 2, NAMES), replace(split, micro_batches=1)).startswith(
        "ratio 2 = number of stages that hold it: summed once more"
    )
    assert nearly(scaled(want, 1.7, NAMES), split) is None
    for factor in (1.7, 4.001, 3.999, -4, 64):
        assert nearly(scaled(want, factor), split) is None
    assert nearly([scaled(want, 4), scaled(want, 3)], split) is None  # not on all ranks
    assert nearly([scaled(want, 4), want], split) is None
    single = {n: (g + 0.1).astype("float32").astype("float64") for n, g in want.items()}
    assert nearly(single, split) is None  # of few digits, but wrong


def test_sums_of_parts_that_are_not_quite_right_have_no_cause():
    split = Split(data=3)
    parts, want = parts_of(split), one_device(CASE)
    for factors in ([1, 1.4, 1], [1, 1, 1e-3], [0, 1, 2], [1.0001, 1, 0]):
        assert nearly(summed(parts, factors), split) is None
    noise = {n: 1e-6 * arrays(*g.shape, seed=5) for n, g in want.items()}
    assert nearly(summed([*parts[:2], noise]), split) is None
    assert nearly([summed([part, noise]) for part in parts], split) is None
    assert nearly([summed([part, noise]) for part in parts[:2]], Split(tensor=2)) is None
    assert nearly([want, scaled(want, 0)], Split(tensor=2)) is None  # one rank has all of it


def test_one_thing_that_is_done_wrong_leaves_its_mark_in_all_parameters_or_is_not_the_cause():
    case = transformer_case()
    want, split = one_device(case), Split(tensor=3)
    again = [
        counterfactuals.with_biases_times(case, 3, counterfactuals.BIASES[1]),
        *(
            counterfactuals.with_permuted_heads(case, "qkv", order, 3)
            for order in counterfactuals.PERMUTATIONS.values()
        ),
        counterfactuals.with_padding(case, 3)[1],
    ]
    for gradients in again:
        name = next(n for n in want if not np.allclose(gradients[n], want[n], rtol=1e-6))
        assert nearly({name: gradients[name]}, split, case) is None
    uses = counterfactuals.without_tying(case)
    other = {uses.name: 0.9 * uses.gradients["head"]}
    assert nearly(other, Split(stages=(["a"], ["b"])), case) is None
    local = counterfactuals.with_local_masks(case, np.array_split(np.arange(5), 2))
    assert nearly([local, want], Split(data=2), case) is None


def test_where_one_device_has_infinity_the_ranks_are_not_to_blame():
    want = {n: g.copy() for n, g in one_device(CASE).items()}
    want[NAMES[1]][0] = np.inf
    said = cause(Finding([want] * 2, want, CASE, Split()))
    assert said == f"{NAMES[1]} is not finite on one device either"


def test_where_backward_goes_wrong_is_said_if_all_behind_it_is_right():
    want = one_device(CASE)
    got = {**want, **{n: arrays(*want[n].shape) for n in NAMES[:3]}}
    finding = Finding([got], want, CASE, Split())
    assert right_from(finding) == f"all from {NAMES[3]} on are right"
    for wrong in ([2], [0, 2]):
        got = {**want, **{NAMES[i]: want[NAMES[i]] + 1 for i in wrong}}
        assert right_from(replace(finding, got=[got])) is None


def test_what_is_in_a_sum():
    inputs = [arrays(7, seed=r) for r in range(3)]
    sound = [np.sum(inputs, axis=0)] * 3
    assert cause_of.sums(inputs, sound) is None
    wrong = sound[1].copy()
    wrong[3:5] = inputs[0][3:5] + 2 * inputs[2][3:5]
    said = "rank 1, elements 3 to 4: the sum is one without rank 1 and with rank 2 twice"
    assert cause_of.sums(inputs, [sound[0], wrong, sound[2]]) == said
    assert "no sum" in cause_of.sums(inputs, [sound[0] + 0.1] * 3)


def test_norms_of_parts_and_of_copies():
    assert cause_of.norms([5.0, 5.0], 5.0) is None
    assert "0.6, 0.8 of one device's; their squares add up" in cause_of.norms([3.0, 4.0], 5.0)
    assert "2 times too large: every element was counted 2 times" in cause_of.norms(
        [2**0.5] * 2, 1.0
    )
    assert cause_of.norms([1.3, 1.2], 1.0) == "the ranks' norms are 1.3, 1.2 of one device's"


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
    said = cause_of.bytes_held({"state": 8}, {"state": 4}, {"state": 8})
    assert said == "state: 8 bytes, not 4; as much as if it were not split"
    said = "send: by the ledger rank 1 sent 5 bytes, not 4"
    assert cause_of.bytes_moved([4, 5], [4, 4], "send") == said
