"""A model is profiled, planned for, run and certified: on ranks that are threads, and processes."""

import json

import numpy as np
import pytest

from minidist import nn
from minidist.observe import profile
from minidist.planning import pipedream
from minidist.verify import equivalence
from minidist.verify.strategies.pipedream import planned_cases
from tests.planted import planted
from tests.strategies import arrays


def an_mlp(examples=6):
    model = nn.MLP([5, 40, 7, 3], "gelu", dtype="float64")
    return model, arrays(examples, 5), np.arange(examples) % 3


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_plan_is_made_of_what_was_measured_runs_and_is_replayed_bitwise(ranks):
    found = profile.profile_and_run(*an_mlp(), ranks=ranks, transport="thread")
    assert [(a, p) for _, a, p in found.profile] == [
        (8 * 6 * 40, 8 * (5 * 40 + 40)),
        (8 * 6 * 7, 8 * (40 * 7 + 7)),
        (8 * 6 * 3, 8 * (7 * 3 + 3)),
    ]
    assert all(seconds > 0 for seconds, _, _ in found.profile)
    assert (found.stages, found.seconds) == pipedream(found.profile, ranks, found.bandwidth)
    assert found.certificate["ok"] and found.certificate["promise"] == "replayed bitwise"
    computed = [sum(t for t, _, _ in found.profile[i:j]) / k for i, j, k in found.stages]
    assert found.simulated > 0.999 * max(computed) and found.measured > 0
    assert json.loads(json.dumps(found.row(), allow_nan=False))["ranks"] == ranks
    said = profile.text(found)
    assert all(f"layers {first} to {stop - 1} on {k}" in said for first, stop, k in found.stages)
    assert "replayed bitwise: largest error 0.0e+00" in said


def test_a_slow_link_makes_stages_of_uneven_lengths_and_they_run_on_processes():
    """At one byte per second neither sums of weights nor a wide activation pay."""
    found = profile.profile_and_run(*an_mlp(), ranks=2, bandwidth=1.0)
    assert found.stages == [(0, 2, 1), (2, 3, 1)]
    assert found.seconds == 2 * 8 * 6 * 7  # the narrow activation, and its gradient
    assert found.certificate["ok"] and found.certificate["bytes"] == profile.MINIBATCHES * 2 * 336


def test_replicas_without_their_sum_are_named(cluster):
    case = planned_cases(3)[-1]
    assert case.options["replicas"] == [2, 1]
    assert equivalence.check("pipedream", case, 3, cluster(3, "thread"))["ok"]
    with planted("replicas_without_their_sum"):
        row = equivalence.check("pipedream", case, 3, cluster(3, "thread"))
    assert not row["ok"]
    assert "replicas of stages [0] differ: their gradients were not summed" in row["detail"]
