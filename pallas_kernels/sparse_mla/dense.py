"""Dense causal MLA in plain JAX: keys and values expanded per head, or left in the latent."""

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.fp8_latent import Fp8Latent
from pallas_kernels.lightning_indexer.blocks import Plan, in_blocks, plan
from pallas_kernels.lightning_indexer.visibility import Visibility
from pallas_kernels.precision import einsum
from pallas_kernels.sparse_mla.absorbed import absorb, attend_latent, expand, key_tile, product_rows
from pallas_kernels.sparse_mla.attend import (
    Mask,
    Settings,
    attend_tiles,
    attend_with_lse,
    constant_apart,
    dequantized,
    sum_dtype,
    together,
)


@partial(jax.jit, static_argnames=("scale", "form", "budget_bytes"))
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
    form: Literal["naive", "absorbed"] | None,
    budget_bytes: int,
) -> Float[Array, "B T H V"]:
    """Causal attention over all keys, with keys and values expanded per head or left in the latent."""
    groups = _head_groups(q, latent, w_uk, w_uv, budget_bytes)
    if form is None:
        form = "naive" if groups is not None and _naive_is_cheaper(q, latent, w_uk, w_uv) else "absorbed"
    constants = (q_positions, segment_ids), key_segment_ids
    if form == "absorbed":
        return _dense_absorbed(q, latent, w_uk, w_uv, constants, scale, budget_bytes)
    if groups is None:
        raise ValueError(
            f"dense_mla: budget_bytes={budget_bytes} is too small for form='naive': one head takes "
            f"{_expanded_bytes(q, latent, w_uk, w_uv)} bytes, which must fit in three quarters of it; raise it or use "
            "form='absorbed'."
        )
    return _dense_naive(q, latent, w_uk, w_uv, constants, scale, groups, budget_bytes)


@partial(jax.jit, static_argnames=("latent_width", "scale", "budget_bytes"))
def latent_mla(
    q: Float[Array, "B T H K"],
    latent: Float[Array, "B S K"] | Fp8Latent,
    *,
    q_positions: Int[Array, "B T"],
    latent_width: int,
    scale: float,
    budget_bytes: int,
) -> tuple[Float[Array, "B T H L"], Float[Array, "B T H"]]:
    """Attention of absorbed queries over every visible key, with its log-sum-exp."""
    batch, queries, heads, width = q.shape
    item = sum_dtype(q, latent).itemsize
    tile = key_tile(latent.shape[1], batch * width * item, budget_bytes)
    row = heads * (width + 3 * latent_width + 3 * tile) * item
    blocks = plan(1, queries, fits=budget_bytes // (2 * batch * row), wanted=max(16, product_rows() // heads))
    settings = Settings(scale, tile, latent_width)

    def block(sliced: jax.Array, keys: jax.Array | None, constants: Any) -> tuple[jax.Array, jax.Array]:
        mask = Mask(Visibility(constants[0]))
        o, lse = attend_with_lse(settings, sliced[:, None], together(keys, constants[1]), None, mask)
        return o[:, 0].astype(sliced.dtype), lse[:, 0]

    differentiable, constant = constant_apart(latent)
    return in_blocks(block, blocks, q, differentiable, (q_positions, constant))


def _dense_absorbed(
    q: jax.Array,
    latent: jax.Array | Fp8Latent,
    w_uk: jax.Array,
    w_uv: jax.Array,
    constants: Any,
    scale: float,
    budget_bytes: int,
) -> jax.Array:
    batch, queries, heads, _ = q.shape
    width = w_uk.shape[2]
    item = sum_dtype(q, latent).itemsize
    tile = key_tile(latent.shape[1], batch * latent.shape[2] * item, budget_bytes)
    row = heads * (latent.shape[2] + 3 * width + 3 * tile) * item
    blocks = plan(1, queries, fits=budget_bytes // (2 * batch * row), wanted=max(16, product_rows() // heads))
    settings = Settings(scale, tile, width)

    def block(sliced: jax.Array, shared: tuple, constants: Any) -> jax.Array:
        (positions, segments), (key_segments, fixed) = constants
        keys, up_k, up_v = shared
        mask = Mask(Visibility(positions, segments, key_segments))
        return expand(attend_latent(settings, absorb(sliced, up_k), together(keys, fixed), mask), up_v, sliced.dtype)

    rows, key_segments = constants
    differentiable, constant = constant_apart(latent)
    return in_blocks(block, blocks, q, (differentiable, w_uk, w_uv), (rows, (key_segments, constant)))


def _dense_naive(
    q: jax.Array,
    latent: jax.Array | Fp8Latent,
    w_uk: jax.Array,
    w_uv: jax.Array,
    constants: Any,
    scale: float,
    groups: int,
    budget_bytes: int,
) -> jax.Array:
    batch, queries, heads, width = q.shape
    nope, value_width = w_uk.shape[1], w_uv.shape[1]
    size = heads // groups
    item = sum_dtype(q, latent).itemsize
    tile = key_tile(latent.shape[1], batch * size * (width + value_width) * item, budget_bytes // 4)
    row = size * (2 * width + 3 * value_width + 3 * tile) * item
    blocks = plan(1, queries, fits=budget_bytes // (4 * batch * row), wanted=product_rows() // 4)
    settings = Settings(scale, tile, value_width)

    def block(sliced: jax.Array, shared: tuple, constants: Any) -> jax.Array:
        (positions, segments), key_segments = constants
        keys, values = shared
        mask = Mask(Visibility(positions, segments, key_segments))
        o = attend_tiles(settings, jnp.moveaxis(sliced, 2, 1)[:, :, :, None], keys, values, mask)
        return jnp.moveaxis(o[:, :, :, 0], 1, 2).astype(sliced.dtype)

    # A group takes every groups-th head: where heads are sharded, each shard then holds a part of every group. Groups
    # of one head get no axis of their own, for XLA would copy q to add it.
    split = (size, groups) if size > 1 else (groups,)
    expanding = plan(1, latent.shape[1], fits=budget_bytes // (8 * batch * row), wanted=product_rows())

    def expand_keys(sliced: jax.Array | None, shared: tuple, fixed: Any) -> tuple[jax.Array, jax.Array]:
        up_k, up_v = shared
        rows = dequantized(together(sliced, fixed[0]), q.dtype)
        sound = jnp.isfinite(rows)
        content, slot = jnp.split(jnp.where(sound, rows, 0), [up_k.shape[2]], axis=2)
        keys = einsum("bsl,hnl->bshn", content, up_k, out=q.dtype)
        slot = jnp.broadcast_to(slot[:, :, None], (*keys.shape[:3], slot.shape[2])).astype(q.dtype)
        keys = jnp.concatenate([keys, slot], axis=-1)
        # A broken row breaks those who see its key; through the products it would break the gradients of the weights.
        keys = jnp.where(jnp.all(sound, axis=2)[:, :, None, None], keys, jnp.nan)
        return keys, einsum("bsl,hvl->bshv", content, up_v, out=q.dtype)

    def group(sliced: tuple, shared: jax.Array | None, constants: Any) -> jax.Array:
        group_q, up_k, up_v = sliced
        of_queries, fixed = constants[1]
        weights = up_k.reshape(size, nope, -1), up_v.reshape(size, value_width, -1)
        expanded = in_blocks(expand_keys, expanding, shared, weights, (fixed, ()))
        o = in_blocks(block, blocks, group_q.reshape(batch, queries, size, width), expanded, of_queries)
        return o.reshape(batch, queries, *split[:-1], 1, value_width)

    sliced = (
        q.reshape(batch, queries, *split, width),
        w_uk.reshape(1, 1, *split, *w_uk.shape[1:]),
        w_uv.reshape(1, 1, *split, *w_uv.shape[1:]),
    )
    by_group = Plan(axis=1 + len(split), size=1, length=groups)
    differentiable, constant = constant_apart(latent)
    o = in_blocks(group, by_group, sliced, differentiable, ((), (constants, constant)))
    return o.reshape(batch, queries, heads, value_width)


def _expanded_bytes(q: jax.Array, latent: jax.Array | Fp8Latent, w_uk: jax.Array, w_uv: jax.Array) -> int:
    """Keys and values of one head, the accumulator they are rounded from, and the head's queries and outputs."""
    (batch, queries, _, width), num_keys, nope, values = q.shape, latent.shape[1], w_uk.shape[1], w_uv.shape[1]
    rounded = (num_keys + queries) * (width + values) * q.dtype.itemsize
    return batch * (rounded + num_keys * max(nope, values) * sum_dtype(q, latent).itemsize)


def _head_groups(
    q: jax.Array, latent: jax.Array | Fp8Latent, w_uk: jax.Array, w_uv: jax.Array, budget_bytes: int
) -> int | None:
    """The fewest equal groups of heads whose expanded keys and values leave a quarter of the budget free."""
    heads, one = q.shape[2], _expanded_bytes(q, latent, w_uk, w_uv)
    for groups in range(1, heads + 1):
        if heads % groups == 0 and heads // groups * one <= budget_bytes * 3 // 4:
            return groups
    return None


def _naive_is_cheaper(q: jax.Array, latent: jax.Array | Fp8Latent, w_uk: jax.Array, w_uv: jax.Array) -> bool:
    """Multiplications per head: expansion of every key against the wider products of the absorbed form."""
    queries, num_keys, (_, nope, width), values = q.shape[1], latent.shape[1], w_uk.shape, w_uv.shape[1]
    naive = num_keys * width * (nope + values) + queries * num_keys * (q.shape[3] + values)
    absorbed = queries * width * (nope + values) + queries * num_keys * (latent.shape[2] + width)
    return naive < absorbed
