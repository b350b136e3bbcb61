"""The config.json of GPT-2's weights: does nn.Transformer compute what it asks for?

The package `transformers` reads it (models/gpt2/configuration_gpt2.py and modeling_gpt2.py there).
Every key that it may have is in one of these tables (see published.py):

    SIZES      the arrays have these sizes, too: both must agree
    FUNCTION   chooses what is computed; nn.Transformer computes what one value of it asks for
    HARMLESS   does not change the logits of an evaluation
"""

from pathlib import Path

from minidist.checkpoint.published import COMMON, check_keys, read_object, refuse
from minidist.errors import WrongInput

SIZES = {  # a key, and other names for it
    "vocab_size": (),
    "n_positions": ("max_position_embeddings", "n_ctx"),
    "n_embd": ("hidden_size",),
    "n_layer": ("num_hidden_layers",),
    "n_inner": (),  # null: 4 n_embd
}
HEADS, USUAL_HEADS = ("n_head", "num_attention_heads"), 12
FUNCTION = {
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,  # by 1 / sqrt(D)
    "scale_attn_by_inverse_layer_idx": False,
    "is_causal": True,
    "add_cross_attention": False,
    "is_encoder_decoder": False,
    "tie_word_embeddings": True,
    "pruned_heads": {},
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
    found = read_object(path)
    names = {name: key for key, others in SIZES.items() for name in (key, *others)}
    check_keys(path, found, FUNCTION, {*names, *HEADS, *HARMLESS}, "nn.Transformer")
    if found.get("n_inner") is None and sizes["n_inner"] != 4 * sizes["n_embd"]:
        raise WrongInput(f"{path} has no n_inner, and the arrays beside it have {sizes['n_inner']}")
    for key, value in found.items():
        if key in names and (value is not None or key != "n_inner"):
            size = sizes[names[key]]
            if type(value) is not int or value != size:
                refuse(path, key, value, f"the arrays beside it have {size}")
        elif key in HEADS and (type(value) is not int or value < 1):
            refuse(path, key, value, "a number of heads is a whole number from 1")
    asked = {found[key] for key in HEADS if key in found} or {USUAL_HEADS}
    if len(asked) > 1:
        raise WrongInput(f"{path} has {' and '.join(HEADS)} that differ")
    return asked.pop()
