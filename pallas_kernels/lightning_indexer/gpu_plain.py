"""What a warp does by itself, in array operations on four queries at a time, for the interpreter."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from pallas_kernels.lightning_indexer.gpu_select import COLUMNS, INFINITE, INVISIBLE, LIMIT, LOWEST_FINITE, STATE, Room


def begin_plainly(states: Any, limits: Any, first: Array) -> None:
    """Empty selections of four queries."""
    state = jnp.zeros((4, STATE), jnp.int32).at[:, LIMIT].set(limits[pl.ds(first, 4)])
    states[...] = state.reshape(-1)


def order_plainly(scores: Array) -> Array:
    """Float32 scores as integers of the same order; NaN and -inf become the lowest finite number."""
    bits = lax.bitcast_convert_type(scores + 0.0, jnp.int32)
    turned = jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return jnp.where(turned > INFINITE, LOWEST_FINITE, jnp.maximum(turned, LOWEST_FINITE))


def add_heads_plainly(dots: Array, weights: Array) -> Array:
    """Sums over 16 heads of weight times relu(dot) for each of four queries."""
    return (weights[:, None] * jnp.where(dots <= 0, 0, dots)).reshape(4, 16, COLUMNS).sum(axis=1)


def absorb_plainly(scores: Array, places: Array, fresh: Array | bool, states: Any, candidates: Any, room: Room) -> None:
    """Keeps the best top_k of what was kept, of nothing where it is `fresh`, and of the keys of a tile, by position."""
    limits = states[...].reshape(4, STATE)[:, LIMIT, None]
    positions = jnp.broadcast_to(places, (4, COLUMNS))
    orders = jnp.where(positions <= limits, order_plainly(scores), INVISIBLE)
    kept = candidates[...]
    orders = jnp.concatenate([jnp.where(fresh, INVISIBLE, kept[:, 0]), orders], axis=1)
    positions = jnp.concatenate([kept[:, 1], positions], axis=1)
    best = jnp.sort(jnp.argsort(~orders, axis=1, stable=True)[:, : room.top_k], axis=1)
    chosen = (jnp.take_along_axis(orders, best, axis=1), jnp.take_along_axis(positions, best, axis=1))
    missing = ((0, 0), (0, room.size - room.top_k))
    pairs = zip(chosen, (INVISIBLE, 0), strict=True)
    candidates[...] = jnp.stack([jnp.pad(x, missing, constant_values=fill) for x, fill in pairs], axis=1)


def finish_plainly(candidates: Any, out: Any, first: Array, room: Room) -> None:
    """Writes four queries' positions, ascending, with -1 after the last."""
    kept = candidates[...]
    seen = kept[:, 0] > INVISIBLE
    positions = jnp.where(seen, kept[:, 1], jnp.iinfo(jnp.int32).max)
    positions = jnp.sort(positions, axis=1)[:, : room.top_k]
    out[pl.ds(first, 4)] = jnp.where(positions == jnp.iinfo(jnp.int32).max, -1, positions)
