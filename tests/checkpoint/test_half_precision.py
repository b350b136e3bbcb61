"""Checkpoints of 16-bit weights: their float32 copies, and the loss scale."""

from dataclasses import replace

import numpy as np
import pytest

from minidist import Mesh, checkpoint, nn, optim
from minidist.checkpoint import Keep, Part, Saved, parts_of, restore
from minidist.checkpoint.parts import about
from minidist.hybrid import Hybrid
from minidist.nn.datasets import Batch
from minidist.parallel.mixed_precision import LossScale, MixedPrecision, overflow_allowed
from minidist.training import setup
from minidist.training.loop import train
from tests.checkpoint.causes import of_load, of_scale
from tests.checkpoint.test_training import SMALL, TEXT, interrupt
from tests.strategies import assert_same_bits

STEPS, AT = 7, 4


@pytest.fixture(autouse=True)
def scale_that_changes(monkeypatch):
    """The scale begins with overflows, and is then doubled after 3 good steps."""

    def made(*given):
        return LossScale(*(given or (2.0**20, 3)))  # bfloat16's scale is given

    monkeypatch.setattr(setup, "LossScale", made)


def settings_of(precision, **mesh):
    if precision != "float16":
        pytest.importorskip("ml_dtypes", reason="bfloat16 needs ml_dtypes: pip install ml_dtypes")
    return replace(SMALL, steps=STEPS, depth=1, precision=precision, **mesh)


def both(cluster, folder, monkeypatch, first, second=None):
    """Return the checkpoints, losses and weights of a run that went on, and of one that did not."""
    whole = second or first
    keep = Keep(str(folder / "whole"), every=STEPS)
    want = cluster(whole.ranks, "thread").run(train, TEXT, whole, keep)[0]
    found = interrupt(cluster, folder / "parts", monkeypatch, first, second, at=AT)
    return [(Saved.newest(folder / n), *run) for n, run in (("parts", found), ("whole", want))]


def on_mesh(group, mesh, seed=0):
    """Return a float16 model on a mesh, and its optimizer."""
    axes = {"dp": 1, "pp": 1, "tp": 1} | {k: n for k, n in mesh.items() if k != "zero"}
    model = nn.Transformer(7, 8, 2, 2, 4, seed).astype("float16")
    hybrid = Hybrid(model, Mesh(group, **axes), zero=mesh.get("zero", 0), micro_batches=2)
    return hybrid, MixedPrecision(optim.AdamW(hybrid.parameters(), 0.05), group)


def save_and_load(cluster, folder, mesh):
    """Train on one rank; load it on the mesh; return what the ranks hold, and what was trained."""

    def trained(group):
        hybrid, optimizer = on_mesh(group, {})
        tokens = np.arange(24).reshape(6, 4) * 5 % 7
        with overflow_allowed():
            for step in range(6):
                hybrid.backward(Batch(tokens, tokens, 0, step, loss_scale=optimizer.loss_scale))
                hybrid.step(optimizer)
        checkpoint.save(
            folder, parts_of(hybrid, optimizer), 6, about={"optimizer": about(optimizer)}
        )
        whole = {}
        for s, copy, state in zip(optimizer.slices, optimizer.copies, optimizer.state, strict=True):
            for name, array in ("", copy), ("optimizer.0/", state[0]), ("optimizer.1/", state[1]):
                whole |= {name + n: array[at] for n, at in places(s).items()}
        shapes = {name: p.whole_shape for name, p in hybrid.named_parameters().items()}
        whole = {n: a.reshape(shapes[n.rpartition("/")[2]]) for n, a in whole.items()}
        return whole, optimizer.scale, optimizer.steps

    def loaded(group):
        hybrid, optimizer = on_mesh(group, mesh, seed=1)
        restore(Saved.newest(folder), hybrid, optimizer)
        held = [Part(part.cut, part.on_host()) for part in parts_of(hybrid, optimizer)]
        return (held, optimizer.steps), optimizer.scale

    want = cluster(1, "thread").run(trained)[0]
    return cluster(int(np.prod([*mesh.values()])), "thread").run(loaded), want


def places(s):
    """Return {name: slice} of the parameters in a flat slice."""
    return {p.name: at for p, at in s.parts.items()}


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"dp": 2, "zero": 1}, {"pp": 2}], ids=str)
def test_every_mesh_goes_on_with_the_copies_and_the_scale(cluster, tmp_path, mesh):
    found, (whole, scale, steps) = save_and_load(cluster, tmp_path, mesh)
    assert scale.value < 2.0**16
    cause = of_load([held for held, _ in found], whole, steps)
    cause = cause or next(filter(None, (of_scale(own, scale) for _, own in found)), None)
    if cause:
        pytest.fail(cause)


@pytest.mark.parametrize(
    "precision, mesh",
    [("float16", {}), *((f, {"pp": 2}) for f in ("bfloat16", "bfloat16-stochastic", "float8"))],
)
def test_a_run_that_goes_on_is_the_uninterrupted_run_bit_for_bit(
    cluster, tmp_path, monkeypatch, precision, mesh
):
    found, want = both(cluster, tmp_path, monkeypatch, settings_of(precision, **mesh))
    the_same(found, want)
    if precision == "float16":
        scale = want[0].about["optimizer"]["loss_scale"]
        assert scale["value"] < 2.0**20 and scale["skipped"] and want[0].about["optimizer"]["steps"]


def test_a_pipeline_goes_on_with_a_run_of_zero_bit_for_bit(cluster, tmp_path, monkeypatch):
    first, second = settings_of("float16", zero=1), settings_of("float16", pp=2)
    the_same(*both(cluster, tmp_path, monkeypatch, first, second))


def the_same(found, want):
    """Require the same losses and weights, and on the disk the same copies, averages and scale."""
    assert found[1] == want[1]
    assert_same_bits(found[2], want[2])
    (found, *_), (want, *_) = found, want
    assert found.about["optimizer"] == want.about["optimizer"]
    assert {str(dtype) for dtype in want.dtypes.values()} == {"float32", "float64"}  # losses: 64
    names = sorted(want.shapes)
    assert_same_bits(*({name: saved.whole(name) for name in names} for saved in (found, want)))
