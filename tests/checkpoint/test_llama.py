"""Llama's published layout: a reference in NumPy, files by hand, and the package transformers."""

import importlib.util
import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from minidist import checkpoint, nn
from minidist.checkpoint.llama import FUNCTION, SIZES, STRETCH

CONFIG = {
    "model_type": "llama",
    "vocab_size": 11,
    "hidden_size": 32,
    "intermediate_size": 10,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 12,
    "rms_norm_eps": 0.01,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 50.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 40,
}
INDEX = "model.safetensors.index.json"
TOKENS = np.random.default_rng(0).integers(0, 11, (3, 12))


def arrays(config):
    """Return a published model's arrays by name; each has numbers of its own."""
    C, F, V = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    own = C // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes = {"model.embed_tokens": (V, C), "model.norm": (C,)}
    if not config.get("tie_word_embeddings"):
        shapes["lm_head"] = (V, C)
    for i in range(config["num_hidden_layers"]):
        at, attention = f"model.layers.{i}", {"q": C, "k": own, "v": own, "o": C}
        shapes |= {f"{at}.self_attn.{x}_proj": (n, C) for x, n in attention.items()}
        shapes |= {f"{at}.mlp.gate_proj": (F, C), f"{at}.mlp.up_proj": (F, C)}
        shapes |= {f"{at}.mlp.down_proj": (C, F)}
        shapes |= {f"{at}.input_layernorm": (C,), f"{at}.post_attention_layernorm": (C,)}
    random = np.random.default_rng(0)
    return {f"{name}.weight": random.standard_normal(shape) for name, shape in shapes.items()}


def saved(folder, arrays, config):
    save_file(arrays, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def in_files(folder, arrays, config, files=3):
    """Deal the arrays to several files, and write their index."""
    (folder / "config.json").write_text(json.dumps(config))
    names = [f"model-{n + 1:05}-of-{files:05}.safetensors" for n in range(files)]
    places = {name: names[n % files] for n, name in enumerate(arrays)}
    for file in names:
        save_file({a: arrays[a] for a in arrays if places[a] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


# The reference: Llama's equations, on the published arrays, one head and one position at a time.


def frequency(i, D, rope):
    """Return the radians per position of pair i."""
    plain = rope["rope_theta"] ** (-2 * i / D)
    if rope["rope_type"] == "default":
        return plain
    old, wave = rope["original_max_position_embeddings"], 2 * np.pi / plain
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    if wave < old / high:
        return plain
    if wave > old / low:
        return plain / rope["factor"]
    smooth = (old / wave - low) / (high - low)
    return (1 - smooth) * plain / rope["factor"] + smooth * plain


def turned(x, t, rope):
    """Return a head x[D] at position t: pair i is x[i] and x[i + D/2], a complex number."""
    half = len(x) // 2
    angles = np.array([t * frequency(i, len(x), rope) for i in range(half)])
    pairs = (x[:half] + 1j * x[half:]) * np.exp(1j * angles)
    return np.concatenate([pairs.real, pairs.imag])


def norm(x, gain, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * gain


def attention(x, at, config):
    """Return Y[T, C] of X[T, C]; query head h reads the keys and values of head h // (H / K)."""
    H, K = config["num_attention_heads"], config["num_key_value_heads"]
    rope = config["rope_parameters"]
    q, k, v = (x @ at[f"self_attn.{n}_proj"].T for n in "qkv")
    q, k, v = q.reshape(len(x), H, -1), k.reshape(len(x), K, -1), v.reshape(len(x), K, -1)
    mixed = np.zeros_like(q)
    for h in range(H):
        own = h // (H // K)
        keys = np.array([turned(k[s, own], s, rope) for s in range(len(x))])
        for t in range(len(x)):
            scores = keys[: t + 1] @ turned(q[t, h], t, rope) / np.sqrt(q.shape[-1])
            p = np.exp(scores - scores.max())
            mixed[t, h] = p / p.sum() @ v[: t + 1, own]
    return mixed.reshape(len(x), -1) @ at["self_attn.o_proj"].T


def logits(arrays, config, tokens):
    """Return the logits[T, V] of tokens[T]."""
    w, eps = {name.removesuffix(".weight"): a for name, a in arrays.items()}, config["rms_norm_eps"]
    x = w["model.embed_tokens"][tokens]
    for i in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{i}."
        at = {name.removeprefix(prefix): a for name, a in w.items() if name.startswith(prefix)}
        x = x + attention(norm(x, at["input_layernorm"], eps), at, config)
        h = norm(x, at["post_attention_layernorm"], eps)
        gate, up = h @ at["mlp.gate_proj"].T, h @ at["mlp.up_proj"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ at["mlp.down_proj"].T
    head = w.get("lm_head", w["model.embed_tokens"])
    return norm(x, w["model.norm"], eps) @ head.T


@pytest.mark.parametrize("rope", [CONFIG["rope_parameters"], LLAMA3], ids=["plain", "llama3"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("save", [saved, in_files])
def test_a_published_model_computes_its_equations(tmp_path, save, tied, kv_heads, rope):
    more = {"num_key_value_heads": kv_heads, "tie_word_embeddings": tied, "rope_parameters": rope}
    config = CONFIG | more
    given = arrays(config)
    model = checkpoint.load_llama(save(tmp_path, given, config), dtype="float64")
    assert isinstance(model, nn.Llama)
    want = np.array([logits(given, config, row) for row in TOKENS])
    assert abs(want).max() > 1
    found = model(TOKENS).data
    assert np.allclose(found, want, rtol=0, atol=1e-9), cause(found, given, config)


def cause(found, given, config):
    """Return why logits are wrong, if it is known: a wrong model has the same ones."""
    exchanged = dict(given)
    for name in given:
        if "gate_proj" in name:
            other = name.replace("gate", "up")
            exchanged |= {name: given[other], other: given[name]}
    plain = config | {"rope_parameters": config["rope_parameters"] | {"rope_type": "default"}}
    for words, model in {
        "gate and up are exchanged": (exchanged, config),
        "slow pairs turn as fast as before the stretch": (given, plain),
    }.items():
        if np.allclose(found, [logits(*model, row) for row in TOKENS], rtol=0, atol=1e-9):
            return words
    return "the logits are not those of the equations"


def test_older_files_say_the_same_in_other_keys(tmp_path):
    config = {key: value for key, value in CONFIG.items() if key != "rope_parameters"}
    want = checkpoint.load_llama(saved(tmp_path, arrays(CONFIG), CONFIG))(TOKENS).data
    for older in (
        {"rope_theta": 50.0},
        {"rope_theta": 50, "rope_scaling": None},
        {"rope_theta": 50.0, "rope_scaling": {"type": "default"}},
        {"head_dim": 8, "rope_theta": 50.0, "torch_dtype": "float32", "pretraining_tp": 1},
    ):
        model = checkpoint.load_llama(saved(tmp_path, arrays(CONFIG), config | older))
        np.testing.assert_array_equal(model(TOKENS).data, want)
    stretched = {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
    want = checkpoint.load_llama(
        saved(tmp_path, arrays(CONFIG), CONFIG | {"rope_parameters": LLAMA3})
    )(TOKENS).data
    older = {"rope_theta": 50.0, "rope_scaling": stretched}
    model = checkpoint.load_llama(saved(tmp_path, arrays(CONFIG), config | older))
    np.testing.assert_array_equal(model(TOKENS).data, want)


@pytest.mark.parametrize(
    "change, config, message",
    [
        ({"model.norm.weight": None}, {}, "lacks model.norm, unlike a Llama of its config"),
        ({"model.layers.0.self_attn.q_proj.bias": np.ones(32)}, {}, "has .*q_proj.bias, unlike"),
        ({"lm_head.weight": None}, {}, "lacks lm_head, unlike"),
        ({"lm_head.weight": np.ones((11, 32))}, {"tie_word_embeddings": True}, "head of its own"),
        ({}, {"num_hidden_layers": 3}, r"lacks model.layers.2.\w+, unlike"),
        ({}, {"vocab_size": 12}, r"embed_tokens \[11, 32\], and its config.json asks \w+ \[12, 32"),
        ({"model.norm.weight": np.ones(32, "i4")}, {}, "head.norm.gain is int32 in the state"),
    ],
)
def test_arrays_that_are_not_those_of_the_config_are_refused(tmp_path, change, config, message):
    given = {name: a for name, a in (arrays(CONFIG) | change).items() if a is not None}
    with pytest.raises(ValueError, match=message):
        checkpoint.load_llama(saved(tmp_path, given, CONFIG | config))


def test_files_that_are_not_those_of_their_index_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"cannot read .*config.json"):
        checkpoint.load_llama(tmp_path)
    in_files(tmp_path, arrays(CONFIG), CONFIG)
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = "model-00001-of-00003.safetensors"
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"only one of the two knows 'model.norm.weight'; fetch"):
        checkpoint.load_llama(tmp_path)
    (tmp_path / "model-00001-of-00003.safetensors").unlink()
    with pytest.raises(ValueError, match=r"cannot read .*model-00001-of-00003.safetensors"):
        checkpoint.load_llama(tmp_path)


# The config.json.

WRONG = {  # a value that computes another function, for each key that chooses it
    "model_type": "mistral",
    "hidden_act": "gelu",
    "attention_bias": True,
    "mlp_bias": True,
    "is_encoder_decoder": True,
    "is_causal": False,
    "add_cross_attention": True,
    "pruned_heads": {"0": [1]},
    "rope_interleaved": True,
}


def refuses(folder, config, message):
    with pytest.raises(ValueError, match=message):
        checkpoint.load_llama(saved(folder, arrays(CONFIG), config))


def test_a_config_that_asks_for_another_function_is_refused_by_name(tmp_path):
    assert WRONG.keys() == FUNCTION.keys()
    checkpoint.load_llama(saved(tmp_path, arrays(CONFIG), CONFIG | FUNCTION))
    for key, value in WRONG.items():
        for wrong in (value, None):
            refuses(tmp_path, CONFIG | {key: wrong}, rf"config.json has {key} = .*, and nn.Llama")


def test_another_kind_of_model_is_refused_before_its_keys_are(tmp_path):
    """SmolLM3's further keys choose what it computes: without them it would be a Llama's."""
    for kind, remedy in [("smollm3", ""), ("gpt2", "; use load_gpt2")]:
        config = {"no_rope_layers": [1], **CONFIG, "model_type": kind}
        refuses(tmp_path, config, rf"model_type = '{kind}', .* 'llama' asks for{remedy}$")


def test_a_size_is_a_whole_number_from_1(tmp_path):
    for key in SIZES:
        for wrong in (0, "2", 2.0, True, None):
            message = rf"has {key} = .*, and it is a whole number from"
            refuses(tmp_path, CONFIG | {key: wrong}, message)


OTHER_KEYS = [
    ({"head_dim": 4}, "head_dim = 4, and nn.Llama's 4 heads split a width of 32"),
    ({"tie_word_embeddings": None}, "tie_word_embeddings = None, and it is true or false"),
    ({"rms_norm_eps": "1e-5"}, "rms_norm_eps = '1e-5', and it is a number above 0"),
    ({"sliding_window": 4}, "sliding_window = 4, and nobody here knows it"),
    ({"rope_scaling": LLAMA3}, "has rope_parameters and rope_scaling; which of them"),
    ({"rope_parameters": 3}, "rope_parameters = 3, and it is an object"),
]
ROTARY = [
    ({"rope_type": "yarn"}, "rope_type = 'yarn', and nn.Llama computes what 'default' and"),
    ({"rope_type": "default"}, "has factor = 8.0, and nobody here knows it"),
    ({"rope_theta": -1.0}, "rope_theta = -1.0, and it is a number above 0"),
    ({"high_freq_factor": 1.0}, "low_freq_factor = 1.0, and it is below high_freq_factor 1.0"),
    *(({key: None}, f"{key} = None, and it is a number above 0") for key in STRETCH),
]


def test_other_keys_are_computed_or_refused_by_name(tmp_path):
    for change, message in OTHER_KEYS:
        refuses(tmp_path, CONFIG | change, message)
    for change, message in ROTARY:
        refuses(tmp_path, CONFIG | {"rope_parameters": LLAMA3 | change}, message)


# Against the package transformers.

needs_transformers = pytest.mark.skipif(
    not importlib.util.find_spec("transformers"),
    reason="needs the packages transformers and torch: Llama is not compared with theirs",
)


def theirs(folder, tokens, size="1GB", **settings):
    """Save a model of transformers with random arrays; return its logits for some tokens."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {key: CONFIG[key] for key in [*SIZES, "num_key_value_heads"]}
    model = LlamaForCausalLM(LlamaConfig(**sizes | settings)).eval()
    with torch.no_grad():  # as initialised, gains are 1: they would test nothing
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.3)
    model.save_pretrained(folder, max_shard_size=size)
    with torch.no_grad():
        return model(torch.tensor(tokens)).logits.numpy()


@needs_transformers
@pytest.mark.parametrize("size", ["1GB", "3KB"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("rope", [None, LLAMA3], ids=["plain", "llama3"])
def test_logits_are_those_of_the_transformers_package(tmp_path, size, tied, kv_heads, rope):
    more = {"num_key_value_heads": kv_heads, "tie_word_embeddings": tied, "rope_parameters": rope}
    want = theirs(tmp_path, TOKENS, size, **more)
    assert (tmp_path / INDEX).exists() == (size == "3KB")
    found = checkpoint.load_llama(tmp_path)(TOKENS).data
    assert abs(want).max() > 1
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-4)
