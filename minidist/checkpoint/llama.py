"""Llama's published weights in an nn.Llama, which is the same architecture.

The folder is what the package `transformers` saves (models/llama/modeling_llama.py there). It keeps
a weight as [out, in] and nn.Linear as [in, out]: every matrix is transposed, and the matrices that
nn.Llama multiplies at once are put side by side.

    model.embed_tokens.weight[V, C]                 embedding.token.weight, and a tied head's
    model.layers.3.input_layernorm.weight[C]        blocks.3.norm_1.gain
          self_attn.q_proj.weight[H D, C]           blocks.3.attention.query.weight
          self_attn.k_proj, v_proj.weight[K D, C]   blocks.3.attention.key_value.weight[C, 2 K D]
          self_attn.o_proj.weight[C, H D]           blocks.3.attention.output.weight
          post_attention_layernorm.weight[C]        blocks.3.norm_2.gain
          mlp.gate_proj, up_proj.weight[F, C]       blocks.3.expand.weight[C, 2 F]
          mlp.down_proj.weight[C, F]                blocks.3.contract.weight
    model.norm.weight[C]                            head.norm.gain
    lm_head.weight[V, C]                            head.linear.weight, if the head is not tied

The files' rotary pairs are a head's two halves, as nn.Llama's are; those that Meta published are
neighbours, and `transformers` has put the rows of q_proj and k_proj into another order.

Every key that a config.json may have is in one of these tables (see published.py):

    SIZES      whole numbers from 1
    FUNCTION   chooses what is computed; nn.Llama computes what one value of it asks for
    HARMLESS   does not change the logits of an evaluation
    OTHERS     chooses what is computed, and nn.Llama has an argument for it
"""

import re
from pathlib import Path

import numpy as np

from minidist import nn
from minidist.backend import float_dtype
from minidist.checkpoint.published import (
    COMMON,
    DECODER,
    check_keys,
    read_folder,
    read_object,
    refuse,
)
from minidist.errors import WrongInput
from minidist.nn.rotary import Stretched

SIZES = {  # a key, and the argument of nn.Llama
    "vocab_size": "vocab",
    "hidden_size": "width",
    "intermediate_size": "hidden",
    "num_hidden_layers": "depth",
    "num_attention_heads": "heads",
    "max_position_embeddings": "context",
}
FUNCTION = DECODER | {
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "rope_interleaved": False,  # SmolLM2's, like is_llama_config
}
HARMLESS = COMMON | set(  # pretraining_tp: sums in parts
    "attention_dropout pretraining_tp is_llama_config max_sequence_length".split()
)
OTHERS = set(
    "num_key_value_heads head_dim rms_norm_eps tie_word_embeddings rope_theta rope_scaling "
    "rope_parameters".split()
)
STRETCH = {  # keys of rope_parameters where rope_type is "llama3", and fields of Stretched
    "factor": "factor",
    "low_freq_factor": "low",
    "high_freq_factor": "high",
    "original_max_position_embeddings": "context",
}
USUAL_EPS, USUAL_THETA = 1e-6, 10000.0  # where the file says nothing


def sizes_of(path: Path) -> dict:
    """Return the arguments of nn.Llama that a config.json asks for.

    ValueError, with the key, if it asks for what nn.Llama does not compute.
    """
    config = read_object(path)
    check_keys(path, config, FUNCTION, {*SIZES, *OTHERS, *HARMLESS}, "nn.Llama")
    asked: dict = {ours: whole_number(path, key, config.get(key)) for key, ours in SIZES.items()}
    heads, width = asked["heads"], asked["width"]
    kv_heads = config.get("num_key_value_heads")
    asked["kv_heads"] = heads
    if kv_heads is not None:
        asked["kv_heads"] = whole_number(path, "num_key_value_heads", kv_heads)
    head_width = config.get("head_dim")
    if head_width is not None and (type(head_width) is not int or head_width * heads != width):
        refuse(path, "head_dim", head_width, f"nn.Llama's {heads} heads split a width of {width}")
    asked["tied"] = config.get("tie_word_embeddings", False)
    if type(asked["tied"]) is not bool:
        refuse(path, "tie_word_embeddings", asked["tied"], "it is true or false")
    asked["eps"] = positive(path, "rms_norm_eps", config.get("rms_norm_eps", USUAL_EPS))
    return asked | {"theta": theta_of(path, config)}


def theta_of(path: Path, config: dict) -> float | Stretched:
    """Return the base of the rotary angles, from rope_parameters or, in older files, two keys."""
    keys = [key for key in ("rope_parameters", "rope_scaling") if config.get(key) is not None]
    if len(keys) > 1:
        raise WrongInput(f"{path} has {' and '.join(keys)}; which of them counts is not known")
    rope = config[keys[0]] if keys else {}
    if not isinstance(rope, dict):
        refuse(path, keys[0], rope, "it is an object with keys and values, or null")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        refuse(path, "rope_type", kind, "nn.Llama computes what 'default' and 'llama3' ask for")
    base = rope.get("rope_theta", config.get("rope_theta", USUAL_THETA))
    theta, stretch = positive(path, "rope_theta", base), STRETCH if kind == "llama3" else {}
    check_keys(path, rope, {}, {"rope_type", "type", "rope_theta", *stretch}, "nn.Llama")
    if not stretch:
        return theta
    how = {ours: positive(path, key, rope.get(key)) for key, ours in stretch.items()}
    if how["low"] >= how["high"]:
        refuse(path, "low_freq_factor", how["low"], f"it is below high_freq_factor {how['high']}")
    return Stretched(theta, **how)


def whole_number(path: Path, key: str, value) -> int:
    if type(value) is not int or value < 1:
        refuse(path, key, value, "it is a whole number from 1")
    return value


def positive(path: Path, key: str, value) -> float:
    if type(value) not in (int, float) or not 0 < value < float("inf"):
        refuse(path, key, value, "it is a number above 0")
    return float(value)


ANGLES = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")  # of theta: skipped
EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
NORMS = "input_layernorm", "post_attention_layernorm"
PARTS = {  # of a block: ours, and theirs, side by side
    "norm_1.gain": ["input_layernorm"],
    "attention.query.weight": ["self_attn.q_proj"],
    "attention.key_value.weight": ["self_attn.k_proj", "self_attn.v_proj"],
    "attention.output.weight": ["self_attn.o_proj"],
    "norm_2.gain": ["post_attention_layernorm"],
    "expand.weight": ["mlp.gate_proj", "mlp.up_proj"],
    "contract.weight": ["mlp.down_proj"],
}


def load_llama(folder: str | Path, dtype: str = "float32") -> nn.Llama:
    """Return the model that a folder of published weights holds, to use or to cut like any other.

    ValueError if the config.json asks for a function that the model does not compute: see
    FUNCTION. Dropout is left out.
    """
    path = Path(folder)
    sizes = sizes_of(path / "config.json")
    arrays = {name: a for name, a in read_folder(path).items() if not ANGLES.fullmatch(name)}
    if sizes["depth"] > len(arrays):  # else there would be as many names as it says
        raise WrongInput(f"{path} has {len(arrays)} arrays for {sizes['depth']} num_hidden_layers")
    head = arrays.pop(f"{HEAD}.weight", None) if sizes["tied"] else None
    shapes = shapes_of(**sizes)
    if wrong := sorted(shapes.keys() ^ {name.removesuffix(".weight") for name in arrays}):
        which = "lacks" if wrong[0] in shapes else "has"
        raise WrongInput(f"{path} {which} {wrong[0]}, unlike a Llama of its config.json")
    for name, shape in shapes.items():
        if arrays[f"{name}.weight"].shape != shape:
            has = list(arrays[f"{name}.weight"].shape)
            raise WrongInput(f"{path} has {name} {has}, and its config.json asks for {list(shape)}")
    if head is not None and not np.array_equal(head, arrays[f"{EMBEDDING}.weight"]):
        raise WrongInput(f"{path} has a head of its own, and tie_word_embeddings, too")
    model = nn.Llama(**sizes, dtype=float_dtype(dtype))
    model.load_state(state_of(arrays, **sizes))
    return model


def shapes_of(
    vocab, width, heads, kv_heads, depth, hidden, tied, **_
) -> dict[str, tuple[int, ...]]:
    """Return the shape of each array by its published name, without `.weight`."""
    C, F, K_D = width, hidden, kv_heads * (width // heads)  # K D
    of_block: dict[str, tuple[int, ...]] = dict.fromkeys(NORMS, (C,))
    of_block |= {f"self_attn.{part}_proj": (C, C) for part in "qo"}
    of_block |= {f"self_attn.{part}_proj": (K_D, C) for part in "kv"}
    of_block |= {f"mlp.{part}_proj": (F, C) for part in ("gate", "up")}
    of_block |= {"mlp.down_proj": (C, F)}
    blocks = {f"model.layers.{i}.{k}": of_block[k] for i in range(depth) for k in of_block}
    head = {} if tied else {HEAD: (vocab, C)}
    return {EMBEDDING: (vocab, C), **blocks, "model.norm": (C,), **head}


def state_of(arrays: dict[str, np.ndarray], depth: int, tied: bool, **_) -> dict:
    """Return the arrays by nn.Llama's names."""
    state = {
        "embedding.token.weight": arrays[f"{EMBEDDING}.weight"],
        "head.norm.gain": arrays["model.norm.weight"],
    }
    if not tied:
        state["head.linear.weight"] = arrays[f"{HEAD}.weight"].T
    for i in range(depth):
        for ours, theirs in PARTS.items():
            parts = [arrays[f"model.layers.{i}.{part}.weight"].T for part in theirs]
            state[f"blocks.{i}.{ours}"] = np.concatenate(parts, axis=-1)
    return state
