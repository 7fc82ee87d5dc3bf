"""The indexer's loss: blocks of queries under a byte budget, differentiable in the indexer.

In plain JAX, but for the selection and the attention's shares of the selected keys, which may come from Hopper kernels.
"""

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.lightning_indexer import lightning_indexer
from pallas_kernels.lightning_indexer.blocks import in_blocks, plan
from pallas_kernels.lightning_indexer.select import select_block, tile_scores
from pallas_kernels.lightning_indexer.visibility import Visibility
from pallas_kernels.lightning_indexer.xla import score_tile
from pallas_kernels.precision import at_least_float32, einsum
from pallas_kernels.sparse_mla import gpu
from pallas_kernels.sparse_mla.absorbed import absorb, product_rows
from pallas_kernels.sparse_mla.attend import gather_rows


def gpu_obstacle(
    index_k: Float[Array, "B S K"],
    q: Float[Array, "B T H Q"],
    latent: Float[Array, "B S R"],
    w_uk: Float[Array, "H N L"],
    top_k: int | None,
) -> str | None:
    """Why Hopper kernels can't run for this call, or None. The selection takes whatever the indexer picks for itself."""
    if top_k is None:
        return "indexer_kl over all visible keys has no GPU kernel yet."
    if index_k.shape[1] <= top_k:
        return f"{index_k.shape[1]} keys are no more than top_k={top_k}: all are compared, and nothing is selected."
    return gpu.obstacle(latent.shape[2], q.dtype, latent, w_uk.shape[2])


@partial(jax.jit, static_argnames=("top_k", "scale", "budget_bytes", "form"))
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
    form: Literal["mask", "gather", "kernels"] = "mask",
) -> Float[Array, "B T"]:
    """A block of queries at a time.

    "mask" scores all keys and drops those not selected; "gather" scores copies of the selected ones; "kernels" is the
    latter with Hopper kernels for the selection and for the attention's share of each key.
    """
    if top_k is not None and index_k.shape[1] > top_k and form != "mask":
        detached = jax.lax.stop_gradient((index_q, index_k, index_w, q, latent, w_uk))
        indices = lightning_indexer(
            *detached[:3],
            top_k=top_k,
            q_positions=q_positions,
            segment_ids=segment_ids,
            key_segment_ids=key_segment_ids,
            budget_bytes=budget_bytes,
            implementation=None if form == "kernels" else "xla",
        )
        target = _selected_target(*detached[3:], indices, scale, budget_bytes, form == "kernels")
        return _selected_kl(index_q, index_k, index_w, target, indices, budget_bytes)
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
        return _distance(target, scores, mask)

    attended = jax.lax.stop_gradient((q, latent, w_uk))
    rows = (q_positions, segment_ids, attended[0])
    return in_blocks(block, blocks, (index_q, index_w), index_k, (rows, (*attended[1:], key_segment_ids)))


def _selected_target(
    q: Float[Array, "B T H Q"],
    latent: Float[Array, "B S R"],
    w_uk: Float[Array, "H N L"],
    indices: Int[Array, "B T C"],
    scale: float,
    budget_bytes: int,
    kernels: bool,
) -> Float[Array, "B T C"]:
    """Mean over heads of the attention probabilities of the selected keys; it has no gradient."""
    (batch, queries, heads, _), (top_k, width) = q.shape, (indices.shape[2], latent.shape[2])
    dtype, value_width = at_least_float32(q, latent), w_uk.shape[2]
    row = top_k * (4 * heads * dtype.itemsize + 2 * width * latent.dtype.itemsize)
    if kernels:
        row = 2 * heads * (width + value_width) * q.dtype.itemsize
    blocks = plan(1, queries, fits=budget_bytes // (batch * row), wanted=queries)

    def block(sliced: tuple, shared: tuple, constants: Any) -> jax.Array:
        del sliced, shared
        (block_q, block_indices), (keys, up_k) = constants
        if kernels:
            absorbed = absorb(block_q, up_k)
            attended: Any = gpu.sparse_mla(absorbed, keys, block_indices, value_width, scale, budget_bytes)
            # Imported late: Mosaic takes a second, which nobody should wait for who has no such GPU.
            from pallas_kernels.sparse_mla import gpu_shares

            return gpu_shares.mean_probabilities(absorbed, keys, block_indices, attended[1], scale)
        rows, valid = gather_rows(keys, block_indices, block_q.dtype)
        attention = einsum("bthk,btck->bthc", absorb(block_q, up_k), rows) * scale
        return jnp.mean(_softmax(attention, valid[:, :, None]), axis=2)

    return in_blocks(block, blocks, (), (), ((q, indices), (latent, w_uk)))


def _selected_kl(
    index_q: Float[Array, "B T I K"],
    index_k: Float[Array, "B S K"],
    index_w: Float[Array, "B T I"],
    target: Float[Array, "B T C"],
    indices: Int[Array, "B T C"],
    budget_bytes: int,
) -> Float[Array, "B T"]:
    """The loss, given the selection and what it should look like."""
    (batch, queries, heads, width), top_k = index_q.shape, indices.shape[2]
    dtype = at_least_float32(index_q, index_k, index_w)
    row = top_k * ((4 * heads + 2 * width) * dtype.itemsize + 2 * width * index_k.dtype.itemsize)
    blocks = plan(1, queries, fits=budget_bytes // (batch * row), wanted=queries)

    def block(sliced: tuple[jax.Array, jax.Array], index_keys: jax.Array, constants: Any) -> jax.Array:
        (block_target, block_indices), _ = constants
        block_index_q, block_w = sliced
        rows = _chosen(index_keys, block_indices)
        dots = einsum("bthk,btck->bthc", block_index_q, rows)
        dots = jnp.where(dots <= 0, 0, dots)  # as in `tile_scores`
        scores = einsum("bth,bthc->btc", block_w, dots).astype(dtype)
        return _distance(block_target, scores, block_indices >= 0)

    return in_blocks(block, blocks, (index_q, index_w), index_k, ((target, indices), ()))


@jax.custom_vjp
def _chosen(keys: Float[Array, "B S K"], indices: Int[Array, "B T C"]) -> Float[Array, "B T C K"]:
    """The named keys, zeros for -1. Their gradients are added in float32 or better, whatever their dtype."""
    return gather_rows(keys, indices, keys.dtype)[0]


def _chosen_forward(keys: jax.Array, indices: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _chosen(keys, indices), (keys, indices)


def _chosen_backward(saved: tuple[jax.Array, jax.Array], grad: jax.Array) -> tuple[jax.Array, None]:
    keys, indices = saved
    total = jnp.zeros(keys.shape, at_least_float32(keys))
    where = jnp.where(indices >= 0, indices, keys.shape[1])
    total = jax.vmap(lambda total, i, x: total.at[i].add(x, mode="drop"))(total, where, grad.astype(total.dtype))
    return total.astype(keys.dtype), None


_chosen.defvjp(_chosen_forward, _chosen_backward)


def _distance(
    target: Float[Array, "B T C"], scores: Float[Array, "B T C"], mask: Bool[Array, "B T C"]
) -> Float[Array, "B T"]:
    """KL of softmax(scores) from `target`, both over the keys of the mask."""
    log_share = scores - _log_sum_exp(scores, mask)
    distance = target * (jnp.log(jnp.where(target > 0, target, 1)) - log_share)
    return jnp.sum(jnp.where(mask & (target > 0), distance, 0), axis=-1)


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
