"""Our models and PyTorch's compute the same from the same weights, and so do their gradients."""

import numpy as np
import pytest

from minidist import nn, verify
from minidist.verify.interop import torch as interop
from tests.strategies import arrays

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
    "relu mlp": (lambda **o: nn.MLP([5, 7, 4], **o), arrays(3, 5), 4),
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


@pytest.mark.parametrize("name", MODELS)
def test_weights_there_and_back(name):
    make, _, _ = MODELS[name]
    model, fresh = make(seed=1), make(seed=2)
    interop.load(fresh, twin(model))
    for key, array in model.state().items():
        assert np.array_equal(fresh.state()[key], array), key
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


def test_a_wrapped_module_gets_weights_and_gives_gradients():
    model = nn.MLP([5, 7, 4], dtype="float64")
    wrapped = torch.nn.ModuleDict({"module": twin(nn.MLP([5, 7, 4], dtype="float64", seed=1))})
    interop.load_torch(wrapped, model)
    again = nn.MLP([5, 7, 4], dtype="float64", seed=2)
    interop.load(again, wrapped)
    for name, array in model.state().items():
        assert np.array_equal(again.state()[name], array)
    assert not any(g.any() for g in interop.gradients(model, wrapped).values())


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
    found = interop.from_torch(model, wrapped, names)
    assert all(np.array_equal(found[name], array) for name, array in model.state().items())
    with pytest.raises(ValueError, match=r"several names are 'layers.0.weight' without the words"):
        interop.from_torch(model, interop.to_torch(model) | {"module.layers.0.weight": 0})


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
    one = which | {"blocks.1.expand": "blocks.1.gate"}
    with pytest.raises(ValueError, match=r"names=.*k_proj.* a buffer, such as a mask") as refused:
        interop.from_torch(model, theirs.state_dict(), one | {"blocks.1.expand": "blocks.1.gate"})
    assert "'blocks.1.up.weight'" in str(refused.value) and "leave it out" not in str(refused.value)
    three = {"blocks.0.expand": ["a", "b", "c", "d", "e"]}
    with pytest.raises(ValueError, match=r"48 outputs of blocks.0.expand.weight are no equal"):
        interop.to_torch(model, three)


def test_a_shard_of_an_array_is_refused_with_both_shapes():
    pieces = {name: a.reshape(-1)[:4] for name, a in interop.to_torch(nn.MLP([2, 3])).items()}
    with pytest.raises(ValueError, match=r"is \[4\]; .* has to be \[3, 2\] .*gathered first"):
        interop.from_torch(nn.MLP([2, 3]), pieces)


def test_the_longest_name_wins():
    names = {"layers": "net", "layers.1": "head", "layers.1.bias": "b"}
    table = interop.matches(nn.MLP([2, 3, 4]), names)
    assert [m.theirs for m in table] == ["net.0.weight", "net.0.bias", "head.weight", "b"]


def test_a_list_of_no_names_is_refused():
    with pytest.raises(ValueError, match=r"names\['layers.1'\] is empty; give"):
        interop.matches(nn.MLP([2, 3, 4]), {"layers.1": []})


def test_a_missing_name_says_which_are_left():
    with pytest.raises(ValueError, match=r"no 'layers.0.weight' .* but '0.bias', '0.weight', '2"):
        interop.load(nn.MLP([5, 7, 4]), sequential())


def test_an_array_too_many_is_named():
    arrays_of = {**interop.to_torch(nn.MLP([2, 3])), "extra": np.zeros(3)}
    with pytest.raises(ValueError, match="has 'extra' besides"):
        interop.from_torch(nn.MLP([2, 3]), arrays_of)


def test_a_layout_that_was_not_turned_is_named():
    wrong = {name: np.asarray(a).T for name, a in interop.to_torch(nn.MLP([2, 3])).items()}
    with pytest.raises(ValueError, match=r"is \[2, 3\]; for .* has to be \[3, 2\] \(\[out, in\]\)"):
        interop.from_torch(nn.MLP([2, 3]), wrong)


def test_a_model_without_a_twin_says_what_to_do():
    with pytest.raises(ValueError, match=r"no twin of a Siamese.*to_torch"):
        twin(nn.Siamese([4, 3, 2]))
    with pytest.raises(ValueError, match="experts=0"):
        twin(nn.Transformer(5, 4, 1, 1, 4, experts=2))


def test_bfloat16_comes_as_float32():
    assert interop.as_numpy(torch.ones(2, dtype=torch.bfloat16)).dtype == np.float32
