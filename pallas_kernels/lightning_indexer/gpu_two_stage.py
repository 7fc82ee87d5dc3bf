"""Two stages on Hopper: a threshold a query from a sample, bits of what passes it, lists of 8 queries, their best keys.

Some of `CHUNK` queries at a time, as many tiles of 8 as the card has multiprocessors, so that bits and lists stay small.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.lightning_indexer.gpu_coarse import QUERIES, TOGETHER, WORD, lists, wanted_bits
from pallas_kernels.lightning_indexer.gpu_prefill import prefill
from pallas_kernels.lightning_indexer.gpu_select import room_for
from pallas_kernels.lightning_indexer.linear import linear_queries, sampled, taken
from pallas_kernels.lightning_indexer.two_stage import TwoStage
from pallas_kernels.mxfp8 import Mxfp8
from pallas_kernels.precision import einsum

CHUNK = 1024
"""Queries of which bits and lists exist at a time."""

SAMPLE = 8192
"""Keys whose coarse scores stand for all in finding the threshold of a query."""

SPARE = 1.5
"""How many more than top_k keys a query keeps at least: thresholds from a sample aren't exact."""

_LIST = 256


def two_stage(
    q: Float[Array, "B T H K"] | Mxfp8,
    k: Float[Array, "B S K"] | Mxfp8,
    w: Float[Array, "B T H"],
    *,
    top_k: int,
    q_positions: Int[Array, "B T"],
    settings: TwoStage,
    blocks: int,
    interpret: Any = None,
) -> Int[Array, "B T C"]:
    """Selected positions. Where candidates are too few or too many for their room, queries are scored against all keys."""
    batch, num_queries = q.shape[:2]
    num_keys = k.shape[1]
    chunk = min(CHUNK, -(-num_queries // QUERIES) * QUERIES)
    missing = -num_queries % chunk

    def longer(x: Array, fill: int = 0) -> Array:
        return jnp.pad(x, ((0, 0), (0, missing), *(((0, 0),) * (x.ndim - 2))), constant_values=fill)

    if missing:
        q, w, q_positions = jax.tree.map(longer, q), longer(w), longer(q_positions, -1)
    vectors = linear_queries(q, k, w, q_positions).astype(jnp.bfloat16)
    places = sampled(q_positions, SAMPLE)
    sample = taken(k, places).astype(jnp.bfloat16)
    length = list_length(settings, num_keys, top_k)
    room = room_for(top_k)

    def some(row: Array, first: Array) -> Array:
        def part(x: Array) -> Array:
            return lax.dynamic_slice(x, (row, first, *([0] * (x.ndim - 2))), (1, chunk, *x.shape[2:]))

        def of_row(x: Array) -> Array:
            return x if batch == 1 else lax.dynamic_slice_in_dim(x, row, 1)

        queries, weights, limits = jax.tree.map(part, q), part(w), part(q_positions)
        keys = jax.tree.map(of_row, k)
        mine = part(vectors)
        cuts = thresholds(mine, of_row(sample), of_row(places), limits, settings, top_k)
        bits = wanted_bits(mine, keys, cuts, limits, blocks=blocks, interpret=interpret)
        bits, counts, enough = settled(bits, limits, num_keys, top_k)
        enough &= jnp.all(counts <= length)

        def everything() -> Array:
            return prefill(queries, keys, weights, limits, room, blocks=blocks, interpret=interpret)

        def candidates() -> Array:
            listed = lists(bits[0], length, interpret=interpret)
            given = {"listed": listed, "listed_counts": counts[0], "interpret": interpret}
            return prefill(queries, keys, weights, limits, room, blocks=blocks, **given)

        return lax.cond(enough, candidates, everything)[0]

    starts = [(row, first) for row in range(batch) for first in range(0, q.shape[1], chunk)]
    if len(starts) == 1:
        found = some(jnp.int32(0), jnp.int32(0))
    else:
        found = lax.map(lambda start: some(start[0], start[1]), jnp.array(starts, jnp.int32))
    return found.reshape(batch, -1, top_k)[:, :num_queries]


def kept_part(settings: TwoStage, seen: Array | int, top_k: int) -> Array:
    """The part of the keys it sees that a query keeps."""
    return jnp.clip(SPARE * settings.fewest(top_k) / jnp.maximum(seen, 1), settings.kept_fraction, 1.0)


def list_length(settings: TwoStage, num_keys: int, top_k: int) -> int:
    """Room for what 8 queries want, if each keeps a quarter more than it should and no two want the same."""
    part = max(settings.kept_fraction, SPARE * settings.fewest(top_k) / num_keys)
    wanted = min(num_keys, math.ceil(1.25 * TOGETHER * part * num_keys) + 1024)
    return -(-wanted // _LIST) * _LIST


def thresholds(
    vectors: Float[Array, "B T K"],
    sample: Float[Array, "B C K"],
    places: Int[Array, "B C"],
    q_positions: Int[Array, "B T"],
    settings: TwoStage,
    top_k: int,
) -> Float[Array, "B T"]:
    """What the part of the sample that a query is to keep is above; +inf for a query that sees nothing.

    Found to 16 bits, from below, by counting in eight steps of two bits.
    """
    scores = einsum("btk,bsk->bts", vectors, sample, out=jnp.float32)
    bits = lax.bitcast_convert_type(scores + 0.0, jnp.int32)
    seen = places[:, None, :] <= q_positions[..., None]
    order = jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits) >> 16
    order = jnp.where(seen & ~jnp.isnan(scores), order, -(2**15)).astype(jnp.int16)
    count = jnp.sum(seen, axis=-1)
    part = kept_part(settings, q_positions + 1, top_k)
    wanted = jnp.ceil(part * count).astype(jnp.int32)
    low = jnp.full(q_positions.shape, -(2**15), jnp.int32)
    for shift in range(14, -1, -2):
        steps = [low + (number << shift) for number in (1, 2, 3)]
        counts = [jnp.sum(order >= step[..., None].astype(jnp.int16), axis=-1, dtype=jnp.int32) for step in steps]
        for step, number in zip(steps, counts, strict=True):
            low = jnp.where(number >= wanted, step, low)
    edge = (low << 16) - 1
    cut = lax.bitcast_convert_type(jnp.where(edge < 0, edge ^ 0x7FFFFFFF, edge), jnp.float32)
    # Everything, also of what wasn't in the sample, where nothing is to be left out.
    cut = jnp.where((part >= 1) | (low <= -(2**15) + 2**7), -jnp.inf, cut)
    return jnp.where(q_positions < 0, jnp.inf, cut)


def settled(
    bits: Int[Array, "B G W"], q_positions: Int[Array, "B T"], num_keys: int, top_k: int
) -> tuple[Int[Array, "B G W"], Int[Array, "B G"], Array]:
    """Bits of visible keys, with the first and the newest ones; how many; and whether all queries see enough of them."""
    grouped = q_positions.reshape(*bits.shape[:2], TOGETHER)
    last = jnp.minimum(jnp.max(grouped, axis=-1), num_keys - 1)[..., None]
    first = jnp.min(jnp.where(grouped < 0, num_keys, grouped), axis=-1)[..., None]
    words = jnp.arange(bits.shape[-1], dtype=jnp.int32)

    def upto(place: Array) -> Array:
        number = jnp.clip(place + 1 - words * WORD, 0, WORD)
        return jnp.where(number == WORD, -1, jnp.left_shift(1, jnp.minimum(number, WORD - 1)) - 1)

    forced = (words == 0) | (words >= lax.div(first, WORD) - 1)
    bits = jnp.where(forced, -1, bits) & upto(last)
    counts = jnp.sum(lax.population_count(bits), axis=-1, dtype=jnp.int32)
    least = jnp.sum(lax.population_count(bits & upto(first)), axis=-1, dtype=jnp.int32)
    needed = jnp.where(last[..., 0] < 0, 0, jnp.minimum(first[..., 0] + 1, top_k))
    return bits, counts, jnp.all(least >= needed)
