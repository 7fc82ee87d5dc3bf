"""One step of the indexer's TPU kernel: a tile of keys for a block of queries, and the selection after the last one."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.lightning_indexer.tpu_pages import Pages
from pallas_kernels.lightning_indexer.tpu_select import INVISIBLE, LANES, SUBLANES, TILE, Places, order, select
from pallas_kernels.mxfp8 import BLOCK

TOGETHER = 2 * LANES
"""Keys of one product."""

BYTES = 4
"""Scales of an integer."""

_LIMIT, _SEGMENT = 0, 1
_BLOCK_BITS = BLOCK.bit_length() - 1


class Shape(NamedTuple):
    """What the kernel is compiled for.

    Attributes:
        rows: queries of a block.
        blocks: of queries, in a row.
        heads: of a query.
        width: of a head.
        keys: of a tile.
        top_k: keys to select.
        low: whether queries and keys are MXFP8.
        segmented: whether there are segments.
        paged: whether keys are in pages.
    """

    rows: int
    blocks: int
    heads: int
    width: int
    keys: int
    top_k: int
    low: tuple[bool, bool]
    segmented: bool
    paged: bool = False

    @property
    def groups(self) -> int:
        """Of eight queries, the last one perhaps of fewer."""
        return -(-self.rows // SUBLANES)


class _Work(NamedTuple):
    """References to VMEM; most of them by groups of eight queries.

    Attributes:
        numbers: [128, N], of 128 queries, the block's among them.
        queries: [groups, H * 8, K], the eight queries of a head together.
        weights: [groups, H, 8, 128] of the heads, in all lanes.
        limits: [groups, 2, 8, 128], of each query its last visible key, and its segment.
        orders: see `Places`.
        bits: see `Places`.
        found: see `Places`.
    """

    numbers: Any
    queries: Any
    weights: Any
    limits: Any
    orders: Any
    bits: Any
    found: Any


def run(ends: Any, numbers: Any, q: Any, k: Any, *refs: Any, shape: Shape) -> None:
    """A step of the grid; `ends` are one past the last key that each block of queries sees."""
    left = list(refs)
    scale = left.pop(0) if shape.low[1] else None
    key_segments = left.pop(0) if shape.segmented else None
    table = left.pop(0) if shape.paged else None
    out, *scratch = left
    work = _Work(*scratch[: len(_Work._fields)])
    tile = pl.program_id(2)
    end = ends[pl.program_id(0) * shape.blocks + pl.program_id(1)]
    seen = tile * TILE < end
    scored = seen & (end > shape.top_k)
    keys: Any = _Tile(k, scale)
    if shape.paged:
        slots, arrived, *scale_slots = scratch[len(_Work._fields) :]
        keys = Pages(table, k, scale, slots, scale_slots[0] if scale_slots else None, arrived)

    @pl.when(tile == 0)
    def begin() -> None:
        work.numbers[...] = jnp.swapaxes(numbers[0], 0, 1)
        for group in range(shape.groups):
            _prepare(group, q, work, shape)

    @pl.when(scored)
    def score() -> None:
        if shape.paged:
            pl.when(tile == 0)(lambda: keys.start(tile, end))
            pl.when((tile + 1) * TILE < end)(lambda: keys.start(tile + 1, end))
            keys.wait(tile, end)
        _score(tile, end, keys, key_segments, work, shape)

    @pl.when(seen & (end <= shape.top_k))
    def take_all() -> None:
        def one(part: Any, carry: Any) -> Any:
            for group in range(shape.groups):
                _mark(tile, part, group, jnp.zeros((SUBLANES, LANES), jnp.int32), key_segments, work, shape)
            return carry

        jax.lax.fori_loop(0, shape.keys // LANES, one, 0)

    @pl.when(tile == pl.num_programs(2) - 1)
    def finish() -> None:
        tiles = (end + (TILE - 1)) >> (TILE.bit_length() - 1)
        whole, rest = divmod(shape.rows, SUBLANES)

        def one(group: Any, count: int) -> None:
            select(Places(work.orders.at[group], work.bits, work.found), tiles, shape.top_k)
            rows = pl.ds(pl.multiple_of(group * SUBLANES, SUBLANES), count)
            for block in range(work.found.shape[0]):
                lanes = min(LANES, shape.top_k - block * LANES)
                out[0, rows, block * LANES : block * LANES + lanes] = work.found[block][:count, :lanes]

        def one_whole(group: Any, carry: Any) -> Any:
            one(group, SUBLANES)
            return carry

        jax.lax.fori_loop(0, whole, one_whole, 0)
        if rest:
            one(whole, rest)


def _prepare(group: int, q: Any, work: _Work, shape: Shape) -> None:
    """Brings a group's queries and their numbers into the form in which every tile of keys needs them."""
    first, heads = group * SUBLANES, shape.heads
    count = min(SUBLANES, shape.rows - first)
    # A row that isn't split into blocks begins with its first query.
    begin: Any = pl.program_id(1) * shape.rows & (LANES - 1) if shape.blocks > 1 else 0
    columns = work.numbers[pl.ds(pl.multiple_of(begin + first, SUBLANES), SUBLANES)]

    def column(place: int) -> jax.Array:
        return jnp.broadcast_to(columns[:, place : place + 1], (SUBLANES, LANES))

    work.limits[group, _LIMIT] = column(0)
    if shape.segmented:
        work.limits[group, _SEGMENT] = column(1 + heads)
    queries = q[0, first : first + count]
    queries = _from_e4m3(queries) if shape.low[0] else queries.astype(jnp.float32)
    if count < SUBLANES:
        queries = jnp.concatenate([queries, jnp.zeros((SUBLANES - count, *queries.shape[1:]), jnp.float32)])
    by_head = []
    for head in range(heads):
        work.weights[group, head] = jax.lax.bitcast_convert_type(column(1 + head), jnp.float32)
        rows = queries[:, head]
        if shape.low[0]:
            rows = _scaled_queries(rows, columns, 1 + heads + shape.segmented, head)
        by_head.append(rows)
    work.queries[group] = jnp.concatenate(by_head).astype(work.queries.dtype)
    if shape.keys < TILE:
        parts = shape.keys // LANES
        missing = (work.orders.shape[2] - parts, SUBLANES, LANES)
        work.orders[group, 0, parts:] = jnp.full(missing, INVISIBLE)


def _scaled_queries(rows: jax.Array, columns: jax.Array, first: int, head: int) -> jax.Array:
    """Eight queries of a head, [8, K], times their scales, which are in words from column `first` on."""
    width = rows.shape[1]
    groups = width // BLOCK
    words = -(-groups // BYTES)
    lane = jax.lax.broadcasted_iota(jnp.int32, rows.shape, 1)
    scale = jnp.zeros_like(lane)
    for block in range(groups):
        place = first + head * words + block // BYTES
        mine = (columns[:, place : place + 1] >> (8 * (block % BYTES))) & 255
        scale = jnp.where(lane >> _BLOCK_BITS == block, mine, scale)
    factor, halves = _factors(scale)
    return rows * halves * factor


class _Tile(NamedTuple):
    """References to a tile of keys that lie in order.

    Attributes:
        keys: [1, keys, K].
        scales: [1, K / 32, keys], or None.
    """

    keys: Any
    scales: Any

    def rows(self, tile: Any, rows: Any) -> jax.Array:
        """Some of the keys."""
        return self.keys[0, rows]

    def scales_of(self, tile: Any, part: Any, size: int) -> list[jax.Array]:
        """Scales [K / 32, size] of the part's keys."""
        return [self.scales[0, :, pl.ds(pl.multiple_of(part * size, size), size)]]


def _score(tile: Any, end: Any, source: Any, key_segments: Any, work: _Work, shape: Shape) -> None:
    """Orders of a tile's scores, for all groups."""

    def one(part: Any, carry: Any) -> Any:
        keys = source.rows(tile, pl.ds(pl.multiple_of(part * TOGETHER, TOGETHER), TOGETHER))
        if source.scales is not None:
            keys, runs, first = _from_e4m3(keys), [], 0
            for scale in source.scales_of(tile, part, TOGETHER):
                runs.append(_scaled_keys(keys[first : first + scale.shape[1]], scale))
                first += scale.shape[1]
            keys = jnp.concatenate(runs) if len(runs) > 1 else runs[0]
        keys = keys.astype(work.queries.dtype)
        exact = jax.lax.Precision.HIGHEST if keys.dtype == jnp.float32 else None
        for group in range(shape.groups):
            dots = jax.lax.dot_general(
                work.queries[group],
                keys,
                (((1,), (1,)), ((), ())),
                precision=exact,
                preferred_element_type=jnp.float32,
            )
            dots = jnp.where(dots <= 0, 0, dots).reshape(shape.heads, SUBLANES, TOGETHER)  # NaN stays NaN
            for half in range(TOGETHER // LANES):
                scores = jnp.sum(work.weights[group] * dots[..., half * LANES : (half + 1) * LANES], axis=0)
                place = part * (TOGETHER // LANES) + half
                _mark(tile, place, group, order(scores), key_segments, work, shape)
        return carry

    def clear(part: Any, carry: Any) -> Any:
        for group in range(shape.groups):
            work.orders[group, tile, part] = jnp.full((SUBLANES, LANES), INVISIBLE)
        return carry

    parts, lanes = shape.keys // TOGETHER, TOGETHER // LANES
    seen = jnp.minimum((end - tile * TILE + (TOGETHER - 1)) >> (TOGETHER.bit_length() - 1), parts)
    jax.lax.fori_loop(0, seen, one, 0)
    jax.lax.fori_loop(seen * lanes, parts * lanes, clear, 0)


def _mark(tile: Any, part: Any, group: int, orders: jax.Array, key_segments: Any, work: _Work, shape: Shape) -> None:
    """Stores the orders of 128 keys, `INVISIBLE` where a query doesn't see them."""
    lane = jax.lax.broadcasted_iota(jnp.int32, (SUBLANES, LANES), 1)
    visible = tile * TILE + part * LANES + lane <= work.limits[group, _LIMIT]
    if shape.segmented:
        own = key_segments[0, :, pl.ds(pl.multiple_of(part * LANES, LANES), LANES)]
        visible &= (own == work.limits[group, _SEGMENT]) & (own >= 0)
    work.orders[group, tile, part] = jnp.where(visible, orders, INVISIBLE)


def _scaled_keys(keys: jax.Array, scale: jax.Array) -> jax.Array:
    """Keys [N, K] times their scales, [K / 32, N]."""
    blocks = keys.shape[1] // BLOCK
    factor, halves = _factors(scale.astype(jnp.int32))
    # A product with ones turns them and spreads each over its 32 lanes: powers of two are exact in bfloat16. A NaN gets
    # into all of the key, whose scores it makes NaN anyway.
    both = jnp.concatenate([factor, halves]).astype(jnp.bfloat16)
    row, lane = (jax.lax.broadcasted_iota(jnp.int32, (2 * blocks, 2 * keys.shape[1]), axis) for axis in range(2))
    ones = jnp.where(lane >> _BLOCK_BITS == row, 1.0, 0.0).astype(jnp.bfloat16)
    spread = jax.lax.dot_general(both, ones, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    return keys * spread[:, keys.shape[1] :] * spread[:, : keys.shape[1]]


def _factors(scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two numbers whose product is 2^(scale - 127), neither of them subnormal; NaN for 255."""
    factor = jax.lax.bitcast_convert_type(jnp.minimum(scale + 1, 254) << 23, jnp.float32)
    return jnp.where(scale == 255, jnp.nan, factor), jnp.where(scale == 254, 1.0, 0.5)


def _from_e4m3(codes: jax.Array) -> jax.Array:
    """Float32 numbers of e4m3 ones, by integer operations, which every TPU has."""
    wide = jax.lax.bitcast_convert_type(codes, jnp.int8).astype(jnp.int32)
    size = wide & 0x7F
    number = jax.lax.bitcast_convert_type((size << 20) + (120 << 23), jnp.float32)
    number = jnp.where(size < 8, size.astype(jnp.float32) * 2.0**-9, number)
    number = jnp.where(size == 0x7F, jnp.nan, number)
    return jnp.where(wide < 0, -number, number)
