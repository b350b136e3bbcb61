"""GPT-2's layout of weights: by hand, and as the package transformers writes it."""

import importlib.util
import json
from itertools import product

import numpy as np
import pytest
from safetensors.numpy import save_file

from minidist import checkpoint, nn
from minidist.checkpoint.gpt2 import FUNCTION, SIZES
from tests.strategies import assert_same_bits

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
    save_file(arrays, folder / "model.safetensors")
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


@pytest.mark.parametrize(
    "change, config, message",
    [
        ({"h.0.attn.q.weight": np.ones(3)}, {}, r"has an array 'h.0.attn.q.weight', which is none"),
        ({"wpe.weight": None}, {}, "has no wpe.weight: these are no weights of"),
        ({"h.1.ln_2.bias": None}, {"n_head": 2}, "'blocks.1.norm_2.bias' is missing in the state"),
        ({"lm_head.weight": np.ones((11, 6), "f4")}, {}, "has a head of its own"),
        ({"transformer.ln_f.bias": np.ones(6)}, {}, "has both ln_f.bias and transformer.ln_f.bias"),
        ({"wpe.weight": np.ones(())}, {}, r"has a wpe.weight of shape \[\], not \[n, C\]"),
        ({"ln_f.bias": np.ones(6, "i4")}, {}, "head.norm.bias is int32 in the state"),
    ],
)
def test_what_is_not_gpt2_is_refused(tmp_path, change, config, message):
    file = {name: array for name, array in (arrays() | change).items() if array is not None}
    with pytest.raises(ValueError, match=message):
        checkpoint.load_gpt2(saved(tmp_path, file, **config))


# The config.json.

OTHER = {  # a value that computes another function, for each key that chooses it
    "activation_function": "relu",
    "layer_norm_epsilon": 0.1,
    "scale_attn_weights": False,
    "scale_attn_by_inverse_layer_idx": True,
    "is_causal": False,
    "add_cross_attention": True,
    "is_encoder_decoder": True,
    "tie_word_embeddings": False,
    "pruned_heads": {"0": [1]},
    "model_type": "gpt_bigcode",
}


def test_a_config_that_asks_for_another_function_is_refused_by_name(tmp_path):
    assert OTHER.keys() == FUNCTION.keys()
    file = saved(tmp_path, arrays(), n_head=2, **FUNCTION)
    checkpoint.load_gpt2(file)
    for key, value in OTHER.items():
        for wrong in (value, None):
            saved(tmp_path, arrays(), n_head=2, **{key: wrong})
            with pytest.raises(ValueError, match=rf"config.json has {key} = .*, and nn.Transf"):
                checkpoint.load_gpt2(file)


def test_a_size_that_is_not_the_arrays_is_refused_by_name(tmp_path):
    sizes = {"vocab_size": 11, "n_positions": 5, "n_embd": 6, "n_layer": 2, "n_inner": 24}
    checkpoint.load_gpt2(saved(tmp_path, arrays(), n_head=2, **sizes))
    for key, right in sizes.items():
        for name in [key, *SIZES[key]]:
            for wrong in (right + 1, 0, float(right)):
                with pytest.raises(ValueError, match=rf"{name} = .*, and the arrays .* {right}"):
                    checkpoint.load_gpt2(saved(tmp_path, arrays(), n_head=2, **{name: wrong}))


def test_heads_that_differ_are_refused(tmp_path):
    file = saved(tmp_path, arrays(), n_head=2)
    assert checkpoint.load_gpt2(file, heads=2).layers[1].attention.heads == 2
    with pytest.raises(ValueError, match=r"config.json says 2 heads, not 3; leave heads out"):
        checkpoint.load_gpt2(file, heads=3)
    saved(tmp_path, arrays(), n_head=2, num_attention_heads=3)
    with pytest.raises(ValueError, match="n_head and num_attention_heads that differ"):
        checkpoint.load_gpt2(file)
    saved(tmp_path, arrays(), n_embd=6)  # the published code takes 12
    with pytest.raises(ValueError, match="width 6 does not split into 12 heads"):
        checkpoint.load_gpt2(file)


def test_another_kind_of_model_is_refused_before_its_keys_are(tmp_path):
    for kind, remedy in [("gptj", ""), ("llama", "; use load_llama")]:
        file = saved(tmp_path, arrays(), rotary=True, n_head=2, model_type=kind)
        with pytest.raises(
            ValueError, match=rf"model_type = '{kind}', .* 'gpt2' asks for{remedy}$"
        ):
            checkpoint.load_gpt2(file)


def test_another_hidden_width_and_another_name_of_the_activation_are_loaded(tmp_path):
    given, narrow = arrays(), {"c_fc.weight": 1, "c_fc.bias": 0, "c_proj.weight": 0}
    for i, (name, axis) in product(range(2), narrow.items()):
        at = f"h.{i}.mlp.{name}"
        given[at] = np.take(given[at], range(10), axis)
    config = {"n_head": 2, "n_inner": 10, "activation_function": "gelu_pytorch_tanh"}
    model = checkpoint.load_gpt2(saved(tmp_path, given, **config))
    want = nn.Transformer(11, 6, 2, 2, 5, tied=True)  # whose further columns add 0
    want.load_state(
        {
            name: padded if padded.shape != array.shape else array
            for name, array in model.state().items()
            for padded in [widened(array)]
        }
    )
    tokens = np.arange(10).reshape(2, 5)
    np.testing.assert_allclose(model(tokens).data, want(tokens).data, rtol=1e-5, atol=1e-6)
    for wrong in ({"n_head": 2}, {"n_head": 2, "n_inner": None}):
        with pytest.raises(ValueError, match="has no n_inner, and the arrays beside it have 10"):
            checkpoint.load_gpt2(saved(tmp_path, given, **wrong))


def widened(array):
    """Return an array whose axes of length 10 have 24 elements, zeros at the end."""
    return np.pad(array, [(0, 14 if n == 10 else 0) for n in array.shape])


def test_a_published_folder_is_loaded_in_one_file_or_in_several(tmp_path):
    want = checkpoint.load_gpt2(saved(tmp_path, arrays(), n_head=2)).state()
    assert_same_bits(checkpoint.load_gpt2(tmp_path).state(), want)
    (tmp_path / "model.safetensors").unlink()
    parts, places = [{}, {}], {}
    for i, (name, array) in enumerate(arrays().items()):
        parts[i % 2][name], places[name] = array, f"model-{i % 2}.safetensors"
    for i, part in enumerate(parts):
        save_file(part, tmp_path / f"model-{i}.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    for path in (tmp_path, index):
        assert_same_bits(checkpoint.load_gpt2(path).state(), want)
    index.unlink()
    with pytest.raises(ValueError, match=r"has neither model.safetensors nor .*index.json$"):
        checkpoint.load_gpt2(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ValueError, match=r"has neither .*; \*.bin are pickles, and not read"):
        checkpoint.load_gpt2(tmp_path)


# Against the package transformers.


needs_transformers = pytest.mark.skipif(
    not importlib.util.find_spec("transformers"),
    reason="needs the packages transformers and torch: GPT-2 is not compared with theirs",
)


def theirs(folder, **settings):
    """Save a model of transformers with random arrays; return its logits for random tokens."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": 101, "n_positions": 24, "n_embd": 48, "n_layer": 3, "n_head": 4}
    tokens_of_control = dict.fromkeys(["bos_token_id", "eos_token_id"], 1)
    config = GPT2Config(**sizes | tokens_of_control | settings)
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():  # as initialised, biases are 0 and gains 1: they would test nothing
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.3)
    model.save_pretrained(folder)
    with torch.no_grad():
        return model(torch.tensor(TOKENS)).logits.numpy()


TOKENS = np.random.default_rng(0).integers(0, 101, (3, 24))


@needs_transformers
def test_logits_are_those_of_the_transformers_package(tmp_path):
    want = theirs(tmp_path)
    found = checkpoint.load_gpt2(tmp_path / "model.safetensors")(TOKENS).data
    assert abs(want).max() > 1
    np.testing.assert_allclose(found, want, atol=1e-4)
