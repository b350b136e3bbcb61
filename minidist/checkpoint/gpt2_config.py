"""The config.json of GPT-2's weights: does nn.Transformer compute what it asks for?

The package `transformers` reads it (models/gpt2/configuration_gpt2.py and modeling_gpt2.py there).
Every key that it may have is in one of three tables:

    SIZES      the arrays have these sizes, too: both must agree
    FUNCTION   chooses what is computed; nn.Transformer computes what one value of it asks for
    HARMLESS   does not change the logits of an evaluation

A key in none of them is refused, since a later version of that package may let it choose something.
"""

from pathlib import Path

from minidist.checkpoint.manifest import read_json

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
HARMLESS = frozenset(
    """
    resid_pdrop embd_pdrop attn_pdrop initializer_range reorder_and_upcast_attn
    dtype torch_dtype use_bfloat16 torchscript gradient_checkpointing chunk_size_feed_forward
    use_cache output_past output_attentions output_hidden_states output_scores return_dict
    return_dict_in_generate is_decoder cross_attention_hidden_size tie_encoder_decoder
    architectures transformers_version _name_or_path name_or_path _commit_hash tokenizer_class
    prefix task_specific_params finetuning_task n_special predict_special_tokens
    summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout
    summary_last_dropout classifier_dropout hidden_dropout num_labels _num_labels id2label label2id
    problem_type bos_token_id eos_token_id eos_token_ids pad_token_id sep_token_id
    decoder_start_token_id
    assistant_confidence_threshold assistant_lookbehind bad_words_ids begin_suppress_tokens
    diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size
    encoder_repetition_penalty epsilon_cutoff eta_cutoff exponential_decay_length_penalty
    forced_bos_token_id forced_eos_token_id length_penalty max_length min_length
    no_repeat_ngram_size num_assistant_tokens num_assistant_tokens_schedule num_beam_groups
    num_beams num_return_sequences remove_invalid_values repetition_penalty suppress_tokens
    target_lookbehind temperature tf_legacy_loss top_k top_p typical_p
    """.split()
)


def heads_of(path: Path, sizes: dict[str, int]) -> int | None:
    """Return how many heads a config.json asks for; None if there is none.

    sizes  of the arrays in the same folder, by the keys of SIZES

    ValueError, with the key, if it asks for what nn.Transformer does not compute.
    """
    if not path.exists():
        return None
    found = read_json(path)
    if not isinstance(found, dict):
        raise ValueError(f"{path} is damaged: it is no JSON object with keys and values")
    names = {name: key for key, others in SIZES.items() for name in (key, *others)}
    for key, value in found.items():
        if key in FUNCTION and (type(value), value) != (type(FUNCTION[key]), FUNCTION[key]):
            refuse(path, key, value, f"nn.Transformer computes what {FUNCTION[key]!r} asks for")
        elif key in names and (value is not None or key != "n_inner"):
            size = sizes[names[key]]
            if type(value) is not int or value != size:
                refuse(path, key, value, f"the arrays beside it have {size}")
        elif key in HEADS and (type(value) is not int or value < 1):
            refuse(path, key, value, "a number of heads is a whole number from 1")
        elif key not in {*FUNCTION, *names, *HEADS, *HARMLESS}:
            refuse(path, key, value, "nobody here knows it; remove it if it changes no logits")
    asked = {found[key] for key in HEADS if key in found} or {USUAL_HEADS}
    if len(asked) > 1:
        raise ValueError(f"{path} has {' and '.join(HEADS)} that differ; remove the wrong one")
    return asked.pop()


def refuse(path: Path, key: str, value, why: str) -> None:
    raise ValueError(f"{path} has {key} = {value!r}, and {why}")
