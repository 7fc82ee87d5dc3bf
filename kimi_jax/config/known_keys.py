"""Keys of a public config.json that don't describe the architecture.

The rule: a key is understood, or it is on one of these three lists, or the configuration is refused. An ignored key can
change a model without a sign (a misspelt activation constant became 1, a misspelt latent width switched a projection
off), so nothing is ignored because it is unknown.
"""

from collections.abc import Mapping

# Bookkeeping and text-generation settings that transformers' base configuration class writes for every model.
GENERIC_KEYS = frozenset(
    {
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_commit_hash",
        "_name_or_path",
        "architectures",
        "attn_implementation",
        "auto_map",
        "bad_words_ids",
        "begin_suppress_tokens",
        "chunk_size_feed_forward",
        "decoder_start_token_id",
        "diversity_penalty",
        "do_sample",
        "early_stopping",
        "encoder_no_repeat_ngram_size",
        "exponential_decay_length_penalty",
        "finetuning_task",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "id2label",
        "label2id",
        "length_penalty",
        "max_length",
        "min_length",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_labels",
        "num_return_sequences",
        "output_attentions",
        "output_hidden_states",
        "output_scores",
        "prefix",
        "problem_type",
        "remove_invalid_values",
        "repetition_penalty",
        "return_dict",
        "return_dict_in_generate",
        "sep_token_id",
        "suppress_tokens",
        "task_specific_params",
        "temperature",
        "tf_legacy_loss",
        "tokenizer_class",
        "top_k",
        "top_p",
        "torchscript",
        "transformers_version",
        "typical_p",
        "use_bfloat16",
        "use_cache",
    }
)

# Settings of the same base class that would change the model if they held anything but their neutral value.
NEUTRAL_KEYS: Mapping[str, object] = {
    "add_cross_attention": False,
    "cross_attention_hidden_size": None,
    "is_decoder": False,
    "is_encoder_decoder": False,
    "pruned_heads": {},
    "tie_encoder_decoder": False,
}

# Keys of the Kimi text configuration that nothing reads: these models don't rotate, and their head widths have keys of
# their own.
UNUSED_TEXT_KEYS = frozenset({"head_dim", "rope_parameters", "rope_scaling", "rope_theta"})

# Keys of the multimodal wrapper that concern training labels and the plain-text stand-in of an image.
UNUSED_WRAPPER_KEYS = frozenset({"ignore_index", "image_placeholder"})
