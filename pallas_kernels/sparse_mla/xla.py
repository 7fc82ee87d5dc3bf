"""Sparse MLA in plain JAX: blocks of queries under a byte budget, differentiable."""

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.fp8_latent import Fp8Latent
from pallas_kernels.lightning_indexer.blocks import in_blocks, plan
from pallas_kernels.lightning_indexer.linear import linear_queries
from pallas_kernels.lightning_indexer.select import select_block, selected_indices
from pallas_kernels.lightning_indexer.two_stage import Stage, TwoStage
from pallas_kernels.lightning_indexer.visibility import Visibility
from pallas_kernels.lightning_indexer.xla import lightning_indexer, score_tile, scoring_bytes
from pallas_kernels.mxfp8 import Mxfp8
from pallas_kernels.sparse_mla.absorbed import absorb, attend_latent, expand, key_tile, product_rows
from pallas_kernels.sparse_mla.attend import Mask, Settings, attend_selected, constant_apart, sum_dtype, together
from pallas_kernels.sparse_mla.dense import dense_mla
from pallas_kernels.target import platform

# Dense scores with the selection as a mask beat gathering while heads * keys stay below this many times top_k, once
# several queries share a tile of keys (on CPUs measured from 8 to 96 heads and 2 to 8 keys per selected key). For
# GPUs the number is a guess: products cost little there, and listing a selection takes several passes.
MASK_HEAD_KEYS = {"cpu": 64, "gpu": 1024}
MASK_QUERIES = 8
# Rows gathered together: more of them leave the cache before they are read.
GATHER_BYTES = 10 * 2**20


@partial(jax.jit, static_argnames=("latent_width", "scale", "budget_bytes"))
def sparse_mla(
    q: Float[Array, "B T H K"],
    latent: Float[Array, "B S K"] | Fp8Latent,
    indices: Int[Array, "B T C"],
    *,
    latent_width: int,
    scale: float,
    budget_bytes: int,
) -> tuple[Float[Array, "B T H L"], Float[Array, "B T H"]]:
    """Attention over given rows of the latent cache, absorbed form."""
    settings = Settings(scale, 0, latent_width)  # rows are gathered, not cut into tiles
    o, lse = _attend_indices(settings, q, latent, indices, budget_bytes)
    return o.astype(q.dtype), lse


@partial(jax.jit, static_argnames=("top_k", "scale", "form", "two_stage", "budget_bytes", "return_indices"))
def dsa_mla(
    index_q: Float[Array, "B T I K"] | Mxfp8,
    index_k: Float[Array, "B S K"] | Mxfp8,
    index_w: Float[Array, "B T I"],
    q: Float[Array, "B T H Q"],
    latent: Float[Array, "B S R"] | Fp8Latent,
    w_uk: Float[Array, "H N L"],
    w_uv: Float[Array, "H V L"],
    *,
    top_k: int,
    q_positions: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"] | None,
    key_segment_ids: Int[Array, "B S"] | None,
    scale: float,
    form: Literal["gather", "mask"] | None,
    two_stage: TwoStage | None,
    budget_bytes: int,
    return_indices: bool,
) -> tuple[Float[Array, "B T H V"], Int[Array, "B T C"] | None]:
    """Scoring, selection and attention for one block of queries after the other."""
    batch, queries, heads, _ = q.shape
    num_keys, width = index_k.shape[1], w_uk.shape[2]
    if num_keys <= top_k:  # every visible key is selected, whatever its score
        out = dense_mla(
            q,
            latent,
            w_uk,
            w_uv,
            q_positions=q_positions,
            segment_ids=segment_ids,
            key_segment_ids=key_segment_ids,
            scale=scale,
            form=None,
            budget_bytes=budget_bytes,
        )
        if not return_indices:
            return out, None
        return out, lightning_indexer(
            index_q,
            index_k,
            index_w,
            top_k=top_k,
            q_positions=q_positions,
            segment_ids=segment_ids,
            key_segment_ids=key_segment_ids,
            budget_bytes=budget_bytes,
        )
    if two_stage is not None and two_stage.keeps_all(num_keys, top_k):
        two_stage = None
    if form is None and two_stage is not None:
        form = "gather"
    elif form is None:
        limit = MASK_HEAD_KEYS.get(platform(), MASK_HEAD_KEYS["cpu"])
        mask_wins = queries >= MASK_QUERIES and heads * num_keys <= limit * top_k
        form = "mask" if mask_wins else "gather"
    item = sum_dtype(q, latent).itemsize
    tile = key_tile(num_keys, batch * latent.shape[2] * item, budget_bytes)
    scored = score_tile(index_k, budget_bytes)
    settings = Settings(scale, tile, width)
    row = heads * (latent.shape[2] + 2 * width) * item
    row += scoring_bytes(index_q, index_k, scored) + (3 * heads * tile * item if form == "mask" else 0)
    stage, pooled, vectors = None, None, None
    if two_stage is not None:
        stage = Stage.of(index_k, two_stage, top_k, budget_bytes)
        row += stage.query_bytes(index_q, index_k)
        if two_stage.coarse == "linear":
            vectors = linear_queries(*jax.lax.stop_gradient((index_q, index_k, index_w)), q_positions)
        else:
            pooled = stage.pooled(jax.lax.stop_gradient(index_k))
    blocks = plan(1, queries, fits=budget_bytes // (2 * batch * row), wanted=max(64, product_rows() // heads))

    def block(sliced: jax.Array, shared: tuple, constants: Any) -> tuple[jax.Array, jax.Array | None]:
        (block_index_q, block_w, positions, segments, vectors), (index_keys, key_segments, pooled, fixed) = constants
        keys, up_k, up_v = shared
        keys = together(keys, fixed)
        visibility = Visibility(positions, segments, key_segments)
        selection, indices = None, None
        if stage is not None:
            indices, _ = stage.block(block_index_q, index_keys, block_w, visibility, pooled, vectors)
        else:
            selection = select_block(block_index_q, index_keys, block_w, visibility, top_k, scored)
            selection = jax.lax.stop_gradient(selection)
            indices = selected_indices(selection, top_k) if return_indices or form == "gather" else None
        absorbed = absorb(sliced, up_k)
        if form == "gather":
            assert indices is not None
            o, _ = _attend_indices(settings, absorbed, keys, indices, budget_bytes // 2)
        else:
            o = attend_latent(settings, absorbed, keys, Mask(visibility, selection))
        return expand(o, up_v, sliced.dtype), indices if return_indices else None

    rows = (*jax.lax.stop_gradient((index_q, index_w)), q_positions, segment_ids, vectors)
    differentiable, constant = constant_apart(latent)
    whole = (jax.lax.stop_gradient(index_k), key_segment_ids, pooled, constant)
    return in_blocks(block, blocks, q, (differentiable, w_uk, w_uv), (rows, whole))


def _attend_indices(
    settings: Settings, q: jax.Array, latent: jax.Array | Fp8Latent, indices: jax.Array, budget_bytes: int
) -> tuple[jax.Array, jax.Array]:
    """Absorbed attention over the named keys of the same batch row."""
    (batch, queries, heads, width), (num_keys, top_k) = q.shape, (latent.shape[1], indices.shape[2])
    item = sum_dtype(q, latent).itemsize
    fits = budget_bytes // ((2 * top_k * width + heads * (3 * top_k + 2 * width)) * item)
    # A block takes queries of as many batch rows as fit, evenly spread: where the batch is sharded, each shard then works
    # on every block. The rows between them are laid end to end.
    outer = max(n for n in range(1, batch + 1) if batch % n == 0 and n <= max(1, fits))
    inner = batch // outer
    inside = (indices >= 0) & (indices < num_keys)
    offsets = num_keys * (jnp.arange(batch, dtype=jnp.int32) % inner)
    rows = jnp.where(inside, indices + offsets[:, None, None], -1)
    wanted = GATHER_BYTES // (top_k * width * item)
    o, lse = attend_selected(
        settings,
        plan(1, inner * queries, fits=fits // outer, wanted=wanted // outer),
        q.reshape(outer, inner * queries, heads, width),
        _end_to_end(latent, outer, inner * num_keys),
        rows.reshape(outer, inner * queries, top_k),
    )
    return o.reshape(batch, queries, heads, settings.value_width), lse.reshape(batch, queries, heads)


def _end_to_end(latent: jax.Array | Fp8Latent, outer: int, rows: int) -> jax.Array | Fp8Latent:
    """[outer, rows, width] of the same rows."""
    if isinstance(latent, Fp8Latent):
        return latent.reshape(outer, rows)
    return latent.reshape(outer, rows, latent.shape[2])
