"""Ring attention: one device's attention, from pieces that no rank sees together."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist.context_parallel import plain, ring_attention, tiles, zigzag
from minidist.context_parallel.ring_attention import RingAttention, join
from tests.context_parallel.judges import attend, errors, inputs
from tests.strategies import arrays, seeds


def run(cluster, held, qkv, grad, device="cpu"):
    ranks = cluster(len(held), "thread", device)
    return ranks.run(attend, ring_attention.ring_attention, held, qkv, grad)


@pytest.mark.parametrize("spread", [30, 3000])
def test_scores_beyond_the_range_of_exp_stay_finite(cluster, device, spread):
    held = zigzag(12, 3)
    qkv, grad = inputs(1, 2, 4, held)
    qkv[:2] *= spread
    assert max(errors(run(cluster, held, qkv, grad, device), held, qkv, grad).values()) < 1e-6


@given(parts=st.lists(st.integers(1, 4), min_size=1, max_size=5), seed=seeds)
def test_softmaxes_over_disjoint_keys_join_to_the_softmax_over_all_in_any_order(parts, seed):
    scores, v = 5 * arrays(3, sum(parts), seed=seed), arrays(sum(parts), 2, seed=seed + 1)
    o, log_z = np.zeros((3, 2)), np.full((3, 1), -np.inf)
    pieces = np.split(np.arange(sum(parts)), np.cumsum(parts)[:-1])
    for keys in np.random.default_rng(seed).permutation(np.array(pieces, object)):
        keys = np.asarray(keys, int)
        z = np.exp(scores[:, keys]).sum(1, keepdims=True)
        join(o, log_z, np.exp(scores[:, keys]) / z @ v[keys], np.log(z))
    z = np.exp(scores).sum(1, keepdims=True)
    np.testing.assert_allclose(o, np.exp(scores) / z @ v, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(log_z, np.log(z), rtol=1e-9, atol=1e-12)


class Watched:
    """A group that writes down what its rank does: "send", "receive", and products as shapes."""

    def __init__(self, group):
        self.group, self.rank, self.size, self.did = group, group.rank, group.size, []

    def send(self, array, to, tag):
        self.did.append(("send", tag))
        self.group.send(array, to, tag)

    def recv(self, source, tag):
        array = self.group.recv(source, tag)
        self.did.append(("receive", tag))
        return array


def watched_forward(group, held, qkv):
    """Return what a rank does in forward, in order; products as (rows of Q, rows of K)."""
    watched, matmul = Watched(group), ring_attention.batched_matmul

    def counting(a, b, **more):
        watched.did.append(("product", a.shape[-2], b.shape[-1]))
        return matmul(a, b, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring_attention, "batched_matmul", counting)
        RingAttention(watched, held).forward(qkv[..., held[group.rank].indices, :])
    return watched.did


@pytest.mark.parametrize("cut", [plain, zigzag])
def test_the_next_block_is_under_way_before_the_products_with_this_one(cluster, cut):
    held = cut(24, 3)
    for did in cluster(3).run(watched_forward, held, inputs(1, 1, 5, held)[0]):
        steps = [what for what, *_ in did]
        assert [what for what in steps if what != "product"] == ["send", "receive"] * 2
        received = [i for i, what in enumerate(steps) if what == "receive"]
        assert steps[0] == steps[received[0] + 1] == "send"  # at once, before any product
        if cut is zigzag:  # where every rank computes in every hop
            assert "product" == steps[1] == steps[received[0] - 1] == steps[received[1] + 1]


def met_keys(own):
    """Return the scores of a rank: a block of queries below position t meets t keys."""
    Q = tiles.QUERIES
    blocks = [(t, min(t + Q, b)) for a, b in own.runs for t in range(a, b, Q)]
    return sum((stop - start) * stop for start, stop in blocks)


@pytest.mark.parametrize("T", [25, 300])
def test_the_scores_that_are_computed_are_the_closed_form_and_zigzag_balances_them(cluster, T):
    per_rank = {}
    for cut in (plain, zigzag):
        held = cut(T, 3)
        ranks = cluster(3).run(watched_forward, held, inputs(1, 1, 7, held)[0])
        # a product [n, s] of scores, then one [n, 7] of outputs
        counted = [[step[1:] for step in did if step[0] == "product"][::2] for did in ranks]
        per_rank[cut] = [sum(n * s for n, s in shapes) for shapes in counted]
        assert per_rank[cut] == [met_keys(own) for own in held]
        assert max(n for shapes in counted for n, _ in shapes) <= tiles.QUERIES
    busiest = {cut: max(work) / (sum(work) / 3) for cut, work in per_rank.items()}
    assert busiest[plain] > 1.4 and busiest[zigzag] < (1.001 if T % 6 == 0 else 1.1)
