"""Keys in the memory of a GPU, rows of a batch or pages of a pool, and their way into shared memory."""

from dataclasses import dataclass
from math import gcd
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.lightning_indexer.pages import PagedKeys
from pallas_kernels.mxfp8 import Mxfp8

WIDTH = 128

LINE = 32
"""Keys whose scales fill 128 bytes: scales are copied by so many."""


@dataclass(frozen=True)
class Source:
    """Which keys are where; a kernel's arguments are `stored`, and its references to them `refs`.

    Attributes:
        packed: whether they are MXFP8.
        page: keys of a page, 0 where each row of the batch has its own keys in order.
        pages: numbers of pages in a row of the page table.
        pool: pages that there are.
        joined: whether scales lie behind the elements of their page.
    """

    packed: bool
    page: int = 0
    pages: int = 0
    pool: int = 0
    joined: bool = False

    def copies(self, count: int, most: int) -> int:
        """How many `pieces` there are."""
        return count // (gcd(self.page, most) if self.page else most)

    def pieces(self, refs: Any, row: Array, start: Array, count: int, most: int) -> list["Piece"]:
        """Keys `start .. start + count - 1` of a row, by runs of a divisor of `most` that don't leave their page.

        `start` is a multiple of `most`. Past the row's last page they are any keys.
        """
        if not self.page:
            return [Piece(begin, most, row, start + begin) for begin in range(0, count, most)]
        size = gcd(self.page, most)
        found = []
        for begin in range(0, count, size):
            position = start + begin
            number = jnp.minimum(lax.div(position, self.page), self.pages - 1)
            page = jnp.clip(refs[-1][row * self.pages + number], 0, self.pool - 1)
            found.append(Piece(begin, size, page, lax.rem(position, self.page)))
        return found

    def copy_keys(self, refs: Any, piece: "Piece", target: Any, full: Any) -> None:
        """Starts copying a piece."""
        plgpu.copy_gmem_to_smem(refs[0].at[piece.row, pl.ds(piece.first, piece.size)], target, full)

    def copy_scales(self, refs: Any, piece: "Piece", target: Any, full: Any) -> None:
        """Starts copying its scales, 32 keys a line."""
        first = lax.div(piece.first, LINE)
        source, first = (refs[0], first + self.page) if self.joined else (refs[1], first)
        plgpu.copy_gmem_to_smem(source.at[piece.row, pl.ds(first, piece.size // LINE)], target, full)


class Piece(NamedTuple):
    """Keys that are copied together.

    Attributes:
        begin: the first one's place in its tile.
        size: how many.
        row: of the batch, or the page.
        first: the first one's place in that.
    """

    begin: int
    size: int
    row: Array
    first: Array


def store(k: Float[Array, "B S K"] | Mxfp8 | PagedKeys, tile: int, *, interpret: bool) -> tuple[Source, list[Array]]:
    """What a kernel that reads whole tiles of keys is given. The copy engine finds zeros past the end of a row."""
    if isinstance(k, PagedKeys):
        table = k.page_table.reshape(-1)
        source = Source(k.mxfp8, k.page, k.page_table.shape[1], k.pages.shape[0], k.joined)
        if k.joined:
            return source, [k.pages.reshape(source.pool, -1, WIDTH), table]
        if isinstance(k.pages, Mxfp8):
            elements = lax.bitcast_convert_type(k.pages.elements, jnp.uint8)
            return source, [elements, k.pages.scale.reshape(source.pool, -1, WIDTH), table]
        return source, [k.pages, table]
    missing = ((0, 0), (0, -k.shape[1] % tile), (0, 0))
    stored: list[Array] = []
    if isinstance(k, Mxfp8):
        scale = jnp.pad(k.scale, missing) if missing[1][1] else k.scale
        stored += [lax.bitcast_convert_type(k.elements, jnp.uint8), scale.reshape(k.shape[0], -1, WIDTH)]
    else:
        stored += [k]
    if interpret:  # it refuses to read past the end
        stored[0] = jnp.pad(stored[0], missing)
    return Source(isinstance(k, Mxfp8)), stored
