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
"""

import re
from pathlib import Path

import numpy as np

from minidist import nn
from minidist.checkpoint.llama_config import sizes_of
from minidist.checkpoint.published import read_folder
from minidist.dtypes import float_dtype
from minidist.errors import WrongInput

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
    llama_config.py. Dropout is left out.
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
    vocab, width, heads, kv_heads, depth, hidden, tied, **more
) -> dict[str, tuple[int, ...]]:
    """Return the shape of each array by its published name, without `.weight`."""
    C, F, own = width, hidden, kv_heads * (width // heads)  # K D
    of_block: dict[str, tuple[int, ...]] = dict.fromkeys(NORMS, (C,))
    of_block |= {f"self_attn.{part}_proj": (C, C) for part in "qo"}
    of_block |= {f"self_attn.{part}_proj": (own, C) for part in "kv"}
    of_block |= {f"mlp.{part}_proj": (F, C) for part in ("gate", "up")}
    of_block |= {"mlp.down_proj": (C, F)}
    blocks = {f"model.layers.{i}.{k}": of_block[k] for i in range(depth) for k in of_block}
    head = {} if tied else {HEAD: (vocab, C)}
    return {EMBEDDING: (vocab, C), **blocks, "model.norm": (C,), **head}


def state_of(arrays: dict[str, np.ndarray], depth: int, tied: bool, **more) -> dict:
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
