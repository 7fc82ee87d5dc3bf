"""Two stages on Hopper: a threshold a query from a sample, bits of what passes it, the best of what bits name.

A piece at a time: up to `CHUNK` queries of a row, as many tiles of 8 as the card has multiprocessors; or, where rows have few
queries each, some rows. Bits are all that a piece needs much memory for, besides candidates.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.lightning_indexer.gpu import FEW_QUERIES
from pallas_kernels.lightning_indexer.gpu_coarse import QUERIES, ROWS, TOGETHER, wanted_bits
from pallas_kernels.lightning_indexer.gpu_listed import WORD, listed, words_of
from pallas_kernels.lightning_indexer.gpu_select import room_for
from pallas_kernels.lightning_indexer.linear import SLOPE_KEYS, linear_queries, sampled, taken
from pallas_kernels.lightning_indexer.two_stage import TwoStage
from pallas_kernels.manual_axes import align
from pallas_kernels.mxfp8 import Mxfp8
from pallas_kernels.precision import einsum

CHUNK = 1024
"""Queries of a piece, at most."""

BITS_BYTES, ROWS_BYTES = 18 * 2**20, 26 * 2**20
"""Bits of a piece; and of one of rows with few queries, with what they bring and select. Only 32 tiles of 8 queries, or one
row's few, may take more."""

SAMPLE = 8192
"""Keys whose coarse scores stand for all in finding the threshold of a query."""

SPARE = 1.5
"""How many more than top_k keys a query keeps at least: thresholds from a sample aren't exact."""

_SAMPLED_ROWS = 8
_LINE_BYTES = 2 * TOGETHER * 8192  # 8 queries in bfloat16, and the positions of 2048 keys


class Piece(NamedTuple):
    """What is worked on at a time: `queries` of each of `rows`, a multiple of 256, or of 8 where they are few."""

    rows: int
    queries: int


def piece_of(batch: int, num_queries: int, num_keys: int) -> Piece:
    """As large as may be."""
    line = 4 * words_of(num_keys)
    if num_queries <= FEW_QUERIES:
        lines = -(-num_queries // TOGETHER)
        return Piece(min(batch, max(1, ROWS_BYTES // (lines * (line + _LINE_BYTES)))), TOGETHER * lines)
    most = max(QUERIES, BITS_BYTES // line * TOGETHER // QUERIES * QUERIES)
    return Piece(1, min(CHUNK, most, -(-num_queries // QUERIES) * QUERIES))


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
    """Selected positions. Where one of 8 queries would see too few candidates, they are scored against all keys."""
    batch, num_queries = q.shape[:2]
    num_keys = k.shape[1]
    piece = piece_of(batch, num_queries, num_keys)
    missing = max(0, piece.queries - num_queries)
    # Of the whole row's queries, so that pieces of it have the same slopes.
    slope_places, places = sampled(q_positions, SLOPE_KEYS), sampled(q_positions, SAMPLE)
    room = room_for(top_k)
    # Of few queries, 64 go through the matrix instruction whatever their number.
    lacking = -piece.queries % ROWS
    kept = piece.queries // TOGETHER if num_queries <= FEW_QUERIES else None

    def some(row: Array, first: Array) -> Array:
        def part(x: Array, fill: int = 0) -> Array:
            sizes = piece.rows, piece.queries - missing, *x.shape[2:]
            x = lax.dynamic_slice(x, (row, first, *([0] * (x.ndim - 2))), sizes)
            wide = (0, 0), (0, missing), *(((0, 0),) * (x.ndim - 2))
            return jnp.pad(x, wide, constant_values=fill) if missing else x

        def of_rows(x: Array) -> Array:
            return lax.dynamic_slice_in_dim(x, row, piece.rows)

        queries, weights, limits = jax.tree.map(part, q), part(w), part(q_positions, -1)
        vectors = linear_queries(queries, k, weights, limits, of_rows(slope_places), row).astype(jnp.bfloat16)
        cuts = thresholds_of_rows(vectors, k, of_rows(places), limits, row, settings, top_k)
        wide = ((0, 0), (0, lacking))
        bits = wanted_bits(
            jnp.pad(vectors, (*wide, (0, 0))),
            k,
            jnp.pad(cuts, wide, constant_values=jnp.inf),
            jnp.pad(limits, wide, constant_values=-1),
            row,
            kept=kept,
            blocks=blocks,
            interpret=interpret,
        )
        counts, edges = settled(bits, limits.reshape(-1), num_keys, top_k)
        found = listed(queries, k, weights, limits, bits, counts, edges, row, room, blocks=blocks, interpret=interpret)
        return found[:, : piece.queries - missing]

    # The last piece overlaps its predecessor where pieces don't divide evenly.
    rows, firsts = (
        [max(0, min(first, length - size)) for first in range(0, length, size)]
        for length, size in zip(q.shape[:2], piece, strict=True)
    )
    starts = [(row, first) for row in rows for first in firsts]
    if len(starts) == 1:
        return some(jnp.int32(0), jnp.int32(0))

    def step(number: Array, found: Array) -> Array:
        row, first = jnp.array(starts, jnp.int32)[number]
        return lax.dynamic_update_slice(found, some(row, first), (row, first, jnp.int32(0)))

    found = align(jnp.full((*q.shape[:2], top_k), -1, jnp.int32), q_positions)[0]
    return lax.fori_loop(0, len(starts), step, found)


def kept_part(settings: TwoStage, seen: Array | int, top_k: int) -> Array:
    """The part of the keys it sees that a query keeps."""
    return jnp.clip(SPARE * settings.fewest(top_k) / jnp.maximum(seen, 1), settings.kept_fraction, 1.0)


def thresholds_of_rows(
    vectors: Float[Array, "B T K"],
    k: Float[Array, "R S K"] | Mxfp8,
    places: Int[Array, "B C"],
    q_positions: Int[Array, "B T"],
    first_row: Int[Array, ""],
    settings: TwoStage,
    top_k: int,
) -> Float[Array, "B T"]:
    """`thresholds` from the keys at these places of the rows from first_row on, a few rows at a time."""

    def one(given: tuple[Array, Array, Array, Array]) -> Array:
        vectors, places, limits, row = given
        sample = taken(k, places[None], row).astype(jnp.bfloat16)
        return thresholds(vectors[None], sample, places[None], limits[None], settings, top_k)[0]

    rows = first_row + jnp.arange(vectors.shape[0], dtype=jnp.int32)
    given = align(vectors, places, q_positions, rows)
    if vectors.shape[0] == 1:
        return one((given[0][0], given[1][0], given[2][0], given[3][0]))[None]
    return lax.map(one, given, batch_size=_SAMPLED_ROWS)


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
    bits: Int[Array, "N W"], q_positions: Int[Array, " T"], num_keys: int, top_k: int
) -> tuple[Int[Array, " N"], Int[Array, "N 2"]]:
    """How many keys each 8 queries look at, and their edges (see `gpu_listed.listed`), which add the first and newest keys.

    All of them are looked at if there might be too few that the query of the first position sees.
    """
    grouped = q_positions.reshape(-1, TOGETHER)
    last = jnp.minimum(jnp.max(grouped, axis=-1), num_keys - 1)
    first = jnp.min(jnp.where(grouped < 0, num_keys, grouped), axis=-1)
    words = jnp.arange(bits.shape[-1], dtype=jnp.int32)

    def upto(place: Array) -> Array:
        number = jnp.clip(place[:, None] + 1 - words * WORD, 0, WORD)
        return jnp.where(number == WORD, -1, jnp.left_shift(1, jnp.minimum(number, WORD - 1)) - 1)

    forced = (words == 0) | (words >= lax.div(first, WORD)[:, None] - 1)
    wanted = jnp.where(forced, -1, bits) & upto(last)
    counts = jnp.sum(lax.population_count(wanted), axis=-1, dtype=jnp.int32)
    least = jnp.sum(lax.population_count(wanted & upto(first)), axis=-1, dtype=jnp.int32)
    enough = least >= jnp.where(last < 0, 0, jnp.minimum(first + 1, top_k))
    edges = jnp.stack([jnp.where(enough, first, 0), last], axis=-1)
    return jnp.where(enough, counts, last + 1), edges
