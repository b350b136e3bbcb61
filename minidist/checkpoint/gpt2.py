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
    h.3.mlp.c_fc.weight[C, 4C]       blocks.3.expand.weight                      then a gelu (tanh)
    h.3.mlp.c_proj.weight[4C, C]     blocks.3.contract.weight
    h.3.attn.bias, .masked_bias      causal masks: no parameters, skipped
"""

import json
import re
from pathlib import Path

import numpy as np

from minidist import nn
from minidist.checkpoint import manifest

HEAD_WIDTH = 64  # of all four published sizes
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

    heads  by default what a config.json beside the file says, or the width / 64
    """
    path = Path(file)
    arrays = {name.removeprefix("transformer."): array for name, array in read(path).items()}
    arrays = {name: array for name, array in arrays.items() if not MASK.fullmatch(name)}
    head = arrays.pop("lm_head.weight", None)
    state = {ours(name, path): array for name, array in arrays.items()}
    try:
        vocab, width = state["embedding.token.weight"].shape
        context = len(state["embedding.position.weight"])
    except KeyError as error:
        raise ValueError(f"{path} has no {error.args[0]}: these are no weights of GPT-2") from error
    if head is not None and not np.array_equal(head, state["embedding.token.weight"]):
        raise ValueError(f"{path} has a head of its own; GPT-2's head is its embedding wte")
    blocks = {name.split(".")[1] for name in state if name.startswith("blocks.")}
    heads = heads or config(path).get("n_head") or max(1, width // HEAD_WIDTH)
    model = nn.Transformer(vocab, width, heads, len(blocks), context, dtype=dtype, tied=True)
    model.load_state(state)  # checks names and shapes
    return model


def read(path: Path) -> dict[str, np.ndarray]:
    library = manifest.safetensors()
    try:
        return library.numpy.load_file(path)
    except library.SafetensorError as error:
        raise ValueError(f"{path} is damaged or foreign: {error}") from error
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from error


def config(path: Path) -> dict:
    """Return the config.json beside the file; ValueError if it asks for what a model here lacks."""
    beside = path.with_name("config.json")
    if not beside.exists():
        return {}
    try:
        found = json.loads(beside.read_bytes())
    except ValueError as error:
        raise ValueError(f"{beside} is damaged: it is no JSON") from error
    published = {"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5}
    for key, value in published.items():
        if found.get(key, value) != value:
            raise ValueError(f"{beside} has {key} = {found[key]}, and GPT-2 has {value}")
    return found


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
        raise ValueError(f"{path} has an array {name!r}, which is none of GPT-2's")
    part = PARTS[match[2]]
    return f"blocks.{match[1]}.{part}.{norm[kind] if part.startswith('norm') else kind}"
