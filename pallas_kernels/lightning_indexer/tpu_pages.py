"""Pages of keys on a TPU, copied into VMEM one by one, those of the next tile while a tile is scored."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.lightning_indexer.tpu_select import LANES, TILE
from pallas_kernels.mxfp8 import BLOCK

SMALLEST = 32
"""Keys of a page at least: rows of an 8-bit tile."""


class Pages(NamedTuple):
    """References to a pool and to its way into VMEM.

    Attributes:
        table: [1, 1, N] int32 in SMEM, a row's pages.
        pool: [P, page, K], anywhere.
        scales: [P, K / 32, page] uint8, anywhere; None where keys have none.
        slots: [2, keys of a tile, K].
        scale_slots: [2, pages of a tile, K / 32, page], or None.
        arrived: semaphores of two slots, of keys and of scales.
    """

    table: Any
    pool: Any
    scales: Any
    slots: Any
    scale_slots: Any
    arrived: Any

    @property
    def page(self) -> int:
        """Keys of a page."""
        return self.pool.shape[1]

    def start(self, tile: Any, end: Any) -> None:
        """Starts copying the pages of a tile that hold keys before `end`."""
        self._each(tile, end, lambda copy: copy.start())

    def wait(self, tile: Any, end: Any) -> None:
        """Until what `start` started has arrived."""
        self._each(tile, end, lambda copy: copy.wait())

    def _each(self, tile: Any, end: Any, act: Any) -> None:
        slot = tile & 1
        bits = self.page.bit_length() - 1
        most = self.slots.shape[1] >> bits
        first = tile * (TILE >> bits)
        count = jnp.minimum((end - tile * TILE + (self.page - 1)) >> bits, most)

        def one(which: Any, carry: Any) -> Any:
            page = jnp.clip(self.table[0, 0, first + which], 0, self.pool.shape[0] - 1)
            rows = pl.ds(pl.multiple_of(which * self.page, self.page), self.page)
            act(pltpu.make_async_copy(self.pool.at[page], self.slots.at[slot, rows], self.arrived.at[slot, 0]))
            if self.scales is not None:
                target = self.scale_slots.at[slot, which]
                act(pltpu.make_async_copy(self.scales.at[page], target, self.arrived.at[slot, 1]))
            return carry

        jax.lax.fori_loop(0, count, one, 0)

    def rows(self, tile: Any, rows: Any) -> jax.Array:
        """Some of a tile's keys."""
        return self.slots[tile & 1, rows]

    def scales_of(self, tile: Any, part: Any, size: int) -> list[jax.Array]:
        """Scales [K / 32, n] of the part's `size` keys, by runs that don't leave their page."""
        page, slot = self.page, tile & 1
        if page <= size:
            return [self.scale_slots[slot, part * (size // page) + which] for which in range(size // page)]
        bits = (page // size).bit_length() - 1
        lanes = pl.ds(pl.multiple_of((part & (page // size - 1)) * size, LANES), size)
        return [self.scale_slots[slot, part >> bits, :, lanes]]


def unfit_pages(page: int, width: int, mxfp8: bool) -> str | None:
    """Why pages can't be copied, or None.

    Args:
        page: keys of a page.
        width: of a key.
        mxfp8: whether they are MXFP8.
    """
    if page & (page - 1) or not SMALLEST <= page <= TILE:
        return f"pages have {page} keys; the TPU kernel takes powers of two from {SMALLEST} to {TILE}."
    if width % LANES or (mxfp8 and width != 4 * BLOCK):
        wanted = "128" if mxfp8 else "a multiple of 128"
        return f"keys are {width} wide; the TPU kernel takes pages of keys of {wanted}."
    return None
