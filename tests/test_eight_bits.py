"""Models that multiply in eight bits: which products do, and which cuts are right."""

import copy
from dataclasses import replace
from functools import partial
from itertools import product as every
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist import Mesh, Tensor, nn, optim
from minidist.autograd import functions
from minidist.autograd.eight_bits import EightBits
from minidist.autograd.number_format import NumberFormat
from minidist.context_parallel import columns, context_parallel, zigzag
from minidist.data_parallel.naive import all_reduce_gradients
from minidist.data_parallel.parameter_server import ServerPlan, join
from minidist.data_parallel.replicated import DataParallel
from minidist.errors import RankFailed
from minidist.hybrid import Hybrid
from minidist.nn.datasets import Batch
from minidist.parallel import sum_gradients
from minidist.parallel.mixed_precision import multiply_in_eight_bits
from minidist.parallel.trainer import loss_of
from minidist.pipeline_parallel import Pipeline
from minidist.tensor_parallel import (
    ColumnParallelLinear,
    ParallelTransformer,
    RowParallelLinear,
)
from minidist.tensor_parallel.sequence_parallel import sequence_parallel
from minidist.verify import equivalence
from minidist.verify.compare import compare
from minidist.verify.strategies.cases import random_weights
from minidist.verify.strategies.hybrid import eight_bit_case
from tests.strategies import arrays, gradients, seeds

AXES = "dp pp cp tp".split()
MESHES = [
    (dp, pp, cp, tp)  # 5 layers for stages, 16 positions in strips of 4, 32 columns in blocks of 4
    for dp, pp, cp, tp in every((1, 2, 3, 4, 8), repeat=4)
    if dp * pp * cp * tp <= 8 and pp < 8 and cp < 3 and tp != 3
]


def products(x, w, dy):
    """Return Y, dX and dW of a product with a weight, in strips and blocks of 4."""
    x, w = (Tensor(array, requires_grad=True) for array in (x, w))
    w.format = NumberFormat(product=EightBits(4))
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


def test_cuts_through_a_block_are_refused(cluster):
    def worker(group):
        layer = nn.Linear(8, 12, name="a")
        layer.weight.format = NumberFormat(product=EightBits(4))
        RowParallelLinear(layer, group)
        ColumnParallelLinear(layer, group)

    with pytest.raises(RankFailed, match=r"6 of 12 rows or columns of a.weight cut a block of 4"):
        cluster(2, "thread").run(worker)
    with pytest.raises(ValueError, match="1 of 8 w are a part of an array with one scale"):
        EightBits(None).check_part("w", np.array([1]), 8)


def test_what_would_multiply_in_other_bits_is_refused(cluster):
    def worker(group, kv_heads, cut):
        model = nn.Llama(11, 16, 4, kv_heads, 1, 8, dtype="float64", hidden=16)
        multiply_in_eight_bits(model, EightBits(None))
        cut(model, group)

    with pytest.raises(RankFailed, match="of the model's dtype, not of eight bits"):
        cluster(2, "thread").run(worker, 4, sequence_parallel)
    with pytest.raises(RankFailed, match="2 ranks would round their parts of the gradient of 1"):
        cluster(2, "thread").run(worker, 1, ParallelTransformer)


def trained_by(make):
    """Return a worker: the gradient of a batch, computed by what `make(model, group)` gives."""

    def worker(group, model, batch):
        trainer = make(model, group)
        trainer.backward(batch)
        if isinstance(trainer, Hybrid):
            return trainer.gradients()
        return gradients(trainer.model)

    return worker


def in_context(model, group):
    model = context_parallel(model, group)

    def backward(batch):
        held = zigzag(batch.inputs.shape[1], group.size)[group.rank]
        x, y = columns(batch.inputs, held), columns(batch.targets, held)
        loss_of(model, replace(batch, inputs=x, targets=y, positions=held)).backward()
        sum_gradients(model.parameters(), group)

    return SimpleNamespace(model=model, backward=backward)


def by_naive(model, group):
    def backward(batch):
        loss_of(model, batch.share(group.rank, group.size)).backward()
        all_reduce_gradients(model, group)

    return SimpleNamespace(model=model, backward=backward)


def served(model, group):
    return join(group, model, partial(optim.SGD, lr=0.1), ServerPlan())


def on_mesh(model, group, dp=1, pp=1, cp=1, micro_batches=1, **options):
    mesh = Mesh(group, dp=dp, pp=pp, cp=cp, tp=group.size // (dp * pp * cp))
    return Hybrid(model, mesh, "1f1b", micro_batches, **options)


WAYS = {  # a way: what it makes, positions, whether blocks of 4 are refused, and scales of arrays
    "data parallel": (DataParallel, 8, None, None),
    "naive": (by_naive, 8, None, "share_scales"),
    "pipeline": (Pipeline, 8, None, "use one micro-batch"),
    "context": (in_context, 16, None, None),
    "context, cut strips": (in_context, 8, "positions cut a block of 4", None),
    "served": (served, 8, None, "share_scales"),
    "tp": (on_mesh, 8, None, None),
    "cp, cut strips": (partial(on_mesh, cp=2), 8, "positions cut a block of 4", None),
    "dp, tp, ZeRO 3": (partial(on_mesh, dp=2, zero=3), 8, None, None),
    "dp, micro-batches": (partial(on_mesh, dp=2, micro_batches=2), 8, None, "one micro-batch"),
}


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("block", [4, None])
def test_every_way_has_one_devices_products_or_refuses_them(cluster, name, block):
    make, T, *refused = WAYS[name]
    model = random_weights(nn.Transformer(11, 32, 4, 2, 16, dtype="float64"))
    multiply_in_eight_bits(model, EightBits(block))
    batch = Batch(*np.random.default_rng(0).integers(0, 11, (2, 4, T)))
    size = {"dp, tp, ZeRO 3": 4, "served": 3}.get(name, 2)
    run = cluster(size, "thread").run
    if words := refused[block is None]:
        with pytest.raises(RankFailed, match=words):
            run(trained_by(make), model, batch)
    elif name == "served":
        assert len(run(lambda group: make(model, group).group.size)) == size
    else:
        one_device = copy.deepcopy(model)
        loss_of(one_device, batch).backward()
        want = gradients(one_device)
        found = run(trained_by(make), model, batch)
        assert set().union(*found) == set(want)
        for got in found:  # a stage has its own parameters
            assert compare([got], {key: want[key] for key in got}).ok


def test_a_block_is_a_whole_number():
    for block in (-1, 0, 2.5, "4", True):
        with pytest.raises(ValueError, match="the block of EightBits is a whole number from 1"):
            EightBits(block)


@pytest.mark.slow
@pytest.mark.grid(6)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_mesh_of_up_to_eight_ranks_has_one_devices_gradient(cluster, mesh):
    ranks, options = int(np.prod(mesh)), dict(zip(AXES, mesh, strict=True))
    options = {name: n for name, n in options.items() if name != "tp"}
    for block, llama, zero in [(4, False, 0), (None, False, 1), (4, True, 1)]:
        schedule = "zb_h1" if zero else "1f1b"
        case = eight_bit_case(ranks, options | {"zero": zero, "schedule": schedule}, block, llama)
        row = equivalence.check("eight_bits", case, ranks, cluster(ranks, "thread"))
        assert row["ok"], row["detail"]
