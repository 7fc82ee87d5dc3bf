"""Attention of a block of queries, over tiles of all keys (online softmax) or over gathered rows."""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.fp8_latent import Fp8Latent
from pallas_kernels.lightning_indexer.blocks import Plan, pinned
from pallas_kernels.lightning_indexer.select import Selection
from pallas_kernels.lightning_indexer.visibility import Visibility
from pallas_kernels.precision import at_least_float32, einsum


class Mask(NamedTuple):
    """What each query of a block attends: the keys it sees, or those of them that its indexer selected."""

    visibility: Visibility
    selection: Selection | None = None

    def tile(self, start: jax.Array, size: int) -> jax.Array:
        """[B, T, size] for the keys from `start`; a selection holds visible keys only."""
        return (self.selection or self.visibility).tile(start, size)


class Settings(NamedTuple):
    """Static arguments of `attend_tiles`."""

    scale: float
    tile: int
    value_width: int


def _attend_tiles(
    settings: Settings,
    q: Float[Array, "B G T M K"],
    k: Float[Array, "B S G K"] | Float[Array, "B S K"] | Fp8Latent,
    v: Float[Array, "B S G V"] | None,
    mask: Mask,
) -> Float[Array, "B G T M V"]:
    """Softmax attention of M query heads per key head G, a tile of keys at a time, up to the last visible tile.

    Keys without an axis G are one head (a unit axis would make XLA copy the whole cache into another layout). `v` None
    takes the first `value_width` channels of `k`. FP8 latents are dequantised a tile at a time, and are constants. The
    result is float32 or better, 0 for a row without keys. Reverse mode recomputes the probabilities of a tile from the
    log-sum-exp and keeps none.
    """
    return _attend_forward(settings, q, k, v, mask)[0]


def attend_with_lse(
    settings: Settings, q: jax.Array, k: jax.Array | Fp8Latent, v: jax.Array | None, mask: Mask
) -> tuple[jax.Array, jax.Array]:
    """`attend_tiles` that also returns the log-sum-exp [B, G, T, M], -inf for a row without keys; without gradient."""
    dtype = sum_dtype(q, k)

    def step(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        top, total, acc = carry
        _, scores, values, _ = _tile(settings, q, k, v, mask, i)
        new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
        reference = jnp.where(new_top == -jnp.inf, 0, new_top)  # no row computes -inf - (-inf)
        p = jnp.exp(scores - reference[..., None])
        shrink = jnp.exp(top - reference)
        acc = acc * shrink[..., None] + einsum("bgtms,bsgv->bgtmv", p.astype(q.dtype), values)
        return new_top, total * shrink + jnp.sum(p, axis=-1), acc

    rows = q.shape[:-1]
    first = (jnp.full(rows, -jnp.inf, dtype), jnp.zeros(rows, dtype), jnp.zeros((*rows, settings.value_width), dtype))
    with jax.named_scope(f"tiles_of_{settings.tile}_keys"):
        top, total, acc = jax.lax.fori_loop(0, _num_tiles(settings, k, mask), step, first)
    some = jnp.where(total == 0, 1, total)
    return acc / some[..., None], jnp.where(total == 0, -jnp.inf, top + jnp.log(some))


def _attend_forward(
    settings: Settings, q: jax.Array, k: jax.Array | Fp8Latent, v: jax.Array | None, mask: Mask
) -> tuple[jax.Array, tuple]:
    o, lse = attend_with_lse(settings, q, k, v, mask)
    lse = jnp.where(lse == -jnp.inf, 0, lse)  # a row without keys meets scores of -inf only
    return o, (q, k, v, mask, o, lse)


def _attend_backward(settings: Settings, saved: tuple, do: jax.Array) -> tuple:
    q, k, v, mask, o, lse = saved
    dtype = o.dtype
    delta = jnp.sum(do * o, axis=-1)
    do = do.astype(q.dtype)
    constant = isinstance(k, Fp8Latent)

    def step(i: jax.Array, carry: tuple) -> tuple:
        dq, dk, dv = carry
        start, scores, values, keys = _tile(settings, q, k, v, mask, i)
        p = jnp.exp(scores - lse[..., None])
        dp = einsum("bgtmv,bsgv->bgtms", do, values)
        ds = jnp.where(p == 0, 0, p * (dp - delta[..., None])) * settings.scale
        ds = ds.astype(q.dtype)
        dq += einsum("bgtms,bsgk->bgtmk", ds, keys)
        if constant:
            return dq, None, None
        dk = _add(dk, einsum("bgtms,bgtmk->bsgk", ds, q), start)
        dv = _add(dv, einsum("bgtms,bgtmv->bsgv", p.astype(q.dtype), do), start)
        return dq, dk, dv

    zeros: tuple = jnp.zeros(q.shape, dtype), None, None
    if not constant:
        zeros = zeros[0], jnp.zeros(k.shape, dtype), jnp.zeros((*k.shape[:-1], do.shape[-1]), dtype)
    with jax.named_scope(f"tiles_of_{settings.tile}_keys"):
        dq, dk, dv = jax.lax.fori_loop(0, _num_tiles(settings, k, mask), step, zeros)
    if constant:
        return dq.astype(q.dtype), None, None, None
    if v is None:
        dk = dk.at[..., : settings.value_width].add(dv)
        return dq.astype(q.dtype), dk.astype(k.dtype), None, None
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


attend_tiles = jax.custom_vjp(_attend_tiles, nondiff_argnums=(0,))
attend_tiles.defvjp(_attend_forward, _attend_backward)


def sum_dtype(q: jax.Array, latent: jax.Array | Fp8Latent) -> jnp.dtype:
    """In which products with a latent are summed: float32 or better."""
    return at_least_float32(q) if isinstance(latent, Fp8Latent) else at_least_float32(q, latent)


def dequantized(latent: jax.Array | Fp8Latent, dtype: DTypeLike) -> jax.Array:
    """FP8 latents in `dtype`; others as they are."""
    return latent.dequantize(dtype) if isinstance(latent, Fp8Latent) else latent


def constant_apart(latent: jax.Array | Fp8Latent) -> tuple[jax.Array | None, Fp8Latent | None]:
    """A latent as (what is differentiated by, what is not): one of them is None."""
    return (None, latent) if isinstance(latent, Fp8Latent) else (latent, None)


def together(latent: jax.Array | None, constant: Fp8Latent | None) -> jax.Array | Fp8Latent:
    """The latent that `constant_apart` was given."""
    found = constant if latent is None else latent
    assert found is not None
    return found


def _num_tiles(settings: Settings, k: jax.Array | Fp8Latent, mask: Mask) -> jax.Array:
    tile = min(settings.tile, k.shape[1])
    return (mask.visibility.end(k.shape[1]) + tile - 1) // tile


def _tile(
    settings: Settings, q: jax.Array, k: jax.Array | Fp8Latent, v: jax.Array | None, mask: Mask, i: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Start, scores (-inf where masked), values and keys of tile i.

    A zero probability times a NaN is NaN. Scores come from the keys as they are, so a NaN reaches exactly the rows that
    attend it; every other product uses keys and values without it, so that it reaches no other row.
    """
    num_keys = k.shape[1]
    k, v = pinned((k, v), i)
    size = min(settings.tile, num_keys)
    start = jnp.minimum(i * size, num_keys - size)
    part = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, size, axis=1), k)
    keys = _heads(dequantized(part, q.dtype))
    values = keys[..., : settings.value_width] if v is None else jax.lax.dynamic_slice_in_dim(v, start, size, axis=1)
    scores = einsum("bgtmk,bsgk->bgtms", q, keys) * settings.scale
    fresh = start + jnp.arange(size) >= i * size  # the last tile overlaps its predecessor
    scores = jnp.where((mask.tile(start, size) & fresh)[:, None, :, None, :], scores, -jnp.inf)
    return start, scores, _finite(values), _finite(keys)


def _finite(x: jax.Array) -> jax.Array:
    return jnp.where(jnp.isfinite(x), x, 0)


def _heads(keys: jax.Array) -> jax.Array:
    return keys if keys.ndim == 4 else keys[:, :, None]


def _add(total: jax.Array, part: jax.Array, start: jax.Array) -> jax.Array:
    old = jax.lax.dynamic_slice_in_dim(total, start, part.shape[1], axis=1)
    return jax.lax.dynamic_update_slice_in_dim(total, old + part.reshape(old.shape), start, axis=1)


def attend_rows(
    q: Float[Array, "B M H K"],
    rows: Float[Array, "B M C K"],
    valid: Bool[Array, "B M C"],
    *,
    scale: float,
    value_width: int,
) -> tuple[Float[Array, "B M H V"], Float[Array, "B M H"]]:
    """Softmax attention of each query over its own C rows; values are the first `value_width` channels."""
    scores = jnp.where(valid[:, :, None, :], einsum("bmhk,bmck->bmhc", q, rows) * scale, -jnp.inf)
    top = jax.lax.stop_gradient(jnp.max(scores, axis=-1))
    top = jnp.where(top == -jnp.inf, 0, top)
    p = jnp.exp(scores - top[..., None])
    total = jnp.sum(p, axis=-1)
    some = jnp.where(total == 0, 1, total)
    o = einsum("bmhc,bmcv->bmhv", (p / some[..., None]).astype(q.dtype), rows[..., :value_width])
    return o, jnp.where(total == 0, -jnp.inf, top + jnp.log(some))


def _attend_selected(
    settings: Settings,
    plan: Plan,
    q: Float[Array, "B M H K"],
    latent: Float[Array, "B N K"] | Fp8Latent,
    indices: Int[Array, "B M C"],
) -> tuple[Float[Array, "B M H V"], Float[Array, "B M H"]]:
    """Softmax attention of each query over the rows of `latent` that it names (-1: none), a block of M at a time.

    Only a block's rows are gathered, and dequantised, at a time. Reverse mode gathers them again and adds their gradients
    into one float32 array; FP8 latents are constants.
    """

    def run(start: jax.Array) -> tuple[jax.Array, jax.Array]:
        block_q, block_indices = plan.take((q, indices), start)
        rows, valid = gather_rows(pinned(latent, start), block_indices, block_q.dtype)
        return attend_rows(block_q, rows, valid, scale=settings.scale, value_width=settings.value_width)

    def step(block: jax.Array, out: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        start = plan.start(block)
        return plan.put(out, run(start), start)

    if plan.blocks == 1:
        return run(jnp.int32(0))
    return jax.lax.fori_loop(0, plan.blocks, step, plan.whole(jax.eval_shape(run, 0)))


def _selected_forward(
    settings: Settings, plan: Plan, q: jax.Array, latent: jax.Array | Fp8Latent, indices: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], tuple]:
    return _attend_selected(settings, plan, q, latent, indices), (q, latent, indices)


def _selected_backward(settings: Settings, plan: Plan, saved: tuple, grads: tuple[jax.Array, jax.Array]) -> tuple:
    q, latent, indices = saved
    constant = isinstance(latent, Fp8Latent)

    def step(block: jax.Array, totals: tuple[jax.Array, jax.Array | None]) -> tuple[jax.Array, jax.Array | None]:
        dq, dlatent = totals
        start = plan.start(block)
        fresh = start + jnp.arange(plan.size) >= block * plan.size  # rows of an overlap count once
        block_q, block_indices, *block_grads = plan.take((q, indices, *grads), start)
        block_indices = jnp.where(fresh[None, :, None], block_indices, -1)
        rows, valid = gather_rows(pinned(latent, start), block_indices, q.dtype)
        attend = partial(attend_rows, valid=valid, scale=settings.scale, value_width=settings.value_width)
        block_dq, drows = jax.vjp(attend, block_q, rows)[1](tuple(block_grads))
        if dlatent is not None:
            where = jnp.where(valid, block_indices, latent.shape[1])
            dlatent = jax.vmap(lambda total, i, x: total.at[i].add(x, mode="drop"))(
                dlatent, where, drows.astype(dlatent.dtype)
            )
        return plan.put(dq, plan.take(dq, start) + block_dq, start), dlatent

    totals = jnp.zeros_like(q), None if constant else jnp.zeros(latent.shape, at_least_float32(latent))
    dq, dlatent = jax.lax.fori_loop(0, plan.blocks, step, totals)
    return dq, None if dlatent is None else dlatent.astype(latent.dtype), None


attend_selected = jax.custom_vjp(_attend_selected, nondiff_argnums=(0, 1))
attend_selected.defvjp(_selected_forward, _selected_backward)


def gather_rows(
    latent: Float[Array, "B N K"] | Fp8Latent, indices: Int[Array, "B M C"], dtype: DTypeLike
) -> tuple[Float[Array, "B M C K"], Bool[Array, "B M C"]]:
    """The named rows, zeros for -1: an unwritten row may hold NaN, and a zero probability wouldn't cancel it.

    FP8 rows are dequantised to `dtype`, others come as they are.
    """
    valid = indices >= 0
    stored = latent.packed if isinstance(latent, Fp8Latent) else latent
    rows = jax.vmap(lambda rows, chosen: rows[chosen])(stored, jnp.where(valid, indices, 0))
    if isinstance(latent, Fp8Latent):
        rows = dequantized(replace(latent, packed=rows), dtype)
    return jnp.where(valid[..., None], rows, 0), valid
