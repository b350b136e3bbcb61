"""Gradients of another program: what differs is named, with its likely cause."""

import copy

import numpy as np
import pytest

from minidist import nn, verify
from minidist.verify import foreign
from minidist.verify.interop import torch as interop
from minidist.verify.strategies.cases import Case
from tests.strategies import arrays

TOKENS, NEXTS = np.random.default_rng(0).integers(0, 11, (2, 4, 6))


def transformer():
    return nn.Transformer(11, 8, 2, 2, 6, dtype="float64", seed=1)


def gradients(model, x, y, change=lambda model: None):
    change(model)
    return foreign.gradients_of(Case("other", model, x, y, model.loss))


def words(model, got, x=TOKENS, y=NEXTS, **options):
    found = verify.against(model, got, x, y, **options)
    assert not found.ok
    return str(found)


def test_equal_gradients_are_ok_and_say_how_near():
    found = verify.against(transformer(), gradients(transformer(), TOKENS, NEXTS), TOKENS, NEXTS)
    assert found.ok and str(found) == "ok: all 29 gradients, largest error 0.0e+00"


def test_a_mean_that_counts_padding():
    nexts = np.where(np.arange(6) < 4, NEXTS, nn.IGNORED)
    got = gradients(transformer(), TOKENS, nexts)
    got = {name: g * 16 / 24 for name, g in got.items()}
    assert "a mean over all targets, padding too" in words(transformer(), got, TOKENS, nexts)


@pytest.mark.parametrize("eps", [1e-6, 3e-6])
@pytest.mark.parametrize("make", ["transformer", "llama"])
def test_another_eps_is_no_rounding(make, eps):
    """Embeddings of size 1, as PyTorch draws them: then the norms' eps changes little."""
    other = transformer()
    if make == "llama":
        other = nn.Llama(11, 8, 2, depth=2, context=6, dtype="float64", seed=1)
    other.named_parameters()["embedding.token.weight"].data[...] = arrays(11, 8)
    model = copy.deepcopy(other)
    for norm in [*other.modules(nn.LayerNorm), *other.modules(nn.RMSNorm)]:
        norm.eps = eps
    got = gradients(other, TOKENS, NEXTS)
    cause = verify.against(model, got, TOKENS, NEXTS).cause
    assert cause == "the norms have eps 1e-6, not 1e-5" if eps == 1e-6 else "a constant" in cause
    single = {name: g.astype("float32") for name, g in got.items()}
    known = cause if eps == 1e-6 else "right but for rounding: it was computed in float32"
    assert verify.against(model, single, TOKENS, NEXTS).cause == known


@pytest.mark.parametrize(
    "name, change, said",
    [
        ("blocks.0.attention.output.weight", np.transpose, "transposed: [out, in]"),
        ("blocks.1.expand.weight", np.transpose, "transposed: [out, in]"),
        ("embedding.token.weight", lambda g: 2 * g, "twice: it was counted twice"),
        ("embedding.position.weight", np.zeros_like, "it is 0: its use was cut off"),
        ("head.norm.gain", lambda g: g * np.nan, "8 elements are not finite"),
        (
            "blocks.0.attention.qkv.weight",
            lambda g: g.reshape(8, 3, 2, 4).swapaxes(1, 2).reshape(8, 24),
            "its columns are [H, 3, D], as in Megatron-LM",
        ),
    ],
)
def test_one_wrong_parameter_is_named_with_its_cause(name, change, said):
    got = gradients(transformer(), TOKENS, NEXTS)
    got[name] = change(got[name])
    lines = words(transformer(), got).splitlines()
    assert lines[0] == "1 of 29 gradients differ" and len(lines) == 2
    assert lines[1].startswith(f"  {name} ") and said in lines[1]


def test_float32_is_named():
    got = {n: g.astype("float32") for n, g in gradients(transformer(), TOKENS, NEXTS).items()}
    assert "it was computed in float32" in words(transformer(), got)


def test_what_is_wrong_without_a_known_cause_has_none():
    got = gradients(transformer(), TOKENS, NEXTS)
    got["head.linear.weight"] = got["head.linear.weight"] + arrays(8, 11)
    first, row, tried = words(transformer(), got).splitlines()
    assert first == "1 of 29 gradients differ" and row.split("got/want")[1].count("  ") == 0
    assert tried.startswith("no known cause fits (tried: factors, rounding, ")


def test_names_and_layouts_of_pytorch_are_turned():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch")
    from minidist.verify.interop.twins import twin

    theirs = twin(transformer())
    logits = theirs(torch.tensor(TOKENS)).flatten(0, 1)
    torch.nn.functional.cross_entropy(logits, torch.tensor(NEXTS).flatten()).backward()
    got = {name: p.grad for name, p in theirs.named_parameters()}
    assert verify.against(transformer(), got, TOKENS, NEXTS).ok


def of_ranks(model, x, y, size=3):
    """Return what each rank's share gives, of a loss that is the mean over the share."""
    shares = np.array_split(np.arange(len(x)), size)
    return [gradients(model, x[mine], y[mine]) for mine in shares]


def test_what_ranks_did_wrong_is_named_with_their_number():
    parts = of_ranks(transformer(), TOKENS, NEXTS)
    said = words(transformer(), parts)
    assert "29 of 29 gradients differ: equals each rank's own mean: the all_reduce is" in said
    mean = {name: sum(part[name] for part in parts) / 3 for name in parts[0]}
    said = words(transformer(), [mean] * 3)
    assert "29 of 29 gradients differ: equals the mean of the ranks' means" in said
    right = gradients(transformer(), TOKENS, NEXTS)
    weight = [len(mine) / 4 for mine in np.array_split(np.arange(4), 3)]
    local = [w * part["head.norm.gain"] for w, part in zip(weight, parts, strict=True)]
    said = words(transformer(), [right | {"head.norm.gain": g} for g in local])
    assert "the all_reduce is missing, only in norms (head.norm.gain)" in said
    assert verify.against(transformer(), [right] * 3, TOKENS, NEXTS).ok
    assert "head.norm.gain                   rank 1  " in words(
        transformer(), [right, right | {"head.norm.gain": np.ones(8)}]
    )


def test_ranks_weights_are_compared_with_rank_0s_and_its_with_the_models():
    model, name = transformer(), "head.norm.gain"
    right, state = gradients(transformer(), TOKENS, NEXTS), model.state()
    other = state | {name: state[name] + 0.1}
    assert verify.against(model, [right] * 3, TOKENS, NEXTS, weights=[state] * 3).ok
    said = words(model, {2: right, 0: right, 1: right}, weights=[state, other, other])
    line = f"ranks 1, 2 have other weights than rank 0, in {name}: not broadcast from rank 0"
    assert said == f"{line}\nthe gradients are right: all 29 gradients, largest error 0.0e+00"
    model.named_parameters()[name].requires_grad = False
    del right[name]
    frozen = words(model, [right] * 2, weights=[state, other])
    assert frozen.startswith(line.replace("ranks 1, 2 have", "rank 1 has") + " (frozen: ")
    assert f"rank 0 has other weights than the model, in {name}: give it rank 0's" in words(
        model, [right] * 2, weights=[other, other]
    )
    with pytest.raises(ValueError, match="weights of 1 ranks, and gradients of 2"):
        verify.against(model, [right] * 2, TOKENS, NEXTS, weights=[state])


def test_statistics_that_move_are_no_weights():
    cnn, x, y = nn.CNN(1, 3, (2,), dtype="float64"), arrays(4, 1, 4, 4), np.arange(4) % 3
    state = {n: a + ("running" in n) for n, a in cnn.state().items()}
    assert verify.against(cnn, gradients(cnn, x, y), x, y, weights=[state]).ok


def test_what_wrappers_add_to_names_is_left_out_and_the_layout_of_tensors_is_pytorchs():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch")
    model, x, y = nn.MLP([5, 7, 7, 3], dtype="float64"), arrays(4, 5), np.arange(4) % 3
    ours = gradients(model, x, y)
    theirs = {name: torch.tensor(g.T) for name, g in ours.items()}
    for start in ("", "module.", "_orig_mod.module."):
        got = {start + name: g for name, g in theirs.items()}
        assert verify.against(model, got, torch.tensor(x), torch.tensor(y)).ok
    assert "transposed" in words(model, {name: g.T for name, g in ours.items()}, x, y)


def test_none_is_zeros_and_what_is_frozen_is_not_asked_for():
    model = transformer()
    for name in ("head.norm.gain", "blocks.0.expand.weight"):
        model.named_parameters()[name].requires_grad = False
    got = gradients(model, TOKENS, NEXTS)
    assert len(got) == 27 and verify.against(model, got, TOKENS, NEXTS).ok
    theirs = {match.theirs: None for match in interop.matches(model)}
    for ours, name, transposed in interop.matches(model):
        if ours in got:
            theirs[name] = got[ours].T if transposed else got[ours]
    assert verify.against(model, theirs, TOKENS, NEXTS).ok
    said = words(model, got | {"head.norm.bias": None})
    assert "1 of 27 gradients differ" in said and "it is 0" in said


def test_dropout_and_a_part_of_an_array_are_refused_with_the_remedy():
    model = nn.Transformer(11, 8, 2, 2, 6, dropout=0.1)
    with pytest.raises(ValueError, match=r"embedding.dropout drops out at 0.1.* dropout=0"):
        verify.against(model, {}, TOKENS, NEXTS)

    class DTensor:
        detach = full_tensor = None

    with pytest.raises(ValueError, match=r"give x.full_tensor\(\), called on every rank"):
        verify.against(
            nn.MLP([2, 3]),
            {"layers.0.weight": DTensor(), "layers.0.bias": None},
            np.ones((1, 2)),
            [0],
        )


def test_a_shape_that_fits_nothing_is_an_error():
    got = gradients(transformer(), TOKENS, NEXTS)
    got["head.norm.gain"] = np.zeros(3)
    with pytest.raises(ValueError, match=r"the gradient of head.norm.gain is \[3\], not \[8\]"):
        verify.against(transformer(), got, TOKENS, NEXTS)


@pytest.mark.parametrize("spread", [6e-5, 1e-4, 2e-4])
def test_noise_has_no_cause(spread):
    """Any sum of examples fits numbers of few digits: it must be nearer than the right sum."""
    random = np.random.default_rng(0)
    noisy = {
        name: (g + spread * abs(g).max() * random.standard_normal(g.shape)).astype("float32")
        for name, g in gradients(transformer(), TOKENS, NEXTS).items()
    }
    for ranks in ([noisy], [noisy] * 2):
        verdict = verify.against(transformer(), ranks, TOKENS, NEXTS)
        assert not verdict and verdict.cause is None, verdict
