"""Published weights: a folder with a config.json and files of safetensors, as transformers writes.

    FOLDER/config.json                     what is computed
           model.safetensors               the arrays; or, if they fill several files:
           model.safetensors.index.json    {"weight_map": {name of an array: name of its file}}
           model-00001-of-00002.safetensors ...

The kind of model comes first: another model_type is refused. Then every key of a config.json is
known to one of the tables of its architecture, or refused by its name, since a later version of the
package `transformers` may let it choose what is computed.
"""

from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file

from minidist.backend import float_dtype
from minidist.checkpoint import manifest
from minidist.errors import WrongInput

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
KINDS = set("F64 F32 F16 BF16 I64 I32 I16 I8 U64 U32 U16 U8 BOOL".split())  # that NumPy has
LOADERS = {"gpt2": "; use load_gpt2", "llama": "; use load_llama"}  # by model_type
SAME = {"gelu_pytorch_tanh": "gelu_new", "swish": "silu"}  # other names of a function
DECODER = {  # what chooses that a model is a decoder alone, and that it is whole
    "is_causal": True,
    "add_cross_attention": False,
    "is_encoder_decoder": False,
    "pruned_heads": {},
}
COMMON = frozenset(  # keys of all architectures that do not change the logits of an evaluation
    """
    initializer_range dtype torch_dtype use_bfloat16 torchscript gradient_checkpointing
    chunk_size_feed_forward use_cache output_past output_attentions output_hidden_states
    output_scores return_dict return_dict_in_generate is_decoder cross_attention_hidden_size
    tie_encoder_decoder architectures transformers_version _name_or_path name_or_path _commit_hash
    tokenizer_class prefix task_specific_params finetuning_task classifier_dropout hidden_dropout
    num_labels _num_labels id2label label2id problem_type bos_token_id eos_token_id eos_token_ids
    pad_token_id sep_token_id decoder_start_token_id
    assistant_confidence_threshold assistant_lookbehind bad_words_ids begin_suppress_tokens
    diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size
    encoder_repetition_penalty epsilon_cutoff eta_cutoff exponential_decay_length_penalty
    forced_bos_token_id forced_eos_token_id length_penalty max_length min_length
    no_repeat_ngram_size num_assistant_tokens num_assistant_tokens_schedule num_beam_groups
    num_beams num_return_sequences remove_invalid_values repetition_penalty suppress_tokens
    target_lookbehind temperature tf_legacy_loss top_k top_p typical_p transformers.js_config
    """.split()
)


def read_object(path: Path) -> dict:
    """Return the object in a file of JSON."""
    value = manifest.read_json(path)
    if not isinstance(value, dict):
        raise WrongInput(f"{path} is damaged: it is no JSON object with keys and values")
    return value


def check_keys(path: Path, config: dict, function: dict, known: set[str], model: str) -> None:
    """Raise ValueError unless all keys are known, and the model computes what they ask for.

    function  keys that choose what is computed, each with the value that the model computes
    """
    for key in sorted(config, key=lambda key: key != "model_type"):  # the kind of model first
        value = config[key]
        name = SAME.get(value, value) if isinstance(value, str) else value
        if key in function and (type(name), name) != (type(function[key]), function[key]):
            other = LOADERS.get(name, "") if key == "model_type" and name == value else ""
            refuse(path, key, value, f"{model} computes what {function[key]!r} asks for{other}")
        elif key not in {*function, *known}:
            refuse(path, key, value, "nobody here knows it: it may change what is computed")


def refuse(path: Path, key: str, value, why: str) -> None:
    raise WrongInput(f"{path} has {key} = {value!r}, and {why}")


def read(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of a safetensors file; of bfloat16 only where ml_dtypes is installed."""
    with manifest.in_words(f"read {path}"):
        try:
            with safe_open(path, "np") as file:
                kinds = {file.get_slice(name).get_dtype() for name in file.keys()}
            if strange := sorted(kinds - KINDS):
                raise WrongInput(f"{path} has arrays of {strange[0]}; save them as float32")
            if "BF16" in kinds:
                float_dtype("bfloat16")  # imports what makes it a dtype of NumPy
            return load_file(path)
        except SafetensorError as error:
            raise WrongInput(f"{path} is damaged or foreign: {error}") from error


def read_folder(folder: Path) -> dict[str, np.ndarray]:
    """Return the arrays of a folder's one file, or of the files that its index names."""
    if (folder / FILE).exists():
        return read(folder / FILE)
    if not (folder / INDEX).exists():
        other = "; *.bin are pickles, and not read" if [*folder.glob("*.bin")] else ""
        raise WrongInput(f"{folder} has neither {FILE} nor {INDEX}{other}")
    places = read_object(folder / INDEX).get("weight_map")
    if not isinstance(places, dict) or not all(map(is_beside, places.values())):
        raise WrongInput(f"{folder / INDEX} has no weight_map from arrays to files beside it")
    arrays_of_all: dict[str, np.ndarray] = {}
    for name in sorted(set(places.values())):
        arrays = read(folder / name)
        if wrong := sorted(arrays.keys() ^ {array for array in places if places[array] == name}):
            where = "only one of the two knows"
            raise WrongInput(f"{folder / INDEX} and {name}: {where} {wrong[0]!r}; fetch them again")
        arrays_of_all |= arrays
    return arrays_of_all


def is_beside(name: object) -> bool:
    """Return whether this is the name of a safetensors file, without a way to another folder."""
    return isinstance(name, str) and name.endswith(".safetensors") and Path(name).name == name
