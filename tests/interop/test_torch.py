"""Our models and PyTorch's compute the same from the same weights, and so do their gradients."""

import numpy as np
import pytest

from minidist import nn, verify
from minidist.verify.interop import torch as interop
from tests.strategies import arrays, assert_same_bits

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch")
from minidist.verify.interop.twins import twin  # noqa: E402


def tokens(rows, columns, vocab, seed=0):
    return np.random.default_rng(seed).integers(3, vocab, (rows, columns))


def padded(rows, S, T, vocab):
    found = tokens(rows, S + T, vocab)
    found[0, S - 2 : S] = 0
    return found


MODELS = {
    "mlp": (lambda **o: nn.MLP([5, 7, 6, 4], "gelu", **o), arrays(3, 5), 4),
    "transformer": (lambda **o: nn.Transformer(11, 8, 2, 2, 6, **o), tokens(3, 5, 11), 11),
    "tied": (lambda **o: nn.Transformer(11, 8, 4, 1, 6, tied=True, **o), tokens(2, 6, 11), 11),
    "long": (lambda **o: nn.Transformer(7, 4, 1, 1, 140, **o), tokens(2, 140, 7), 7),
    "seq2seq": (lambda **o: nn.Seq2Seq(9, 8, 6, 2, 2, 5, 4, **o), padded(3, 5, 4, 8), 8),
    "cnn": (lambda **o: nn.CNN(3, 4, (4, 4, 6), **o), arrays(3, 3, 8, 6), 4),
}


@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_every_gradient_are_those_of_the_twin(name):
    make, x, classes = MODELS[name]
    model = make(dtype="float64", seed=3)
    for p in model.parameters():  # gains, and biases too
        p.data += 0.1 * arrays(*p.shape, seed=len(p.name)) * p.requires_grad
    other = twin(model)
    logits, theirs = model(x), other(torch.tensor(x))
    np.testing.assert_allclose(logits.data, theirs.detach().numpy(), rtol=1e-9, atol=1e-9)
    targets = np.arange(logits.data[..., 0].size) % classes
    nn.cross_entropy(logits, targets.reshape(logits.shape[:-1])).backward()
    torch.nn.functional.cross_entropy(theirs.flatten(0, -2), torch.tensor(targets)).backward()
    found = interop.gradients(model, other)
    wanted = {name: p for name, p in model.named_parameters().items() if p.requires_grad}
    assert found.keys() == wanted.keys()
    for name, p in wanted.items():
        np.testing.assert_allclose(found[name], p.grad, rtol=1e-9, atol=1e-9, err_msg=name)
    fresh = make(dtype="float64", seed=2)
    interop.load(fresh, twin(model))  # there and back
    assert_same_bits(fresh.state(), model.state())
    assert fresh.state().keys() == interop.from_torch(model, interop.to_torch(model)).keys()


def sequential():
    layers = [torch.nn.Linear(5, 7), torch.nn.ReLU(), torch.nn.Linear(7, 4)]
    return torch.nn.Sequential(*layers).double()


NAMES = {"layers.0": "0", "layers.1": "2"}


def test_names_of_ones_own_module():
    theirs, model = sequential(), nn.MLP([5, 7, 4], dtype="float64")
    interop.load(model, theirs, NAMES)
    x = arrays(3, 5)
    np.testing.assert_allclose(model(x).data, theirs(torch.tensor(x)).detach(), rtol=1e-12)
    other = interop.load_torch(sequential(), model, NAMES)
    assert torch.equal(other[2].weight, theirs[2].weight)


WRAPPERS = ["module.", "_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module."]


@pytest.mark.parametrize("names", [None, {"layers": "module.net"}])
def test_words_of_wrappers_are_left_out_anywhere_in_a_name(names):
    model = nn.MLP([5, 7, 4], dtype="float64")
    plain = interop.to_torch(model, names)
    wrapped = {}
    for k, (name, array) in enumerate(plain.items()):
        words = name.split(".")
        words[k % len(words)] = f"{WRAPPERS[k]}{words[k % len(words)]}"
        wrapped[f"{WRAPPERS[k - 1]}{'.'.join(words)}"] = array
    assert_same_bits(interop.from_torch(model, wrapped, names), model.state())


def test_a_wrapped_module_gets_weights_and_gives_gradients():
    model = nn.MLP([5, 7, 4], dtype="float64")
    wrapped = torch.nn.ModuleDict({"module": twin(nn.MLP([5, 7, 4], dtype="float64", seed=1))})
    interop.load_torch(wrapped, model)
    again = nn.MLP([5, 7, 4], dtype="float64", seed=2)
    interop.load(again, wrapped)
    assert_same_bits(again.state(), model.state())
    assert not any(g.any() for g in interop.gradients(model, wrapped).values())


def test_one_array_here_may_be_several_there():
    from tests.torch_llama import Llama, names

    which = names(2)
    model = nn.Llama(11, 16, 4, 2, depth=2, context=6, hidden=24, dtype="float64")
    theirs, x = Llama(11, 16, 4, 2, 2, 24), tokens(3, 6, 11)
    interop.load(model, theirs, which)
    logits, nexts = theirs(torch.tensor(x)), tokens(3, 6, 11, seed=1)
    np.testing.assert_allclose(model(x).data, logits.detach().numpy(), rtol=1e-9, atol=1e-9)
    torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), torch.tensor(nexts).flatten()
    ).backward()
    got = {name: p.grad for name, p in theirs.named_parameters()}
    assert verify.against(model, got, x, nexts, names=which).ok
    again = interop.load_torch(Llama(11, 16, 4, 2, 2, 24), model, which)
    assert all(map(torch.equal, again.state_dict().values(), theirs.state_dict().values()))


def test_the_longest_name_wins():
    names = {"layers": "net", "layers.1": "head", "layers.1.bias": "b"}
    table = interop.matches(nn.MLP([2, 3, 4]), names)
    assert [m.theirs for m in table] == ["net.0.weight", "net.0.bias", "head.weight", "b"]


def small():
    return nn.MLP([2, 3])


def turned(change):
    return {name: change(np.asarray(a)) for name, a in interop.to_torch(small()).items()}


REFUSED = [
    (
        lambda: interop.from_torch(small(), turned(lambda a: a.reshape(-1)[:2])),
        r"is \[2\]; .* has to be \[3, 2\] .*gathered first",
    ),
    (
        lambda: interop.from_torch(small(), turned(np.transpose)),
        r"is \[2, 3\]; for .* has to be \[3, 2\] \(\[out, in\]\)",
    ),
    (
        lambda: interop.from_torch(small(), turned(np.copy) | {"extra": np.zeros(3)}),
        "has 'extra' besides",
    ),
    (
        lambda: interop.from_torch(small(), turned(np.copy) | {"module.layers.0.weight": 0}),
        r"several names are 'layers.0.weight' without the words",
    ),
    (
        lambda: interop.to_torch(small(), {"layers.0": ["a", "b"]}),
        r"3 outputs of layers.0.weight are no equal",
    ),
    (
        lambda: interop.matches(nn.MLP([2, 3, 4]), {"layers.1": []}),
        r"names\['layers.1'\] is empty; give",
    ),
    (
        lambda: interop.load(nn.MLP([5, 7, 4]), sequential()),
        r"no 'layers.0.weight' .* but '0.bias', '0.weight', '2",
    ),
    (lambda: twin(nn.Siamese([4, 3, 2])), r"no twin of a Siamese.*to_torch"),
    (lambda: twin(nn.Transformer(5, 4, 1, 1, 4, experts=2)), "experts=0"),
]


def test_what_fits_no_module_of_pytorchs_is_refused_with_the_remedy():
    for call, message in REFUSED:
        with pytest.raises(ValueError, match=message):
            call()


def test_bfloat16_comes_as_float32():
    assert interop.as_numpy(torch.ones(2, dtype=torch.bfloat16)).dtype == np.float32
