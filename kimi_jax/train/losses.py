"""What training minimises: next-token loss, and the distance of the indexer from the attention it stands for."""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kimi_jax.model import Decoder
from kimi_jax.modules.mla import MlaKeys, MlaQueries, MultiHeadLatentAttention
from kimi_jax.modules.moe import MixtureOfExperts, Routing
from kimi_jax.observe import Observed, Observer
from kimi_jax.params import Params
from kimi_jax.rows import Rows
from kimi_jax.train.balancing import margin_histogram
from kimi_jax.train.batches import Batch
from pallas_kernels.fp8_latent import Fp8Latent
from pallas_kernels.mxfp8 import Mxfp8
from pallas_kernels.sparse_mla import indexer_kl

IndexerStage = Literal["dense", "sparse"]
"""The indexer learns from attention over all visible keys (warm-up), or over those that it selects."""

BLOCK = 4096
"""Tokens whose logits exist at once."""


def targets(batch: Batch) -> tuple[Int[Array, "B T"], Bool[Array, "B T"]]:
    """(the next token, whether predicting it counts): it does where it is learned and belongs to the same example."""

    def following(x: Array, fill: int) -> Array:
        return jnp.pad(x[:, 1:], [(0, 0), (0, 1)], constant_values=fill)

    segments = jnp.asarray(batch.segment_ids)
    counts = (following(segments, -1) == segments) & (segments >= 0) & following(jnp.asarray(batch.learned), 0)
    return following(jnp.asarray(batch.tokens), 0), counts


def token_losses(
    decoder: Decoder, params: Params, hidden: Float[Array, "B T D"], wanted: Int[Array, "B T"]
) -> Float[Array, "B T"]:
    """−log p(wanted) in nats, float32; the logits of 4096 tokens exist at a time, in reverse mode too."""
    rows, tokens = hidden.reshape(-1, hidden.shape[-1]), wanted.reshape(-1)
    size = min(BLOCK, rows.shape[0])
    blocks = -(-rows.shape[0] // size)
    padding = blocks * size - rows.shape[0]

    @jax.checkpoint
    def of_block(block: tuple[Array, Array]) -> Array:
        hidden, tokens = block
        return decoder.shards.surprise(decoder.head(params, hidden[None])[0], tokens)

    rows = jnp.pad(rows, [(0, padding), (0, 0)]).reshape(blocks, size, -1)
    tokens = jnp.pad(tokens, [(0, padding)]).reshape(blocks, size)
    losses = of_block((rows[0], tokens[0])) if blocks == 1 else jax.lax.map(of_block, (rows, tokens))
    return losses.reshape(-1)[: wanted.size].reshape(wanted.shape)


class TrainingObserver(Observer):
    """Sums over a batch's tokens: `indexer_kl` by full-attention layer, `expert_load` and `margins` by MoE layer."""

    def __init__(self, decoder: Decoder, indexer: IndexerStage | None):
        """`indexer`: what the indexer learns from, None where it doesn't learn.

        Raises:
            ValueError: the model has no indexer, or `dense_attention` of the decoder contradicts the stage.
        """
        if indexer is not None and decoder.config.dsa is None:
            raise ValueError(f"indexer={indexer!r}: the config has no dsa_config, so there is no indexer to train.")
        if indexer is not None and decoder.dense_attention != (indexer == "dense"):
            raise ValueError(
                f"indexer={indexer!r} with Decoder(dense_attention={decoder.dense_attention}): the indexer learns from "
                "the attention that runs, so 'dense' goes with dense attention and 'sparse' with selected keys."
            )
        self.config = decoder.config
        self.indexer = indexer
        self.implementation = decoder.implementation

    def mla(
        self,
        mixer: MultiHeadLatentAttention,
        queries: MlaQueries,
        keys: MlaKeys,
        rows: Rows,
        selected: Int[Array, "B T k"] | None,
    ) -> Observed:
        """The indexer's loss, summed over tokens."""
        index_q, index_k, index_w, dsa = queries.index_q, keys.index_key, queries.index_w, self.config.dsa
        if self.indexer is None or index_q is None or index_k is None or index_w is None or dsa is None:
            return {}
        # What a cache keeps is a constant; training keeps none.
        assert not isinstance(keys.latent, Fp8Latent)
        assert not isinstance(index_q, Mxfp8)
        assert not isinstance(index_k, Mxfp8)
        mla = self.config.mla
        loss = indexer_kl(
            index_q,
            index_k,
            index_w,
            queries.q,
            keys.latent,
            mixer.key_value_up[...].astype(queries.q.dtype)[:, : mla.qk_nope_head_dim],
            top_k=dsa.top_k if self.indexer == "sparse" else None,
            q_positions=rows.positions,
            segment_ids=rows.segment_ids,
            scale=(mla.qk_nope_head_dim + mla.qk_rope_head_dim) ** -0.5,
            implementation=self.implementation,
        )
        return {"indexer_kl": jnp.sum(loss)}

    def moe(self, ffn: MixtureOfExperts, routing: Routing, rows: Rows) -> Observed:
        """How often each expert was chosen, and the histogram of its margins."""
        moe = self.config.moe
        valid = rows.positions.reshape(-1) >= 0
        chosen = jnp.where(valid[:, None], routing.experts, moe.num_experts)
        scores = jax.lax.stop_gradient(routing.scores)
        return {
            "expert_load": jnp.bincount(chosen.reshape(-1), length=moe.num_experts),
            "margins": margin_histogram(scores, ffn.correction_bias[...], moe.num_experts_per_token, valid),
        }
