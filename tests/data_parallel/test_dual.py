"""Two translators on ranks: each term of their loss counts once, however the batch is dealt."""

from dataclasses import replace

import pytest

from minidist.verify.equivalence import check, gradients
from minidist.verify.strategies.cases import dual_case, one_device, random_weights


def case_of(read="soft", weight=0.5, pairs=5):
    case = dual_case()
    case.model.read, case.model.weight = read, weight
    random_weights(case.model)
    return replace(case, inputs=case.inputs[:pairs], targets=case.targets[:pairs])


def times_counted(case, size, cluster, **options):
    """Return how often the ranks' gradient has the reconstruction's, by least squares."""
    whole = one_device(case)
    other = case_of(weight=0).model
    without = one_device(replace(case, model=other, loss=other.loss))
    given = case.model, case.inputs, case.targets, size, case.loss
    found = gradients("naive", *given, cluster=cluster(size, "thread"), **options)
    terms = [(whole[name] - without[name], found[name] - without[name]) for name in found]
    return sum((a * b).sum() for a, b in terms) / sum((a * a).sum() for a, _ in terms)


@pytest.mark.parametrize("read", ["soft", "hard"])
@pytest.mark.parametrize("size, micro_batches", [(2, 1), (1, 2)])
def test_parts_count_the_reconstruction_once(cluster, size, micro_batches, read):
    case = case_of(read, pairs=2)
    case.inputs[1], case.targets[1] = case.inputs[0], case.targets[0]  # parts of equal weight
    times = times_counted(case, size, cluster, micro_batches=micro_batches)
    said = f"the reconstruction counts {times:.2f} times, not once: its divisor is the batch's"
    assert times == pytest.approx(1), said


@pytest.mark.parametrize(
    "strategy, pairs, read", [("naive", 2, "hard"), ("bucketed", 5, "soft"), ("zero_1", 5, "hard")]
)
def test_uneven_and_empty_parts_are_one_device(cluster, pairs, strategy, read):
    case = replace(case_of(read, pairs=pairs), options={"micro_batches": 2})
    row = check(strategy, case, 3, cluster(3, "thread"))
    assert row["ok"], row["detail"]
