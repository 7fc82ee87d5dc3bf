"""The indexer's loss in plain JAX: blocks of queries under a byte budget, differentiable in the indexer."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.lightning_indexer.blocks import in_blocks, plan
from pallas_kernels.lightning_indexer.select import select_block, tile_scores
from pallas_kernels.lightning_indexer.visibility import Visibility
from pallas_kernels.lightning_indexer.xla import score_tile
from pallas_kernels.precision import at_least_float32, einsum
from pallas_kernels.sparse_mla.absorbed import absorb, product_rows


@partial(jax.jit, static_argnames=("top_k", "scale", "budget_bytes"))
def indexer_kl(
    index_q: Float[Array, "B T I K"],
    index_k: Float[Array, "B S K"],
    index_w: Float[Array, "B T I"],
    q: Float[Array, "B T H Q"],
    latent: Float[Array, "B S R"],
    w_uk: Float[Array, "H N L"],
    *,
    top_k: int | None,
    q_positions: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"] | None,
    key_segment_ids: Int[Array, "B S"] | None,
    scale: float,
    budget_bytes: int,
) -> Float[Array, "B T"]:
    """A block of queries against all keys at a time."""
    batch, queries, heads, _ = q.shape
    num_keys, index_heads = index_k.shape[1], index_q.shape[2]
    dtype = at_least_float32(index_q, q)
    row = 3 * (heads + index_heads + 4) * num_keys * dtype.itemsize
    blocks = plan(1, queries, fits=budget_bytes // (batch * row), wanted=max(16, product_rows() // heads))
    tile = score_tile(index_k, budget_bytes)

    def block(sliced: tuple[jax.Array, jax.Array], index_keys: jax.Array, constants: Any) -> jax.Array:
        (positions, segments, block_q), (keys, up_k, key_segments) = constants
        block_index_q, block_w = sliced
        visibility = Visibility(positions, segments, key_segments)
        if top_k is None or num_keys <= top_k:
            mask = visibility.tile(jnp.int32(0), num_keys)
        else:
            arguments = jax.lax.stop_gradient((block_index_q, index_keys, block_w))
            mask = select_block(*arguments, visibility, top_k, tile).tile(jnp.int32(0), num_keys)
        attention = einsum("bthk,bsk->bhts", absorb(block_q, up_k), keys) * scale
        target = jnp.mean(_softmax(attention, mask[:, None]), axis=1)
        # A key that nobody sees may hold anything; through the product its NaN would reach the weights.
        seen = jnp.any(mask, axis=1)[..., None]
        scores = tile_scores(block_index_q, jnp.where(seen, index_keys, 0), block_w).astype(dtype)
        log_share = scores - _log_sum_exp(scores, mask)
        distance = target * (jnp.log(jnp.where(target > 0, target, 1)) - log_share)
        return jnp.sum(jnp.where(mask & (target > 0), distance, 0), axis=-1)

    detached = jax.lax.stop_gradient((q, latent, w_uk))
    rows = (q_positions, segment_ids, detached[0])
    return in_blocks(block, blocks, (index_q, index_w), index_k, (rows, (*detached[1:], key_segment_ids)))


def _softmax(scores: jax.Array, mask: jax.Array) -> jax.Array:
    """Probabilities over the last axis; zeros for rows without keys."""
    scores = jnp.where(mask, scores, -jnp.inf)
    top = jnp.max(scores, axis=-1, keepdims=True)
    p = jnp.exp(scores - jnp.where(top == -jnp.inf, 0, top))
    total = jnp.sum(p, axis=-1, keepdims=True)
    return p / jnp.where(total == 0, 1, total)


def _log_sum_exp(scores: jax.Array, mask: jax.Array) -> jax.Array:
    """Over the last axis, kept; 0 for rows without keys, and no gradient that isn't finite."""
    top = jax.lax.stop_gradient(jnp.max(jnp.where(mask, scores, -jnp.inf), axis=-1, keepdims=True))
    top = jnp.where(top == -jnp.inf, 0, top)
    total = jnp.sum(jnp.where(mask, jnp.exp(jnp.where(mask, scores - top, 0)), 0), axis=-1, keepdims=True)
    return top + jnp.log(jnp.where(total == 0, 1, total))
