"""The whole model's configuration, from and to the public config.json."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kimi_jax import strict_json
from kimi_jax.config.attention import (
    LOW_RANK_NORM_EPS,
    DsaConfig,
    KdaConfig,
    LayerKind,
    MlaConfig,
    write_dsa,
    write_linear_attention,
    write_mla,
)
from kimi_jax.config.errors import ConfigError
from kimi_jax.config.fields import shown
from kimi_jax.config.moe import MoeConfig, write_moe
from kimi_jax.config.quantization import QuantizationConfig, write_quantization
from kimi_jax.config.read import ARCHITECTURES, OVERRIDES_KEY, TEXT_MODEL_TYPE, read_config
from kimi_jax.config.vision import VisionConfig

_LARGEST_FILE = 16 * 2**20


@dataclass(frozen=True, kw_only=True)
class KimiConfig:
    """One Kimi model: sizes, layers and constants, all taken from its config.json.

    Every instance can be written as a public config.json and read back as itself; one that can't is refused when it's
    built, also by `dataclasses.replace`.

    Attributes:
        model_type: `kimi_linear`, `kimi_k3` or `kimi_k31`, as at the top of the file.
        vocab_size: rows of the embedding table.
        hidden_size: model width D.
        num_hidden_layers: decoder layers.
        intermediate_size: inner width of the dense MLP.
        num_attention_heads: heads of latent attention.
        hidden_act: `silu` or `situ`.
        situ_beta: soft cap on the gate branch; None with `silu`.
        situ_linear_beta: soft cap on the up branch; None with `silu`.
        rms_norm_eps: eps of every text RMSNorm but the two on MLA's latents.
        initializer_range: standard deviation of a random matrix.
        attn_res_block_size: layers in a block of Attention Residuals; None for the ordinary residual.
        kda: Kimi Delta Attention layers.
        mla: latent-attention layers.
        dsa: their indexer; None for dense attention.
        moe: mixture-of-experts layers; the other layers have a dense MLP.
        vision: the image tower; None for a text model.
        quantization: how routed experts are stored; None for plain weights.
        max_position_embeddings: longest sequence that the model was made for, in tokens.
        tie_word_embeddings: whether the embedding table is also the head. The inner flag of the file.
        bos_token_id: token before a text.
        eos_token_id: token after a message.
        pad_token_id: padding.
        media_placeholder_token_id: token that an image's features replace; None for `kimi_linear`.
        dtype: dtype of the checkpoint's ordinary weights.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    num_attention_heads: int
    hidden_act: str
    situ_beta: float | None
    situ_linear_beta: float | None
    rms_norm_eps: float
    initializer_range: float
    attn_res_block_size: int | None
    kda: KdaConfig
    mla: MlaConfig
    dsa: DsaConfig | None
    moe: MoeConfig
    vision: VisionConfig | None
    quantization: QuantizationConfig | None
    max_position_embeddings: int
    tie_word_embeddings: bool
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    media_placeholder_token_id: int | None
    dtype: str

    def __post_init__(self) -> None:
        read = read_config(self.to_dict())
        differing = [field.name for field in fields(self) if read[field.name] != getattr(self, field.name)]
        if differing:
            raise ConfigError(
                [
                    f"{name} is {getattr(self, name)!r}; written as config.json it reads {read[name]!r}."
                    for name in differing
                ]
            )

    @classmethod
    def from_dict(
        cls,
        json: Mapping[str, Any],
        *,
        allow_unbounded_gate: bool = False,
        index_key_norm_eps: float | None = None,
        biased_router_weights: bool = False,
    ) -> "KimiConfig":
        """Reads a parsed config.json: nested for K3 and K3.1, flat for Kimi-Linear and for a bare K3 text model.

        Args:
            json: the parsed file.
            allow_unbounded_gate: accepts a K3 configuration without `gate_lower_bound`, which then uses the softplus
                gate.
            index_key_norm_eps: eps of the indexer's key LayerNorm; None takes `rms_norm_eps`, because the released
                file has no key for it.
            biased_router_weights: Kimi-Linear-48B only: takes expert weights from the biased scores.

        Raises:
            ConfigError: with everything that is wrong: missing, unknown, misplaced and contradictory keys, values of
                the wrong type or out of range, layer lists that don't cover the model.
        """
        read = read_config(
            json,
            allow_unbounded_gate=allow_unbounded_gate,
            index_key_norm_eps=index_key_norm_eps,
            biased_router_weights=biased_router_weights,
        )
        return cls(**read)

    @classmethod
    def from_directory(
        cls,
        path: str | os.PathLike[str],
        *,
        allow_unbounded_gate: bool = False,
        index_key_norm_eps: float | None = None,
        biased_router_weights: bool = False,
    ) -> "KimiConfig":
        """Reads `config.json` in a directory; the overrides are those of `from_dict`.

        Raises:
            FileNotFoundError: there is no such file.
            ConfigError: the file is larger than 16 MiB or not strict JSON, or `from_dict` refuses it. The message
                starts with the file's path.
        """
        file = Path(path) / "config.json"
        try:
            json = strict_json.load(file, largest=_LARGEST_FILE)
        except strict_json.StrictJsonError as error:
            raise ConfigError([str(error)], str(file)) from error
        if not isinstance(json, Mapping):
            raise ConfigError([f"It holds {shown(json)}; it must hold an object."], str(file))
        try:
            return cls.from_dict(
                json,
                allow_unbounded_gate=allow_unbounded_gate,
                index_key_norm_eps=index_key_norm_eps,
                biased_router_weights=biased_router_weights,
            )
        except ConfigError as error:
            raise ConfigError(error.problems, str(file)) from error

    def to_dict(self) -> dict[str, Any]:
        """The public config.json: nested for K3 and K3.1, flat for Kimi-Linear.

        Choices without a key in the public format are written to an object named `kimi_jax`, which is left out when
        there are none.
        """
        shared: dict[str, Any] = {
            "bos_token_id": self.bos_token_id,
            "dtype": self.dtype,
            "eos_token_id": self.eos_token_id,
            "pad_token_id": self.pad_token_id,
            "tie_word_embeddings": self.tie_word_embeddings,
        }
        overrides = self._overrides()
        own = {OVERRIDES_KEY: overrides} if overrides else {}
        text = {
            "architectures": [ARCHITECTURES[TEXT_MODEL_TYPE]],
            "model_type": TEXT_MODEL_TYPE,
            **shared,
            **self._text_keys(),
        }
        if self.model_type == TEXT_MODEL_TYPE:
            return text | own
        nested: dict[str, Any] = {
            "architectures": [ARCHITECTURES.get(self.model_type, self.model_type)],
            "model_type": self.model_type,
            **shared,
            "media_placeholder_token_id": self.media_placeholder_token_id,
            "text_config": text,
        }
        if self.vision is not None:
            nested["vision_config"] = self.vision.to_dict()
        return nested | own

    @property
    def k3_shaped(self) -> bool:
        """Whether this is a K3 text model, with everything that sets it apart from Kimi-Linear."""
        return self.model_type != TEXT_MODEL_TYPE or (
            self.attn_res_block_size is not None
            or self.hidden_act == "situ"
            or self.moe.latent_size is not None
            or self.moe.latent_norm
        )

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """Zero-based numbers of the layers with a dense MLP."""
        return tuple(layer for layer in range(self.num_hidden_layers) if layer not in self.moe.layers)

    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """What each layer consists of, in order."""
        kda, moe = set(self.kda.layers), set(self.moe.layers)
        return tuple(
            LayerKind(mixer="kda" if layer in kda else "mla", ffn="moe" if layer in moe else "dense")
            for layer in range(self.num_hidden_layers)
        )

    def _text_keys(self) -> dict[str, Any]:
        k3_shaped = self.k3_shaped
        json: dict[str, Any] = {
            "hidden_act": self.hidden_act,
            "hidden_size": self.hidden_size,
            "initializer_range": self.initializer_range,
            "intermediate_size": self.intermediate_size,
            "linear_attn_config": write_linear_attention(self.kda, self.mla, k3_shaped=k3_shaped),
            "max_position_embeddings" if k3_shaped else "model_max_length": self.max_position_embeddings,
            "num_hidden_layers": self.num_hidden_layers,
            "num_nextn_predict_layers": 0,
            "rms_norm_eps": self.rms_norm_eps,
            "vocab_size": self.vocab_size,
            **write_mla(self.mla, self.num_attention_heads, k3_shaped=k3_shaped),
            **write_moe(self.moe, self.num_hidden_layers, k3_shaped=k3_shaped),
        }
        if self.attn_res_block_size is not None:
            json["attn_res_block_size"] = self.attn_res_block_size
        if self.situ_beta is not None:
            json["activation_situ_beta"] = self.situ_beta
        if self.situ_linear_beta is not None:
            json["activation_situ_linear_beta"] = self.situ_linear_beta
        if self.dsa is not None:
            json["dsa_config"] = write_dsa(self.dsa, self.mla)
        if self.quantization is not None:
            json["quantization_config"] = write_quantization(self.quantization)
        return json

    def _overrides(self) -> dict[str, Any]:
        overrides: dict[str, Any] = {}
        if self.k3_shaped and self.kda.gate_lower_bound is None:
            overrides["allow_unbounded_gate"] = True
        if self.dsa is not None and self.dsa.key_norm_eps != self.rms_norm_eps:
            overrides["index_key_norm_eps"] = self.dsa.key_norm_eps
        if self.moe.biased_weights:
            overrides["biased_router_weights"] = True
        if self.mla.low_rank_norm_eps != LOW_RANK_NORM_EPS:
            overrides["low_rank_norm_eps"] = self.mla.low_rank_norm_eps
        return overrides
