"""Cutting rows sorted by group into tiles of one group each."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


class Tiles(NamedTuple):
    """Every tile that the groups need, in the order of their rows, and unused ones after them.

    Attributes:
        group: [N] of each tile.
        number: [N] of each tile within its group.
        first: [N] its first row.
        last: [N] the row after its last; not after `first` for a tile that isn't used.
        used: how many tiles are.
        ends: [G] the row after each group's last.
        begins: [G] each group's first tile.
    """

    group: Int[Array, " N"]
    number: Int[Array, " N"]
    first: Int[Array, " N"]
    last: Int[Array, " N"]
    used: Int[Array, ""]
    ends: Int[Array, " G"]
    begins: Int[Array, " G"]


def most_tiles(num_rows: int, num_groups: int, tile: int) -> int:
    """Tiles that any groups of these rows could need."""
    return min(num_rows, num_rows // tile + min(num_groups, num_rows))


def cut(group_sizes: Int[Array, " G"], num_rows: int, tile: int) -> Tiles:
    """Tiles of `tile` rows; a group's last one may have fewer."""
    sizes = group_sizes.astype(jnp.int32)
    ends = jnp.cumsum(sizes)
    counts = jax.lax.div(sizes + (tile - 1), jnp.int32(tile))
    upto = jnp.cumsum(counts)
    most = most_tiles(num_rows, sizes.shape[0], tile)
    group = jnp.repeat(jnp.arange(sizes.shape[0], dtype=jnp.int32), counts, total_repeat_length=most)
    index = jnp.arange(most, dtype=jnp.int32)
    number = index - (upto - counts)[group]
    first = (ends - sizes)[group] + number * tile
    last = jnp.where(index < upto[-1], jnp.minimum(first + tile, ends[group]), first)
    return Tiles(group, number, first, last, upto[-1], ends, upto - counts)
