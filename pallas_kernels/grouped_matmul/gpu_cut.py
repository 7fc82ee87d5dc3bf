"""`gpu_tiles.cut` as one kernel: XLA takes four launches for it, each longer than its work.

A lane takes a group: where it begins, how many tiles it has, and, once everybody knows how many come before, the tiles.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int

from pallas_kernels.grouped_matmul.gpu_tiles import BLOCK, Work, most_tiles

LANES, WARPS = 32, 8
MOST_GROUPS, MOST_ROWS = LANES * LANES - 1, 1 << 17
"""Groups, and one of rows without a group: a lane adds up each 32 of them. Rows: a lane writes all tiles of its group."""


def room_for(num_groups: int) -> int:
    """int32 numbers in shared memory that `cut_by_warps` needs: two sums of each 32 groups."""
    return 2 * _chunks(num_groups)


def _chunks(num_groups: int) -> int:
    return -(-(num_groups + 1) // LANES)


def cut_by_warps(
    warp: Any,
    sizes: Any,
    offset: Any,
    tiles: Any,
    used: Any,
    room: Any,
    *,
    num_groups: int,
    num_rows: int,
    widths: tuple[int, ...],
    most: int,
) -> None:
    """See `gpu_tiles.cut`, in the words of `gpu_warp.Warp`; tiles that aren't used are left as they are.

    Args:
        warp: the words.
        sizes: place of [G].
        offset: place of [1].
        tiles: place of [6, most] to fill.
        used: place of [G + 1] to fill.
        room: `room_for` numbers of shared memory.
        num_groups: G.
        num_rows: rows of all groups and of none.
        widths: of tiles.
        most: tiles there is room for.
    """
    widest, chunks = widths[-1], _chunks(num_groups)
    row_sums, tile_sums = room, warp.offset(room, warp.integer(chunks))
    first_expert = warp.load(offset, warp.integer(0))

    def sum_up(sums: Any, mine: list[tuple[Any, Any]]) -> list[Any]:
        """For each chunk of this warp and its lanes' numbers: the sum of all numbers before each lane's."""
        for chunk, number in mine:
            here = warp.both(warp.compare("eq", warp.lane, 0), warp.compare("lt", chunk, chunks))
            warp.store(sums, chunk, warp.total(number), here)
        warp.meet_all()
        of_chunk = warp.load(sums, warp.smaller(warp.lane, chunks - 1))
        found = []
        for chunk, number in mine:
            earlier = warp.both(warp.compare("lt", warp.lane, chunk), warp.compare("lt", warp.lane, chunks))
            before = warp.total(warp.select(earlier, of_chunk, 0))
            found.append(warp.add(before, warp.sub(warp.upto(number), number)))
        return found

    owned = []
    for number in range(-(-chunks // WARPS)):
        chunk = warp.add(warp.of_block, number * WARPS)
        group = warp.add(warp.mul(chunk, LANES), warp.lane)
        size = warp.load(sizes, warp.smaller(group, num_groups - 1))
        owned.append((chunk, group, warp.select(warp.compare("lt", group, num_groups), size, 0)))

    cuts = []
    starts = sum_up(row_sums, [(chunk, size) for chunk, _, size in owned])
    for (chunk, group, size), before in zip(owned, starts, strict=True):
        # The rows after the last group's are one more.
        size = warp.select(warp.compare("eq", group, num_groups), warp.sub(num_rows, before), size)
        begin = warp.mul(warp.quotient(before, BLOCK), BLOCK)
        span = warp.select(warp.compare("gt", size, 0), warp.sub(warp.add(before, size), begin), 0)
        count = warp.quotient(warp.add(span, widest - 1), widest)
        shares = warp.larger(count, 1)
        each = warp.whole_ratio(warp.add(span, warp.sub(shares, 1)), shares)
        width = warp.mul(warp.quotient(warp.add(each, BLOCK - 1), BLOCK), BLOCK)
        cuts.append((chunk, group, before, warp.add(before, size), begin, count, width))

    firsts = sum_up(tile_sums, [(cut[0], cut[5]) for cut in cuts])
    for (_, group, before, end, begin, count, width), tile in zip(cuts, firsts, strict=True):
        there = warp.compare("lt", group, num_groups + 1)
        warp.store(used, group, warp.add(tile, count), there)
        real = warp.compare("lt", group, num_groups)
        expert = warp.add(first_expert, warp.smaller(group, num_groups - 1))

        def write(
            index: Any,
            before: Any = before,
            end: Any = end,
            begin: Any = begin,
            count: Any = count,
            width: Any = width,
            tile: Any = tile,
            real: Any = real,
            expert: Any = expert,
        ) -> Sequence[Any]:
            base = warp.add(begin, warp.mul(index, width))
            first = warp.larger(base, before)
            last = warp.larger(warp.smaller(warp.add(base, width), end), first)
            held = warp.sub(last, base)
            kind = warp.integer(0)
            for narrower in widths[:-1]:
                kind = warp.add(kind, warp.count_of(warp.compare("gt", held, narrower)))
            busy = warp.count_of(warp.both(real, warp.compare("gt", last, first)))
            for row, value in enumerate((base, first, last, expert, kind, busy)):
                warp.store(tiles, warp.add(warp.add(tile, index), row * most), value, warp.compare("lt", index, count))
            return []

        warp.loop(warp.largest(count), write, [])


@partial(jax.jit, static_argnums=(2, 3))
def cut(group_sizes: Int[Array, " G"], group_offset: Int[Array, ""], num_rows: int, widths: tuple[int, ...]) -> Work:
    """See `gpu_tiles.cut`; columns of `tiles` past the last tile hold anything."""
    num_groups = group_sizes.shape[0]
    most = most_tiles(num_groups, num_rows, widths)
    ref = plgpu.RefType()

    def emit(context: Any, *refs: Any) -> None:
        from pallas_kernels.lightning_indexer.gpu_warp import Warp, place_of

        del context
        places = map(place_of, refs)
        cut_by_warps(Warp(), *places, num_groups=num_groups, num_rows=num_rows, widths=widths, most=most)

    def cut_tiles(sizes: Any, offset: Any, tiles: Any, used: Any, *, room: Any) -> None:
        plgpu.inline_mgpu(arg_types=(ref,) * 5, return_type=None)(emit)(sizes, offset, tiles, used, room)

    tiles, used = plgpu.kernel(
        cut_tiles,
        out_type=(
            jax.ShapeDtypeStruct((6, most), jnp.int32),
            jax.ShapeDtypeStruct((num_groups + 1,), jnp.int32),
        ),
        grid=(1,),
        grid_names=("block",),
        num_threads=WARPS // 4,
        thread_name="warpgroup",
        scratch_types={"room": plgpu.SMEM((room_for(num_groups),), jnp.int32)},
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(group_sizes.astype(jnp.int32), group_offset.astype(jnp.int32).reshape(1))
    return Work(tiles, used)
