"""The definition of MLA over selected or all keys: everything at once, in float32 or better."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.fp8_latent import Fp8Latent
from pallas_kernels.lightning_indexer.reference import lightning_indexer
from pallas_kernels.lightning_indexer.visibility import visible_keys
from pallas_kernels.mxfp8 import Mxfp8
from pallas_kernels.precision import at_least_float32, einsum
from pallas_kernels.sparse_mla.attend import dequantized


def sparse_mla(
    q: Float[Array, "B T H K"],
    latent: Float[Array, "B S K"] | Fp8Latent,
    indices: Int[Array, "B T C"],
    *,
    latent_width: int,
    scale: float,
) -> tuple[Float[Array, "B T H L"], Float[Array, "B T H"]]:
    """Attention over given rows of the latent cache, absorbed form."""
    latent = dequantized(latent, q.dtype)
    dtype = at_least_float32(q, latent)
    valid = (indices >= 0) & (indices < latent.shape[1])
    rows = jax.vmap(lambda cache, chosen: cache[chosen])(latent, jnp.where(valid, indices, 0))
    rows = jnp.where(valid[..., None], rows, 0).astype(dtype)
    scores = scale * einsum("bthk,btck->bthc", q.astype(dtype), rows)
    p, lse = _softmax(scores, valid[:, :, None, :])
    return einsum("bthc,btcl->bthl", p, rows[..., :latent_width]).astype(q.dtype), lse


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
) -> tuple[Float[Array, "B T H V"], Int[Array, "B T C"]]:
    """Attention over exactly the keys that the indexer selects."""
    indices = lightning_indexer(
        index_q,
        index_k,
        index_w,
        top_k=top_k,
        q_positions=q_positions,
        segment_ids=segment_ids,
        key_segment_ids=key_segment_ids,
    )
    latent = dequantized(latent, q.dtype)
    selected = jnp.any(indices[..., None] == jnp.arange(latent.shape[1]), axis=2)
    return _masked_mla(q, latent, w_uk, w_uv, selected, scale), indices


def dense_mla(
    q: Float[Array, "B T H Q"],
    latent: Float[Array, "B S R"] | Fp8Latent,
    w_uk: Float[Array, "H N L"],
    w_uv: Float[Array, "H V L"],
    *,
    q_positions: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"] | None,
    key_segment_ids: Int[Array, "B S"] | None,
    scale: float,
) -> Float[Array, "B T H V"]:
    """Attention over every visible key."""
    latent = dequantized(latent, q.dtype)
    visible = visible_keys(q_positions, jnp.arange(latent.shape[1]), segment_ids, key_segment_ids)
    return _masked_mla(q, latent, w_uk, w_uv, visible, scale)


def latent_mla(
    q: Float[Array, "B T H K"],
    latent: Float[Array, "B S K"] | Fp8Latent,
    *,
    q_positions: Int[Array, "B T"],
    latent_width: int,
    scale: float,
) -> tuple[Float[Array, "B T H L"], Float[Array, "B T H"]]:
    """Attention of absorbed queries over every visible key, with its log-sum-exp."""
    latent = dequantized(latent, q.dtype)
    dtype = at_least_float32(q, latent)
    visible = visible_keys(q_positions, jnp.arange(latent.shape[1]))
    latent = jnp.where(jnp.any(visible, axis=1)[..., None], latent, 0).astype(dtype)  # unwritten rows may hold NaN
    p, lse = _softmax(scale * einsum("bthk,bsk->bths", q.astype(dtype), latent), visible[:, :, None, :])
    return einsum("bths,bsl->bthl", p, latent[..., :latent_width]).astype(q.dtype), lse


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
) -> Float[Array, "B T"]:
    """KL of softmax(index scores) from the mean over heads of the attention probabilities."""
    mask = visible_keys(q_positions, jnp.arange(latent.shape[1]), segment_ids, key_segment_ids)
    if top_k is not None:
        chosen = lightning_indexer(
            index_q,
            index_k,
            index_w,
            top_k=top_k,
            q_positions=q_positions,
            segment_ids=segment_ids,
            key_segment_ids=key_segment_ids,
        )
        mask &= jnp.any(chosen[..., None] == jnp.arange(latent.shape[1]), axis=2)
    attention = _attention(*jax.lax.stop_gradient((q, latent, w_uk)), mask, scale)
    target = jnp.mean(attention, axis=2)
    scores = jnp.where(jnp.any(mask, axis=1)[..., None], index_k, 0)
    scores = jax.nn.relu(einsum("bthk,bsk->bths", index_q, scores))
    scores = einsum("bth,bths->bts", index_w, scores)
    share, _ = _softmax(scores, mask)
    counts = mask & (target > 0)
    terms = target * (jnp.log(jnp.where(counts, target, 1)) - jnp.log(jnp.where(counts, share, 1)))
    return jnp.sum(jnp.where(counts, terms, 0), axis=-1)


def _attention(
    q: jax.Array, latent: jax.Array, w_uk: jax.Array, mask: Bool[Array, "B T S"], scale: float
) -> Float[Array, "B T H S"]:
    """Attention probabilities; per head: key = [w_uk c | slot], where [c | slot] is the latent."""
    dtype = at_least_float32(q, latent, w_uk)
    latent = jnp.where(jnp.any(mask, axis=1)[..., None], latent, 0).astype(dtype)  # unwritten rows may hold NaN
    nope, slot = jnp.split(q.astype(dtype), [w_uk.shape[1]], axis=-1)
    content, shared = jnp.split(latent, [w_uk.shape[2]], axis=-1)
    keys = einsum("bsl,hnl->bshn", content, w_uk.astype(dtype))
    scores = scale * (einsum("bthn,bshn->bths", nope, keys) + einsum("bthr,bsr->bths", slot, shared))
    return _softmax(scores, mask[:, :, None, :])[0]


def _masked_mla(
    q: jax.Array, latent: jax.Array, w_uk: jax.Array, w_uv: jax.Array, mask: Bool[Array, "B T S"], scale: float
) -> jax.Array:
    """Per head: value = w_uv c."""
    dtype = at_least_float32(q, latent, w_uk, w_uv)
    p = _attention(q, latent, w_uk, mask, scale)
    content = jnp.where(jnp.any(mask, axis=1)[..., None], latent, 0).astype(dtype)[..., : w_uk.shape[2]]
    values = einsum("bsl,hvl->bshv", content, w_uv.astype(dtype))
    return einsum("bths,bshv->bthv", p, values).astype(q.dtype)


def _softmax(scores: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Probabilities and natural log-sum-exp over the last axis; rows without keys give zeros and -inf."""
    scores = jnp.where(mask, scores, -jnp.inf)
    top = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    top = jnp.where(top == -jnp.inf, 0, top)
    p = jnp.exp(scores - top)
    total = jnp.sum(p, axis=-1, keepdims=True)
    some = jnp.where(total == 0, 1, total)
    return p / some, jnp.where(total == 0, -jnp.inf, top + jnp.log(some))[..., 0]
