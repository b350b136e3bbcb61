"""GPT-2's layout of weights: by hand, and as the package transformers writes it."""

import importlib.util
import json

import numpy as np
import pytest

from minidist import Mesh, checkpoint, nn
from minidist.hybrid import Hybrid
from tests.strategies import assert_same_bits

numpy_file = pytest.importorskip(
    "safetensors.numpy", reason="checkpoints need the package safetensors"
)
NAMES = {  # of one block, and the shape for C = 6
    "ln_1.weight": (6,),
    "ln_1.bias": (6,),
    "attn.c_attn.weight": (6, 18),
    "attn.c_attn.bias": (18,),
    "attn.c_proj.weight": (6, 6),
    "attn.c_proj.bias": (6,),
    "ln_2.weight": (6,),
    "ln_2.bias": (6,),
    "mlp.c_fc.weight": (6, 24),
    "mlp.c_fc.bias": (24,),
    "mlp.c_proj.weight": (24, 6),
    "mlp.c_proj.bias": (6,),
}


def arrays():
    """Two blocks; each array has numbers of its own."""
    random = np.random.default_rng(0)
    shapes = {"wte.weight": (11, 6), "wpe.weight": (5, 6), "ln_f.weight": (6,), "ln_f.bias": (6,)}
    shapes |= {f"h.{i}.{name}": shape for i in range(2) for name, shape in NAMES.items()}
    return {name: random.standard_normal(shape).astype("f4") for name, shape in shapes.items()}


def saved(folder, arrays, **config):
    numpy_file.save_file(arrays, folder / "model.safetensors")
    if config:
        (folder / "config.json").write_text(json.dumps(config))
    return folder / "model.safetensors"


@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_every_array_gets_its_place_and_masks_are_skipped(tmp_path, prefix):
    given = arrays()
    file = {prefix + name: array for name, array in given.items()}
    file[prefix + "h.0.attn.bias"] = np.tril(np.ones((1, 1, 5, 5), "f4"))
    file[prefix + "h.0.attn.masked_bias"] = np.full((), -1e4, "f4")
    model = checkpoint.load_gpt2(saved(tmp_path, file), heads=2)
    assert isinstance(model, nn.Transformer) and model.layers[1].attention.heads == 2
    state = model.state()
    assert len(state) == len(given)
    for ours, theirs in {
        "embedding.token.weight": "wte.weight",
        "embedding.position.weight": "wpe.weight",
        "blocks.1.norm_2.gain": "h.1.ln_2.weight",
        "blocks.1.attention.qkv.weight": "h.1.attn.c_attn.weight",
        "blocks.0.attention.output.bias": "h.0.attn.c_proj.bias",
        "blocks.0.expand.weight": "h.0.mlp.c_fc.weight",
        "blocks.1.contract.weight": "h.1.mlp.c_proj.weight",
        "head.norm.gain": "ln_f.weight",
    }.items():
        np.testing.assert_array_equal(state[ours], given[theirs], err_msg=ours)


def test_the_number_of_heads_is_the_configs(tmp_path):
    model = checkpoint.load_gpt2(saved(tmp_path, arrays(), n_head=3))
    assert model.layers[1].attention.heads == 3
    (tmp_path / "config.json").unlink()
    wide = {"wte.weight": (3, 128), "wpe.weight": (2, 128)} | dict.fromkeys(
        ["ln_f.weight", "ln_f.bias"], (128,)
    )
    file = saved(tmp_path, {name: np.ones(shape, "f4") for name, shape in wide.items()})
    assert len(checkpoint.load_gpt2(file).layers) == 2


@pytest.mark.parametrize(
    "change, config, message",
    [
        ({"h.0.attn.q.weight": np.ones(3)}, {}, r"has an array 'h.0.attn.q.weight', which is none"),
        ({"wpe.weight": None}, {}, "has no embedding.position.weight: these are no weights of"),
        ({"h.1.ln_2.bias": None}, {"n_head": 2}, "'blocks.1.norm_2.bias' is missing in the state"),
        ({"lm_head.weight": np.ones((11, 6), "f4")}, {}, "has a head of its own"),
        ({}, {"activation_function": "relu"}, "has activation_function = relu, and GPT-2 has gelu"),
    ],
)
def test_what_is_not_gpt2_is_refused(tmp_path, change, config, message):
    file = {name: array for name, array in (arrays() | change).items() if array is not None}
    with pytest.raises(ValueError, match=message):
        checkpoint.load_gpt2(saved(tmp_path, file, **config))


def test_a_file_that_is_none_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"cannot read .*nowhere"):
        checkpoint.load_gpt2(tmp_path / "nowhere")
    (tmp_path / "text").write_text("wte")
    with pytest.raises(ValueError, match="text is damaged or foreign"):
        checkpoint.load_gpt2(tmp_path / "text")


def test_it_is_cut_over_ranks_like_any_other_model(cluster, tmp_path):
    file = saved(tmp_path, arrays(), n_head=2)

    def worker(group):
        hybrid = Hybrid(checkpoint.load_gpt2(file), Mesh(group, dp=1, pp=2, tp=2))
        return hybrid.state()

    for state in cluster(4, "thread").run(worker):
        assert_same_bits(state, checkpoint.load_gpt2(file).state())


@pytest.mark.skipif(
    not importlib.util.find_spec("transformers"),
    reason="needs the packages transformers and torch: logits are not compared with theirs",
)
def test_logits_are_those_of_the_transformers_package(tmp_path):
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=101, n_positions=24, n_embd=48, n_layer=3, n_head=4)
    theirs = GPT2LMHeadModel(config).eval()
    with torch.no_grad():  # as initialised, biases are 0 and gains 1: they would test nothing
        for p in theirs.parameters():
            p.add_(torch.randn_like(p) * 0.3)
    theirs.save_pretrained(tmp_path)
    tokens = np.random.default_rng(0).integers(0, 101, (3, 24))
    with torch.no_grad():
        want = theirs(torch.tensor(tokens)).logits.numpy()
    found = checkpoint.load_gpt2(tmp_path / "model.safetensors")(tokens).data
    assert abs(want).max() > 1
    np.testing.assert_allclose(found, want, atol=1e-4)
