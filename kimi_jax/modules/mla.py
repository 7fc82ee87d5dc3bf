"""Multi-head latent attention without positions (NoPE), dense or sparse through a lightning indexer."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from kimi_jax.config import KimiConfig
from kimi_jax.modules.linear import linear
from kimi_jax.modules.norm import LayerNorm, RMSNorm
from kimi_jax.params import param
from kimi_jax.shards import ALONE, Shards
from pallas_kernels.dispatch import Implementation
from pallas_kernels.fp8_latent import Fp8Latent
from pallas_kernels.lightning_indexer import TwoStage
from pallas_kernels.mxfp8 import Mxfp8
from pallas_kernels.precision import at_least_float32


class MlaKeys(NamedTuple):
    """What one MLA layer keeps of every token.

    Attributes:
        latent: [B, S, L+R]: the normalised key/value latent, then the channels of the slot that other models rotate; also
            in FP8.
        index_key: [B, S, KI] for sparse layers, also in MXFP8, else None.
    """

    latent: Float[Array, "B S W"] | Fp8Latent
    index_key: Float[Array, "B S K"] | Mxfp8 | None


class Indexer(nnx.Module):
    """Projections of the lightning indexer: queries from the query latent, one key and head weights from x.

    w = (x W) · H^-1/2 · K^-1/2, accumulated and kept in float32: rounding it makes ties, and ties decide membership.
    """

    def __init__(self, config: KimiConfig):
        assert config.dsa is not None
        assert config.mla.q_lora_rank is not None
        heads, width, hidden = config.dsa.num_heads, config.dsa.head_dim, config.hidden_size
        name = "self_attn.indexer"
        self.query = param(
            (heads, width, config.mla.q_lora_rank), (None, None, None), f"{name}.wq_b.weight", adapt="heads"
        )
        self.key = param((width, hidden), (None, "embed"), f"{name}.wk.weight")
        self.key_norm = LayerNorm(width, config.dsa.key_norm_eps, f"{name}.k_norm")
        self.head_weights = param((heads, hidden), (None, "embed"), f"{name}.weights_proj.weight")

    def __call__(
        self, x: Float[Array, "B T D"], query_latent: Float[Array, "B T Q"]
    ) -> tuple[Float[Array, "B T H K"], Float[Array, "B T K"], Float[Array, "B T H"]]:
        """Returns (queries, keys, head weights).

        Keys and head weights come out of one product of x, which doesn't wait for the query latent.
        """
        heads, width, rank = self.query.shape
        batch, tokens, _ = x.shape
        if tokens == 1:
            # Joined with the attention's own queries, whose weights XLA copies for that.
            query_latent = jax.lax.optimization_barrier(query_latent)
        queries = linear(query_latent, self.query[...].reshape(heads * width, rank))
        both = jnp.concatenate([self.key[...].astype(x.dtype), self.head_weights[...].astype(x.dtype)])
        keys, weights = jnp.split(linear(x, both, out=at_least_float32(x)), [width], axis=-1)
        keys = self.key_norm(keys.astype(x.dtype))
        return queries.reshape(batch, tokens, heads, width), keys, weights * (heads * width) ** -0.5


class MultiHeadLatentAttention(nnx.Module):
    """One MLA layer; x is already normalised by the layer's input norm."""

    def __init__(self, config: KimiConfig):
        self.config = config
        mla, heads, hidden = config.mla, config.num_attention_heads, config.hidden_size
        query_width = mla.qk_nope_head_dim + mla.qk_rope_head_dim
        if mla.q_lora_rank is None:
            self.query = param(
                (heads, query_width, hidden), ("heads", None, "embed"), "self_attn.q_proj.weight", adapt="heads"
            )
        else:
            self.query_down = param((mla.q_lora_rank, hidden), (None, "embed"), "self_attn.q_a_proj.weight")
            self.query_norm = RMSNorm(mla.q_lora_rank, mla.low_rank_norm_eps, "self_attn.q_a_layernorm.weight")
            self.query = param(
                (heads, query_width, mla.q_lora_rank), ("heads", None, None), "self_attn.q_b_proj.weight", adapt="heads"
            )
        self.latent_down = param(
            (mla.kv_lora_rank + mla.qk_rope_head_dim, hidden), (None, "embed"), "self_attn.kv_a_proj_with_mqa.weight"
        )
        self.latent_norm = RMSNorm(mla.kv_lora_rank, mla.low_rank_norm_eps, "self_attn.kv_a_layernorm.weight")
        self.key_value_up = param(
            (heads, mla.qk_nope_head_dim + mla.v_head_dim, mla.kv_lora_rank),
            ("heads", None, None),
            "self_attn.kv_b_proj.weight",
            adapt="heads",
        )
        if mla.output_gate:
            self.output_gate = param((heads * mla.v_head_dim, hidden), ("heads", "embed"), "self_attn.g_proj.weight")
        self.output = param((hidden, heads * mla.v_head_dim), ("embed", "heads"), "self_attn.o_proj.weight")
        if config.dsa is not None:
            self.indexer = Indexer(config)

    def project(self, x: Float[Array, "B T D"]) -> tuple["MlaQueries", MlaKeys]:
        """What the attention over T new tokens needs of them: their queries, and the keys to write to the cache."""
        mla = self.config.mla
        batch, tokens, _ = x.shape
        source = x if mla.q_lora_rank is None else self.query_norm(linear(x, self.query_down[...]))
        heads, width, rank = self.query.shape
        q = linear(source, self.query[...].reshape(heads * width, rank)).reshape(batch, tokens, heads, width)
        down = linear(x, self.latent_down[...])
        latent = jax.lax.concatenate(
            [self.latent_norm(down[..., : mla.kv_lora_rank]), down[..., mla.kv_lora_rank :]], dimension=2
        )
        if self.config.dsa is None:
            return MlaQueries(q, None, None), MlaKeys(latent, None)
        # The indexer learns from its own loss, and nothing else does.
        index_q, index_k, index_w = self.indexer(*jax.lax.stop_gradient((x, source)))
        return MlaQueries(q, index_q, index_w), MlaKeys(latent, index_k)

    def attend(
        self,
        x: Float[Array, "B T D"],
        queries: "MlaQueries",
        keys: MlaKeys,
        q_positions: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"] | None = None,
        *,
        dense: bool = False,
        cached: bool = False,
        return_indices: bool = False,
        two_stage: TwoStage | None = None,
        implementation: Implementation | None = None,
        shards: Shards = ALONE,
    ) -> tuple[Float[Array, "B T D"], Int[Array, "B T k"] | None]:
        """Causal attention of the new tokens over `keys` (their own included), output gate and projection.

        Args:
            x: normalised layer input of the new tokens.
            queries: from `project`, `MlaQueries.like` keys where these are quantised.
            keys: [B, S, ...] all keys of the rows.
            q_positions: each new token's own place among the keys; -1 for padding.
            segment_ids: ids of packed sequences.
            dense: attend all visible keys, whatever the indexer thinks of them.
            cached: `keys` are a cache, and not those of the new tokens alone.
            return_indices: also return the selected positions (sparse layers only).
            two_stage: how the indexer leaves keys out (see `pallas_kernels.lightning_indexer.TwoStage`); None: not at all.
            implementation: of the operations; None picks.
            shards: the devices that share the work; heads of the others are missing from the output.
        """
        mla, dsa = self.config.mla, self.config.dsa
        up = self.key_value_up[...].astype(x.dtype)
        w_uk, w_uv = up[:, : mla.qk_nope_head_dim], up[:, mla.qk_nope_head_dim :]
        scale = (mla.qk_nope_head_dim + mla.qk_rope_head_dim) ** -0.5
        index_q, index_k, index_w = queries.index_q, keys.index_key, queries.index_w
        indices = None
        if dense or dsa is None or index_q is None or index_k is None or index_w is None:
            out = shards.dense_mla(
                queries.q,
                keys.latent,
                w_uk,
                w_uv,
                q_positions=q_positions,
                segment_ids=segment_ids,
                scale=scale,
                cached=cached,
                implementation=implementation,
            )
        else:
            result = shards.dsa_mla(
                index_q,
                index_k,
                index_w,
                queries.q,
                keys.latent,
                w_uk,
                w_uv,
                top_k=dsa.top_k,
                q_positions=q_positions,
                segment_ids=segment_ids,
                scale=scale,
                cached=cached,
                return_indices=return_indices,
                two_stage=two_stage,
                implementation=implementation,
            )
            out, indices = result if isinstance(result, tuple) else (result, None)
        flat = out.reshape(*x.shape[:2], -1)
        if mla.output_gate:
            dtype = at_least_float32(x)
            gate = jax.nn.sigmoid(linear(x, self.output_gate[...]).astype(dtype))
            flat = (flat.astype(dtype) * gate).astype(x.dtype)
        return linear(flat, self.output[...]), indices


class MlaQueries(NamedTuple):
    """Queries of the new tokens: q [B, T, H, N+R] and, for sparse layers, the indexer's queries and head weights."""

    q: Float[Array, "B T H W"]
    index_q: Float[Array, "B T HI KI"] | Mxfp8 | None
    index_w: Float[Array, "B T HI"] | None

    def like(self, keys: MlaKeys) -> "MlaQueries":
        """With index queries in MXFP8 where index keys are: both sides of their product in eight bits."""
        if self.index_q is None or isinstance(self.index_q, Mxfp8) or not isinstance(keys.index_key, Mxfp8):
            return self
        return self._replace(index_q=Mxfp8.quantize(self.index_q))
