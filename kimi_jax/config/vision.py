"""The vision tower, its merger and projector."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kimi_jax.config.errors import ConfigError
from kimi_jax.config.fields import Section
from kimi_jax.config.known_keys import GENERIC_KEYS

# Choices of the public file for which there is one implementation.
_FIXED: Mapping[str, Any] = {
    "pos_emb_type": "divided_fixed",
    "pos_emb_interpolation_mode": "bilinear",
    "norm_type": "rmsnorm",
    "mlp_type": "mlp2",
    "activation_func": "gelu_pytorch_tanh",
    "attn_bias": False,
    "linear_bias": False,
    "patch_embed_proj_bias": False,
    "merge_type": "sd2_tpool",
    "mm_projector_type": "patchmergerv2",
    "projector_hidden_act": "gelu",
}
_SIZES = (
    "patch_size",
    "init_pos_emb_height",
    "init_pos_emb_width",
    "init_pos_emb_time",
    "vt_hidden_size",
    "vt_intermediate_size",
    "vt_num_hidden_layers",
    "vt_num_attention_heads",
    "qkv_hidden_size",
    "mm_hidden_size",
    "text_hidden_size",
)


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """MoonViT tower, merger and projector; the names are those of the public file.

    Attributes:
        patch_size: side of a square patch in pixels.
        init_pos_emb_height: rows of the learned position table.
        init_pos_emb_width: columns of the learned position table.
        init_pos_emb_time: most frames of one clip.
        pos_emb_type: `divided_fixed`, a learned table in space and a fixed one in time.
        pos_emb_interpolation_mode: `bilinear`.
        vt_hidden_size: width of the tower.
        vt_intermediate_size: inner width of the tower's MLP.
        vt_num_hidden_layers: blocks of the tower.
        vt_num_attention_heads: attention heads of the tower.
        qkv_hidden_size: width of q, of k and of v, all heads together.
        norm_type: `rmsnorm`.
        mlp_type: `mlp2`, two matrices.
        activation_func: `gelu_pytorch_tanh`.
        attn_bias: false; the checkpoint holds no bias.
        linear_bias: false.
        patch_embed_proj_bias: false.
        merge_kernel_size: rows and columns of patches that become one token.
        merge_type: `sd2_tpool`, merge in space and mean over time.
        mm_projector_type: `patchmergerv2`, norm after the projection.
        mm_hidden_size: width that enters the merger, vt_hidden_size.
        projector_hidden_act: `gelu`, the exact form.
        projector_ln_eps: eps of the projector's RMSNorm.
        text_hidden_size: width of the text model.
    """

    patch_size: int
    init_pos_emb_height: int
    init_pos_emb_width: int
    init_pos_emb_time: int
    pos_emb_type: str
    pos_emb_interpolation_mode: str
    vt_hidden_size: int
    vt_intermediate_size: int
    vt_num_hidden_layers: int
    vt_num_attention_heads: int
    qkv_hidden_size: int
    norm_type: str
    mlp_type: str
    activation_func: str
    attn_bias: bool
    linear_bias: bool
    patch_embed_proj_bias: bool
    merge_kernel_size: tuple[int, int]
    merge_type: str
    mm_projector_type: str
    mm_hidden_size: int
    projector_hidden_act: str
    projector_ln_eps: float
    text_hidden_size: int

    @property
    def head_dim(self) -> int:
        """Width of one attention head of the tower."""
        return self.qkv_hidden_size // self.vt_num_attention_heads

    @classmethod
    def from_dict(cls, json: Mapping[str, Any]) -> "VisionConfig":
        """Reads the `vision_config` object of a public config.json.

        Raises:
            ConfigError: a key is missing, unknown or of the wrong type, or the sizes contradict each other.
        """
        problems: list[str] = []
        config = read_vision(Section(json, "vision_config", problems), text_hidden_size=None)
        if problems:
            raise ConfigError(problems)
        return config

    def to_dict(self) -> dict[str, Any]:
        """The `vision_config` object of a public config.json."""
        return {**asdict(self), "merge_kernel_size": list(self.merge_kernel_size)}


def read_vision(section: Section, *, text_hidden_size: int | None) -> VisionConfig:
    """Reads a `vision_config` object; `text_hidden_size` is the text model's width where that is known."""
    for key, legal in _FIXED.items():
        section.exactly(key, legal, "the public models use nothing else.")
    sizes: dict[str, Any] = {key: section.integer(key) for key in _SIZES}
    merge = section.integers("merge_kernel_size")
    if section.has("merge_kernel_size") and (len(merge) != 2 or min(merge) < 1):
        section.problem("merge_kernel_size", f"is {list(merge)}; it must hold two integers of at least 1.")
    config = VisionConfig(
        **sizes,
        **_FIXED,
        merge_kernel_size=(merge[0], merge[1]) if len(merge) == 2 else (1, 1),
        projector_ln_eps=section.number("projector_ln_eps", maximum=1.0),
    )
    _check_sizes(section, config, text_hidden_size)
    section.accept("model_type")
    section.refuse_unknown(GENERIC_KEYS)
    return config


def _check_sizes(section: Section, config: VisionConfig, text_hidden_size: int | None) -> None:
    if section.has("qkv_hidden_size", "vt_num_attention_heads") and (
        config.qkv_hidden_size % config.vt_num_attention_heads or config.head_dim % 4
    ):
        section.problem(
            "qkv_hidden_size",
            f"is {config.qkv_hidden_size}; it must be vt_num_attention_heads = {config.vt_num_attention_heads} times a "
            "multiple of 4, because a head's channels are rotated in pairs by row and by column.",
        )
    if section.has("vt_hidden_size") and config.vt_hidden_size % 2:
        section.problem(
            "vt_hidden_size",
            f"is {config.vt_hidden_size}; it must be even, because frames are encoded by sines and cosines.",
        )
    if section.has("mm_hidden_size", "vt_hidden_size") and config.mm_hidden_size != config.vt_hidden_size:
        section.problem(
            "mm_hidden_size", f"is {config.mm_hidden_size}; it must equal vt_hidden_size = {config.vt_hidden_size}."
        )
    if section.has("text_hidden_size") and text_hidden_size is not None and config.text_hidden_size != text_hidden_size:
        section.problem(
            "text_hidden_size",
            f"is {config.text_hidden_size}; it must equal the text model's hidden_size = {text_hidden_size}.",
        )
