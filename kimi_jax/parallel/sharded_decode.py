"""Attention of few new tokens over caches whose places are split over the devices of a mesh axis.

Device r owns the places r·S to (r+1)·S - 1 of every row. Keys stay with their owner: scores of candidates, partial outputs
and their log-sum-exps travel. All devices hold the same queries and get the same output.
"""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kimi_jax.parallel.context_dsa import gather_tokens
from kimi_jax.parallel.zigzag import AxisName
from pallas_kernels.dispatch import Implementation
from pallas_kernels.fp8_latent import Fp8Latent
from pallas_kernels.lightning_indexer import DEFAULT_BUDGET_BYTES, TwoStage, best_candidates, index_candidates
from pallas_kernels.mxfp8 import Mxfp8
from pallas_kernels.sparse_mla import latent_mla, sparse_mla
from pallas_kernels.sparse_mla.absorbed import absorb, expand

Tree = TypeVar("Tree")


def owned_places(positions: Int[Array, "B T"], places: int, axis: AxisName) -> Int[Array, "B T"]:
    """Positions in a whole row as places on this device, -1 for those it doesn't own; inside `jax.shard_map`.

    Args:
        positions: places of tokens in the whole row; -1 for padding.
        places: S, how many this device owns.
        axis: mesh axis that splits the places.
    """
    local = positions - jax.lax.axis_index(axis) * places
    return jnp.where((positions >= 0) & (local >= 0) & (local < places), local, -1)


def write_keys_sharded(
    cache_layer: Float[Array, "B S W"], new: Float[Array, "B T W"], positions: Int[Array, "B T"], axis: AxisName
) -> Float[Array, "B S W"]:
    """This device's part of a cache with the new rows that belong there; inside `jax.shard_map`.

    Args:
        cache_layer: rows at this device's S places.
        new: rows of new tokens, the same on all devices.
        positions: their places in the whole row, all different; -1 for padding. Those of other devices are dropped.
        axis: mesh axis that splits the places.
    """
    places = owned_places(positions, cache_layer.shape[1], axis)
    places = jnp.where(places < 0, cache_layer.shape[1], places)
    return cache_layer.at[jnp.arange(new.shape[0])[:, None], places].set(new.astype(cache_layer.dtype), mode="drop")


def write_context_keys(cache_layers: Tree, new: Tree, positions: Int[Array, "B T"], axis: AxisName) -> Tree:
    """`write_keys_sharded` of new rows that are themselves split over the devices, T of them on each.

    Args:
        cache_layers: tree of arrays [B, S, W].
        new: the same tree of arrays [B, T, W], this device's new tokens.
        positions: their places in the whole row; -1 for padding.
        axis: mesh axis that splits places and new tokens.
    """
    new, positions = gather_tokens((new, positions), axis)
    return jax.tree.map(lambda layer, rows: write_keys_sharded(layer, rows, positions, axis), cache_layers, new)


def dsa_decode_sharded(
    index_q: Float[Array, "B T HI KI"] | Mxfp8,
    index_k: Float[Array, "B S KI"] | Mxfp8,
    index_w: Float[Array, "B T HI"],
    q: Float[Array, "B T H NR"],
    latent: Float[Array, "B S LR"] | Fp8Latent,
    w_uk: Float[Array, "H N L"],
    w_uv: Float[Array, "H V L"],
    *,
    axis: AxisName,
    top_k: int,
    q_positions: Int[Array, "B T"],
    scale: float,
    two_stage: TwoStage | None = None,
    budget_bytes: int | None = None,
    return_indices: bool = False,
    implementation: Implementation | None = None,
) -> Float[Array, "B T H V"] | tuple[Float[Array, "B T H V"], Int[Array, "B T {top_k}"]]:
    """`dsa_mla` over keys whose places are split over `axis`, for queries that all its devices hold.

    Every device scores its own keys and selects its best `top_k`; among these are all of its keys that belong to the
    best of the row. Their scores are gathered, everyone finds the same `top_k` best of them (equal scores go to the
    lower place, as everywhere), and attends those that it owns. The outputs o_r, in the latent space and with
    log-sum-exps l_r, become

        o = Σ_r exp(l_r - max l) o_r / Σ_r exp(l_r - max l),

    where a device without keys has o_r = 0 and l_r = -inf. For each query and head L + 2 numbers travel, for each
    query top_k scores from each device. For one new token or several; not differentiable.

    Args:
        index_q: index queries.
        index_k: index keys at this device's places.
        index_w: index head weights.
        q: queries, [nope | rope slot], not absorbed.
        latent: [normed latent | shared rope slot] at this device's places. Rows that nobody sees may hold anything.
        w_uk: key projection of each head.
        w_uv: value projection of each head.
        axis: mesh axis that splits the places; of any size.
        top_k: number of keys a query attends at most.
        q_positions: each query's own place in the whole row; -1 for padding, whose output is 0.
        scale: multiplies the scores, (N + R) ** -0.5 in the Kimi models.
        two_stage: of `index_candidates`: each device leaves out of its own keys, so with means the selection isn't quite
            that of one device.
        budget_bytes: bound on working memory of the operations; None: their own.
        return_indices: also return the selection, for which another top_k numbers from each device travel.
        implementation: of the operations; None takes the best that can run.

    Returns:
        The output in the dtype of `q`; with `return_indices` also int32 places in the whole row, ascending, padded with
        -1. Both are the same on all devices.

    Raises:
        ValueError: shapes disagree, or a number is out of range.
        TypeError: a dtype is wrong.
        UnsupportedImplementationError: the implementation named can't run.
    """
    rank, places = jax.lax.axis_index(axis), index_k.shape[1]
    width = min(top_k, places)
    mine = index_candidates(
        index_q,
        index_k,
        index_w,
        top_k=width,
        q_positions=_visible_places(q_positions, places, axis),
        two_stage=two_stage,
        budget_bytes=DEFAULT_BUDGET_BYTES if budget_bytes is None else budget_bytes,
        implementation=implementation,
    )
    # Devices own ascending places and list theirs in ascending order, so what is gathered is in the order of places:
    # ties need no positions to be broken.
    scores = jax.lax.all_gather(mine.scores, axis, axis=2, tiled=True)
    best = best_candidates(scores, top_k=top_k)
    chosen = jax.lax.dynamic_slice_in_dim(best, rank * width, width, axis=2)
    indices = _ascending(jnp.where(chosen, mine.indices, -1))
    out = _merge(
        *sparse_mla(
            absorb(q, w_uk),
            latent,
            indices,
            latent_width=w_uk.shape[2],
            scale=scale,
            budget_bytes=budget_bytes,
            implementation=implementation,
        ),
        axis,
    )
    out = expand(out, w_uv, q.dtype)
    if not return_indices:
        return out
    everyone = jnp.where(indices < 0, -1, indices + rank * places)
    everyone = _ascending(jax.lax.all_gather(everyone, axis, axis=2, tiled=True))[..., :top_k]
    return out, jnp.pad(everyone, ((0, 0), (0, 0), (0, top_k - everyone.shape[2])), constant_values=-1)


def dense_decode_sharded(
    q: Float[Array, "B T H NR"],
    latent: Float[Array, "B S LR"] | Fp8Latent,
    w_uk: Float[Array, "H N L"],
    w_uv: Float[Array, "H V L"],
    *,
    axis: AxisName,
    q_positions: Int[Array, "B T"],
    scale: float,
    budget_bytes: int | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "B T H V"]:
    """`dense_mla` over keys whose places are split over `axis`, for queries that all its devices hold.

    Every device attends its own places; outputs are merged as in `dsa_decode_sharded`, whose arguments and errors these
    are.
    """
    o, lse = latent_mla(
        absorb(q, w_uk),
        latent,
        q_positions=_visible_places(q_positions, latent.shape[1], axis),
        latent_width=w_uk.shape[2],
        scale=scale,
        budget_bytes=budget_bytes,
        implementation=implementation,
    )
    return expand(_merge(o, lse, axis), w_uv, q.dtype)


def _visible_places(q_positions: jax.Array, places: int, axis: AxisName) -> jax.Array:
    """The last of this device's places that each query sees, -1 for none."""
    return jnp.clip(q_positions - jax.lax.axis_index(axis) * places, -1, places - 1)


def _ascending(indices: jax.Array) -> jax.Array:
    """In ascending order, -1 at the end."""
    last = jnp.iinfo(indices.dtype).max
    ordered = jnp.sort(jnp.where(indices < 0, last, indices), axis=-1)
    return jnp.where(ordered == last, -1, ordered)


def _merge(o: jax.Array, lse: jax.Array, axis: AxisName) -> jax.Array:
    """Attention over all devices' keys from that over each one's, in the dtype of `lse`."""
    if jax.lax.axis_size(axis) == 1:
        return o
    top = jax.lax.pmax(lse, axis)
    weight = jnp.exp(lse - jnp.where(top == -jnp.inf, 0, top))  # 0 for a device without keys, never -inf - (-inf)
    weighted = jnp.concatenate([o.astype(lse.dtype) * weight[..., None], weight[..., None]], axis=-1)
    total: Any = jax.lax.psum(weighted, axis)
    merged, norm = total[..., :-1], total[..., -1:]
    return merged / jnp.where(norm == 0, 1, norm)
