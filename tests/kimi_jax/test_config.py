"""Configurations: what the public files say, what is refused, what survives a round trip, how large the models are."""

import copy
import dataclasses
import json
import os
import pickle
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kimi_jax.config import ConfigError, KdaConfig, KimiConfig, LayerKind, MoeConfig, VisionConfig, parameter_count

CONFIGS = Path(__file__).parents[2] / "configs"
GOLDEN = Path(__file__).parents[1] / "golden"
PUBLIC = ("kimi-linear-48b-a3b", "kimi-k3", "kimi-k31-pro")
TINY = ("kimi-linear-tiny", "kimi-k3-tiny", "kimi-k3-tiny-mxfp4", "kimi-k31-tiny", "kimi-k31-d128")

# Keys whose absence changes nothing, by what the public files document: bookkeeping; keys that no code path reads;
# selection settings with one legal value; a wrapper's copies of inner keys; how the observer found the scales.
HARMLESS = {
    "_attn_implementation",
    "architectures",
    "head_dim",
    "ignore_index",
    "image_placeholder",
    "rope_scaling",
    "rope_theta",
    "topk_method",
    "transformers_version",
    "use_cache",
    "use_grouped_topk",
}
WRAPPER_COPIES = {"bos_token_id", "dtype", "eos_token_id", "pad_token_id", "tie_word_embeddings"}
# A text model alone, or plain weights: the files say so by leaving these out.
OPTIONAL_OBJECTS = {"quantization_config", "vision_config"}
QUANTIZATION_REQUIRED = {
    "config_groups",
    "format",
    "group_0",
    "group_size",
    "num_bits",
    "quant_method",
    "strategy",
    "targets",
    "type",
    "weights",
}


def load(name: str) -> dict[str, Any]:
    return json.loads((CONFIGS / f"{name}.json").read_text())


def objects(tree: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Paths of all keys."""
    for key, value in tree.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from objects(value, (*path, key))


def holder(tree: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    for key in path[:-1]:
        tree = tree[key]
    return tree


def changed(name: str, path: str, value: Any) -> dict[str, Any]:
    tree = load(name)
    keys = tuple(path.split("."))
    holder(tree, keys)[keys[-1]] = value
    return tree


def required(path: tuple[str, ...], tree: dict[str, Any]) -> bool:
    key = path[-1]
    if key == "format" and path[-2] == "group_0":
        return False
    if "quantization_config" in path[:-1]:
        return key in QUANTIZATION_REQUIRED
    if path[-2:] == ("linear_attn_config", "head_dim"):
        return True
    if "text_config" in tree and len(path) == 1 and key in WRAPPER_COPIES:
        return False
    return key not in HARMLESS | OPTIONAL_OBJECTS


def is_said_missing(key: str, message: str) -> bool:
    accepted = re.findall(r"is missing \(accepted spellings: ([^)]*)\)", message)
    return f"{key} is missing" in message or any(key in spellings.split(", ") for spellings in accepted)


def problems(tree: dict[str, Any], **overrides: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        KimiConfig.from_dict(tree, **overrides)
    return str(caught.value)


# What the files say.


def test_kimi_linear_48b_reads_as_published() -> None:
    config = KimiConfig.from_dict(load("kimi-linear-48b-a3b"))
    assert config.mla.layers == (3, 7, 11, 15, 19, 23, 26)
    assert len(config.kda.layers) == 20
    assert config.kda.gate_lower_bound is None
    assert not config.kda.full_rank_gate
    assert not config.mla.output_gate
    assert config.mla.q_lora_rank is None
    assert config.attn_res_block_size is None
    assert config.moe.latent_size is None
    assert config.moe.routed_scaling_factor == 2.446
    assert config.hidden_act == "silu"
    assert (config.situ_beta, config.situ_linear_beta) == (None, None)
    assert config.max_position_embeddings == 1_048_576
    assert not config.k3_shaped


def test_kimi_k3_reads_as_published() -> None:
    config = KimiConfig.from_dict(load("kimi-k3"))
    assert config.mla.layers == (*range(3, 92, 4), 92)
    assert len(config.kda.layers) == 69
    assert config.kda == KdaConfig(
        layers=config.kda.layers,
        num_heads=96,
        head_dim=128,
        conv_kernel_size=4,
        gate_lower_bound=-5.0,
        full_rank_gate=True,
    )
    assert config.mla.low_rank_norm_eps == 1e-6
    assert config.rms_norm_eps == 1e-5
    assert config.moe == MoeConfig(
        layers=tuple(range(1, 93)),
        num_experts=896,
        num_experts_per_token=16,
        num_shared_experts=2,
        intermediate_size=3072,
        latent_size=3584,
        latent_norm=True,
        renormalize=True,
        router_activation="sigmoid",
        routed_scaling_factor=1.0,
        num_expert_group=1,
        topk_group=1,
    )
    assert config.moe.shared_intermediate_size == 6144
    assert (config.situ_beta, config.situ_linear_beta) == (4.0, 25.0)
    assert config.attn_res_block_size == 12
    assert config.vision is not None
    assert config.vision.head_dim == 128
    assert config.quantization is not None
    assert config.quantization.group_size == 32
    assert config.dsa is None
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (163584, 163586, 163839)
    assert config.media_placeholder_token_id == 163605


def test_kimi_k31_is_k3_with_an_indexer_in_every_full_attention_layer() -> None:
    config, k3 = (KimiConfig.from_dict(load(name)) for name in ("kimi-k31-pro", "kimi-k3"))
    assert config.dsa is not None
    assert (config.dsa.num_heads, config.dsa.head_dim, config.dsa.top_k) == (32, 128, 2048)
    assert config.dsa.key_norm_eps == config.rms_norm_eps == 1e-5
    assert dataclasses.replace(config, model_type="kimi_k3", dsa=None) == k3


def test_layer_kinds_follow_the_lists() -> None:
    kinds = KimiConfig.from_dict(load("kimi-k3")).layer_kinds()
    assert len(kinds) == 93
    assert kinds[0] == LayerKind("kda", "dense")
    assert kinds[1] == LayerKind("kda", "moe")
    assert kinds[3] == kinds[91] == kinds[92] == LayerKind("mla", "moe")
    assert sum(kind.mixer == "mla" for kind in kinds) == 24


@pytest.mark.parametrize("name", TINY)
def test_tiny_configs_equal_those_of_the_reference_checkpoints(name: str) -> None:
    assert KimiConfig.from_dict(load(name)) == KimiConfig.from_directory(GOLDEN / name)


# Round trips.


@pytest.mark.parametrize("name", PUBLIC + TINY)
def test_round_trip(name: str) -> None:
    config = KimiConfig.from_dict(load(name))
    written = config.to_dict()
    assert KimiConfig.from_dict(json.loads(json.dumps(written))) == config
    assert hash(KimiConfig.from_dict(written)) == hash(config)


@pytest.mark.parametrize("name", PUBLIC + TINY)
def test_written_file_keeps_every_architectural_key(name: str) -> None:
    original = load(name)
    written = KimiConfig.from_dict(original).to_dict()
    for path in objects(original):
        if path[-1] in HARMLESS - {"architectures", "topk_method", "use_grouped_topk"} and path[-2:-1] != (
            "linear_attn_config",
        ):
            continue
        value = holder(original, path)[path[-1]]
        if isinstance(value, dict):
            continue
        assert holder(written, path)[path[-1]] == value, path


def test_choices_without_a_public_key_survive_a_round_trip() -> None:
    k31 = load("kimi-k31-tiny")
    del k31["text_config"]["linear_attn_config"]["gate_lower_bound"]
    config = KimiConfig.from_dict(k31, allow_unbounded_gate=True, index_key_norm_eps=1e-6)
    assert config.kda.gate_lower_bound is None
    assert config.dsa is not None
    assert config.dsa.key_norm_eps == 1e-6
    assert KimiConfig.from_dict(config.to_dict()) == config

    linear = KimiConfig.from_dict(load("kimi-linear-tiny"), biased_router_weights=True)
    assert linear.moe.biased_weights
    assert KimiConfig.from_dict(linear.to_dict()) == linear

    other_eps = dataclasses.replace(linear, mla=dataclasses.replace(linear.mla, low_rank_norm_eps=1e-5))
    assert KimiConfig.from_dict(other_eps.to_dict()) == other_eps


@pytest.mark.parametrize(
    ("first", "every", "layers"),
    [
        (0, 1, range(11)),
        (11, 1, ()),
        (3, 2, (4, 6, 8, 10)),
        (4, 5, (5, 10)),
        (6, 7, (7,)),
        (9, 10, (10,)),
        (0, 11, (0,)),
    ],
)
def test_moe_layers_are_those_from_the_first_that_the_frequency_divides(
    first: int, every: int, layers: tuple[int, ...]
) -> None:
    tree = load("kimi-linear-tiny") | {"first_k_dense_replace": first, "moe_layer_freq": every}
    config = KimiConfig.from_dict(tree)
    assert config.moe.layers == tuple(layers)
    assert config.dense_layers == tuple(layer for layer in range(11) if layer not in layers)
    assert KimiConfig.from_dict(config.to_dict()) == config


# A missing or misnamed key is never replaced by a default.


@pytest.mark.parametrize("name", PUBLIC)
def test_deleting_any_key_is_an_error_that_names_it(name: str) -> None:
    original = load(name)
    silent, unnamed = [], []
    for path in objects(original):
        tree = copy.deepcopy(original)
        del holder(tree, path)[path[-1]]
        if not required(path, original):
            KimiConfig.from_dict(tree)
            continue
        try:
            KimiConfig.from_dict(tree)
            silent.append(path)
        except ConfigError as error:
            if not is_said_missing(path[-1], str(error)):
                unnamed.append((path, str(error)))
    assert not silent
    assert not unnamed


@pytest.mark.parametrize("name", PUBLIC)
def test_misspelling_any_key_is_an_error_that_lists_it(name: str) -> None:
    original = load(name)
    failures = []
    for path in objects(original):
        key = path[-1]
        middle = len(key) // 2
        misspelt = key[:middle] + "x" + key[middle:]
        tree = copy.deepcopy(original)
        parent = holder(tree, path)
        parent[misspelt] = parent.pop(key)
        if path == ("model_type",):
            assert "model_type is missing" in problems(tree)
            continue
        message = problems(tree)
        lists_it = repr(misspelt) in message
        names_it = not required(path, original) or is_said_missing(key, message)
        suggests_it = key in HARMLESS or f"did you mean {key!r}" in message
        if not (lists_it and names_it and suggests_it):
            failures.append((path, message))
    assert not failures


def test_a_text_model_of_k3_loads_alone_and_needs_all_k3_keys() -> None:
    whole = load("kimi-k3")
    text = whole["text_config"]
    config = KimiConfig.from_dict(text)
    nested = KimiConfig.from_dict(whole)
    assert config.k3_shaped
    assert config == dataclasses.replace(nested, model_type="kimi_linear", vision=None, media_placeholder_token_id=None)
    assert KimiConfig.from_dict(config.to_dict()) == config
    k3_keys = (
        "activation_situ_beta",
        "activation_situ_linear_beta",
        "attn_res_block_size",
        "routed_expert_hidden_size",
        "latent_moe_use_norm",
        "mla_use_output_gate",
    )
    for key in k3_keys:
        assert f"{key} is missing" in problems({k: v for k, v in text.items() if k != key})
        assert f"{key} is null" in problems(text | {key: None})
    for key in ("gate_lower_bound", "use_full_rank_gate"):
        linear = {k: v for k, v in text["linear_attn_config"].items() if k != key}
        assert f"{key} is missing" in problems(text | {"linear_attn_config": linear})


def test_k3_without_a_gate_bound_needs_an_explicit_choice() -> None:
    tree = load("kimi-k3")
    del tree["text_config"]["linear_attn_config"]["gate_lower_bound"]
    message = problems(tree)
    assert "gate_lower_bound is missing" in message
    assert "allow_unbounded_gate=True" in message
    assert KimiConfig.from_dict(tree, allow_unbounded_gate=True).kda.gate_lower_bound is None


@pytest.mark.parametrize(("outer", "inner"), [(True, False), (False, True), (True, True), (None, False)])
def test_only_the_inner_flag_ties_the_head(outer: bool | None, inner: bool) -> None:
    tree = load("kimi-k3")
    tree["tie_word_embeddings"] = outer
    tree["text_config"]["tie_word_embeddings"] = inner
    config = KimiConfig.from_dict(tree)
    assert config.tie_word_embeddings is inner
    assert (parameter_count(config).head == 0) is inner


def test_all_problems_are_reported_at_once() -> None:
    tree = load("kimi-k3")
    text = tree["text_config"]
    del text["attn_res_block_size"]
    text["kv_lora_rnk"] = text.pop("kv_lora_rank")
    text["num_experts"] = "896"
    text["linear_attn_config"]["gate_lower_bound"] = -8
    tree["vision_config"]["patch_size"] = 0
    tree["frobnicate"] = 1
    with pytest.raises(ConfigError) as caught:
        KimiConfig.from_dict(tree)
    message = str(caught.value)
    for part in (
        "text_config.attn_res_block_size is missing",
        "text_config.kv_lora_rank is missing",
        "'kv_lora_rnk' (did you mean 'kv_lora_rank'?)",
        "text_config.num_experts is '896' (str)",
        "text_config.linear_attn_config.gate_lower_bound is -8",
        "vision_config.patch_size is 0",
        "'frobnicate'",
    ):
        assert part in message
    assert len(caught.value.problems) == 7
    assert str(pickle.loads(pickle.dumps(caught.value))) == message


# Layer lists.


@pytest.mark.parametrize(
    ("kda", "full", "parts"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 9, 10], [4, 8, 11], ("both list: 4",)),
        ([1, 2, 3, 5, 6, 7, 9], [4, 8, 11], ("miss layers: 10",)),
        ([1, 2, 3, 5, 6, 7, 9, 10, 12], [4, 8, 11], ("don't exist: 12",)),
        ([0, 1, 2, 4, 5, 6, 8, 9], [3, 7, 10], ("don't exist: 0", "miss layers: 11", "count from 1")),
        ([1, 1, 2, 3, 5, 6, 7, 9, 10], [4, 8, 11], ("more than once: 1",)),
        ([1, 2, 3, 5, 6, 7, 9, 10], [4, 8, 11, 11], ("full_attn_layers lists a layer more than once: 11",)),
        ([True, 2, 3, 5, 6, 7, 9, 10], [4, 8, 11], ("True (bool)", "integers")),
        ([1.0, 2, 3, 5, 6, 7, 9, 10], [4, 8, 11], ("1.0 (float)",)),
        ("1,2,3", [4, 8, 11], ("must be a list of integers",)),
        (None, [4, 8, 11], ("kda_layers is null",)),
    ],
)
def test_layer_lists_must_cover_the_model_once(kda: Any, full: Any, parts: tuple[str, ...]) -> None:
    tree = load("kimi-linear-tiny")
    tree["linear_attn_config"] |= {"kda_layers": kda, "full_attn_layers": full}
    message = problems(tree)
    for part in parts:
        assert part in message


def test_order_in_layer_lists_has_no_meaning() -> None:
    tree = load("kimi-linear-tiny")
    tree["linear_attn_config"]["kda_layers"].reverse()
    assert KimiConfig.from_dict(tree) == KimiConfig.from_dict(load("kimi-linear-tiny"))


# Keys that transformers 5.24 saves beside the released ones.


def saved_by_transformers() -> dict[str, Any]:
    """config.json as transformers 5.24.0 writes it for `KimiLinearConfig(**kimi-linear-tiny)` in float64."""
    tree = load("kimi-linear-tiny") | {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": "float64",
        "layer_types": ["full_attention" if layer in (3, 7, 10) else "linear_attention" for layer in range(11)],
        "linear_conv_kernel_dim": 4,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
        "mlp_layer_types": ["dense"] + ["sparse"] * 10,
        "output_router_logits": False,
        "pretraining_tp": 1,
        "qk_head_dim": 48,
        "rope_parameters": None,
        "transformers_version": "5.24.0",
    }
    return tree


def test_a_config_saved_by_transformers_reads_as_the_released_one() -> None:
    released = KimiConfig.from_dict(load("kimi-linear-tiny"))
    assert KimiConfig.from_dict(saved_by_transformers()) == dataclasses.replace(released, dtype="float64")
    # Null says nothing.
    silent = dict.fromkeys(("layer_types", "mlp_layer_types", "qk_head_dim", "linear_head_dim", "pretraining_tp"))
    assert KimiConfig.from_dict(load("kimi-linear-tiny") | silent) == released


@pytest.mark.parametrize(
    ("key", "value", "canonical"),
    [
        ("linear_conv_kernel_dim", 3, "linear_attn_config.short_conv_kernel_size is 4"),
        ("linear_head_dim", 32, "linear_attn_config.head_dim is 16"),
        ("linear_head_dim", 16.0, "linear_attn_config.head_dim is 16"),
        ("linear_num_heads", 8, "linear_attn_config.num_heads is 4"),
        ("qk_head_dim", 32, "qk_nope_head_dim + qk_rope_head_dim is 48"),
        (
            "layer_types",
            ["full_attention" if i and i % 4 == 0 else "linear_attention" for i in range(11)],
            "linear_attn_config.kda_layers and full_attn_layers at layer 4, 5, 8, 9, 11",
        ),
        ("layer_types", ["linear_attention"] * 10, "num_hidden_layers = 11"),
        ("layer_types", "linear_attention", "num_hidden_layers = 11"),
        ("mlp_layer_types", ["sparse"] * 11, "first_k_dense_replace and moe_layer_freq at layer 1 "),
        ("attention_bias", True, "must be False"),
        ("attention_dropout", 0.1, "must be 0.0"),
        ("output_router_logits", True, "must be False"),
        ("pretraining_tp", 2, "must be 1"),
    ],
)
def test_a_redundant_key_that_contradicts_names_both(key: str, value: Any, canonical: str) -> None:
    with pytest.raises(ConfigError) as caught:
        KimiConfig.from_dict(saved_by_transformers() | {key: value})
    assert len(caught.value.problems) == 1
    assert f"{key} " in str(caught.value)
    assert canonical in str(caught.value)


def test_redundant_keys_dont_stand_in_for_the_layer_lists() -> None:
    tree = saved_by_transformers()
    del tree["linear_attn_config"]
    assert "linear_attn_config is missing" in problems(tree)


# Indexer.


@pytest.mark.parametrize("heads", ["index_n_heads", "num_heads"])
@pytest.mark.parametrize("width", ["index_head_dim", "head_dim", "key_length"])
@pytest.mark.parametrize("top_k", ["index_topk", "top_k"])
@pytest.mark.parametrize("layers", ["dsa_layers", "layers"])
def test_every_spelling_of_the_indexer_reads_the_same(heads: str, width: str, top_k: str, layers: str) -> None:
    tree = load("kimi-k31-tiny")
    tree["text_config"]["dsa_config"] = {heads: 16, width: 32, top_k: 16, layers: [4, 8, 12, 13]}
    config = KimiConfig.from_dict(tree)
    assert config == KimiConfig.from_dict(load("kimi-k31-tiny"))
    assert config.to_dict()["text_config"]["dsa_config"] == load("kimi-k31-tiny")["text_config"]["dsa_config"]


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"num_heads": 8}, ("index_n_heads is 16", "num_heads is 8", "disagree")),
        ({"layers": [4, 8]}, ("dsa_layers", "layers", "disagree")),
        ({"index_topk": None}, ("index_topk", "null", "top_k")),
        ({"index_topk": 0}, ("index_topk is 0",)),
        ({"dsa_layers": [3, 7, 11, 12]}, ("[3, 7, 11, 12]", "[4, 8, 12, 13]", "counted from 1")),
        ({"dsa_layers": [4, 8, 12]}, ("[4, 8, 12]", "exactly")),
        ({"index_eps": 1e-6}, ("'index_eps'", "index_head_dim", "key_length", "dsa_layers")),
    ],
)
def test_a_faulty_indexer_is_refused(change: dict[str, Any], parts: tuple[str, ...]) -> None:
    tree = load("kimi-k31-tiny")
    tree["text_config"]["dsa_config"] |= change
    message = problems(tree)
    for part in parts:
        assert part in message


def test_equal_values_under_two_spellings_are_accepted() -> None:
    tree = load("kimi-k31-tiny")
    tree["text_config"]["dsa_config"] |= {"num_heads": 16, "layers": [4, 8, 12, 13]}
    assert KimiConfig.from_dict(tree) == KimiConfig.from_dict(load("kimi-k31-tiny"))


def test_only_k31_has_an_indexer() -> None:
    dsa = load("kimi-k31-tiny")["text_config"]["dsa_config"]
    k3 = load("kimi-k3-tiny")
    k3["text_config"]["dsa_config"] = dsa
    assert "dsa_config belongs to model_type 'kimi_k31'" in problems(k3)
    assert "dsa_config belongs to" in problems(load("kimi-linear-tiny") | {"dsa_config": dsa})
    k31 = load("kimi-k31-tiny")
    del k31["text_config"]["dsa_config"]
    assert "dsa_config is missing" in problems(k31)
    assert "q_lora_rank is null" in problems(changed("kimi-k31-tiny", "text_config.q_lora_rank", None))
    assert "no indexer" in problems(load("kimi-k3-tiny"), index_key_norm_eps=1e-6)


# Values.


@pytest.mark.parametrize(
    ("path", "value", "part"),
    [
        ("text_config.num_attention_heads", "96", "'96' (str); it must be an integer"),
        ("text_config.num_attention_heads", 96.0, "96.0 (float)"),
        ("text_config.num_shared_experts", True, "True (bool)"),
        ("text_config.hidden_size", 0, "is 0"),
        ("text_config.hidden_size", -7168, "is -7168"),
        ("text_config.hidden_size", 2**31, "from 1 to 2147483647"),
        ("text_config.num_hidden_layers", 10**9, "from 1 to 4096"),
        ("text_config.num_key_value_heads", 8, "must equal num_attention_heads = 96"),
        ("text_config.rms_norm_eps", 0, "above 0"),
        ("text_config.rms_norm_eps", "1e-5", "(str)"),
        ("text_config.rms_norm_eps", float("nan"), "finite"),
        ("text_config.routed_scaling_factor", float("inf"), "finite"),
        ("text_config.temperature", float("inf"), "text_config.temperature"),
        ("text_config.mla_use_nope", False, "mla_use_nope"),
        ("text_config.mla_use_nope", 1, "1 (int)"),
        ("text_config.mla_use_output_gate", "true", "true or false"),
        ("text_config.moe_router_activation_func", "softmax", "'sigmoid'"),
        ("text_config.topk_method", "greedy", "'noaux_tc'"),
        ("text_config.num_nextn_predict_layers", 1, "must be 0"),
        ("text_config.hidden_act", "gelu", "'silu' or 'situ'"),
        ("text_config.hidden_act", "silu", "activation_situ_beta is given, but hidden_act is 'silu'"),
        ("text_config.activation_situ_beta", 0, "above 0"),
        ("text_config.activation_situ_linear_beta", None, "activation_situ_linear_beta is null"),
        ("text_config.attn_res_block_size", None, "attn_res_block_size is null"),
        ("text_config.routed_expert_hidden_size", 0, "routed_expert_hidden_size is 0"),
        ("text_config.num_experts_per_token", 897, "more than num_experts = 896"),
        ("text_config.num_expert_group", 5, "doesn't divide num_experts = 896"),
        ("text_config.topk_group", 2, "more than num_expert_group = 1"),
        ("text_config.first_k_dense_replace", 94, "more than num_hidden_layers = 93"),
        ("text_config.first_k_dense_replace", -1, "is -1"),
        ("text_config.moe_layer_freq", 0, "is 0"),
        ("text_config.eos_token_id", 163840, "below vocab_size = 163840"),
        ("text_config.eos_token_id", [163586], "an integer"),
        ("text_config.dtype", "float8", "'bfloat16' or 'float32'"),
        ("text_config.model_type", "llama", "'kimi_linear'"),
        ("text_config.is_encoder_decoder", True, "must be False"),
        ("text_config.pruned_heads", {"1": [0]}, "must be {}"),
        ("text_config.linear_attn_config.gate_lower_bound", 0.0, "from -5.5 to below 0"),
        ("text_config.linear_attn_config.gate_lower_bound", -5.6, "from -5.5 to below 0"),
        ("text_config.linear_attn_config.gate_lower_bound", "-5", "from -5.5 to below 0"),
        ("text_config.linear_attn_config.short_conv_kernel_size", 1, "from 2"),
        ("text_config.linear_attn_config", [], "must be an object"),
        ("text_config", "kimi", "must be an object"),
        ("model_type", "kimi_k4", "'kimi_linear' or 'kimi_k3' or 'kimi_k31'"),
        ("pad_token_id", 0, "pad_token_id is 0 (int), but text_config.pad_token_id is 163839"),
        ("dtype", "float16", "must agree"),
        ("media_placeholder_token_id", 163840, "below vocab_size"),
        ("text_config.quantization_config.format", "nvfp4-pack-quantized", "'mxfp4-pack-quantized'"),
        ("text_config.quantization_config.config_groups.group_0.weights.group_size", 16, "must be 32"),
        ("text_config.quantization_config.config_groups.group_0.weights.num_bits", 8, "must be 4"),
        ("text_config.quantization_config.config_groups.group_1", {}, "Understood here: group_0"),
        ("text_config.quantization_config.kv_cache_scheme", {"num_bits": 8}, "must be None"),
        ("text_config.quantization_config.ignore", [1], "list of strings"),
        ("text_config.moe_intermediate_size", 3080, "multiple of 32"),
        ("text_config.routed_expert_hidden_size", 3588, "multiple of 32"),
        ("vision_config.text_hidden_size", 4096, "must equal the text model's hidden_size = 7168"),
        ("vision_config.qkv_hidden_size", 1530, "multiple of 4"),
        ("vision_config.mm_hidden_size", 512, "must equal vt_hidden_size = 1024"),
        ("vision_config.merge_kernel_size", [2, 2, 2], "two integers"),
        ("vision_config.norm_type", "layernorm", "'rmsnorm'"),
        ("vision_config.attn_bias", True, "must be False"),
        ("vision_config.projector_hidden_act", "gelu_pytorch_tanh", "'gelu'"),
    ],
)
def test_an_illegal_value_is_an_error_that_names_key_and_value(path: str, value: Any, part: str) -> None:
    message = problems(changed("kimi-k3", path, value))
    assert part in message
    assert path.rpartition(".")[2] in message


def test_groups_of_experts_must_leave_enough_to_choose_from() -> None:
    base = load("kimi-linear-tiny")
    grouped = base | {"num_expert_group": 4, "topk_group": 2}
    assert KimiConfig.from_dict(grouped).moe.topk_group == 2
    assert "more than the 4 experts of topk_group = 1" in problems(
        grouped | {"topk_group": 1, "num_experts_per_token": 5}
    )
    assert "two best" in problems(base | {"num_expert_group": 16, "topk_group": 8})
    assert "use_grouped_topk" in problems(grouped | {"use_grouped_topk": False})


def test_a_context_length_has_two_spellings() -> None:
    tree = load("kimi-linear-tiny")
    length = tree.pop("model_max_length")
    config = KimiConfig.from_dict(tree | {"max_position_embeddings": length})
    assert config == KimiConfig.from_dict(load("kimi-linear-tiny"))
    assert "disagree" in problems(load("kimi-linear-tiny") | {"max_position_embeddings": length + 1})


def test_quantization_may_sit_at_the_top() -> None:
    tree = load("kimi-k3-tiny-mxfp4")
    tree["quantization_config"] = tree["text_config"].pop("quantization_config")
    assert KimiConfig.from_dict(tree) == KimiConfig.from_dict(load("kimi-k3-tiny-mxfp4"))
    tree["text_config"]["quantization_config"] = copy.deepcopy(tree["quantization_config"])
    assert KimiConfig.from_dict(tree) == KimiConfig.from_dict(load("kimi-k3-tiny-mxfp4"))
    tree["quantization_config"]["ignore"] = []
    assert "differs" in problems(tree)


def test_biased_router_weights_are_for_kimi_linear() -> None:
    assert "biased_router_weights" in problems(load("kimi-k3-tiny"), biased_router_weights=True)


def test_an_unknown_override_is_refused() -> None:
    tree = load("kimi-linear-tiny") | {"kimi_jax": {"low_rank_eps": 1e-5}}
    assert "'low_rank_eps' (did you mean 'low_rank_norm_eps'?)" in problems(tree)


def test_vision_config_reads_alone() -> None:
    tree = load("kimi-k3")["vision_config"]
    vision = VisionConfig.from_dict(tree)
    assert vision.merge_kernel_size == (2, 2)
    assert VisionConfig.from_dict(vision.to_dict()) == vision
    with pytest.raises(ConfigError, match=r"vision_config\.patch_size is missing"):
        VisionConfig.from_dict({key: value for key, value in tree.items() if key != "patch_size"})


# Configurations built in Python obey the same rules.


def test_a_replaced_field_is_checked() -> None:
    config = KimiConfig.from_dict(load("kimi-k3-tiny"))
    assert dataclasses.replace(config, intermediate_size=128).intermediate_size == 128
    with pytest.raises(ConfigError, match="num_experts_per_token"):
        dataclasses.replace(config, moe=dataclasses.replace(config.moe, num_experts_per_token=17))
    with pytest.raises(ConfigError, match="attn_res_block_size is missing"):
        dataclasses.replace(config, attn_res_block_size=None)
    with pytest.raises(ConfigError, match="miss layers: 3"):
        dataclasses.replace(config, kda=dataclasses.replace(config.kda, layers=(0, 1, 4, 5, 6, 8, 9, 10)))
    with pytest.raises(ConfigError, match="moe is MoeConfig"):
        dataclasses.replace(config, moe=dataclasses.replace(config.moe, layers=(1, 2, 5)))


# Files.


def directory_with(path: Path, content: bytes) -> Path:
    (path / "config.json").write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"", "valid JSON"),
        (b"{", "valid JSON"),
        (b"\xff\xfe{}", "valid JSON"),
        (b"[1]", "must hold an object"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": -Infinity}', "Infinity"),
        (b'{"rms_norm_eps": 1e999}', "too large"),
        (b'{"a": ' + b"1" * 5000 + b"}", "valid JSON"),
        (b'{"num_experts": 8, "num_experts": 16}', "'num_experts'"),
        (b'{"a":' * 100_000, "nests deeper"),
        (b'{"a":' * 40 + b"1" + b"}" * 40, "nests deeper"),
        (b'{"model_type": "llama"}', "'llama'"),
    ],
)
def test_a_faulty_file_is_refused_by_name(tmp_path: Path, content: bytes, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        KimiConfig.from_directory(directory_with(tmp_path, content))
    assert str(tmp_path / "config.json") in str(caught.value)
    assert part in str(caught.value)


def test_a_huge_file_is_refused_unread(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(100 * 2**20)
    with pytest.raises(ConfigError, match="larger than 16777216 bytes"):
        KimiConfig.from_directory(tmp_path)


def test_a_pipe_is_refused_unopened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ConfigError, match="regular file"):
        KimiConfig.from_directory(tmp_path)


def test_a_directory_without_config_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        KimiConfig.from_directory(tmp_path)


def test_hostile_values_keep_messages_short(tmp_path: Path) -> None:
    tree: dict[str, Any] = load("kimi-linear-tiny") | {f"unknown_{i}": i for i in range(10_000)}
    tree["hidden_size"] = "9" * 1_000_000
    tree["linear_attn_config"]["kda_layers"] = [1] * 100_000 + ["x"] * 100_000
    with pytest.raises(ConfigError) as caught:
        KimiConfig.from_directory(directory_with(tmp_path, json.dumps(tree).encode()))
    assert len(str(caught.value)) < 10_000
    assert "and 9950 more" in str(caught.value)


# Sizes.


def test_published_sizes() -> None:
    k3 = parameter_count(KimiConfig.from_dict(load("kimi-k3")))
    assert k3.text / 1e9 == pytest.approx(2779.5, abs=0.05)
    assert k3.active_per_token / 1e9 == pytest.approx(104.2, abs=0.05)
    groups = {
        k3.routed_experts: 2722.74,
        k3.kda: 30.62,
        k3.shared_experts: 12.16,
        k3.mla: 5.57,
        k3.latent: 4.73,
        k3.embedding + k3.head: 2.35,
        k3.dense_mlp: 0.73,
        k3.router: 0.59,
    }
    for counted, published in groups.items():
        assert counted / 1e9 == pytest.approx(published, abs=0.005)
    assert k3.vision_tower == 401_214_464
    assert k3.projector == 46_144_512
    assert k3.total == k3.text + k3.vision

    linear = parameter_count(KimiConfig.from_dict(load("kimi-linear-48b-a3b")))
    assert linear.total / 1e9 == pytest.approx(49.12, abs=0.005)
    assert linear.active_per_token / 1e9 == pytest.approx(3.11, abs=0.005)

    k31 = parameter_count(KimiConfig.from_dict(load("kimi-k31-pro")))
    assert k31.indexer == 178_526_208
    assert k31.total - k3.total == k31.active_per_token - k3.active_per_token == 178_526_208


def stored_values(directory: Path) -> int:
    """Values in a reference checkpoint, from its headers alone: without scales and padding, two to a packed byte."""
    count = 0
    for file in directory.glob("*.safetensors"):
        data = file.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        header.pop("__metadata__", None)
        for name, entry in header.items():
            size = 1
            for dimension in entry["shape"]:
                size *= dimension
            if name.endswith("weight_packed"):
                size *= 2
            if name.endswith("A_log"):
                # Stored with a zero tail; dt_bias has one value per head and channel.
                size = 0
            if not name.endswith("weight_scale"):
                count += size
    return count


@pytest.mark.parametrize("name", TINY)
def test_counts_equal_the_tensors_of_a_reference_checkpoint(name: str) -> None:
    config = KimiConfig.from_directory(GOLDEN / name)
    without_a_log = parameter_count(config).total - len(config.kda.layers) * config.kda.num_heads
    assert without_a_log == stored_values(GOLDEN / name)
