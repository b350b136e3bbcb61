"""The config.json of Llama's weights: which nn.Llama does it ask for?

The package `transformers` reads it (models/llama/configuration_llama.py and modeling_llama.py
there). Every key that it may have is in one of these tables (see published.py):

    SIZES      whole numbers from 1
    FUNCTION   chooses what is computed; nn.Llama computes what one value of it asks for
    HARMLESS   does not change the logits of an evaluation
    OTHERS     chooses what is computed, and nn.Llama has an argument for it
"""

from pathlib import Path

from minidist.checkpoint.published import COMMON, check_keys, read_object, refuse
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
FUNCTION = {
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "is_encoder_decoder": False,
    "is_causal": True,
    "add_cross_attention": False,
    "pruned_heads": {},
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
    found = read_object(path)
    check_keys(path, found, FUNCTION, {*SIZES, *OTHERS, *HARMLESS}, "nn.Llama")
    asked: dict = {ours: whole(path, key, found.get(key)) for key, ours in SIZES.items()}
    heads, width = asked["heads"], asked["width"]
    kv_heads = found.get("num_key_value_heads")
    asked["kv_heads"] = heads if kv_heads is None else whole(path, "num_key_value_heads", kv_heads)
    head_width = found.get("head_dim")
    if head_width is not None and (type(head_width) is not int or head_width * heads != width):
        refuse(path, "head_dim", head_width, f"nn.Llama's {heads} heads split a width of {width}")
    asked["tied"] = found.get("tie_word_embeddings", False)
    if type(asked["tied"]) is not bool:
        refuse(path, "tie_word_embeddings", asked["tied"], "it is true or false")
    asked["eps"] = positive(path, "rms_norm_eps", found.get("rms_norm_eps", USUAL_EPS))
    return asked | {"theta": theta_of(path, found)}


def theta_of(path: Path, found: dict) -> float | Stretched:
    """Return the base of the rotary angles, from rope_parameters or, in older files, two keys."""
    given = [key for key in ("rope_parameters", "rope_scaling") if found.get(key) is not None]
    if len(given) > 1:
        raise WrongInput(f"{path} has {' and '.join(given)}; which of them counts is not known")
    rope = found[given[0]] if given else {}
    if not isinstance(rope, dict):
        refuse(path, given[0], rope, "it is an object with keys and values, or null")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        refuse(path, "rope_type", kind, "nn.Llama computes what 'default' and 'llama3' ask for")
    base = rope.get("rope_theta", found.get("rope_theta", USUAL_THETA))
    theta, stretch = positive(path, "rope_theta", base), STRETCH if kind == "llama3" else {}
    check_keys(path, rope, {}, {"rope_type", "type", "rope_theta", *stretch}, "nn.Llama")
    if not stretch:
        return theta
    how = {ours: positive(path, key, rope.get(key)) for key, ours in stretch.items()}
    if how["low"] >= how["high"]:
        refuse(path, "low_freq_factor", how["low"], f"it is below high_freq_factor {how['high']}")
    return Stretched(theta, **how)


def whole(path: Path, key: str, value) -> int:
    if type(value) is not int or value < 1:
        refuse(path, key, value, "it is a whole number from 1")
    return value


def positive(path: Path, key: str, value) -> float:
    if type(value) not in (int, float) or not 0 < value < float("inf"):
        refuse(path, key, value, "it is a number above 0")
    return float(value)
