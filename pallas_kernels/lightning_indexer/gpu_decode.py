"""The Hopper kernel for few queries a row: scores of long rows of keys, read once from memory as they're stored.

Keys are on the instruction's 64 rows, MXFP8 ones unpacked in registers, and the heads of up to 4 queries on its other
side. Blocks of threads share all rows' keys evenly; one warpgroup copies and the others score 64 keys each. Scores go
to memory in the order of `gpu_select`, with the highest of every 16, from which `gpu_rows` starts its search.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.lightning_indexer.gpu_keys import LINE, store
from pallas_kernels.lightning_indexer.gpu_plain import order_plainly
from pallas_kernels.lightning_indexer.gpu_select import INVISIBLE, order
from pallas_kernels.lightning_indexer.gpu_unpack import order_inputs, unpack, unpack_plainly
from pallas_kernels.lightning_indexer.pages import PagedKeys
from pallas_kernels.mxfp8 import Mxfp8

HEADS, WIDTH, KEYS = 32, 128, 64
GROUP = 16
"""Keys of which the highest score is kept as well."""

SHARED_BYTES = 225 * 1024
"""Shared memory that a block of threads may fill: Hopper's 227 KiB but for barriers and alignment."""

_COPY_REGISTERS, _MOST_STAGES = 40, 8
_SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


def score_rows(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S K"] | Mxfp8 | PagedKeys,
    w: Float[Array, "B T H"],
    limits: Int[Array, "B T"],
    *,
    blocks: int = 132,
    groups: int = 4,
    stages: int | None = None,
    interpret: Any = None,
) -> tuple[Int[Array, "B T S"], Int[Array, "B T G"]]:
    """Orders of scores and the highest of every 16, of T = 1, 2, 4 or 8 queries; anything past a row's last tile.

    `limits` are last visible positions. Rows of scores are as long as whole tiles of 64 · groups keys.
    """
    batch, queries, _, _ = q.shape
    tile = KEYS * groups
    source, stored = store(k, tile, interpret=interpret is not None)
    packed = source.packed
    num_keys = -(-k.shape[1] // tile) * tile
    columns = queries * HEADS
    if stages is None:
        free = SHARED_BYTES - 2 * columns * (2 * WIDTH + 4)
        stages = min(_MOST_STAGES, free // (tile * (WIDTH + 4 if packed else 2 * WIDTH)))
    q = q.reshape(batch, columns, WIDTH)
    if packed:
        q = order_inputs(q)

    def kernel(limits: Any, weights: Any, q: Any, *refs: Any, **scratch: Any) -> None:
        *keys, orders, highest = refs
        k_slots, q_slots, w_slots = scratch["k_slots"], scratch["q_slots"], scratch["w_slots"]
        full, empty, q_full, q_empty = scratch["full"], scratch["empty"], scratch["q_full"], scratch["q_empty"]
        group = lax.axis_index("warpgroup")
        me = lax.axis_index("block")
        share = _share_plainly if interpret is not None else _share
        first_row, first_tile, mine = share(limits, me, batch, queries, tile, blocks)

        def tiles_of(row: Array) -> Array:
            last = functools.reduce(jnp.maximum, [limits[row * queries + query] for query in range(queries)])
            return lax.div(jnp.maximum(last, 0), tile) + 1

        def walk(step: Any) -> Array:
            """Calls step(number, row, which of this block's rows, tile, whether the row is new) for each tile.

            Returns which of this block's rows came last.
            """

            def one(number: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
                seen, began = carry
                row, at = first_row + seen, number - began + jnp.where(seen == 0, first_tile, 0)
                step(number, row, seen, at, number == began)
                ends = ((at + 1 == tiles_of(row)) & (number + 1 < mine)).astype(jnp.int32)
                return seen + ends, jnp.where(ends > 0, number + 1, began)

            return lax.fori_loop(0, mine, one, (jnp.int32(0), jnp.int32(0)))[0]

        def copy(number: Array, row: Array, seen: Array, at: Array, fresh: Array) -> None:
            @pl.when(fresh)
            def _() -> None:
                side = lax.rem(seen, 2)

                @pl.when(seen >= 2)
                def _() -> None:
                    plgpu.barrier_wait(q_empty.at[side])

                plgpu.copy_gmem_to_smem(q.at[row], q_slots.at[side], q_full.at[side])
                plgpu.copy_gmem_to_smem(weights.at[row], w_slots.at[side], q_full.at[side])

            slot = lax.rem(number, stages)

            @pl.when(number >= stages)
            def _() -> None:
                plgpu.barrier_wait(empty.at[slot])

            pieces = source.pieces(keys, row, at * tile, tile, KEYS)
            for piece in pieces:
                which, begin = divmod(piece.begin, KEYS)
                target = k_slots.at[slot, which, pl.ds(begin, piece.size)]
                source.copy_keys(keys, piece, target, full.at[slot])
            if not packed:
                return
            for piece in pieces if source.page else source.pieces(keys, row, at * tile, tile, tile):
                target = scratch["scale_slots"].at[slot, pl.ds(piece.begin // LINE, piece.size // LINE)]
                source.copy_scales(keys, piece, target, full.at[slot])

        def score(number: Array, row: Array, seen: Array, at: Array, fresh: Array) -> None:
            side = lax.rem(seen, 2)

            @pl.when(fresh)
            def _() -> None:
                @pl.when(number > 0)
                def _() -> None:
                    plgpu.barrier_arrive(q_empty.at[1 - side])

                plgpu.barrier_wait(q_full.at[side])

            slot = lax.rem(number, stages)
            plgpu.barrier_wait(full.at[slot])
            if not packed:
                left = k_slots.at[slot, group]
            else:
                scale = scratch["scale_slots"].at[slot, pl.ds(group * 2, 2)]
                if interpret is None:
                    left = unpack(k_slots.at[slot, group], scale)
                else:
                    scratch["plain"][group] = unpack_plainly(k_slots[slot, group], scale[...].reshape(KEYS, 4))
                    left = scratch["plain"].at[group]

            def product(total: Any) -> Array:
                if interpret is None:
                    right = q_slots.at[side].transpose((1, 0))
                else:  # which turns no references in jax 0.10
                    scratch["flipped"][group] = q_slots[side].T
                    right = scratch["flipped"].at[group]
                plgpu.wgmma(total, left, right)
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(empty.at[slot])
                return total[...]

            dots = pl.run_scoped(product, plgpu.WGMMAAccumulatorRef((KEYS, columns), jnp.float32))
            act = _plainly if interpret is not None else _emit
            act(dots, w_slots.at[side], limits, orders, highest, row * queries, at * tile + group * KEYS)

        @pl.when(group == groups)
        def _() -> None:
            plgpu.set_max_registers(_COPY_REGISTERS, action="decrease")
            last = walk(copy)
            # Stay until everything was read: barriers must be even in the end.

            @pl.when(last > 0)
            def _() -> None:
                plgpu.barrier_wait(q_empty.at[lax.rem(last + 1, 2)])

            for index in range(stages):

                @pl.when(mine + index >= stages)
                def _(index: int = index) -> None:
                    plgpu.barrier_wait(empty.at[lax.rem(mine + index, stages)])

        @pl.when(group < groups)
        def _() -> None:
            plgpu.set_max_registers({1: 240, 2: 232, 3: 152, 4: 104}[groups], action="increase")
            walk(score)

    arrivals = source.copies(tile, KEYS)
    if packed:
        arrivals += source.copies(tile, KEYS if source.page else tile)
    scratch: dict[str, Any] = {
        "q_slots": plgpu.SMEM((2, columns, WIDTH), q.dtype, transforms=_SWIZZLED),
        "w_slots": plgpu.SMEM((2, columns), jnp.float32),
        "full": plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages),
        "empty": plgpu.Barrier(num_arrivals=groups, num_barriers=stages),
        "q_full": plgpu.Barrier(num_arrivals=2, num_barriers=2),
        "q_empty": plgpu.Barrier(num_arrivals=groups, num_barriers=2),
    }
    if packed:
        scratch["k_slots"] = plgpu.SMEM((stages, groups, KEYS, WIDTH), jnp.uint8)
        scratch["scale_slots"] = plgpu.SMEM((stages, 2 * groups, WIDTH), jnp.uint8)
    else:
        scratch["k_slots"] = plgpu.SMEM((stages, groups, KEYS, WIDTH), q.dtype, transforms=_SWIZZLED)
    mesh: dict[str, Any] = {}
    if interpret is not None:
        scratch["flipped"] = plgpu.SMEM((groups, WIDTH, columns), q.dtype)
        if packed:
            scratch["plain"] = plgpu.SMEM((groups, KEYS, WIDTH), q.dtype)
        mesh["interpret"] = interpret
    rows = batch * queries
    orders, highest = plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct((rows, num_keys), jnp.int32),
            jax.ShapeDtypeStruct((rows, num_keys // GROUP), jnp.int32),
        ),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=groups + 1,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        **mesh,
    )(limits.reshape(-1), w.astype(jnp.float32).reshape(batch, columns), q, *stored)
    return orders.reshape(batch, queries, -1), highest.reshape(batch, queries, -1)


def _share(limits: Any, me: Array, batch: int, queries: int, tile: int, blocks: int) -> list[Array]:
    """A block's run of tiles: row and tile of the first one, and how many.

    All blocks get as many tiles as the others, give or take one, of those that somebody sees. Each warp finds that out
    by itself; XLA would take several kernels for as many microseconds.
    """

    def emit(context: Any, limits: Any, me: Any) -> list[Any]:
        from pallas_kernels.lightning_indexer.gpu_warp import Warp, place_of

        del context
        warp = Warp()
        found = share_of(warp, place_of(limits), me.registers.item(), batch, queries, tile, blocks)
        return [warp.splat(value) for value in found]

    scalar = plgpu.Layout.WG_SPLAT(())
    kind = plgpu.ShapeDtypeStruct((), jnp.dtype("int32"), layout=scalar)
    return plgpu.inline_mgpu(arg_types=(plgpu.RefType(), scalar), return_type=[kind] * 3)(emit)(limits, me)


def share_of(warp: Any, limits: Any, me: Any, batch: int, queries: int, tile: int, blocks: int) -> list[Any]:
    """`_share` in the words of `gpu_warp.Warp`, which all lanes know in the end."""

    def tiles_from(chunk: Any) -> Any:
        """Tiles of 32 rows, one a lane."""
        row = warp.add(warp.mul(chunk, 32), warp.lane)
        inside = warp.smaller(row, batch - 1)
        last = warp.integer(0)
        for query in range(queries):
            last = warp.larger(last, warp.load(limits, warp.add(warp.mul(inside, queries), query)))
        return warp.select(warp.compare("lt", row, batch), warp.add(warp.quotient(last, tile), 1), 0)

    chunks = -(-batch // 32)
    [total] = warp.loop(
        warp.integer(chunks), lambda chunk, sum: [warp.add(sum, warp.total(tiles_from(chunk)))], [warp.integer(0)]
    )
    each = warp.quotient(total, blocks)
    extra = warp.sub(total, warp.mul(each, blocks))
    first = warp.add(warp.mul(me, each), warp.smaller(me, extra))
    mine = warp.add(each, warp.count_of(warp.compare("lt", me, extra)))

    def look(chunk: Any, before: Any, row: Any, skipped: Any) -> list[Any]:
        """Counts rows that end at or before the first tile, and their tiles."""
        count = tiles_from(chunk)
        upto = warp.add(before, warp.upto(count))
        past = warp.both(warp.compare("ge", first, upto), warp.compare("gt", count, 0))
        row = warp.add(row, warp.ones(warp.ballot(past)))
        skipped = warp.add(skipped, warp.total(warp.select(past, count, 0)))
        return [warp.add(before, warp.total(count)), row, skipped]

    zero = warp.integer(0)
    _, row, skipped = warp.loop(warp.integer(chunks), look, [zero, zero, zero])
    return [warp.smaller(row, batch - 1), warp.sub(first, skipped), mine]


def _share_plainly(limits: Any, me: Array, batch: int, queries: int, tile: int, blocks: int) -> list[Array]:
    """The same for the interpreter."""
    counts = jnp.maximum(jnp.max(limits[...].reshape(batch, queries), axis=1), 0) // tile + 1
    upto = jnp.cumsum(counts)
    each, extra = upto[-1] // blocks, upto[-1] % blocks
    first = me * each + jnp.minimum(me, extra)
    row = jnp.minimum(jnp.sum(upto <= first), batch - 1)
    return [row, first - (upto - counts)[row], each + (me < extra)]


def _emit(dots: Array, weights: Any, limits: Any, orders: Any, highest: Any, row: Array, start: Array) -> None:
    """Head sums of 64 keys, their orders and the highest of each warp's 16 keys to memory."""
    queries, num_keys = dots.shape[1] // HEADS, orders.shape[1]

    def emit(
        context: Any, dots: Any, weights: Any, limits: Any, orders: Any, highest: Any, row: Any, start: Any
    ) -> None:
        from pallas_kernels.lightning_indexer.gpu_warp import Warp, place_of

        warp = Warp()
        del context
        registers = dots.registers.reshape(queries * HEADS // 8, 2)
        column = warp.both(warp.lane, 3)
        upper = warp.compare("eq", warp.both(warp.lane, 1), 1)
        below = warp.compare("lt", column, 2)
        w_place, limit_place = place_of(weights), place_of(limits)
        order_place, high_place = place_of(orders), place_of(highest)
        # Lanes c = 0 and 1 of four end up with keys r and r + 8 of the warp's 16.
        mine = warp.add(warp.mul(warp.number, GROUP), warp.shift_down(warp.lane, 2))
        mine = warp.add(mine, warp.mul(warp.both(warp.lane, 1), 8))
        first = start.registers.item()
        position = warp.add(first, mine)
        for query in range(queries):
            sums = [warp.real(0.0), warp.real(0.0)]
            for block in range(HEADS // 8):
                for odd in range(2):
                    place = warp.add(warp.add(column, column), query * HEADS + 8 * block + odd)
                    weight = warp.load_real(w_place, place)
                    for half in range(2):
                        value = warp.element(registers[query * HEADS // 8 + block, half], odd)
                        sums[half] = warp.multiply_add(weight, warp.relu(value), sums[half])
            kept, sent = warp.select(upper, sums[1], sums[0]), warp.select(upper, sums[0], sums[1])
            score = warp.add_real(kept, warp.from_lane_xor(sent, 1))
            score = warp.add_real(score, warp.from_lane_xor(score, 2))
            number = warp.add(row.registers.item(), query)
            limit = warp.load(limit_place, number)
            value = warp.select(warp.compare("ge", limit, position), order(warp, score), INVISIBLE)
            line = warp.offset(order_place, warp.mul(number, num_keys))
            warp.store(line, position, value, below)
            best = warp.largest(value)
            group = warp.add(warp.shift_down(first, 4), warp.number)
            line = warp.offset(high_place, warp.mul(number, num_keys // GROUP))
            warp.store(line, group, best, warp.compare("eq", warp.lane, 0))

    ref, scalar = plgpu.RefType(), plgpu.Layout.WG_SPLAT(())
    plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, ref, ref, ref, ref, scalar, scalar), return_type=None)(emit)(
        dots, weights, limits, orders, highest, row, start
    )


def _plainly(dots: Array, weights: Any, limits: Any, orders: Any, highest: Any, row: Array, start: Array) -> None:
    """The same for the interpreter."""
    queries = dots.shape[1] // HEADS
    relu = jnp.where(dots <= 0, 0, dots) * weights[...]
    scores = relu.reshape(KEYS, queries, HEADS).sum(axis=2).T
    position = start + jnp.arange(KEYS)
    seen = position <= limits[pl.ds(row, queries)][:, None]
    values = jnp.where(seen, order_plainly(scores), INVISIBLE)
    orders[pl.ds(row, queries), pl.ds(start, KEYS)] = values
    grouped = values.reshape(queries, KEYS // GROUP, GROUP).max(axis=2)
    highest[pl.ds(row, queries), pl.ds(lax.div(start, GROUP), KEYS // GROUP)] = grouped
