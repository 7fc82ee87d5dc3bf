"""What `gpu_threads` does, in operations on whole arrays, which Pallas' interpreter knows. See there."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.sparse_mla.gpu import TILE
from pallas_kernels.sparse_mla.gpu_threads import CHUNK, FLOOR, SLACK

_WARPGROUPS, _MOST_TOTALS = 3, 6


def full_barriers(count: int, parts: int = 1) -> Any:
    """Barriers that rows arrive at."""
    return plgpu.Barrier(num_arrivals=parts, num_barriers=count)


def more_scratch(heads: int) -> dict[str, Any]:
    """Room for what accumulators would hold: the interpreter can't write to those."""
    return {"totals": plgpu.SMEM((_WARPGROUPS, _MOST_TOTALS, TILE, heads), jnp.float32)}


def accumulate(body: Callable[..., Any], widths: list[int], scratch: dict[str, Any], warpgroup: Any, first: int) -> Any:
    """body(float32 [64, width] of zeros for each width); `first` tells calls within each other apart."""
    totals = [scratch["totals"].at[warpgroup, first + i, :, pl.ds(0, width)] for i, width in enumerate(widths)]
    for total in totals:
        total[...] = jnp.zeros(total.shape, jnp.float32)
    return body(*totals)


def multiply(total: Any, left: Any, right: Any) -> None:
    """Total += left · rightᵀ."""
    total[...] += jnp.dot(left[...], right[...].T, preferred_element_type=jnp.float32)


def multiply_turned(total: Any, left: Any, right: Any) -> None:
    """Total += leftᵀ · rightᵀ."""
    total[...] += jnp.dot(left[...].T, right[...].T, preferred_element_type=jnp.float32)


def until_added(count: int) -> None:
    """Products are done at once."""
    del count


def start_barriers(barriers: Any, count: int, parts: int = 1) -> None:
    """Pallas starts its own."""
    del barriers, count, parts


def wait(barriers: Any, slot: Any, parity: Any, *, shown: bool = False) -> None:
    """Waits until rows of a slot are there."""
    del parity, shown
    plgpu.barrier_wait(barriers.at[slot])


def fence() -> None:
    """Memory is in order."""


def rows_to_gather(indices: Any, base: Any, part: Any = None, parts: int = 1) -> jax.Array:
    """Row numbers of one of `parts` parts of the tile that begins at indices[base]."""
    return indices[pl.ds(base + (0 if part is None else part * (TILE // parts)), TILE // parts)]


def rows_to_score(indices: Any, base: Any) -> jax.Array:
    """Row numbers of the tile that begins at indices[base]."""
    return indices[pl.ds(base, TILE)]


def gather(
    latent: Any,
    rows: Any,
    first_row: Any,
    slot: Any,
    barriers: Any,
    number: Any,
    part: Any = None,
    *,
    parts: int = 1,
    num_rows: int,
    begin: int,
) -> None:
    """Copies 128 bytes of each of a tile's rows, zeros for rows that don't exist, and arrives at the barrier."""
    bytes_each = jnp.dtype(latent.dtype).itemsize
    chunk, exists = _take(latent, rows, first_row, num_rows, begin // bytes_each, 128 // bytes_each)
    if latent.dtype == jnp.uint8:
        chunk = lax.bitcast_convert_type(chunk.reshape(-1, CHUNK, 2), jnp.bfloat16)
    slot[_part(part, parts)] = jnp.where(exists, chunk, 0)
    plgpu.barrier_arrive(barriers.at[number])


def copy_codes(
    latent: Any,
    rows: Any,
    first_row: Any,
    room: Any,
    scales: Any,
    part: Any,
    *,
    parts: int,
    num_rows: int,
    begin: int,
    scale: int | None,
) -> None:
    """Copies 128 e4m3 codes of each of a tile's rows, zeros for rows that don't exist."""
    codes, exists = _take(latent, rows, first_row, num_rows, begin, 2 * CHUNK)
    codes = jnp.where(exists, codes, jnp.uint8(0)).reshape(-1, CHUNK, 2)
    room[_part(part, parts)] = lax.bitcast_convert_type(codes, jnp.bfloat16)
    if scale is not None:
        found, _ = _take(latent, rows, first_row, num_rows, scale, 16)
        found = jnp.where(exists, found, jnp.uint8(0)).reshape(-1, 4, 4)
        scales[_part(part, parts)] = lax.bitcast_convert_type(found, jnp.float32)


def expect(latent: Any, rows: Any, first_row: Any, *, parts: int, num_rows: int) -> None:
    """There is no cache."""
    del latent, rows, first_row, parts, num_rows


def unpack_codes(
    slots: tuple[Any, Any],
    scales: Any,
    barriers: Any,
    numbers: tuple[Any, Any],
    part: Any,
    *,
    parts: int,
    scale: int,
    pending: int,
) -> None:
    """Turns the codes in the second slot into bf16 values, 64 channels in each slot, and arrives at their barriers."""
    del pending
    mine = _part(part, parts)
    codes = lax.bitcast_convert_type(slots[1][mine], jnp.uint8).reshape(-1, 2 * CHUNK)
    values = lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)
    values = (values * scales[mine][:, scale : scale + 1]).astype(jnp.bfloat16)
    for i in range(2):
        slots[i][mine] = values[:, i * CHUNK : (i + 1) * CHUNK]
        plgpu.barrier_arrive(barriers.at[numbers[i]])


def _part(part: Any, parts: int) -> Any:
    return pl.ds(0 if part is None else part * (TILE // parts), TILE // parts)


def _take(latent: Any, rows: Any, first_row: Any, num_rows: int, begin: int, size: int) -> tuple[jax.Array, jax.Array]:
    exists = (rows >= 0) & (rows < num_rows)
    everything = latent[:, begin : begin + size]
    return everything[jnp.where(exists, rows + first_row, 0)], exists[:, None]


def state_size(heads: int) -> int:
    """Numbers in a state: factors of the last two tiles, references as powers of two, inverse sums, sums."""
    return 5 * heads


def softmax_start(state: Any, heads: int, warpgroup: int) -> None:
    """Sets references and sums of a query."""
    del warpgroup
    state[pl.ds(2 * heads, heads)] = jnp.full(heads, FLOOR)
    state[pl.ds(4 * heads, heads)] = jnp.zeros(heads)


def softmax(
    scores: Any,
    rows: Any,
    state: Any,
    changed: Any,
    probabilities: Any,
    turn: Any,
    *,
    heads: int,
    num_rows: int,
    scale: float,
    warpgroup: int,
) -> jax.Array:
    """Writes exp2(score - reference) of a tile, keys contiguous; returns their sums."""
    del warpgroup
    exists = (rows >= 0) & (rows < num_rows)
    scores = jnp.where(exists[:, None], scores * (scale * math.log2(math.e)), -jnp.inf)
    old, top = state[pl.ds(2 * heads, heads)], jnp.max(scores, axis=0)
    raised = jnp.any(top - old > SLACK)
    new = jnp.where(raised, jnp.maximum(old, top), old)
    factor = jnp.exp2(old - new)
    changed[0] = raised.astype(jnp.int32)
    p = jnp.exp2(scores - new)
    probabilities[...] = p.T.astype(jnp.bfloat16)
    state[pl.ds(turn * heads, heads)] = factor
    state[pl.ds(2 * heads, heads)] = new
    state[pl.ds(4 * heads, heads)] = state[pl.ds(4 * heads, heads)] * factor
    return jnp.sum(p, axis=0)


def softmax_add(parts: Any, state: Any, *, heads: int) -> None:
    """Adds a tile's sums."""
    state[pl.ds(4 * heads, heads)] = state[pl.ds(4 * heads, heads)] + parts


def softmax_end(state: Any, lse: Any, base: Any, *, heads: int, warpgroup: int) -> None:
    """Writes 1 / sum of each head to `state` and its log-sum-exp to lse[base + head]."""
    del warpgroup
    total = state[pl.ds(4 * heads, heads)]
    none = total == 0
    some = jnp.where(none, 1, total)
    state[pl.ds(3 * heads, heads)] = jnp.where(none, 0, 1 / some)
    log = (jnp.log2(some) + state[pl.ds(2 * heads, heads)]) * math.log(2)
    lse[pl.ds(base, heads)] = jnp.where(none, -jnp.inf, log)


def scale_down(values: Any, state: Any, turn: Any, *, heads: int, begin: int = 0, column: int = 0) -> jax.Array:
    """[64, N] sums of heads column..column + N, those of begin..begin + heads times the factors in `state`."""
    return values * _spread(state[pl.ds(turn * heads, heads)], values.shape[1], begin, column)


def put_aside(values: Any, aside: Any) -> None:
    """Keeps float32 [64, N]."""
    aside[...] = values.reshape(-1)


def take_back(aside: Any, width: int) -> jax.Array:
    """What `put_aside` kept."""
    return aside[...].reshape(CHUNK, width)


def store(
    values: Any,
    state: Any,
    out: Any,
    row: Any,
    first: Any,
    *,
    heads: int,
    width: int,
    begin: int = 0,
    column: int = 0,
) -> None:
    """out[row + head, first + channel] = values[channel, head] / sum of the head, for 64 channels, as `scale_down`."""
    del width
    low, high = max(begin, column), min(begin + heads, column + values.shape[1])
    if low < high:
        inverse = state[pl.ds(3 * heads, heads)][low - begin : high - begin]
        part = values[:, low - column : high - column] * inverse
        out[pl.ds(row + low, high - low), pl.ds(first, CHUNK)] = part.T.astype(out.dtype)


def _spread(factors: Any, width: int, begin: int, column: int) -> jax.Array:
    """[width] factors of heads from `column`, 1 for those that aren't begin..begin + len(factors)."""
    head = jnp.arange(width) + column - begin
    inside = (head >= 0) & (head < factors.shape[0])
    return jnp.where(inside, factors[jnp.clip(head, 0, factors.shape[0] - 1)], 1)
