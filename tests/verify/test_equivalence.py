"""The certificate of every strategy; and the judge, of right gradients and of wrong ones."""

from dataclasses import replace

import numpy as np
import pytest

from minidist import nn
from minidist.comm.communicator import BY_FORMULA
from minidist.verify import equivalence
from minidist.verify import strategies as listed
from minidist.verify.compare import compare
from minidist.verify.equivalence import certificate, check, find, gradients, strategies, worker_of
from minidist.verify.outcomes import Outcome
from minidist.verify.strategies import Case, one_device
from minidist.verify.strategies.cases import small_cases
from tests.strategies import arrays


@pytest.mark.parametrize("strategy", strategies())
def test_every_strategy_keeps_its_promise(cluster, ledgers, strategy):
    """And sends as much as a paper says or, by operation, as it did when that was recorded."""
    entry = find(strategy)
    size = max(ranks for ranks in entry.ranks if ranks <= 3)
    for case in entry.cases(size):
        row = check(strategy, case, size, cluster(size))
        assert row["ok"], f"{strategy}, {row['ranks']} ranks, {row['case']}: {row['detail']}"
        assert row["bytes"] > 0 and row["bytes_formula"] in (None, row["bytes"])
        assert row["error"] <= 1e-9
        if row["bytes_formula"] is None:
            ledgers.check(row)


MEASURED = [name for name in strategies() if find(name).costs.bytes is None]


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("strategy", MEASURED)
def test_every_case_sends_the_bytes_that_were_recorded(cluster, ledgers, strategy, size):
    entry = find(strategy)
    for case in entry.cases(size) if size in entry.ranks else ():
        ledgers.check(check(strategy, case, size, cluster(size, "thread")))


FAMILIES = {find(name).family: name for name in reversed(strategies())}


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", FAMILIES.values())  # -m slow takes all, and all cases
def test_the_first_strategy_of_a_family_keeps_its_promise_on_gpus(cluster, strategy):
    row = check(strategy, find(strategy).cases(2)[0], 2, cluster(2, "thread", "gpu"))
    assert row["ok"], f"{strategy}, {row['case']}: {row['detail']}"


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("transport, size", [("thread", 2), ("process", 2), ("process", 3)])
@pytest.mark.parametrize("strategy", strategies())
def test_every_case_of_a_strategy_keeps_its_promise_on_gpus(
    gpu, cluster, strategy, transport, size
):
    entry = find(strategy)
    for case in entry.cases(size) if size in entry.ranks else ():
        row = check(strategy, case, size, cluster(size, transport, "gpu"))
        assert row["ok"], f"{strategy}, {row['case']}: {row['detail']}"


def a_case():
    model = nn.MLP([3, 5, 2], activation="gelu", dtype="float64")
    return Case("small", model, arrays(5, 3), np.array([0, 1, 1, 0, 1]))


def test_gradients_have_the_names_of_the_parameters_and_leave_the_model_alone():
    case = a_case()
    before = case.model.state()
    got = gradients("naive", case.model, case.inputs, case.targets, 3)
    assert list(got) == list(case.model.named_parameters())
    want = one_device(case)
    assert compare([got], {name: want[name] for name in got}).ok
    for name, p in case.model.named_parameters().items():
        assert p.grad is None and np.array_equal(p.data, before[name])


@pytest.mark.gpu
def test_what_is_given_on_a_gpu_is_compared_too():
    case = a_case()
    want, there = gradients("naive", case.model, case.inputs, case.targets, 2), case.to("gpu")
    for device in ("cpu", "gpu"):
        given = there.model, there.inputs, there.targets
        got = gradients("zero_3", *given, 2, transport="thread", device=device)
        assert compare([got], want).ok
    assert check("naive", there, 2, transport="thread", device="gpu")["ok"]


def test_a_failure_names_the_first_parameter_the_rank_the_error_and_the_ratio():
    want = {"a": np.array([1.0, 2.0]), "b": np.array([[4.0]]), "c": np.array([8.0])}
    off = {**want, "b": np.array([[1.0]]), "c": np.array([80.0])}
    verdict = compare([want, want, off], want)
    assert not verdict.ok
    assert (verdict.parameter, verdict.rank, verdict.ratio) == ("b", 2, 0.25)
    assert verdict.error == 9 and verdict.difference == 72
    assert str(verdict).startswith("b differs on rank 2: largest error 9.0e+00 (bound 1e-09)")


def test_missing_misshapen_infinite_slightly_wrong_and_further_gradients_are_all_caught():
    want = {"a": np.array([1.0, 2.0])}
    for second in (np.nan, np.inf, 2.0 + 1e-8, -2.0):
        assert not compare([{"a": np.array([1.0, second])}], want).ok
    for got in ({}, {"a": np.zeros(3)}, {**want, "more": np.ones(1)}):
        assert not compare([got], want).ok
    assert not compare([{"a": np.full(2, 1e-6)}], {"a": np.zeros(2)}).ok  # zeros must be zero
    assert compare([{"a": np.zeros(2)}], {"a": np.zeros(2)}).ok
    for undefined in (np.inf, np.nan):  # on one device, too
        want = {"a": np.array([1.0, undefined])}
        verdict = compare([want], want)
        assert not verdict.ok and verdict.error == np.inf
    for got, wanted in ([], want), ([want], {}):
        with pytest.raises(ValueError, match="nothing to compare"):
            compare(got, wanted)


def test_the_bound_is_relative_to_the_parameter_but_not_below_a_thousandth_of_the_model():
    want = {"large": np.array([1000.0]), "tiny": np.array([1e-12])}
    assert compare([{**want, "tiny": np.array([5e-10])}], want).ok
    assert not compare([{**want, "tiny": np.array([5e-9])}], want).ok
    assert compare([{**want, "large": np.array([1000.0 + 5e-7])}], want).ok
    assert not compare([{**want, "large": np.array([1000.0 + 5e-6])}], want).ok


def test_ranks_that_do_not_agree_are_not_averaged_away(monkeypatch):
    sound = find("naive")

    def differing(group, case):
        outcome = worker_of(sound)(group, case)
        outcome.gradients["layers.0.weight"] += group.rank
        return outcome

    monkeypatch.setitem(listed.STRATEGIES, "naive", replace(sound, worker=differing))
    case = a_case()
    with pytest.raises(ValueError, match=r"do not agree with rank 0: layers\.0\.weight .* rank 1"):
        gradients("naive", case.model, case.inputs, case.targets, 2)


def test_another_name_or_number_of_ranks_is_refused_and_no_evidence_certifies_nothing(cluster):
    case = a_case()
    given = case.model, case.inputs, case.targets
    with pytest.raises(ValueError, match="the cluster has 2 ranks, not 3"):
        gradients("naive", *given, 3, cluster=cluster(2))
    with pytest.raises(ValueError, match="unknown strategy 'magic'; choose one of naive"):
        gradients("magic", *given, 2)
    assert not equivalence.Certificate("naive", "exact", []).ok


@pytest.mark.parametrize("operation", ["all_reduce", f"all_gather{BY_FORMULA}"])
@pytest.mark.parametrize("reordered", [False, True])
def test_a_replay_has_the_same_bits_unless_a_library_chose_the_order_and_the_row_says_so(
    monkeypatch, cluster, operation, reordered
):
    """Bytes by formula alone do not excuse other bits: a library that only moves has no order."""

    def nearly(group, case):
        weights = {"w": np.arange(1.0, 9.0)}
        replay = {"w": weights["w"] * (1 + 1e-13)}
        return Outcome(weights, 0, {operation: 0}, replay, reordered=reordered)

    wrong = replace(listed.STRATEGIES["naive"], worker=nearly, promise="invariant")
    monkeypatch.setitem(listed.STRATEGIES, "naive", wrong)
    row = check("naive", a_case(), 1, cluster(1, "thread"))
    assert row["ok"] == reordered
    assert row["promise"] == "invariant" + ", up to the order of sums, 1e-9" * reordered


def test_a_certificate_has_a_promise_and_its_evidence():
    for strategy, promise in {"naive": "exact", "pipedream": "replayed bitwise"}.items():
        paper = certificate(strategy, 3, "thread")
        assert paper.ok and paper.promise == promise
        assert [row["ranks"] for row in paper.evidence] == [3] * len(find(strategy).cases(3))


def test_the_cases_have_unequal_examples_uneven_shards_and_empty_ones():
    shards = [
        [len(part) for part in np.array_split(np.arange(len(case.inputs)), 4)]
        for case in small_cases(4)
    ]
    assert any(len(set(sizes)) > 1 and min(sizes) > 0 for sizes in shards)
    assert any(min(sizes) == 0 for sizes in shards)
