"""The definition of the lightning indexer: all scores at once, a stable sort for the selection."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.lightning_indexer.pages import PagedKeys
from pallas_kernels.lightning_indexer.visibility import visible_keys
from pallas_kernels.mxfp8 import Mxfp8
from pallas_kernels.precision import at_least_float32, einsum


def index_scores(
    q: Float[Array, "B T H K"] | Mxfp8,
    k: Float[Array, "B S K"] | Mxfp8,
    w: Float[Array, "B T H"],
    *,
    q_positions: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"] | None,
    key_segment_ids: Int[Array, "B S"] | None,
) -> Float[Array, "B T S"]:
    """Scores in float32 or better, -inf where invisible."""
    q, k = (x.dequantize(jnp.float32) if isinstance(x, Mxfp8) else x for x in (q, k))
    dtype = at_least_float32(q, k, w)
    dots = einsum("bthk,bsk->bths", q.astype(dtype), k.astype(dtype))
    dots = jnp.where(dots <= 0, 0, dots)  # jax.nn.relu turns NaN into 0 on CPUs, but only in some fusions
    scores = jnp.sum(w.astype(dtype)[..., None] * dots, axis=2)
    visible = visible_keys(q_positions, jnp.arange(k.shape[1]), segment_ids, key_segment_ids)
    return jnp.where(visible, scores, -jnp.inf)


def lightning_indexer(
    q: Float[Array, "B T H K"] | Mxfp8,
    k: Float[Array, "B S K"] | Mxfp8 | PagedKeys,
    w: Float[Array, "B T H"],
    *,
    top_k: int,
    q_positions: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"] | None,
    key_segment_ids: Int[Array, "B S"] | None,
) -> Int[Array, "B T C"]:
    """Indices of the selected keys: sorted by falling score then rising position, the invisible dropped."""
    q, k, w = jax.lax.stop_gradient((q, k.whole() if isinstance(k, PagedKeys) else k, w))
    num_keys = k.shape[1]
    scores = index_scores(q, k, w, q_positions=q_positions, segment_ids=segment_ids, key_segment_ids=key_segment_ids)
    visible = visible_keys(q_positions, jnp.arange(num_keys), segment_ids, key_segment_ids)
    lowest = jnp.finfo(scores.dtype).min
    ranked = jnp.where(visible, jnp.where(scores > lowest, scores, lowest), -jnp.inf)  # NaN loses to what is visible
    ranked = jnp.where(ranked == 0, 0, ranked)  # one zero, whatever its sign
    best = jnp.argsort(-ranked, axis=-1, stable=True)[..., :top_k].astype(jnp.int32)
    best = jnp.where(jnp.take_along_axis(visible, best, axis=-1), best, num_keys)
    best = jnp.sort(best, axis=-1)
    best = jnp.where(best == num_keys, -1, best)
    return jnp.pad(best, ((0, 0), (0, 0), (0, top_k - best.shape[-1])), constant_values=-1)


def index_candidates(
    q: Float[Array, "B T H K"] | Mxfp8,
    k: Float[Array, "B S K"] | Mxfp8,
    w: Float[Array, "B T H"],
    *,
    top_k: int,
    q_positions: Int[Array, "B T"],
) -> tuple[Int[Array, "B T C"], Float[Array, "B T C"]]:
    """The selection and its scores: NaN and -inf of a visible key as the lowest finite number, -inf where none is."""
    q, k, w = jax.lax.stop_gradient((q, k, w))
    indices = lightning_indexer(q, k, w, top_k=top_k, q_positions=q_positions, segment_ids=None, key_segment_ids=None)
    scores = index_scores(q, k, w, q_positions=q_positions, segment_ids=None, key_segment_ids=None)
    lowest = jnp.finfo(scores.dtype).min
    chosen = jnp.take_along_axis(scores, jnp.maximum(indices, 0), axis=-1)
    return indices, jnp.where(indices < 0, -jnp.inf, jnp.where(chosen > lowest, chosen, lowest))
