"""Two stages on TPUs: the exact kernel picks single keys by one vector a query; plain JAX gathers and scores these.

The kernel's score of two heads, v and -v, with weights 1 and -1 is relu(v · k) - relu(-v · k) = v · k.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.lightning_indexer import tpu
from pallas_kernels.lightning_indexer.blocks import in_blocks, plan
from pallas_kernels.lightning_indexer.linear import SLOPE_KEYS, linear_by, sampled
from pallas_kernels.lightning_indexer.select import plain, score_dtype
from pallas_kernels.lightning_indexer.two_stage import Stage, TwoStage, chosen
from pallas_kernels.lightning_indexer.visibility import Visibility
from pallas_kernels.mxfp8 import Mxfp8

MEMORY_BYTES = 24 * 2**20
"""Of gathered keys and what becomes of them, and of positions of the first stage."""

_QUERIES, _GATHERED = 128, 1024

MOST_KEPT = 2**15
"""Keys that a query keeps in the first stage."""


def unfit(k: Any, two_stage: TwoStage, top_k: int) -> str | None:
    """Why the kernel can't be the first stage, or None."""
    if two_stage.coarse != "linear" or two_stage.block_size != 1:
        return (
            f"two stages choose blocks of {two_stage.block_size} by their {two_stage.coarse!r}; the TPU kernel takes "
            "single keys by 'linear'."
        )
    kept = two_stage.most(k.shape[1], top_k)
    if kept > MOST_KEPT:
        return f"two stages keep {kept} keys of a query; the TPU kernel's first one keeps at most {MOST_KEPT}."
    return None


def lightning_indexer(
    q: Float[Array, "B T H K"] | Mxfp8,
    k: Float[Array, "B S K"] | Mxfp8,
    w: Float[Array, "B T H"],
    *,
    top_k: int,
    q_positions: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"] | None = None,
    key_segment_ids: Int[Array, "B S"] | None = None,
    two_stage: TwoStage,
    budget_bytes: int = MEMORY_BYTES,
    interpret: Any = False,
) -> Int[Array, "B T C"]:
    """Selected positions. Queries that see few keys keep as many of them as those that see all."""
    q, k, w = jax.lax.stop_gradient((q, k, w))
    batch, num_queries, heads, width = q.shape
    num_keys = k.shape[1]
    kept = two_stage.most(num_keys, top_k)
    wide = score_dtype(q, k, w).itemsize
    # A key in bfloat16 and in float32 or better, and the products of all heads.
    each = width * (2 + wide) + 2 * heads * wide
    budget_bytes = min(budget_bytes, MEMORY_BYTES)
    chunks = -(-kept // max(1, min(_GATHERED, budget_bytes // (2 * batch * each))))
    stage = Stage(two_stage, top_k, num_keys, kept, -(-kept // chunks), budget_bytes)

    def block(sliced: tuple, keys: Any, constants: tuple[Any, Any]) -> Array:
        some_q, some_w, positions, segments = sliced
        places, sample, key_segments = constants[1]
        visibility = Visibility(positions, segments, key_segments)
        vectors = linear_by(sample, places, some_q, some_w, positions).astype(sample.dtype)
        found = tpu.lightning_indexer(
            jnp.stack([vectors, -vectors], axis=2),
            keys,
            jnp.broadcast_to(jnp.array([1, -1], jnp.float32), (*positions.shape, 2)),
            top_k=kept,
            q_positions=positions,
            segment_ids=segments,
            key_segment_ids=key_segments,
            interpret=interpret,
        )
        candidates = with_ends(found, positions, first_seen(visibility, num_keys), num_keys)

        def gather(index: Array) -> Array:
            return keys_at(keys, index)[:, :, :, None]

        scores, positions = stage.score_blocks(some_q, keys, some_w, visibility, candidates, gather)
        return chosen(scores, top_k, positions)[0]

    places = sampled(q_positions, SLOPE_KEYS)
    sample = keys_at(k, jnp.minimum(places, num_keys - 1)[:, None])[:, 0]
    # Besides, positions and scores of what is kept, three times.
    fits = budget_bytes // (batch * (stage.chunk * each + 6 * kept * wide))
    blocks = plan(1, num_queries, fits=fits, wanted=_QUERIES)
    sliced = q, w, q_positions.astype(jnp.int32), segment_ids
    return in_blocks(block, blocks, sliced, k, ((), (places, sample, key_segment_ids)))


def keys_at(k: Float[Array, "B S K"] | Mxfp8, index: Int[Array, "B T C"]) -> Float[Array, "B T C K"]:
    """Rows of keys, MXFP8 ones in bfloat16; scales are read from where positions lie along lanes, as the kernel reads them."""
    rows = jnp.arange(index.shape[0])[:, None, None]
    if not isinstance(k, Mxfp8):
        return k[rows, index]
    scale = jnp.swapaxes(k.scale, 1, 2)
    found = [scale[rows, group, index] for group in range(scale.shape[1])]
    return plain(Mxfp8(k.elements[rows, index], jnp.stack(found, axis=-1)))


def first_seen(visibility: Visibility, num_keys: int) -> Int[Array, "B T"]:
    """The first key that each query sees, if it sees any."""
    if visibility.key_segments is None:
        return jnp.zeros_like(visibility.q_positions)
    return jnp.argmax(visibility.tile(jnp.int32(0), num_keys), axis=-1).astype(jnp.int32)


def with_ends(
    found: Int[Array, "B T C"], q_positions: Int[Array, "B T"], first: Int[Array, "B T"], num_keys: int
) -> Int[Array, "B T D"]:
    """Positions with the first key and the query's own, where they aren't among them; num_keys in places that are free."""
    empty = q_positions < 0
    before = jnp.where(empty | (found[..., 0] == first), num_keys, first)
    own = jnp.minimum(q_positions, num_keys - 1)
    behind = jnp.where(empty | (jnp.max(found, axis=-1) == own), num_keys, own)
    found = jnp.where(found < 0, num_keys, found)
    return jnp.concatenate([before[..., None], found, behind[..., None]], axis=-1)
