"""What a certificate says of a function that nobody has foreseen: by arithmetic, or not at all.

Each mistake has its own words, and no words of another; what fits nothing is said to fit nothing.
"""

import numpy as np
import pytest

from minidist import nn, verify
from minidist.verify.causes.reasons import UNKNOWN
from tests.strategies import arrays


def parts(model):
    return [np.zeros(p.shape) if p.grad is None else p.grad for p in model.parameters()]


def leave(model, gradients):
    for p, g in zip(model.parameters(), gradients, strict=True):
        p.grad = g.reshape(p.shape)


def flat(model):
    return np.concatenate([g.reshape(-1) for g in parts(model)])


def split(model, vector):
    ends = np.cumsum([p.size for p in model.parameters()])
    leave(model, np.split(vector, ends[:-1]))


def summed(change):
    """Return a reduce that sums, and then changes all gradients."""

    def reduce(model, group):
        leave(model, [change(group.all_reduce(g)) for g in parts(model)])

    return reduce


def to_root(model, group):
    sums = [group.all_reduce(g) for g in parts(model)]
    leave(model, sums if group.rank == 1 else parts(model))


def broadcast(model, group):
    leave(model, [group.broadcast(g, 2) for g in parts(model)])


def halves(model, group):
    half = group.split(group.rank // 2)
    leave(model, [half.all_reduce(g) for g in parts(model)])


def clipped_first(model, group):
    factor = 0.01 / np.linalg.norm(flat(model))
    leave(model, [group.all_reduce(factor * g) for g in parts(model)])


def rank_twice(model, group):
    leave(model, [group.all_reduce(g * (2 if group.rank == 1 else 1)) for g in parts(model)])


def slice_short(model, group):
    """Rank 3's part of the first 40 elements is lost on rank 0."""
    mine, own = flat(model), flat(model)
    if group.rank == 3:
        own[:40] = 0
    less, right = group.all_reduce(own), group.all_reduce(mine)
    split(model, less if group.rank == 0 else right)


def rotated(model, group):
    split(model, np.roll(group.all_reduce(flat(model)), 11))


def reversed_on_two(model, group):
    own = flat(model)
    sums = group.all_reduce(own[::-1].copy() if group.rank == 2 else own)
    split(model, sums[::-1] if group.rank == 2 else sums)


def exchanged(model, group):
    sums = [group.all_reduce(g) for g in parts(model)]
    sums[4], sums[0] = sums[0], sums[4]  # the weights of layers 0 and 2, both [6, 6]
    leave(model, sums)


def transposed(model, group):
    sums = [group.all_reduce(g) for g in parts(model)]
    leave(model, [sums[0].T.copy(), *sums[1:]])


WRONG = {
    "reduce": (to_root, "only rank 1 has the sum, the others their own: reduce, not all_reduce"),
    "broadcast": (broadcast, "every rank has only the gradient of rank 2's examples: broadcast"),
    "halves": (halves, "ranks {0, 1} and {2, 3} are summed among themselves, never across"),
    "clipped first": (clipped_first, "as if each rank had scaled its share before the sum"),
    "a rank twice": (rank_twice, "the sum counts examples 2, 3 twice"),
    "a slice": (slice_short, "on rank 0 the sum counts example 6 not at all, in elements 0 to 39"),
    "rotated": (rotated, "the right numbers at other places, most of them 11 elements later"),
    "reversed": (reversed_on_two, "are added at other places"),
    "exchanged": (exchanged, "layers.0.weight has the gradient of layers.2.weight"),
    "transposed": (transposed, "layers.0.weight is transposed"),
    "sign": (summed(np.negative), "ratio -1: the sign is wrong"),
    "three times": (summed(lambda g: 3 * g), "ratio 3: added 3 times"),
    "a third": (summed(lambda g: 0.3 * g), "scaled after the sum (clipped?)"),
    "float16": (summed(lambda g: g.astype("float16").astype("float64")), "rounding to float16"),
    "noise": (
        summed(lambda g: g + 0.1 * g.std() * np.sin(np.arange(g.size) ** 2).reshape(g.shape)),
        "",
    ),
    "signs": (summed(np.sign), ""),
    "clipped": (summed(lambda g: g.clip(-0.05, 0.05)), ""),
    "squared": (summed(lambda g: g * np.abs(g)), ""),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_cause_is_named_by_arithmetic_and_no_other_one(name):
    reduce, words = WRONG[name]
    model = nn.MLP([6, 6, 6, 6], "gelu", dtype="float64")
    found = verify.certify(reduce, model, arrays(7, 6), np.arange(7) % 3, transport="thread")
    (detail,) = [row["detail"] for row in found.evidence]
    assert not found.ok and (words or UNKNOWN) in detail, detail
    for other, (_, unlike) in WRONG.items():
        assert other == name or not unlike or unlike not in detail, detail


def test_rounding_and_a_single_other_value_are_named_against_a_replay():
    def tree(model, group):
        pair = group.split(group.rank // 2)
        sums = [pair.all_reduce(g) for g in parts(model)]
        leave(model, [group.all_reduce(s if pair.rank == 0 else 0 * s) for s in sums])

    def in_rank_order(found):
        return {name: sum(each[name] for each in found) for name in found[0]}

    asked = nn.MLP([6, 6, 3], dtype="float64"), arrays(7, 6), np.arange(7) % 3
    late = verify.certify(tree, *asked, replay=in_rank_order, transport="thread")
    assert "the sum was taken in another order" in str(late.evidence[0]["detail"])
    ones = verify.certify(
        summed(np.ones_like),
        *asked,
        replay=lambda found: {name: 0 * g for name, g in found[0].items()},
        transport="thread",
    )
    assert "0 is promised, 1 is there" in ones.evidence[0]["detail"]


def test_examples_that_depend_on_each_other_have_no_weights():
    """With batch norms the examples' gradients do not add up, and nothing of them is said."""
    model = nn.CNN(1, 10, widths=(2,), dtype="float64")
    images, labels = arrays(8, 1, 8, 8), np.arange(8) % 10
    found = verify.certify(summed(lambda g: g), model, images, labels, transport="thread")
    assert (
        "each rank's batch norms used its own examples' statistics" in found.evidence[0]["detail"]
    )
