"""Token mixers: Kimi Delta Attention, multi-head latent attention, and the lightning indexer of K3.1."""

from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from kimi_jax.config.fields import Section, listed

LOW_RANK_NORM_EPS = 1e-6

# With 16-token chunks the in-chunk decays reach exp(16 * 5.5) = exp(88), the last whole number below float32's limit.
LOWEST_GATE_BOUND = -5.5


class LayerKind(NamedTuple):
    """What one decoder layer consists of."""

    mixer: Literal["kda", "mla"]
    ffn: Literal["dense", "moe"]


@dataclass(frozen=True, kw_only=True)
class KdaConfig:
    """Kimi Delta Attention layers.

    Attributes:
        layers: zero-based numbers of the KDA layers, ascending.
        num_heads: heads H; the projections are H * head_dim wide.
        head_dim: key and value width of a head, and the rank of the low-rank gates.
        conv_kernel_size: taps of the short convolution on q, k and v.
        gate_lower_bound: L of the bounded gate g = L * sigmoid(exp(A_log) * z); None for the unbounded gate
            g = -exp(A_log) * softplus(z).
        full_rank_gate: whether the output gate is one full matrix and not two of rank head_dim.
    """

    layers: tuple[int, ...]
    num_heads: int
    head_dim: int
    conv_kernel_size: int
    gate_lower_bound: float | None
    full_rank_gate: bool

    @property
    def width(self) -> int:
        """Width of q, k, v and of the gates: num_heads * head_dim."""
        return self.num_heads * self.head_dim


@dataclass(frozen=True, kw_only=True)
class MlaConfig:
    """Multi-head latent attention layers, without rotation.

    Attributes:
        layers: zero-based numbers of the full-attention layers, ascending.
        q_lora_rank: width of the query latent; None for one plain query projection.
        kv_lora_rank: width L of the latent that is cached.
        qk_nope_head_dim: key width of a head that comes out of the latent.
        qk_rope_head_dim: key width R shared by all heads; never rotated in these models.
        v_head_dim: value width V of a head.
        output_gate: whether the output is multiplied by a full-rank sigmoid gate.
        low_rank_norm_eps: eps of the norms on the query and key latents; upstream leaves it at its class default and
            never passes rms_norm_eps.
    """

    layers: tuple[int, ...]
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    output_gate: bool
    low_rank_norm_eps: float = LOW_RANK_NORM_EPS

    @property
    def qk_head_dim(self) -> int:
        """Width of a query or key head; scores are scaled by its inverse square root."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cache_width(self) -> int:
        """Values cached for one token: the latent and the shared key channels."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True, kw_only=True)
class DsaConfig:
    """The lightning indexer that every full-attention layer of K3.1 carries.

    Attributes:
        num_heads: indexer heads.
        head_dim: width of an indexer query or key.
        top_k: most keys that one query attends to.
        key_norm_eps: eps of the LayerNorm on indexer keys.
    """

    num_heads: int
    head_dim: int
    top_k: int
    key_norm_eps: float


def read_kda(linear: Section, layers: tuple[int, ...], *, k3_shaped: bool, allow_unbounded_gate: bool) -> KdaConfig:
    """Reads `linear_attn_config`; `layers` come from `read_layers`."""
    kda = KdaConfig(
        layers=layers,
        num_heads=linear.integer("num_heads"),
        head_dim=linear.integer("head_dim"),
        conv_kernel_size=linear.integer("short_conv_kernel_size", minimum=2),
        gate_lower_bound=linear.negative_number(
            "gate_lower_bound",
            minimum=LOWEST_GATE_BOUND,
            reason=", because exp of 16 times a lower bound overflows float32; it's -5 in the released models.",
        ),
        full_rank_gate=linear.optional_boolean("use_full_rank_gate", needed_by=_k3_needs(k3_shaped)),
    )
    if k3_shaped and kda.gate_lower_bound is None and not allow_unbounded_gate:
        linear.problem(
            "gate_lower_bound",
            "is missing; a K3 configuration must give it. Without it the decay gate would be the unbounded softplus "
            "form, a different function. Pass allow_unbounded_gate=True if the checkpoint was trained that way.",
        )
    return kda


def read_layers(linear: Section, num_layers: int | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Reads the one-based layer lists and returns the zero-based KDA and full-attention layers.

    Together the lists must hold each of 1..num_layers once; `num_layers` is None when it couldn't be read.
    """
    kda = linear.integers("kda_layers")
    full = linear.integers("full_attn_layers")
    if not linear.has("kda_layers", "full_attn_layers"):
        return (), ()
    both = f"{linear.name('kda_layers')} and {linear.name('full_attn_layers')}"
    before = len(linear.problems)
    for key, layers in (("kda_layers", kda), ("full_attn_layers", full)):
        repeated = sorted(layer for layer, times in Counter(layers).items() if times > 1)
        if repeated:
            linear.problem(key, f"lists a layer more than once: {listed(repeated)}.")
    overlap = sorted(set(kda) & set(full))
    if overlap:
        linear.problems.append(f"{both} both list: {listed(overlap)}. A layer is one or the other.")
    if num_layers is not None:
        every = set(range(1, num_layers + 1))
        outside = sorted({*kda, *full} - every)
        if outside:
            linear.problems.append(
                f"{both} list layers that don't exist: {listed(outside)}. Layers count from 1 to "
                f"num_hidden_layers = {num_layers}."
            )
        missing = sorted(every - {*kda, *full})
        if missing:
            linear.problems.append(
                f"{both} miss layers: {listed(missing)}. Each layer from 1 to num_hidden_layers = {num_layers} must "
                "be in one of them."
            )
    if len(linear.problems) > before:
        return (), ()
    return tuple(layer - 1 for layer in sorted(kda)), tuple(layer - 1 for layer in sorted(full))


def read_mla(
    text: Section, layers: tuple[int, ...], *, k3_shaped: bool, low_rank_norm_eps: float
) -> tuple[MlaConfig, int]:
    """Reads the latent-attention keys of the text configuration and the number of heads."""
    text.exactly("mla_use_nope", True, "rotary encodings aren't part of these models.")
    num_heads = text.integer("num_attention_heads")
    num_key_value_heads = text.integer("num_key_value_heads")
    if text.has("num_attention_heads", "num_key_value_heads") and num_heads != num_key_value_heads:
        text.problem(
            "num_key_value_heads",
            f"is {num_key_value_heads}; it must equal num_attention_heads = {num_heads}, because every head of latent "
            "attention has its own keys.",
        )
    mla = MlaConfig(
        layers=layers,
        q_lora_rank=text.nullable_integer("q_lora_rank"),
        kv_lora_rank=text.integer("kv_lora_rank"),
        qk_nope_head_dim=text.integer("qk_nope_head_dim"),
        qk_rope_head_dim=text.integer("qk_rope_head_dim"),
        v_head_dim=text.integer("v_head_dim"),
        output_gate=text.optional_boolean("mla_use_output_gate", needed_by=_k3_needs(k3_shaped)),
        low_rank_norm_eps=low_rank_norm_eps,
    )
    return mla, num_heads


def read_dsa(text: Section, mla: MlaConfig, *, present: bool, key_norm_eps: float) -> DsaConfig | None:
    """Reads `dsa_config`, which must be there when `present` and must not be there otherwise.

    The key names of the released file are unconfirmed, so each field has several spellings.
    """
    if not present:
        if text.accept("dsa_config") is not None:
            text.problem("dsa_config", "belongs to model_type 'kimi_k31'; other models have no indexer.")
        return None
    dsa = text.section("dsa_config", needed_by="a kimi_k31 configuration must give it")
    if dsa is None:
        return None
    config = DsaConfig(
        num_heads=dsa.integer("index_n_heads", "num_heads"),
        head_dim=dsa.integer("index_head_dim", "head_dim", "key_length"),
        top_k=dsa.integer("index_topk", "top_k"),
        key_norm_eps=key_norm_eps,
    )
    layers = dsa.integers("dsa_layers", "layers")
    if dsa.has("dsa_layers") and mla.layers and sorted(layers) != [layer + 1 for layer in mla.layers]:
        dsa.problem(
            "dsa_layers",
            f"is [{listed(layers)}]; it must list exactly linear_attn_config.full_attn_layers, counted from 1: "
            f"[{listed([layer + 1 for layer in mla.layers])}].",
        )
    if text.has("q_lora_rank") and mla.q_lora_rank is None:
        text.problem("q_lora_rank", "is null; the indexer reads the query latent, so it must be an integer.")
    dsa.refuse_unknown()
    return config


def write_linear_attention(kda: KdaConfig, mla: MlaConfig, *, k3_shaped: bool) -> dict[str, Any]:
    """The `linear_attn_config` object of the public file."""
    json: dict[str, Any] = {
        "full_attn_layers": [layer + 1 for layer in mla.layers],
        "head_dim": kda.head_dim,
        "kda_layers": [layer + 1 for layer in kda.layers],
        "num_heads": kda.num_heads,
        "short_conv_kernel_size": kda.conv_kernel_size,
    }
    if kda.gate_lower_bound is not None:
        json["gate_lower_bound"] = kda.gate_lower_bound
    if k3_shaped or kda.full_rank_gate:
        json["use_full_rank_gate"] = kda.full_rank_gate
    return json


def write_mla(mla: MlaConfig, num_heads: int, *, k3_shaped: bool) -> dict[str, Any]:
    """The latent-attention keys of the public file."""
    json: dict[str, Any] = {
        "kv_lora_rank": mla.kv_lora_rank,
        "mla_use_nope": True,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        "q_lora_rank": mla.q_lora_rank,
        "qk_nope_head_dim": mla.qk_nope_head_dim,
        "qk_rope_head_dim": mla.qk_rope_head_dim,
        "v_head_dim": mla.v_head_dim,
    }
    if k3_shaped or mla.output_gate:
        json["mla_use_output_gate"] = mla.output_gate
    return json


def write_dsa(dsa: DsaConfig, mla: MlaConfig) -> dict[str, Any]:
    """The `dsa_config` object, in the first spelling of each field."""
    return {
        "index_n_heads": dsa.num_heads,
        "index_head_dim": dsa.head_dim,
        "index_topk": dsa.top_k,
        "dsa_layers": [layer + 1 for layer in mla.layers],
    }


def _k3_needs(k3_shaped: bool) -> str | None:
    return "a K3 configuration must give it" if k3_shaped else None
