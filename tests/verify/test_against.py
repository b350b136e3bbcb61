"""Gradients of another program: what differs is named, with its likely cause."""

import copy

import numpy as np
import pytest

from minidist import nn, verify
from minidist.verify import foreign
from minidist.verify.interop import torch as interop
from minidist.verify.strategies.cases import Case
from minidist.verify.variants import ERF, VARIANTS
from tests.grids import some
from tests.strategies import arrays

TOKENS, NEXTS = np.random.default_rng(0).integers(0, 11, (2, 4, 6))
IMAGES, LABELS = arrays(4, 1, 4, 4), np.arange(4) % 3


def transformer():
    return nn.Transformer(11, 8, 2, 2, 6, dtype="float64", seed=1)


def llama():
    return nn.Llama(11, 16, 4, 2, 2, 6, dtype="float64", seed=1)


def cnn():
    return nn.CNN(1, 3, (2,), dtype="float64")


def gradients(model, x=TOKENS, y=NEXTS, change=lambda model: None):
    change(model)
    return foreign.gradients_of(Case("other", model, x, y, model.loss))


OURS = gradients(transformer())


def against(got, model=None, **options):
    return verify.against(model or transformer(), got, TOKENS, NEXTS, **options)


def words(model, got, x=TOKENS, y=NEXTS, **options):
    found = verify.against(model, got, x, y, **options)
    assert not found.ok
    return str(found)


def in_float32(gradients):
    return {name: g.astype("float32") for name, g in gradients.items()}


def test_equal_gradients_are_ok_and_say_how_near():
    found = against(OURS)
    assert found.ok and str(found) == "ok: all 29 gradients, largest error 0.0e+00"
    assert against([OURS] * 3).ok
    assert "it was computed in float32" in words(transformer(), in_float32(OURS))


MODELS = {"transformer": (transformer, 29), "llama": (llama, 17)}
THERE = [
    (kind, name)
    for name in VARIANTS
    for kind in MODELS
    if VARIANTS[name](MODELS[kind][0]()) and "theta is 10000" not in name  # as our Llama has it
]


def assert_named(kind, variant):
    """With another factor, and beside what PyTorch has for a gelu."""
    make, count = MODELS[kind]
    times, sums = 1, ""
    if kind == "llama":
        times, sums = 24, " and the loss is a sum over the targets, not their mean"
    got = {n: times * g for n, g in gradients(make(), change=VARIANTS[variant]).items()}
    first, *rest = words(make(), got).splitlines()
    wrong, _, cause = first.partition(f" of {count} gradients differ: ")
    assert cause == variant + sums
    assert int(wrong) > count // 2 and len(rest) == 4 and rest[-1] == f"  and {int(wrong) - 3} more"
    if kind == "transformer" and "activation" not in variant and variant != ERF:
        got = gradients(make(), change=lambda m: (VARIANTS[variant](m), VARIANTS[ERF](m)))
        head = f"29 of 29 gradients differ: {variant} and {ERF}\n"
        assert words(make(), got).startswith(head)


def test_another_convention_is_named_with_its_factor():
    for kind, variant in some(THERE, 4, "conventions"):
        assert_named(kind, variant)


@pytest.mark.slow
@pytest.mark.parametrize("kind, variant", THERE)
def test_every_convention_is_named_with_its_factor(kind, variant):
    assert_named(kind, variant)


LLAMA = {  # torch_llama.py's mistakes, in the words of verify.against
    "no mask": "the attention has no causal mask",
    "no scale": "the scores are not divided by sqrt(D)",
    "gelu": "the gate is a gelu, not a silu",
    "no rotary": "there are no rotary positions",
    "neighbours": "rotary positions turn neighbours, not the halves of a head",
    "up first": "gate and up are exchanged",
    "layer norm": "the norms subtract the mean (layer norm), not RMSNorm",
    "eps": "the norms have eps 1e-6, not 1e-5",
    "eps of PyTorch": "RMSNorm has PyTorch's default eps (2.2e-16 in float64, 1.2e-7 in float32)",
    "post-norm": "the norms come after the sub-layers (post-norm)",
    "repeat": "query h reads keys h % K (repeat), not h // G (repeat_interleave)",
    "theta": "theta is 500000",
    "": None,
}


@pytest.mark.parametrize("count", [3, pytest.param(99, marks=pytest.mark.slow)])
def test_mistakes_in_a_llama_of_pytorchs_are_named(count):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch")
    from tests import torch_llama

    every = [(mistake, dtype) for mistake in LLAMA for dtype in ("float64", "float32")]
    for mistake, dtype in some(every, count, "llamas"):
        torch.manual_seed(0)
        theirs = torch_llama.Llama(11, 16, 4, 2, 2, 24, mistake)
        names = torch_llama.names(2)
        model = nn.Llama(11, 16, 4, 2, 2, 6, hidden=24, dtype="float64")
        interop.load(model, theirs, names)
        got = gradients_of_torch(torch, theirs.to(getattr(torch, dtype)))
        cause = LLAMA[mistake]
        if dtype == "float32" and not mistake:
            cause = "right but for rounding: it was computed in float32"
        assert against(got, model, names=names).cause == cause, (mistake, dtype)


def gradients_of_torch(torch, theirs):
    logits = theirs(torch.tensor(TOKENS)).flatten(0, 1)
    torch.nn.functional.cross_entropy(logits, torch.tensor(NEXTS).flatten()).backward()
    return {name: p.grad for name, p in theirs.named_parameters()}


def test_names_and_layouts_of_pytorch_are_turned_and_wrappers_left_out():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch")
    from minidist.verify.interop.twins import twin

    got = gradients_of_torch(torch, twin(transformer()))
    for start in ("", "module.", "_orig_mod.module."):
        assert against({start + name: g for name, g in got.items()}).ok
    model, x, y = nn.MLP([5, 7, 7, 3], dtype="float64"), arrays(4, 5), np.arange(4) % 3
    ours = gradients(model, x, y)
    theirs = {name: torch.tensor(g.T) for name, g in ours.items()}
    assert verify.against(model, theirs, torch.tensor(x), torch.tensor(y)).ok
    assert "transposed" in words(model, {name: g.T for name, g in ours.items()}, x, y)


@pytest.mark.parametrize("eps", [1e-6, 3e-6])
def test_another_eps_is_no_rounding(eps):
    """Embeddings of size 1, as PyTorch draws them: then the norms' eps changes little."""
    other = nn.Llama(11, 8, 2, depth=2, context=6, dtype="float64", seed=1)
    other.named_parameters()["embedding.token.weight"].data[...] = arrays(11, 8)
    model = copy.deepcopy(other)
    for norm in other.modules(nn.RMSNorm):
        norm.eps = eps
    got = gradients(other)
    known = eps == 1e-6
    cause = against(got, model).cause
    assert cause == "the norms have eps 1e-6, not 1e-5" if known else "a constant" in cause
    single = cause if known else "right but for rounding: it was computed in float32"
    assert against(in_float32(got), model).cause == single


def test_statistics_of_evaluation_are_named_and_those_that_move_are_no_weights():
    got = gradients(cnn(), IMAGES, LABELS, lambda model: model.eval())
    assert "eval mode" in words(cnn(), got, IMAGES, LABELS)
    model, got = cnn(), gradients(cnn(), IMAGES, LABELS)
    running = {n: p.data for n, p in model.named_parameters().items() if not p.requires_grad}
    assert running and verify.against(model, got | running, IMAGES, LABELS).ok
    state = {n: a + ("running" in n) for n, a in model.state().items()}
    assert verify.against(model, got, IMAGES, LABELS, weights=[state]).ok


FACTORS = {
    24: "a sum over the targets, not their mean",
    6: "a mean over the examples, not over the targets",
    -1: "differ: the sign is turned",
    3: "3 times: added up that often",
    1 / 4: "1/4: divided by 4 once too often",
    0.7: "all are 0.7 times as large",
    -4: "the sign is turned and 4 times: added up that often",
    25: "all are 25 times as large",  # of 24 targets
    1e-7: "differ: all are 1e-07 times as large",
    65536: "differ: 2^16: a loss scale that was not divided out?",
    2.0**-12: "differ: 2^-12: a loss scale that was divided out once too often?",
}


def test_a_factor_is_explained():
    for factor, said in FACTORS.items():
        got = {n: factor * g for n, g in OURS.items()}
        assert said in words(transformer(), got)
        if factor in (24, -4, 65536):
            single = in_float32({n: (1 + 2e-6) * g for n, g in got.items()})
            assert said in words(transformer(), single)


def test_a_mean_that_counts_padding():
    nexts = np.where(np.arange(6) < 4, NEXTS, nn.IGNORED)
    got = {n: g * 16 / 24 for n, g in gradients(transformer(), TOKENS, nexts).items()}
    assert "a mean over all targets, padding too" in words(transformer(), got, TOKENS, nexts)


ONE_WRONG = [
    ("blocks.0.attention.output.weight", np.transpose, "transposed: [out, in]"),
    ("embedding.token.weight", lambda g: 2 * g, "twice: it was counted twice"),
    ("embedding.position.weight", np.zeros_like, "it is 0: its use was cut off"),
    ("head.norm.bias", lambda g: None, "it is 0"),
    ("head.norm.gain", lambda g: g * np.nan, "8 elements are not finite"),
    (
        "blocks.0.attention.qkv.weight",
        lambda g: g.reshape(8, 3, 2, 4).swapaxes(1, 2).reshape(8, 24),
        "its columns are [H, 3, D], as in Megatron-LM",
    ),
    (
        "blocks.0.attention.qkv.weight",
        lambda g: np.concatenate([g[:, 16:], g[:, :16]], axis=1),
        "its columns are VQK, not QKV",
    ),
]


def test_one_wrong_parameter_is_named_with_its_cause():
    for name, change, said in ONE_WRONG:
        first, row = words(transformer(), OURS | {name: change(OURS[name])}).splitlines()
        assert first == "1 of 29 gradients differ" and row.startswith(f"  {name} ") and said in row


def test_what_is_wrong_without_a_known_cause_has_none():
    name = "head.linear.weight"
    got = OURS | {name: OURS[name] + arrays(8, 11)}
    first, row, tried = words(transformer(), got).splitlines()
    assert first == "1 of 29 gradients differ" and row.split("got/want")[1].count("  ") == 0
    assert tried.startswith("no known cause fits (tried: factors, rounding, ")
    got = {n: g + 0.1 * arrays(*g.shape, seed=3) for n, g in OURS.items()}
    head, *rows, more, _ = words(transformer(), got).splitlines()
    assert head == "29 of 29 gradients differ" and len(rows) == 5 and more == "  and 24 more"


def test_noise_has_no_cause():
    """Any sum of examples fits numbers of few digits: it must be nearer than the right sum."""
    random = np.random.default_rng(0)
    noisy = {
        name: (g + 1e-4 * abs(g).max() * random.standard_normal(g.shape)).astype("float32")
        for name, g in OURS.items()
    }
    verdict = against([noisy] * 2)
    assert not verdict and verdict.cause is None, verdict


SHARES = np.array_split(np.arange(4), 3)
MEANS = [gradients(transformer(), TOKENS[mine], NEXTS[mine]) for mine in SHARES]
OWN = [
    {n: len(mine) / 4 * g for n, g in one.items()} for mine, one in zip(SHARES, MEANS, strict=True)
]
GAIN = "head.norm.gain"
RANKS = [
    (MEANS, "29 of 29 gradients differ: equals each rank's own mean: the all_reduce is missing"),
    (
        [{name: sum(part[name] for part in MEANS) / 3 for name in OURS}] * 3,
        "equals the mean of the ranks' means",
    ),
    (
        [OURS | {GAIN: part[GAIN]} for part in OWN],
        "the all_reduce is missing, only in norms (head.norm.gain)",
    ),
    ([OURS, OURS | {GAIN: np.ones(8)}], "head.norm.gain                   rank 1  "),
    ([OURS, *OWN[1:]], "only rank 0 has the sum, the others their own: reduce, not all_reduce"),
    ([OURS, *MEANS[1:]], "only rank 0 has the sum, the others their own: reduce, not all_reduce"),
    ([OURS, OURS, OWN[2]], "on rank 2 the sum counts examples 0, 1, 2 not at all"),
    (
        [OURS, OURS | {GAIN: OWN[1][GAIN]}, OURS],
        "on rank 1 the sum counts examples 0, 1, 3 not at all, only in norms",
    ),
    ({n: OWN[0][n] + OWN[1][n] for n in OURS}, "the sum counts example 3 not at all"),
]


def test_what_ranks_did_wrong_is_named_with_their_number():
    for ranks, said in RANKS:
        assert said in words(transformer(), ranks)
        if said.startswith("on"):  # of a mean of means several causes are as near
            assert said in words(transformer(), [in_float32(one) for one in ranks])


def test_ranks_weights_are_compared_with_rank_0s_and_its_with_the_models():
    model, state = transformer(), transformer().state()
    other = state | {GAIN: state[GAIN] + 0.1}
    assert against([OURS] * 3, weights=[state] * 3).ok
    said = words(model, {2: OURS, 0: OURS, 1: OURS}, weights=[state, other, other])
    line = f"ranks 1, 2 have other weights than rank 0, in {GAIN}: not broadcast from rank 0"
    assert said == f"{line}\nthe gradients are right: all 29 gradients, largest error 0.0e+00"
    assert f"rank 0 has other weights than the model, in {GAIN}: give it rank 0's" in words(
        model, [OURS] * 2, weights=[other, other]
    )
    model.named_parameters()[GAIN].requires_grad = False
    trained = {n: g for n, g in OURS.items() if n != GAIN}
    frozen = words(model, [trained] * 2, weights=[state, other])
    assert frozen.startswith(line.replace("ranks 1, 2 have", "rank 1 has") + " (frozen: ")


def test_what_is_frozen_is_not_asked_for():
    model = transformer()
    for name in ("head.norm.gain", "blocks.0.expand.weight"):
        model.named_parameters()[name].requires_grad = False
    got = gradients(model)
    assert len(got) == 27 and against(got, model).ok
    theirs = {match.theirs: None for match in interop.matches(model)}
    for ours, name, transposed in interop.matches(model):
        if ours in got:
            theirs[name] = got[ours].T if transposed else got[ours]
    assert against(theirs, model).ok


class DTensor:
    detach = full_tensor = None


REFUSED = [
    (
        lambda: against({}, nn.Transformer(11, 8, 2, 2, 6, dropout=0.1)),
        r"embedding.dropout drops out at 0.1.* dropout=0",
    ),
    (
        lambda: verify.against(
            nn.MLP([2, 3]), dict.fromkeys(nn.MLP([2, 3]).state(), DTensor()), arrays(1, 2), [0]
        ),
        r"give x.full_tensor\(\), called on every rank",
    ),
    (
        lambda: against(OURS | {GAIN: np.zeros(3)}),
        r"the gradient of head.norm.gain is \[3\], not \[8\]",
    ),
    (
        lambda: against([OURS] * 2, weights=[transformer().state()]),
        "weights of 1 ranks, and gradients of 2",
    ),
    (lambda: verify.against(OURS, OURS, TOKENS, NEXTS), "minidist, not dict"),
    (lambda: against(None), "or a list of them, not NoneType; of PyTorch"),
    (lambda: against([3]), "or a list of them, not list"),
    (lambda: against([]), "nothing to compare"),
    (
        lambda: against(OURS | {"head.norm.gian": np.ones(8)}),
        r"unknown parameter 'head.norm.gian'; did you mean head.norm.gain\?",
    ),
    (
        lambda: against([OURS, {n: g for n, g in OURS.items() if n != GAIN}]),
        "the gradient of head.norm.gain is missing on rank 1",
    ),
    (
        lambda: against({n: g + 0j for n, g in OURS.items()}),
        "the gradient of embedding.token.weight is complex128, not real",
    ),
    (
        lambda: against({n: g.astype(str) for n, g in OURS.items()}),
        "the gradient of embedding.token.weight is str.*, not real",
    ),
    (
        lambda: against(OURS, names={"embeding.token": "wte"}),
        r"unknown name of ours 'embeding.token'; did you mean embedding.token\?",
    ),
]


def test_wrong_input_is_a_value_error_of_one_line():
    for call, message in REFUSED:
        with pytest.raises(ValueError, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)
