"""What `gpu_backward_threads` does, in operations on whole arrays, which Pallas' interpreter knows. See there."""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.sparse_mla import gpu_plain
from pallas_kernels.sparse_mla.gpu import TILE, WIDTH
from pallas_kernels.sparse_mla.gpu_threads import CHUNK

fence = gpu_plain.fence
full_barriers = gpu_plain.full_barriers
gather = gpu_plain.gather
multiply = gpu_plain.multiply
multiply_turned = gpu_plain.multiply_turned
rows_to_gather = gpu_plain.rows_to_gather
rows_to_score = gpu_plain.rows_to_score
start_barriers = gpu_plain.start_barriers
until_added = gpu_plain.until_added
wait = gpu_plain.wait

_TOTALS = 1 + WIDTH // CHUNK


def more_scratch(heads: int) -> dict[str, Any]:
    """Room for what accumulators would hold: the interpreter can't write to those."""
    return {"totals": plgpu.SMEM((_TOTALS, TILE, 2 * heads), jnp.float32)}


def accumulate(body: Callable[..., Any], widths: list[int], scratch: dict[str, Any], warpgroup: Any, first: int) -> Any:
    """body(float32 [64, width] of zeros for each width); `first` tells calls apart."""
    del warpgroup
    totals = [scratch["totals"].at[first + i, :, pl.ds(0, width)] for i, width in enumerate(widths)]
    for total in totals:
        total[...] = jnp.zeros(total.shape, jnp.float32)
    return body(*totals)


def start_query(info: Any, state: Any, row: Any, tail: Any, *, heads: int, warpgroup: int) -> None:
    """Copies info[row] to `state` and writes zeros to `tail`."""
    del warpgroup
    state[...] = info[row]
    tail[...] = jnp.zeros((heads, CHUNK), tail.dtype)


def start_shares(info: Any, state: Any, row: Any, *, heads: int, warpgroup: int) -> None:
    """Copies info[row] to `state`."""
    del heads, warpgroup
    state[...] = info[row]


def store_shares(
    scores: Any, rows: Any, state: Any, out: Any, place: Any, *, heads: int, num_rows: int, scale: float, by: float
) -> None:
    """out[place + key] = by Σ_heads 2^(scale log2(e) s - lse), for 64 keys; 0 for those that don't exist."""
    del heads
    exists = (rows >= 0) & (rows < num_rows)
    p = jnp.exp2(scores * (scale * math.log2(math.e)) - state[...])
    out[pl.ds(place, TILE)] = jnp.where(exists, jnp.sum(p, axis=1) * by, 0)


def differentiate(
    products: Any, rows: Any, state: Any, weights: Any, *, heads: int, num_rows: int, scale: float
) -> None:
    """Writes scores' gradients and probabilities of a tile to shared memory, keys contiguous."""
    exists = ((rows >= 0) & (rows < num_rows))[:, None]
    lse, delta = state[pl.ds(0, heads)], state[pl.ds(heads, heads)]
    p = jnp.where(exists, jnp.exp2(products[:, :heads] * (scale * math.log2(math.e)) - lse), 0)
    slopes = jnp.where(exists, scale * p * (products[:, heads:] - delta), 0)
    weights[...] = jnp.concatenate([slopes, p], axis=1).T.astype(weights.dtype)


def add_to_latents(
    weights: Any, both: Any, rows: Any, out: Any, first_row: Any, *, heads: int, num_rows: int, together: int
) -> None:
    """out[first_row + rows] += weightsᵀ · both, for 64 keys, the one after the other."""
    del heads, together
    chunks = both[...].astype(jnp.float32)
    by_key = weights[...].astype(jnp.float32).T
    parts = [by_key @ chunks[i] for i in range(chunks.shape[0])]
    add = jnp.concatenate(parts, axis=1)
    exists = (rows >= 0) & (rows < num_rows)
    place = jnp.where(exists, rows + first_row, out.shape[0])
    mine = (place[None] == jnp.arange(out.shape[0])[:, None]).astype(jnp.float32)
    out[...] = out[...] + mine @ add


def add_by_copies(weights: Any, both: Any, rows: Any, out: Any, first_row: Any, stage: Any, **sizes: int) -> None:
    """The same."""
    del stage
    add_to_latents(weights, both, rows, out, first_row, **sizes)


def store_turned(values: Any, out: Any, row: Any, first: Any, *, heads: int) -> None:
    """out[row + head, first + channel] = values[channel, head], for 64 channels."""
    out[pl.ds(row, heads), pl.ds(first, CHUNK)] = values.T.astype(out.dtype)


def stage_pitch(together: int) -> int:
    """Numbers from row to row of a stage."""
    return together * CHUNK


def finish_adding() -> None:
    """Sums are added at once."""


def await_wave(finished: Any, item: Any, *, wave: int, warpgroup: int) -> None:
    """Blocks run one after the other."""
    del finished, item, wave, warpgroup


def report(finished: Any) -> None:
    """Nobody waits."""
    del finished
