"""The lightning indexer in plain JAX: scores of a block of queries at a time, selection without sorting."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.lightning_indexer.blocks import in_blocks, plan
from pallas_kernels.lightning_indexer.pages import PagedKeys
from pallas_kernels.lightning_indexer.select import score_dtype, score_keys, select, select_block, selected_indices
from pallas_kernels.lightning_indexer.visibility import Visibility
from pallas_kernels.mxfp8 import Mxfp8
from pallas_kernels.target import platform

Queries = Float[Array, "B T H K"] | Mxfp8
Keys = Float[Array, "B S K"] | Mxfp8 | PagedKeys


def score_rows() -> int:
    """Queries scored together: enough for full throughput once multiplied by the indexer's heads."""
    return 64 if platform() == "cpu" else 512


def score_tile(k: Keys, budget_bytes: int) -> int:
    """Keys scored together; fewer where two copies of the tile would fill a quarter of the budget."""
    batch, num_keys, width = k.shape
    wanted = 512 if platform() == "cpu" else 4096
    return max(1, min(wanted, num_keys, budget_bytes // (8 * batch * width * score_dtype(k).itemsize)))


def scoring_bytes(q: Queries, k: Keys, tile: int) -> int:
    """Working memory of one query: its scores, what selection derives from them, one tile of all heads."""
    return (4 * k.shape[1] + 2 * q.shape[2] * tile) * score_dtype(q, k).itemsize


@partial(jax.jit, static_argnames=("top_k", "budget_bytes"))
def lightning_indexer(
    q: Queries,
    k: Keys,
    w: Float[Array, "B T H"],
    *,
    top_k: int,
    q_positions: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"] | None,
    key_segment_ids: Int[Array, "B S"] | None,
    budget_bytes: int,
) -> Int[Array, "B T C"]:
    """Indices of the selected keys."""
    tile = score_tile(k, budget_bytes)

    def block(sliced: tuple, keys: jax.Array | Mxfp8 | PagedKeys, constants: tuple[Any, Any]) -> jax.Array:
        block_q, block_w, positions, segments = sliced
        visibility = Visibility(positions, segments, constants[1])
        return selected_indices(select_block(block_q, keys, block_w, visibility, top_k, tile), top_k)

    return _over_queries(block, q, k, w, q_positions, segment_ids, key_segment_ids, budget_bytes)


@partial(jax.jit, static_argnames=("top_k", "budget_bytes"))
def index_candidates(
    q: Queries,
    k: Keys,
    w: Float[Array, "B T H"],
    *,
    top_k: int,
    q_positions: Int[Array, "B T"],
    budget_bytes: int,
) -> tuple[Int[Array, "B T C"], Float[Array, "B T C"]]:
    """Indices of the selected keys and their scores."""
    tile = score_tile(k, budget_bytes)

    def block(
        sliced: tuple, keys: jax.Array | Mxfp8 | PagedKeys, constants: tuple[Any, Any]
    ) -> tuple[jax.Array, jax.Array]:
        block_q, block_w, positions, _ = sliced
        scores = score_keys(block_q, keys, block_w, Visibility(positions), tile, rankable=True)
        indices = selected_indices(select(scores, top_k), top_k)
        chosen = jnp.take_along_axis(scores, jnp.maximum(indices, 0), axis=-1)
        return indices, jnp.where(indices < 0, -jnp.inf, chosen)

    return _over_queries(block, q, k, w, q_positions, None, None, budget_bytes)


@partial(jax.jit, static_argnames=("budget_bytes",))
def index_scores(
    q: Queries,
    k: Keys,
    w: Float[Array, "B T H"],
    *,
    q_positions: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"] | None,
    key_segment_ids: Int[Array, "B S"] | None,
    budget_bytes: int,
) -> Float[Array, "B T S"]:
    """Scores in float32 or better, -inf where invisible."""
    tile = score_tile(k, budget_bytes)

    def block(sliced: tuple, keys: jax.Array | Mxfp8 | PagedKeys, constants: tuple[Any, Any]) -> jax.Array:
        block_q, block_w, positions, segments = sliced
        visibility = Visibility(positions, segments, constants[1])
        return score_keys(block_q, keys, block_w, visibility, tile, rankable=False)

    return _over_queries(block, q, k, w, q_positions, segment_ids, key_segment_ids, budget_bytes)


def _over_queries(
    block: Any,
    q: jax.Array | Mxfp8,
    k: jax.Array | Mxfp8 | PagedKeys,
    w: jax.Array,
    q_positions: jax.Array,
    segment_ids: jax.Array | None,
    key_segment_ids: jax.Array | None,
    budget_bytes: int,
) -> Any:
    fits = budget_bytes // (q.shape[0] * scoring_bytes(q, k, score_tile(k, budget_bytes)))
    blocks = plan(1, q.shape[1], fits=fits, wanted=score_rows())
    q, k, w = jax.lax.stop_gradient((q, k, w))
    return in_blocks(block, blocks, (q, w, q_positions, segment_ids), k, ((), key_segment_ids))
