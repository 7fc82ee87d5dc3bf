"""Reading a parsed config.json into the fields of a KimiConfig."""

from collections.abc import Mapping
from typing import Any

from kimi_jax import strict_json
from kimi_jax.config.attention import LOW_RANK_NORM_EPS, read_dsa, read_kda, read_layers, read_mla
from kimi_jax.config.errors import ConfigError
from kimi_jax.config.fields import Section, shown
from kimi_jax.config.known_keys import GENERIC_KEYS, NEUTRAL_KEYS, UNUSED_TEXT_KEYS, UNUSED_WRAPPER_KEYS
from kimi_jax.config.moe import MoeConfig, read_moe
from kimi_jax.config.quantization import QuantizationConfig, read_quantization
from kimi_jax.config.redundant import check_redundant
from kimi_jax.config.vision import read_vision

TEXT_MODEL_TYPE = "kimi_linear"
ARCHITECTURES: Mapping[str, str] = {
    "kimi_linear": "KimiLinearForCausalLM",
    "kimi_k3": "KimiK3ForConditionalGeneration",
    "kimi_k31": "KimiK31ForConditionalGeneration",
}
# Choices that the public format has no key for travel in an object of this name, so that they survive a round trip.
OVERRIDES_KEY = "kimi_jax"

_MOST_LAYERS = 4096
# A text configuration with one of these is K3's, though its model_type reads kimi_linear.
_K3_MARKERS = (
    "attn_res_block_size",
    "activation_situ_beta",
    "activation_situ_linear_beta",
    "routed_expert_hidden_size",
    "latent_moe_use_norm",
)
_WRAPPER_KEYS = (
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "media_placeholder_token_id",
    "dtype",
    "torch_dtype",
    "tie_word_embeddings",
    "quantization_config",
    "vision_config",
)
_TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")


def read_config(
    json: Mapping[str, Any],
    *,
    allow_unbounded_gate: bool = False,
    index_key_norm_eps: float | None = None,
    biased_router_weights: bool = False,
) -> dict[str, Any]:
    """The fields of the KimiConfig that a parsed config.json describes; ConfigError with all problems otherwise."""
    if not isinstance(json, Mapping):
        raise ConfigError([f"It is {shown(json)}; it must be an object."])
    try:
        strict_json.check_tree(json)
    except strict_json.StrictJsonError as error:
        raise ConfigError([str(error)]) from error
    problems: list[str] = []
    top = Section(json, "", problems)
    model_type = top.one_of(tuple(ARCHITECTURES), "model_type")
    if problems:
        # Nothing else can be judged without knowing what kind of file this is.
        raise ConfigError(problems)

    own = top.section(OVERRIDES_KEY) or Section({}, OVERRIDES_KEY, problems)
    text = top
    if model_type != TEXT_MODEL_TYPE:
        nested = top.section("text_config", needed_by=f"a {model_type} configuration must give it")
        if nested is None:
            top.refuse_unknown(GENERIC_KEYS, UNUSED_WRAPPER_KEYS, _WRAPPER_KEYS)
            raise ConfigError(problems)
        text = nested
        text.one_of((TEXT_MODEL_TYPE,), "model_type")
    sections = (top,) if text is top else (top, text)
    k3_shaped = model_type != TEXT_MODEL_TYPE or (
        any(text.gives(key) for key in _K3_MARKERS) or text.json.get("hidden_act") == "situ"
    )

    read = _read_text(
        text,
        model_type,
        k3_shaped=k3_shaped,
        allow_unbounded_gate=own.optional_boolean("allow_unbounded_gate") or allow_unbounded_gate,
        index_key_norm_eps=_index_key_norm_eps(own, index_key_norm_eps),
        biased_router_weights=own.optional_boolean("biased_router_weights") or biased_router_weights,
        low_rank_norm_eps=own.optional_number("low_rank_norm_eps") or LOW_RANK_NORM_EPS,
    )
    read |= {"model_type": model_type, "vision": None, "media_placeholder_token_id": None}
    if text is not top:
        _read_wrapper(top, text, read)
    read["quantization"] = _read_quantization(sections, text, read["hidden_size"], read["moe"])

    own.refuse_unknown()
    for section in sections:
        for key, neutral in NEUTRAL_KEYS.items():
            section.exactly(key, neutral, "anything else would be another architecture.", required=False)
    text.refuse_unknown(GENERIC_KEYS, UNUSED_TEXT_KEYS)
    if text is not top:
        top.refuse_unknown(GENERIC_KEYS, UNUSED_WRAPPER_KEYS)
    if problems:
        raise ConfigError(problems)
    return read


def _read_text(
    text: Section,
    model_type: str,
    *,
    k3_shaped: bool,
    allow_unbounded_gate: bool,
    index_key_norm_eps: float | None,
    biased_router_weights: bool,
    low_rank_norm_eps: float,
) -> dict[str, Any]:
    num_layers = text.integer("num_hidden_layers", maximum=_MOST_LAYERS)
    known_layers = num_layers if text.has("num_hidden_layers") else None
    rms_norm_eps = text.number("rms_norm_eps", maximum=1.0)

    kda = None
    mla_layers: tuple[int, ...] = ()
    linear = text.section("linear_attn_config", needed_by="it says which layers are KDA and which full attention")
    if linear is not None:
        kda_layers, mla_layers = read_layers(linear, known_layers)
        kda = read_kda(linear, kda_layers, k3_shaped=k3_shaped, allow_unbounded_gate=allow_unbounded_gate)
        linear.refuse_unknown()
    mla, num_heads = read_mla(text, mla_layers, k3_shaped=k3_shaped, low_rank_norm_eps=low_rank_norm_eps)
    has_indexer = model_type == "kimi_k31"
    if index_key_norm_eps is not None and not has_indexer:
        text.problems.append(
            f"index_key_norm_eps={index_key_norm_eps} is for model_type 'kimi_k31'; {model_type!r} has no indexer."
        )
    dsa = read_dsa(text, mla, present=has_indexer, key_norm_eps=index_key_norm_eps or rms_norm_eps)

    text.exactly("num_nextn_predict_layers", 0, "there are no multi-token-prediction layers.")
    moe = read_moe(text, known_layers, k3_shaped=k3_shaped, biased_weights=biased_router_weights)
    check_redundant(text, linear, kda, mla, moe, known_layers)
    read: dict[str, Any] = {
        "num_hidden_layers": num_layers,
        "rms_norm_eps": rms_norm_eps,
        "kda": kda,
        "mla": mla,
        "dsa": dsa,
        "moe": moe,
        "num_attention_heads": num_heads,
        "vocab_size": text.integer("vocab_size"),
        "hidden_size": text.integer("hidden_size"),
        "intermediate_size": text.integer("intermediate_size"),
        "initializer_range": text.number("initializer_range"),
        "attn_res_block_size": text.optional_integer(
            "attn_res_block_size", needed_by="a K3 configuration must give it" if k3_shaped else None
        ),
        "max_position_embeddings": text.integer("max_position_embeddings", "model_max_length"),
        "tie_word_embeddings": text.boolean("tie_word_embeddings"),
        "dtype": text.one_of(("bfloat16", "float32", "float64"), "dtype", "torch_dtype"),
        **_read_activation(text),
    }
    for key in _TOKEN_KEYS:
        read[key] = _token_id(text, key, text, read["vocab_size"])
    return read


def _read_activation(text: Section) -> dict[str, Any]:
    act = text.one_of(("silu", "situ"), "hidden_act")
    # Upstream takes 1 and no cap for absent constants; a dropped or misspelt key would then go unnoticed.
    needed_by = "hidden_act 'situ' needs it" if act == "situ" and text.has("hidden_act") else None
    beta = text.optional_number("activation_situ_beta", needed_by=needed_by)
    linear_beta = text.optional_number("activation_situ_linear_beta", needed_by=needed_by)
    if act == "silu" and text.has("hidden_act"):
        for key in ("activation_situ_beta", "activation_situ_linear_beta"):
            if text.has(key):
                text.problem(key, "is given, but hidden_act is 'silu', which has no such constant.")
    return {"hidden_act": act, "situ_beta": beta, "situ_linear_beta": linear_beta}


def _read_wrapper(top: Section, text: Section, read: dict[str, Any]) -> None:
    """Reads the keys around a nested text configuration into `read`."""
    for key in (*_TOKEN_KEYS, "dtype", "torch_dtype"):
        outer = top.accept(key)
        canonical = "dtype" if key == "torch_dtype" else key
        if (
            outer is not None
            and text.has(canonical)
            and (outer != read[canonical] or type(outer) is not type(read[canonical]))
        ):
            top.problem(key, f"is {shown(outer)}, but {text.name(canonical)} is {read[canonical]!r}; they must agree.")
    # Upstream's outer flag defaults to true and used to overwrite a separate head: only the inner one counts.
    top.optional_boolean("tie_word_embeddings")
    read["media_placeholder_token_id"] = _token_id(top, "media_placeholder_token_id", text, read["vocab_size"])
    vision = top.section("vision_config")
    if vision is not None:
        width = read["hidden_size"] if text.has("hidden_size") else None
        read["vision"] = read_vision(vision, text_hidden_size=width)


def _token_id(section: Section, key: str, text: Section, vocab_size: int) -> int:
    token = section.integer(key, minimum=0)
    if section.has(key) and text.has("vocab_size") and token >= vocab_size:
        section.problem(key, f"is {token}; it must be below vocab_size = {vocab_size}.")
    return token


def _read_quantization(
    sections: tuple[Section, ...], text: Section, hidden_size: int, moe: MoeConfig
) -> QuantizationConfig | None:
    """Reads the packing, which upstream keeps in the text configuration and copies to the top."""
    found = [
        read_quantization(section)
        for holder in sections
        if (section := holder.section("quantization_config")) is not None
    ]
    if not found:
        return None
    if found[0] != found[-1]:
        sections[0].problem("quantization_config", "differs from text_config.quantization_config; give one of them.")
    latent_key = "hidden_size" if moe.latent_size is None else "routed_expert_hidden_size"
    for key, size in ((latent_key, moe.latent_size or hidden_size), ("moe_intermediate_size", moe.intermediate_size)):
        if text.has(key) and size % found[0].group_size:
            text.problem(key, f"is {size}; packed experts need a multiple of {found[0].group_size}.")
    return found[0]


def _index_key_norm_eps(own: Section, argument: float | None) -> float | None:
    stored = own.optional_number("index_key_norm_eps")
    if argument is None:
        return stored
    return Section({"index_key_norm_eps": argument}, "", own.problems).number("index_key_norm_eps", maximum=1.0)
