"""How many parameters a configuration stands for, by the shapes of its layers."""

from dataclasses import dataclass

from kimi_jax.config.model import KimiConfig
from kimi_jax.config.vision import VisionConfig


@dataclass(frozen=True, kw_only=True)
class ParameterCount:
    """Numbers of values, by group; packed weights count as the values they stand for.

    Attributes:
        embedding: the embedding table, which is also the head when they're tied.
        head: the separate output head; 0 when tied.
        kda: all KDA layers, without the norms before them.
        mla: all latent-attention layers, without the norms before them and without indexers.
        indexer: all lightning indexers.
        dense_mlp: all dense MLPs.
        router: all router matrices and selection biases.
        routed_experts: all routed experts.
        routed_experts_active: the routed experts that one token passes through.
        shared_experts: all shared experts.
        latent: projections and norms around latent routed experts.
        attn_res: all pseudo-queries and key norms of Attention Residuals.
        norms: norms before mixers and MLPs, and the last one.
        vision_tower: the image tower; 0 for a text model.
        projector: the image projector; 0 for a text model.
        active_embedding: 0, or the tied table: reading one row costs nothing, multiplying by it does.
    """

    embedding: int
    head: int
    kda: int
    mla: int
    indexer: int
    dense_mlp: int
    router: int
    routed_experts: int
    routed_experts_active: int
    shared_experts: int
    latent: int
    attn_res: int
    norms: int
    vision_tower: int
    projector: int
    active_embedding: int

    @property
    def text(self) -> int:
        """The text model."""
        return self.embedding + self.routed_experts + self._always_active

    @property
    def vision(self) -> int:
        """Tower and projector."""
        return self.vision_tower + self.projector

    @property
    def total(self) -> int:
        """Text model, tower and projector."""
        return self.text + self.vision

    @property
    def active_per_token(self) -> int:
        """Text parameters that take part in one token: no embedding table, and only the chosen experts."""
        return self.active_embedding + self.routed_experts_active + self._always_active

    @property
    def _always_active(self) -> int:
        mixers = self.kda + self.mla + self.indexer
        mlps = self.dense_mlp + self.router + self.shared_experts + self.latent
        return self.head + mixers + mlps + self.attn_res + self.norms


def parameter_count(config: KimiConfig) -> ParameterCount:
    """Counts parameters from shapes; A_log counts one value a head, without a checkpoint's padding."""
    width, moe = config.hidden_size, config.moe
    table = config.vocab_size * width
    tied = config.tie_word_embeddings
    expert = 3 * moe.intermediate_size * (moe.latent_size or width)
    latent = 0
    if moe.latent_size is not None:
        latent = 2 * width * moe.latent_size + (moe.latent_size if moe.latent_norm else 0)
    mixes = 0 if config.attn_res_block_size is None else 2 * config.num_hidden_layers + 1
    num_mla, num_moe = len(config.mla.layers), len(moe.layers)
    return ParameterCount(
        embedding=table,
        head=0 if tied else table,
        kda=len(config.kda.layers) * _kda_layer(config),
        mla=num_mla * _mla_layer(config),
        indexer=num_mla * _indexer(config),
        dense_mlp=len(config.dense_layers) * 3 * width * config.intermediate_size,
        router=num_moe * (width + 1) * moe.num_experts,
        routed_experts=num_moe * moe.num_experts * expert,
        routed_experts_active=num_moe * moe.num_experts_per_token * expert,
        shared_experts=num_moe * 3 * width * moe.shared_intermediate_size,
        latent=num_moe * latent,
        attn_res=mixes * 2 * width,
        norms=(2 * config.num_hidden_layers + 1) * width,
        vision_tower=0 if config.vision is None else _vision_tower(config.vision),
        projector=0 if config.vision is None else _projector(config.vision),
        active_embedding=table if tied else 0,
    )


def _kda_layer(config: KimiConfig) -> int:
    kda, width = config.kda, config.hidden_size
    low_rank = kda.head_dim * (width + kda.width)
    gates = low_rank + (width * kda.width if kda.full_rank_gate else low_rank)
    convolutions = 3 * kda.width * kda.conv_kernel_size
    # beta's projection and A_log, then dt_bias and o_norm.
    small = kda.num_heads * (width + 1) + kda.width + kda.head_dim
    return 4 * width * kda.width + gates + convolutions + small


def _mla_layer(config: KimiConfig) -> int:
    mla, width, heads = config.mla, config.hidden_size, config.num_attention_heads
    query_input = width if mla.q_lora_rank is None else mla.q_lora_rank
    count = heads * mla.qk_head_dim * query_input
    if mla.q_lora_rank is not None:
        count += (width + 1) * mla.q_lora_rank
    count += width * mla.cache_width + mla.kv_lora_rank
    count += heads * (mla.qk_nope_head_dim + mla.v_head_dim) * mla.kv_lora_rank
    return count + (2 if mla.output_gate else 1) * width * heads * mla.v_head_dim


def _indexer(config: KimiConfig) -> int:
    dsa, latent = config.dsa, config.mla.q_lora_rank
    if dsa is None or latent is None:
        return 0
    return dsa.num_heads * (dsa.head_dim * latent + config.hidden_size) + dsa.head_dim * (config.hidden_size + 2)


def _vision_tower(vision: VisionConfig) -> int:
    width = vision.vt_hidden_size
    patches = 3 * vision.patch_size**2 * width
    positions = vision.init_pos_emb_height * vision.init_pos_emb_width * width
    block = 4 * width * vision.qkv_hidden_size + 2 * width * vision.vt_intermediate_size + 2 * width
    return patches + positions + vision.vt_num_hidden_layers * block + width


def _projector(vision: VisionConfig) -> int:
    rows, columns = vision.merge_kernel_size
    merged = rows * columns * vision.mm_hidden_size
    return merged * merged + (merged + 1) * vision.text_hidden_size
