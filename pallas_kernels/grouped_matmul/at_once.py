"""All tiles as one batched product, each with a copy of its expert's weights.

For a GPU and small experts: a loop over tiles waits for the host at every trip, which takes longer than a small tile's
product, while copies of small experts are few bytes beside the rows.
"""

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_matmul.tiles import Tiles, cut, most_tiles
from pallas_kernels.mxfp4 import Mxfp4
from pallas_kernels.precision import at_least_float32, einsum

LARGEST_COPIES = 2**28
"""Bytes that copies of experts, or float32 gradients of each tile's expert, may take."""


def suits(weights: Float[Array, "E F D"] | Mxfp4, num_rows: int, num_groups: int, tile: int) -> bool:
    """Whether copies of the experts are small enough; packed ones stay packed."""
    if isinstance(weights, Mxfp4):
        return False
    expert = weights.shape[1] * weights.shape[2] * at_least_float32(weights).itemsize
    return most_tiles(num_rows, num_groups, tile) * expert <= LARGEST_COPIES


def product(
    spec: str,
    rows: Float[Array, "M X"],
    weights: Float[Array, "E F D"],
    group_sizes: Int[Array, " G"],
    group_offset: Int[Array, ""],
    out_dtype: DTypeLike,
    tile: int,
) -> Float[Array, "M Y"]:
    """einsum(spec, rows, weights of the row's group); `spec` is for one tile."""
    num_rows = rows.shape[0]
    tiles = cut(group_sizes, num_rows, tile)
    left, right = spec.split("->")
    first, second = left.split(",")
    batched = f"n{first},n{second}->n{right}"
    products = einsum(batched, _read(rows, tiles, tile), weights[group_offset + tiles.group], out=out_dtype)
    row = jnp.arange(num_rows, dtype=jnp.int32)
    group = jnp.searchsorted(tiles.ends, row, side="right").astype(jnp.int32)
    inside = group < group_sizes.shape[0]
    group = jnp.where(inside, group, 0)
    within = row - (tiles.ends - group_sizes.astype(jnp.int32))[group]
    place = jnp.where(inside, tiles.begins[group] * tile + within, 0)
    return jnp.where(inside[:, None], products.reshape(-1, products.shape[-1])[place], 0)


def weight_gradient(
    rows: Float[Array, "M D"],
    d_result: Float[Array, "M F"],
    weights: Float[Array, "E F D"],
    group_sizes: Int[Array, " G"],
    group_offset: Int[Array, ""],
    tile: int,
) -> Float[Array, "E F D"]:
    """For each expert the sum over its rows of d_result ⊗ row, in float32.

    Tiles are added up by a product with their membership, in one order whatever runs beside it.
    """
    tiles = cut(group_sizes, rows.shape[0], tile)
    outer = einsum("nmf,nmd->nfd", _read(d_result, tiles, tile), _read(rows, tiles, tile))
    experts = jnp.arange(weights.shape[0], dtype=jnp.int32)[:, None]
    used = jnp.arange(tiles.group.shape[0], dtype=jnp.int32) < tiles.used
    member = (used & (experts == group_offset + tiles.group)).astype(outer.dtype)
    return einsum("en,nfd->efd", member, outer).astype(weights.dtype)


def _read(rows: Float[Array, "M X"], tiles: Tiles, tile: int) -> Float[Array, "N C X"]:
    """Every tile's rows; zeros where it has none, so that nothing a neighbour holds, NaN too, gets in."""
    row = tiles.first[:, None] + jnp.arange(tile, dtype=jnp.int32)
    mine = row < tiles.last[:, None]
    return jnp.where(mine[..., None], rows[jnp.where(mine, row, 0)], 0)
