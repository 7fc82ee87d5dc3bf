"""Cutting rows sorted by group for a kernel whose copies start at every eighth row only.

The copy engine sees rows in blocks of 8, which is what the tensor cores' shared-memory layout needs. So a tile begins
at the last multiple of 8 that isn't after its group's first row, and may hold up to seven rows of a neighbour, which are
computed and never written. Inner borders of a group are multiples of 8 as well: only a group's first and last blocks
are ever shared.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

BLOCK = 8
"""Rows that the copy engine moves together."""

COLUMNS = 64
"""Columns of the result that a warpgroup computes."""

PART = 32
"""Fewest rows of a wide result that a warpgroup turns at once."""

WIDEST = 256
"""Rows of one matrix instruction; a wider tile takes two."""

CHUNK = 128
"""Inputs of MXFP4 weights unpacked at once: four blocks of one scale each."""


@dataclass(frozen=True)
class Tuning:
    """How a product is cut.

    Attributes:
        widths: rows that a tile may have, ascending multiples of 8 up to 256, then of 16 up to 512.
        stages: slots of the ring.
        step: inputs a slot holds, a multiple of 64; with MXFP4 of 128.
        warpgroups: that multiply.
        cluster: blocks of threads, 1 or 2, that share a tile's rows.
        blocks: of threads in all, one a multiprocessor.
        tall: blocks of 64 columns that a warpgroup computes, 1 or 2. With a gate there are 2: gate and up.
        part: rows of the result that a warpgroup turns at once, a multiple of 8.
    """

    widths: tuple[int, ...]
    stages: int
    step: int = 64
    warpgroups: int = 2
    cluster: int = 1
    blocks: int = 132
    tall: int = 1
    part: int = PART

    @property
    def columns(self) -> int:
        """Outputs of the weights that must divide into whole pieces of work."""
        return COLUMNS * self.warpgroups * self.cluster * self.tall


class Work(NamedTuple):
    """What the kernel reads as scalars.

    Attributes:
        tiles: [6, N] of each tile: its first block's first row; the first row that is its own; the row after its last;
            its expert; which of the widths holds it; whether it has products (padding and empty tiles have none).
        used: [G + 1] how many tiles there are up to each group; the last one says how many in all.
    """

    tiles: Int[Array, "6 N"]
    used: Int[Array, " groups"]


def most_tiles(num_groups: int, num_rows: int, widths: tuple[int, ...]) -> int:
    """How many tiles `cut` may make."""
    return min(num_rows, num_groups + 1) + (num_rows + 2 * BLOCK * num_groups) // widths[-1] + 1


def cut(group_sizes: Int[Array, " G"], group_offset: Int[Array, ""], num_rows: int, widths: tuple[int, ...]) -> Work:
    """Tiles of at most widths[-1] rows, equal within a group; rows of no group are one more group, of zeros.

    Sums over groups are written as masked reductions: XLA runs each as one small kernel, while a cumulative sum, a
    repetition or a search takes several, and at 8 tokens a launch is as long as an expert's product.
    """
    num_groups = group_sizes.shape[0]
    widest = widths[-1]
    most = most_tiles(num_groups, num_rows, widths)
    sizes = group_sizes.astype(jnp.int32)
    group = jnp.arange(num_groups + 1, dtype=jnp.int32)
    before = jnp.sum(jnp.where(group[:, None] > group[None, :-1], sizes[None, :], 0), axis=1, dtype=jnp.int32)
    sizes = jnp.concatenate([sizes, num_rows - before[-1:]])
    begin = before // BLOCK * BLOCK
    span = jnp.where(sizes > 0, before + sizes - begin, 0)
    counts = (span + (widest - 1)) // widest
    shares = jnp.maximum(counts, 1)
    step = ((span + shares - 1) // shares + (BLOCK - 1)) // BLOCK * BLOCK
    upto = jnp.sum(jnp.where(group[:, None] >= group[None, :], counts[None, :], 0), axis=1, dtype=jnp.int32)
    index = jnp.arange(most, dtype=jnp.int32)
    mine = jnp.sum((upto[None, :] <= index[:, None]).astype(jnp.int32), axis=1, dtype=jnp.int32)
    mine = jnp.minimum(mine, num_groups)
    base = begin[mine] + (index - (upto - counts)[mine]) * step[mine]
    first = jnp.maximum(base, before[mine])
    last = jnp.maximum(jnp.minimum(base + step[mine], (before + sizes)[mine]), first)
    kind = sum(((last - base) > width).astype(jnp.int32) for width in widths[:-1])
    expert = group_offset.astype(jnp.int32) + jnp.minimum(mine, num_groups - 1)
    busy = ((mine < num_groups) & (last > first)).astype(jnp.int32)
    kind = jnp.broadcast_to(jnp.asarray(kind, jnp.int32), base.shape)
    return Work(jnp.stack([base, first, last, expert, kind, busy]), upto)
