"""What other programs compute otherwise is named: alone, with PyTorch's gelu, and with a factor."""

import numpy as np
import pytest

from minidist import nn, verify
from minidist.verify.interop import torch as interop
from minidist.verify.variants import ERF, VARIANTS
from tests.strategies import arrays
from tests.verify.test_foreign import NEXTS, TOKENS, gradients, of_ranks, transformer, words

MODELS = {
    "transformer": (transformer, 29),
    "llama": (lambda: nn.Llama(11, 16, 4, 2, 2, 6, dtype="float64", seed=1), 17),
}
THERE = [(kind, name) for name in VARIANTS for kind in MODELS if VARIANTS[name](MODELS[kind][0]())]
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
}
SAME = "theta is 10000"  # as our Llama has it
WITH_GELU = [
    name
    for kind, name in THERE
    if kind == "transformer" and "activation" not in name and name != ERF
]
OURS = gradients(transformer(), TOKENS, NEXTS)


@pytest.mark.parametrize("kind, variant", [one for one in THERE if SAME not in one])
def test_another_convention_is_named_with_its_factor(kind, variant):
    make, count = MODELS[kind]
    got = gradients(make(), TOKENS, NEXTS, VARIANTS[variant])
    got = {name: g * (24 if kind == "llama" else 1) for name, g in got.items()}
    first, *rest = words(make(), got).splitlines()
    wrong, _, cause = first.partition(f" of {count} gradients differ: ")
    sums = " and the loss is a sum over the targets, not their mean"
    assert cause == variant + (sums if kind == "llama" else "")
    assert int(wrong) > count // 2 and len(rest) == 4 and rest[-1] == f"  and {int(wrong) - 3} more"


@pytest.mark.parametrize("variant", WITH_GELU)
def test_another_convention_beside_pytorchs_gelu_is_named_with_it(variant):
    def both(model):
        assert VARIANTS[variant](model) and VARIANTS[ERF](model)

    got = gradients(transformer(), TOKENS, NEXTS, both)
    assert words(transformer(), got).startswith(f"29 of 29 gradients differ: {variant} and {ERF}\n")


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("mistake", [*LLAMA, ""])
def test_mistakes_in_a_llama_of_pytorchs_are_named(mistake, dtype):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch")
    from tests import torch_llama

    torch.manual_seed(0)
    theirs = torch_llama.Llama(11, 16, 4, 2, 2, 24, mistake)
    names = torch_llama.names(2)
    model = nn.Llama(11, 16, 4, 2, 2, 6, hidden=24, dtype="float64")
    interop.load(model, theirs, names)
    logits = theirs.to(getattr(torch, dtype))(torch.tensor(TOKENS)).flatten(0, 1)
    torch.nn.functional.cross_entropy(logits, torch.tensor(NEXTS).flatten()).backward()
    got = {name: p.grad for name, p in theirs.named_parameters()}
    found = verify.against(model, got, TOKENS, NEXTS, names=names)
    right = None if dtype == "float64" else "right but for rounding: it was computed in float32"
    assert found.cause == LLAMA.get(mistake, right)


def test_statistics_of_evaluation_are_named():
    x, y = arrays(4, 1, 4, 4), np.arange(4) % 3
    cnn = nn.CNN(1, 3, (2,), dtype="float64")
    got = gradients(nn.CNN(1, 3, (2,), dtype="float64"), x, y, lambda model: model.eval())
    assert "eval mode" in words(cnn, got, x, y)


@pytest.mark.parametrize(
    "view, axes, variant",
    [
        ((2, 3), (3, 0, 2, 1, 4), "QKV's columns are read as [H, 3, D], as in Megatron-LM"),
        ((3, 2), "KQV", "QKV's columns are read as KQV"),
        ((3, 2), "VQK", "QKV's columns are read as VQK"),
        ((3, 2), "unscaled", "the scores are not divided by sqrt(D)"),
    ],
)
def test_the_likeliest_mistakes_of_a_module_of_pytorchs_are_named(monkeypatch, view, axes, variant):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch")
    from minidist.verify.interop import twins

    def forward(self, x):
        B, T, C = x.shape
        turned = axes if isinstance(axes, tuple) else (2, 0, 3, 1, 4)
        thirds = self.qkv(x).view(B, T, *view, -1).permute(turned)
        order = axes if axes in ("KQV", "VQK") else "QKV"
        q, k, v = (thirds[order.index(letter)] for letter in "QKV")
        scale = 1.0 if axes == "unscaled" else None
        attend = torch.nn.functional.scaled_dot_product_attention
        mixed = attend(q, k, v, is_causal=True, scale=scale)
        return self.output(mixed.transpose(1, 2).reshape(B, T, C))

    monkeypatch.setattr(twins.SelfAttention, "forward", forward)
    theirs = twins.twin(transformer())
    logits = theirs(torch.tensor(TOKENS)).flatten(0, 1)
    torch.nn.functional.cross_entropy(logits, torch.tensor(NEXTS).flatten()).backward()
    got = {name: p.grad for name, p in theirs.named_parameters()}
    assert words(transformer(), got).startswith(f"29 of 29 gradients differ: {variant}")


def test_columns_in_another_order_are_named_of_the_gradient_alone():
    name = "blocks.0.attention.qkv.weight"
    q, k, v = np.split(OURS[name], 3, axis=1)
    said = words(transformer(), OURS | {name: np.concatenate([v, q, k], axis=1)})
    assert said.splitlines()[1].endswith("its columns are VQK, not QKV")


@pytest.mark.parametrize(
    "factor, said",
    [
        (24, "a sum over the targets, not their mean"),
        (6, "a mean over the examples, not over the targets"),
        (-1, "differ: the sign is turned"),
        (3, "3 times: added up that often"),
        (1 / 4, "1/4: divided by 4 once too often"),
        (0.7, "all are 0.7 times as large"),
        (-4, "the sign is turned and 4 times: added up that often"),
        (-0.25, "the sign is turned and 1/4: divided by 4"),
        (25, "all are 25 times as large"),  # of 24 targets
        (1e-7, "differ: all are 1e-07 times as large"),
        (65536, "differ: 2^16: a loss scale that was not divided out?"),
        (2.0**-12, "differ: 2^-12: a loss scale that was divided out once too often?"),
    ],
)
def test_a_factor_is_explained(factor, said):
    got = {n: factor * g for n, g in OURS.items()}
    assert said in words(transformer(), got)
    single = {n: ((1 + 2e-6) * g).astype("float32") for n, g in got.items()}
    assert said in words(transformer(), single) or factor in (0.7, 25, 1e-7)


@pytest.mark.parametrize("kind, digits", [("float16", 11), ("bfloat16", 8)])
def test_a_smaller_type_is_named(kind, digits):
    def rounded(g):
        mantissa, exponent = np.frexp(g)
        return np.ldexp(np.round(mantissa * 2.0**digits), exponent - digits)

    got = {name: rounded(g) for name, g in OURS.items()}
    assert f"right, except for rounding to {kind}" in words(transformer(), got)


def test_without_a_cause_few_rows_are_printed_and_what_was_tried():
    got = {n: g + 0.1 * arrays(*g.shape, seed=3) for n, g in OURS.items()}
    head, *rows, more, tried = words(transformer(), got).splitlines()
    assert head == "29 of 29 gradients differ" and len(rows) == 5 and more == "  and 24 more"
    assert tried.endswith("other places; known differences between programs)")


def test_no_ratio_is_printed_where_the_right_gradient_is_rounding():
    """The keys' bias moves all scores of a row alike, so that its gradient is 0."""
    bias = "blocks.0.attention.qkv.bias"
    assert 0 < np.abs(OURS[bias][8:16]).max() < 1e-15
    wrong = OURS[bias].copy()
    wrong[8] += 1.0
    (row,) = [r for r in words(transformer(), OURS | {bias: wrong}).splitlines() if bias in r]
    assert "got/want" not in row


def ranks_of(kind):
    size = [len(mine) / 4 for mine in np.array_split(np.arange(4), 3)]
    means = of_ranks(transformer(), TOKENS, NEXTS)
    own = [{n: s * g for n, g in one.items()} for s, one in zip(size, means, strict=True)]
    name = "head.norm.gain"
    return {
        "root": [OURS, *own[1:]],
        "root, means": [OURS, *means[1:]],
        "one": [OURS, OURS, own[2]],
        "one parameter": [OURS, OURS | {name: own[1][name]}, OURS],
    }[kind]


@pytest.mark.parametrize(
    "kind, said",
    [
        ("root", "only rank 0 has the sum, the others their own: reduce, not all_reduce"),
        ("root, means", "only rank 0 has the sum, the others their own: reduce, not all_reduce"),
        ("one", "on rank 2 the sum counts examples 0, 1, 2 not at all"),
        ("one parameter", "on rank 1 the sum counts examples 0, 1, 3 not at all, only in norms"),
    ],
)
def test_what_certify_names_is_named_of_another_programs_ranks(kind, said):
    assert said in words(transformer(), ranks_of(kind))
    single = [{n: g.astype("float32") for n, g in one.items()} for one in ranks_of(kind)]
    assert said in words(transformer(), single)


def test_a_dictionary_with_some_examples_says_which():
    some = gradients(transformer(), TOKENS[:2], NEXTS[:2])
    said = words(transformer(), {n: g / 2 for n, g in some.items()})
    assert "the sum counts examples 2, 3 not at all" in said
