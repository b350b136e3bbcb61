"""Models that multiply in eight bits: which products do, and which cuts are right."""

from itertools import product as every

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist import Tensor, nn
from minidist.autograd import functions
from minidist.autograd.eight_bits import EightBits
from minidist.data_parallel.naive import all_reduce_gradients
from minidist.datasets import shard
from minidist.mixed_precision import check_strips, multiply_in_eight_bits, share_scales
from minidist.tensor_parallel import (
    ColumnParallelLinear,
    ParallelTransformer,
    RowParallelLinear,
)
from minidist.tensor_parallel.sequence_parallel import sequence_parallel
from minidist.verify import equivalence
from minidist.verify.strategies.eight_bits import eight_bit_case
from tests.strategies import arrays, seeds

AXES = "dp pp cp tp".split()
MESHES = [
    (dp, pp, cp, tp)  # 5 layers for stages, 16 positions in strips of 4, 32 columns in blocks of 4
    for dp, pp, cp, tp in every((1, 2, 3, 4, 8), repeat=4)
    if dp * pp * cp * tp <= 8 and pp < 8 and cp < 3 and tp != 3
]


def products(x, w, dy):
    """Return Y, dX and dW of a product with a weight, in strips and blocks of 4."""
    x, w = (Tensor(array, requires_grad=True) for array in (x, w))
    w.product = EightBits(4)
    y = functions.linear(x, w)
    y.backward(dy)
    return y.data, x.grad, w.grad


@given(seed=seeds, parts=st.integers(1, 4))
def test_a_cut_of_the_batch_adds_up_because_no_strip_crosses_an_example(seed, parts):
    x, w, dy = arrays(5, 7, 8, seed=seed), arrays(8, 4, seed=1), arrays(5, 7, 4, seed=seed + 1)
    y, dx, dw = products(x, w, dy)
    cuts = [slice(*np.array_split(range(5), parts)[i][[0, -1]] + [0, 1]) for i in range(parts)]
    found = [products(x[cut], w, dy[cut]) for cut in cuts]
    np.testing.assert_array_equal(np.concatenate([ys for ys, _, _ in found]), y)
    np.testing.assert_array_equal(np.concatenate([dxs for _, dxs, _ in found]), dx)
    np.testing.assert_allclose(sum(dws for *_, dws in found), dw, atol=1e-12)


def test_the_linear_layers_of_the_blocks_multiply_in_eight_bits_and_nothing_else():
    model = nn.Transformer(11, 8, 2, 1, 8, experts=2)
    multiply_in_eight_bits(model)
    chosen = [name for name, p in model.named_parameters().items() if p.product]
    assert chosen == [f"blocks.0.attention.{name}.weight" for name in ("qkv", "output")]
    dense = nn.Transformer(11, 8, 2, 1, 8)
    multiply_in_eight_bits(dense, EightBits(4))
    chosen = {name: p.product for name, p in dense.named_parameters().items() if p.product}
    names = "attention.qkv", "attention.output", "expand", "contract"
    assert chosen == {f"blocks.0.{name}.weight": EightBits(4) for name in names}


def test_cuts_through_a_block_are_refused(cluster):
    def worker(group):
        refused = []
        layer = nn.Linear(8, 12, name="a")
        layer.weight.product = EightBits(4)
        for cut in ColumnParallelLinear, RowParallelLinear:
            try:
                cut(layer, group)
                refused.append("")
            except ValueError as error:
                refused.append(str(error))
        return refused

    columns, rows = cluster(2, "thread").run(worker)[0]
    assert "6 of 12 rows or columns of a.weight cut a block of 4" in columns and rows == ""
    with pytest.raises(ValueError, match="cut a block of 4"):
        EightBits(4).check_part("w", np.array([0, 1, 2, 4]), 8)
    EightBits(4).check_part("w", np.array([0, 1, 2, 3, 8, 9]), 10)
    EightBits(None).check_part("w", np.array([1]), 8)
    with pytest.raises(ValueError, match=r"cp=2 cuts 8 positions into 4 pieces .* of 4; use a"):
        check_strips(8, 2, EightBits(4))
    check_strips(16, 2, EightBits(4))


def test_what_would_multiply_in_other_bits_is_refused(cluster):
    def worker(group, kv_heads, cut):
        model = nn.Llama(11, 16, 4, kv_heads, 1, 8, dtype="float64", hidden=16)
        multiply_in_eight_bits(model, EightBits(None))
        cut(model, group)

    with pytest.raises(Exception, match="of the model's dtype, not of eight bits"):
        cluster(2, "thread").run(worker, 4, sequence_parallel)
    with pytest.raises(Exception, match="2 ranks would round their parts of the gradient of 1"):
        cluster(2, "thread").run(worker, 1, ParallelTransformer)


@pytest.mark.parametrize("block", [4, None])
def test_data_parallel_ranks_have_one_devices_gradient(cluster, block):
    """And with a scale per array only because they share it."""
    x, y = arrays(4, 6), np.arange(4) % 3

    def model():
        found = nn.MLP([6, 8, 3], dtype="float64")
        multiply_in_eight_bits(found, EightBits(block, share=lambda most: most))
        return found

    def worker(group, shared):
        own = model()
        if shared:
            share_scales(own.parameters(), group)
        mine = shard(np.arange(4), group.rank, group.size)
        nn.cross_entropy(own(x[mine]), y[mine], reduction_size=4).backward()
        all_reduce_gradients(own, group)
        return [p.grad.copy() for p in own.parameters()]

    one = model()
    nn.cross_entropy(one(x), y).backward()
    for shared in (True, False):
        found = cluster(2, "thread").run(worker, shared)[0]
        error = max(abs(g - p.grad).max() for g, p in zip(found, one.parameters(), strict=True))
        assert (error < 1e-12) == (block is None and shared), error


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_mesh_of_up_to_eight_ranks_has_one_devices_gradient(cluster, mesh):
    ranks, options = int(np.prod(mesh)), dict(zip(AXES, mesh, strict=True))
    options = {name: n for name, n in options.items() if name != "tp"}
    for block, llama, zero in [(4, False, 0), (None, False, 1), (4, True, 1)]:
        schedule = "zb_h1" if zero else "1f1b"
        case = eight_bit_case(ranks, options | {"zero": zero, "schedule": schedule}, block, llama)
        row = equivalence.check("eight_bits", case, ranks, cluster(ranks, "thread"))
        assert row["ok"], row["detail"]
