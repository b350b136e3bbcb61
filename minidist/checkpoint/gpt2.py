"""GPT-2's published weights in an nn.Transformer, which is the same architecture.

Radford et al. 2019, section 2.3: layer norm before each part and at the end, learned positions, a
tied head. The file is what the package `transformers` saves (models/gpt2/modeling_gpt2.py there):
its Conv1D keeps a weight as [in, out], as nn.Linear does, and c_attn makes queries, keys and values
in this order, each with its heads side by side. So no array is transposed.

    wte.weight[V, C]                 embedding.token.weight, and the head's
    wpe.weight[T, C]                 embedding.position.weight
    h.3.ln_1.weight[C]               blocks.3.norm_1.gain                        ln_2, ln_f likewise
    h.3.attn.c_attn.weight[C, 3C]    blocks.3.attention.qkv.weight
    h.3.attn.c_proj.weight[C, C]     blocks.3.attention.output.weight
    h.3.mlp.c_fc.weight[C, F]        blocks.3.expand.weight                      then a gelu (tanh)
    h.3.mlp.c_proj.weight[F, C]      blocks.3.contract.weight                    F = 4C, or n_inner
    h.3.attn.bias, .masked_bias      causal masks: no parameters, skipped

Every key that a config.json may have is in one of these tables (see published.py):

    SIZES      the arrays have these sizes, too: both must agree
    FUNCTION   chooses what is computed; nn.Transformer computes what one value of it asks for
    HARMLESS   does not change the logits of an evaluation
"""

import re
from pathlib import Path

import numpy as np

from minidist import nn
from minidist.backend import float_dtype
from minidist.checkpoint.published import (
    COMMON,
    DECODER,
    INDEX,
    check_keys,
    read,
    read_folder,
    read_object,
    refuse,
)
from minidist.errors import WrongInput
from minidist.nn.transformer import Style

SIZES = {  # a key, and other names for it
    "vocab_size": (),
    "n_positions": ("max_position_embeddings", "n_ctx"),
    "n_embd": ("hidden_size",),
    "n_layer": ("num_hidden_layers",),
    "n_inner": (),  # null: 4 n_embd
}
HEADS, USUAL_HEADS = ("n_head", "num_attention_heads"), 12
FUNCTION = DECODER | {
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,  # by 1 / sqrt(D)
    "scale_attn_by_inverse_layer_idx": False,
    "tie_word_embeddings": True,
    "model_type": "gpt2",
}
HARMLESS = COMMON | set(
    """
    resid_pdrop embd_pdrop attn_pdrop reorder_and_upcast_attn n_special predict_special_tokens
    summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout
    summary_last_dropout
    """.split()
)


def heads_of(path: Path, sizes: dict[str, int]) -> int | None:
    """Return how many heads a config.json asks for; None if there is none.

    sizes  of the arrays in the same folder, by the keys of SIZES

    ValueError, with the key, if it asks for what nn.Transformer does not compute.
    """
    if not path.exists():
        return None
    config = read_object(path)
    names = {name: key for key, others in SIZES.items() for name in (key, *others)}
    check_keys(path, config, FUNCTION, {*names, *HEADS, *HARMLESS}, "nn.Transformer")
    if config.get("n_inner") is None and sizes["n_inner"] != 4 * sizes["n_embd"]:
        raise WrongInput(f"{path} has no n_inner, and the arrays beside it have {sizes['n_inner']}")
    for key, value in config.items():
        if key in names and (value is not None or key != "n_inner"):
            size = sizes[names[key]]
            if type(value) is not int or value != size:
                refuse(path, key, value, f"the arrays beside it have {size}")
        elif key in HEADS and (type(value) is not int or value < 1):
            refuse(path, key, value, "a number of heads is a whole number from 1")
    asked = {config[key] for key in HEADS if key in config} or {USUAL_HEADS}
    if len(asked) > 1:
        raise WrongInput(f"{path} has {' and '.join(HEADS)} that differ")
    return asked.pop()


HEAD_WIDTH = 64  # of all four published sizes
PREFIX, HIDDEN = "transformer.", "h.0.mlp.c_fc.weight"
MASK = re.compile(r"h\.\d+\.attn\.(masked_)?bias")
PARTS = {
    "ln_1": "norm_1",
    "attn.c_attn": "attention.qkv",
    "attn.c_proj": "attention.output",
    "ln_2": "norm_2",
    "mlp.c_fc": "expand",
    "mlp.c_proj": "contract",
}


def load_gpt2(file: str | Path, heads: int | None = None, dtype: str = "float32") -> nn.Transformer:
    """Return the model that a safetensors file of GPT-2 holds, to use or to cut like any other.

    file   or the folder of published weights, as in load_llama
    heads  by default what a config.json beside the file says; without one, the width / 64

    ValueError if the config.json asks for a function that the model does not compute: see
    FUNCTION. Dropout is left out.
    """
    path = Path(file).parent if Path(file).name == INDEX else Path(file)
    folder = path if path.is_dir() else path.parent
    arrays = without_prefix(read_folder(path) if path.is_dir() else read(path), path)
    arrays = {name: array for name, array in arrays.items() if not MASK.fullmatch(name)}
    head = arrays.pop("lm_head.weight", None)
    vocab, width = matrix(arrays, "wte.weight", path)
    context, _ = matrix(arrays, "wpe.weight", path)
    state = {ours(name, path): array for name, array in arrays.items()}
    depth = len({name.split(".")[1] for name in state if name.startswith("blocks.")})
    hidden = matrix(arrays, HIDDEN, path)[1] if HIDDEN in arrays else 4 * width
    sizes = {"vocab_size": vocab, "n_positions": context, "n_embd": width, "n_layer": depth}
    asked = heads_of(folder / "config.json", sizes | {"n_inner": hidden})
    if head is not None and not np.array_equal(head, arrays["wte.weight"]):
        raise WrongInput(f"{path} has a head of its own; GPT-2's head is its embedding wte")
    if None not in (heads, asked) and heads != asked:
        raise WrongInput(f"config.json says {asked} heads, not {heads}; leave heads out")
    if heads is None:
        heads = asked or max(1, width // HEAD_WIDTH)
    style = Style(hidden=hidden)
    model = nn.Transformer(
        vocab, width, heads, depth, context, dtype=float_dtype(dtype), tied=True, style=style
    )
    model.load_state(state)  # checks names and shapes
    return model


def without_prefix(arrays: dict[str, np.ndarray], path: Path) -> dict[str, np.ndarray]:
    """Return arrays without the prefix that the model with a head gives to their names."""
    plain = {name.removeprefix(PREFIX): array for name, array in arrays.items()}
    if len(plain) < len(arrays):
        twice = next(name for name in plain if {name, PREFIX + name} <= arrays.keys())
        raise WrongInput(f"{path} has both {twice} and {PREFIX}{twice}; remove one of them")
    return plain


def matrix(arrays: dict[str, np.ndarray], name: str, path: Path) -> tuple[int, int]:
    """Return the shape of an embedding."""
    if name not in arrays:
        raise WrongInput(f"{path} has no {name}: these are no weights of GPT-2")
    if arrays[name].ndim != 2:
        raise WrongInput(f"{path} has a {name} of shape {list(arrays[name].shape)}, not [n, C]")
    return arrays[name].shape


def ours(name: str, path: Path) -> str:
    """Return the name that nn.Transformer gives to an array of GPT-2."""
    place, _, kind = name.rpartition(".")
    norm = {"weight": "gain", "bias": "bias"}
    if name in ("wte.weight", "wpe.weight"):
        return f"embedding.{'token' if place == 'wte' else 'position'}.weight"
    if place == "ln_f" and kind in norm:
        return f"head.norm.{norm[kind]}"
    match = re.fullmatch(r"h\.(\d+)\.(.*)", place)
    if match is None or match[2] not in PARTS or kind not in norm:
        raise WrongInput(f"{path} has an array {name!r}, which is none of GPT-2's")
    part = PARTS[match[2]]
    return f"blocks.{match[1]}.{part}.{norm[kind] if part.startswith('norm') else kind}"
