"""Documents that share a window stay apart on every mesh, whatever the attention over context."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from minidist import nn
from minidist.rng import generator
from minidist.verify import equivalence
from minidist.verify.strategies import STRATEGIES, Case
from minidist.verify.strategies.cases import documents, padded, random_weights

WAYS = ({}, {"attention": "gathered"}, {"attention": "ulysses"})
WAYS += ({"ulysses": 2}, {"attention": "gathered", "ulysses": 2})
MESHES = [m for m in product((1, 2, 3, 4), (1, 2, 3), (1, 2, 3, 4, 6, 8)) if np.prod(m) <= 8]


def check(ranks, N, options, kv_heads):
    """Check the gradients of a Transformer, or of a Llama with so many heads of keys and values."""
    tokens, nexts = generator(0, "documents on meshes").integers(0, 11, (2, 5, 12))
    model = nn.Transformer(11, 24, 12, 3, 12, 2, "float64", 0.2, tied=True)
    if kv_heads:
        model = nn.Llama(11, 48, 24, kv_heads, 3, 12, 2, "float64")
    case = Case("documents", random_weights(model), tokens, padded(nexts), options=options)
    case = replace(case, documents=documents(5, 12))
    row = equivalence.check("hybrid", case, N, ranks)
    assert row["ok"], f"{options}: {row['detail']}"


@pytest.mark.parametrize("kv_heads", [0, 4])
@pytest.mark.parametrize(
    "options",
    [
        {"dp": 2, "pp": 2, "micro_batches": 3},
        {"dp": 2, "cp": 2, "attention": "gathered", "zero": 1},
        {"cp": 4, "ulysses": 2},
        {"pp": 2, "cp": 2, "schedule": "zb_h1"},
        {"cp": 2, "attention": "ulysses"},  # and tp = 2
    ],
    ids=str,
)
def test_documents_are_kept_apart_on_a_mesh(cluster, options, kv_heads):
    check(cluster(4, "thread"), 4, options, kv_heads)


@pytest.mark.slow
@pytest.mark.grid(6)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_documents_are_kept_apart_on_every_mesh_of_up_to_eight_ranks(cluster, mesh):
    """Ranks that are left are on the axis tp; heads that do not divide are left out."""
    dp, pp, cp = mesh
    for tp, way in product((1, 2, 4), WAYS):
        N, U = dp * pp * cp * tp, way.get("ulysses", 1)
        if N > 8 or cp % U or (way.get("attention") == "ulysses" and cp > 6):
            continue
        options = {"dp": dp, "pp": pp, "cp": cp} | way
        for kv_heads in (0, 4):
            heads = (24 if kv_heads else 12) // tp
            if heads % (cp if way.get("attention") == "ulysses" else U) == 0:
                check(cluster(N, "thread"), N, options, kv_heads)


TAKE = {
    name: s for name, s in STRATEGIES.items() if s.models.include(nn.Transformer(3, 2, 1, 1, 2))
}


@pytest.mark.slow
@pytest.mark.grid(12)
@pytest.mark.parametrize("name", TAKE)
def test_every_strategy_that_splits_a_transformer_keeps_documents_apart(cluster, name):
    tokens, nexts = generator(0, "documents everywhere").integers(0, 11, (2, 4, 12))
    model = random_weights(nn.Transformer(11, 8, 4, 2, 12, 2, "float64", 0.2))
    case = Case("documents", model, tokens, nexts, documents=documents(4, 12))
    row = equivalence.check(name, case, 2, cluster(2, "thread"), rerun=False)
    assert row["ok"], row["detail"]
