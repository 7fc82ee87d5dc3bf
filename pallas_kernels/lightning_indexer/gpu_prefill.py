"""The Hopper kernel for many queries: scores stay in registers, candidates in a little memory of each block of threads.

A block of threads owns 8 queries at a time and walks over the keys they see. One warpgroup copies queries and tiles of
128 keys into shared memory; two multiply, each 4 queries' 4 x 32 heads by a tile's keys. The heads are laid on the
instruction's 64 rows so that a warp gets all 32 heads of one query, 16 from each of two products. Then a warp sums its
query's heads, and keeps the best keys by itself: no other warp ever sees that query's scores.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.lightning_indexer.gpu_keys import LINE, Piece, store
from pallas_kernels.lightning_indexer.gpu_plain import absorb_plainly, add_heads_plainly, begin_plainly, finish_plainly
from pallas_kernels.lightning_indexer.gpu_select import (
    COLUMNS,
    INVISIBLE,
    LIMIT,
    STATE,
    Room,
    add_heads,
    add_lanes,
    append,
    begin,
    finish,
    make_room,
    order,
)
from pallas_kernels.lightning_indexer.gpu_unpack import widen, widen_plainly
from pallas_kernels.lightning_indexer.pages import PagedKeys
from pallas_kernels.mxfp8 import Mxfp8

HEADS, WIDTH = 32, 128
GROUPS, QUERIES = 2, 4
"""Warpgroups that multiply, and queries of each."""

TILE, ROWS = GROUPS * QUERIES, QUERIES * HEADS // 2
RAW = 3
"""Tiles of MXFP8 keys on their way."""

_COPY_REGISTERS, _PRODUCT_REGISTERS = 40, 232
SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


def prefill(
    q: Float[Array, "B T H K"] | Mxfp8,
    k: Float[Array, "B S K"] | Mxfp8 | PagedKeys,
    w: Float[Array, "B T H"],
    q_positions: Int[Array, "B T"],
    room: Room,
    *,
    blocks: int = 132,
    together: int = 2,
    stages: int | None = None,
    interpret: Any = None,
) -> Int[Array, "B T C"]:
    """Selected positions of a number of queries that divides into tiles of 8; keys past the end are zeros."""
    batch, num_queries, _, _ = q.shape
    num_keys = k.shape[1]
    packed_q = isinstance(q, Mxfp8)
    packed = k.mxfp8 if isinstance(k, PagedKeys) else isinstance(k, Mxfp8)
    stages = stages or (2 if packed else 3 if packed_q else 4)
    source, stored = store(k, COLUMNS * together, interpret=interpret is not None)
    if isinstance(q, Mxfp8):
        stored += [lax.bitcast_convert_type(q.elements, jnp.uint8), q.scale.reshape(batch, num_queries, -1)]
    else:
        stored += [q]
    tiles_of_row = num_queries // TILE
    tiles = batch * tiles_of_row
    blocks = min(blocks, tiles)
    limits = jnp.minimum(q_positions.astype(jnp.int32), num_keys - 1)
    # How many tiles of keys a tile of queries sees.
    ends = (jnp.max(limits.reshape(tiles, TILE), axis=1) // (COLUMNS * together) + 1) * together

    def kernel(
        ends: Any,
        limits: Any,
        weights: Any,
        *refs: Any,
        q_slots: Any,
        k_slots: Any,
        states: Any,
        q_full: Any,
        q_empty: Any,
        full: Any,
        empty: Any,
        **more: Any,
    ) -> None:
        *keys, out, candidates = refs
        keys, (q, *q_scale) = (keys[:-2], keys[-2:]) if packed_q else (keys[:-1], keys[-1:])
        group = lax.axis_index("warpgroup")
        me = lax.axis_index("block")
        mine = lax.div(tiles - me + (blocks - 1), blocks)

        def tile_of(number: Array) -> Array:
            return tiles - 1 - (me + number * blocks)  # the longest first

        def copy_tile(number: Array, done: Array) -> Array:
            tile = tile_of(number)
            row, first = lax.div(tile, tiles_of_row), lax.rem(tile, tiles_of_row) * TILE

            @pl.when(number > 0)
            def _() -> None:
                plgpu.barrier_wait(q_empty)

            for which in range(GROUPS):
                mine = first + which * QUERIES
                if packed_q:
                    plgpu.copy_gmem_to_smem(q.at[row, pl.ds(mine, QUERIES)], more["raw_q"].at[which], q_full)
                    plgpu.copy_gmem_to_smem(q_scale[0].at[row, pl.ds(mine, QUERIES)], more["scale_q"].at[which], q_full)
                    continue
                for half in range(2):
                    for query in range(QUERIES):
                        heads = q.at[row, mine + query, pl.ds(half * (HEADS // 2), HEADS // 2)]
                        target = q_slots.at[which, half, pl.ds(query * (HEADS // 2), HEADS // 2)]
                        plgpu.copy_gmem_to_smem(heads, target, q_full)

            count = ends[tile]

            def room_in(step: Array) -> Array:
                slot = lax.rem(done + step, stages)

                @pl.when(done + step >= stages)
                def _() -> None:
                    plgpu.barrier_wait(empty.at[slot])

                return slot

            def pieces_of(step: Array) -> list[Piece]:
                return source.pieces(keys, row, step * COLUMNS, COLUMNS, COLUMNS)

            def copy(step: Array, carry: tuple[()]) -> tuple[()]:
                slot = room_in(step)
                for piece in pieces_of(step):
                    target = k_slots.at[slot, pl.ds(piece.begin, piece.size)]
                    source.copy_keys(keys, piece, target, full.at[slot])
                return carry

            def fetch(step: Array, pieces: list[Piece]) -> None:
                slot = lax.rem(done + step, RAW)
                raw_full = more["raw_full"].at[slot]
                for piece in pieces:
                    target = more["raw_slots"].at[slot, pl.ds(piece.begin, piece.size)]
                    source.copy_keys(keys, piece, target, raw_full)
                    target = more["scale_slots"].at[slot, pl.ds(piece.begin // LINE, piece.size // LINE)]
                    source.copy_scales(keys, piece, target, raw_full)

            def convert(step: Array, carry: tuple[()]) -> tuple[()]:
                raw = lax.rem(done + step, RAW)
                # A page's number comes from the second cache, so it is looked up long before it is needed.
                pieces = pieces_of(step + RAW)
                plgpu.barrier_wait(more["raw_full"].at[raw])
                slot = room_in(step)
                if interpret is None:
                    widen(more["raw_slots"].at[raw], more["scale_slots"].at[raw], k_slots.at[slot], SWIZZLED)
                else:
                    scale = more["scale_slots"][raw].reshape(COLUMNS, 4)
                    k_slots[slot] = widen_plainly(more["raw_slots"][raw], scale)
                plgpu.commit_smem()
                plgpu.barrier_arrive(full.at[slot])

                @pl.when(step + RAW < count)
                def _() -> None:
                    fetch(step + RAW, pieces)

                return carry

            if packed:
                for step in range(RAW):

                    @pl.when(step < count)
                    def _(step: int = step) -> None:
                        fetch(jnp.int32(step), pieces_of(jnp.int32(step)))

            lax.fori_loop(0, count, convert if packed else copy, ())
            return done + count

        def select_tile(number: Array, done: Array) -> Array:
            tile = tile_of(number)
            act = Plain(room) if interpret is not None else Emit(room, together)
            return select_from(
                act,
                lambda step, tile: (step + tile) * COLUMNS,
                group,
                tile * TILE + group * QUERIES,  # of this warpgroup's queries, of all batch rows
                ends[tile],
                done,
                (weights, limits, out),
                (q_slots, k_slots, states.at[group], candidates.at[me * GROUPS + group]),
                (q_full, q_empty, full, empty),
                (more["raw_q"], more["scale_q"]) if packed_q else None,
                stages=stages,
                together=together,
            )

        @pl.when(group == GROUPS)
        def _() -> None:
            plgpu.set_max_registers(_COPY_REGISTERS, action="decrease")
            done = lax.fori_loop(0, mine, copy_tile, jnp.int32(0))
            # Stay until everything was read: barriers must be even in the end.
            plgpu.barrier_wait(q_empty)
            for index in range(stages):

                @pl.when(done + index >= stages)
                def _(index: int = index) -> None:
                    plgpu.barrier_wait(empty.at[lax.rem(done + index, stages)])

        @pl.when(group < GROUPS)
        def _() -> None:
            plgpu.set_max_registers(_PRODUCT_REGISTERS, action="increase")
            lax.fori_loop(0, mine, select_tile, jnp.int32(0))

    scratch: dict[str, Any] = {
        "q_slots": plgpu.SMEM((GROUPS, 2, ROWS, WIDTH), jnp.bfloat16, transforms=SWIZZLED),
        "k_slots": plgpu.SMEM((stages, COLUMNS, WIDTH), jnp.bfloat16, transforms=SWIZZLED),
        "states": plgpu.SMEM((GROUPS, QUERIES * STATE), jnp.int32),
        "q_full": plgpu.Barrier(num_arrivals=GROUPS * 2 * (1 if packed_q else QUERIES)),
        "q_empty": plgpu.Barrier(num_arrivals=GROUPS),
        "full": plgpu.Barrier(num_arrivals=1 if packed else source.copies(COLUMNS, COLUMNS), num_barriers=stages),
        "empty": plgpu.Barrier(num_arrivals=GROUPS, num_barriers=stages),
    }
    mesh: dict[str, Any] = {}
    if packed_q:
        scratch["raw_q"] = plgpu.SMEM((GROUPS, QUERIES, HEADS, WIDTH), jnp.uint8)
        scratch["scale_q"] = plgpu.SMEM((GROUPS, QUERIES, HEADS * 4), jnp.uint8)
    if packed:
        scratch["raw_slots"] = plgpu.SMEM((RAW, COLUMNS, WIDTH), jnp.uint8)
        scratch["scale_slots"] = plgpu.SMEM((RAW, COLUMNS * 4 // WIDTH, WIDTH), jnp.uint8)
        scratch["raw_full"] = plgpu.Barrier(num_arrivals=2 * source.copies(COLUMNS, COLUMNS), num_barriers=RAW)
    if interpret is not None:
        mesh["interpret"] = interpret
    out, _ = plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct((batch * num_queries, room.top_k), jnp.int32),
            jax.ShapeDtypeStruct((blocks * GROUPS, QUERIES, 2, room.size), jnp.int32),
        ),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=GROUPS + 1,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        **mesh,
    )(ends, limits.reshape(-1), w.reshape(-1, HEADS), *stored)
    return out.reshape(batch, num_queries, room.top_k)


def select_from(
    act: Any,
    places_of: Callable[[Any, int], Any],
    group: Any,
    first: Any,
    count: Any,
    done: Any,
    memory: tuple[Any, Any, Any],
    slots: tuple[Any, Any, Any, Any],
    barriers: tuple[Any, Any, Any, Any],
    raw: tuple[Any, Any] | None,
    *,
    stages: int,
    together: int,
) -> Array:
    """What a warpgroup that multiplies does for its four queries: all tiles of keys, and the selection.

    Args:
        act: what it does by itself, `Emit` or `Plain`.
        places_of: the first position of a tile, or where its positions are, from the number of the first tile of
            `together` and which of these it is.
        group: which warpgroup.
        first: number of the first query, of all rows.
        count: tiles of keys.
        done: tiles before.
        memory: head weights, last visible positions, the result.
        slots: of queries, of keys, the selections' state and candidates.
        barriers: queries are there, and used; keys are there, and used.
        raw: MXFP8 queries and their scales, where queries come so.
        stages: slots of keys.
        together: tiles a step.
    """
    weights, limits, out = memory
    q_slots, k_slots, state, room_of = slots
    q_full, q_empty, full, empty = barriers
    w_low, w_high = act.weights(weights, first, 0), act.weights(weights, first, 1)
    act.begin(state, limits, first)
    plgpu.barrier_wait(q_full)
    if raw is not None:
        act.widen(raw[0].at[group], raw[1].at[group], q_slots, group)
        plgpu.commit_smem()

    def some(number: Array, carry: tuple[()]) -> tuple[()]:
        """`together` tiles; while heads of one product are summed, the next product runs."""
        step = number * together
        slots = [lax.rem(done + step + tile, stages) for tile in range(together)]
        plgpu.barrier_wait(full.at[slots[0]])
        low = act.multiply(q_slots.at[group, 0], k_slots.at[slots[0]])
        sums: list[Array] = []
        for tile, slot in enumerate(slots):
            high = act.multiply(q_slots.at[group, 1], k_slots.at[slot])
            if sums:
                act.append(sums[-1], places_of(step, tile - 1), step + tile == 1, state, room_of)
            act.wait(1)
            half = act.add(low, w_low)
            if tile + 1 < together:
                plgpu.barrier_wait(full.at[slots[tile + 1]])
                low = act.multiply(q_slots.at[group, 0], k_slots.at[slots[tile + 1]])
                act.wait(1)
            else:
                act.wait(0)
            plgpu.barrier_arrive(empty.at[slot])
            sums.append(act.add(high, w_high, half))
        act.append(sums[-1], places_of(step, together - 1), step + together == 1, state, room_of)
        act.make_room(state, room_of)
        return carry

    lax.fori_loop(0, lax.div(count, together), some, ())
    plgpu.barrier_arrive(q_empty)
    act.finish(state, room_of, out, first)
    return done + count


_WGMMA, _ROW, _SCALAR = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WG_SPLAT(())
_REF = plgpu.RefType()


class Emit:
    """The parts of the kernel that a warp does by itself, as instructions."""

    def __init__(self, room: Room, tiles: int) -> None:
        self.room, self.tiles = room, tiles

    def weights(self, weights: Any, first: Array, which: int) -> Array:
        """Weights of the first or the other 16 heads of four queries, as they belong to the rows of a product."""
        layout = _ROW.to_mgpu()

        def emit(context: Any, weights: Any, first: Any) -> Any:
            warp, place = words()
            query = warp.add(first.registers.item(), warp.number)
            head = warp.add(warp.mul(query, HEADS), warp.add(warp.shift_down(warp.lane, 2), which * HEADS // 2))
            values = [warp.load_real(place(weights), warp.add(head, 8 * half)) for half in range(2)]
            return warp.array(values, (ROWS,), layout)

        kind = plgpu.ShapeDtypeStruct((ROWS,), jnp.dtype("float32"), layout=_ROW)
        return plgpu.inline_mgpu(arg_types=(_REF, _SCALAR), return_type=kind)(emit)(weights, first)

    def begin(self, states: Any, limits: Any, first: Array) -> None:
        """Empty selections of four queries."""

        def emit(context: Any, states: Any, limits: Any, first: Any) -> None:
            warp, place = words()
            query = warp.add(first.registers.item(), warp.number)
            limit = warp.load(place(limits), query)
            begin(warp, warp.offset(place(states), warp.mul(warp.number, STATE)), limit)

        inline(emit, (_REF, _REF, _SCALAR))(states, limits, first)

    def widen(self, raw: Any, scale: Any, q_slots: Any, group: Any) -> None:
        """Four MXFP8 queries as the products want them."""
        widen(raw, scale, q_slots.at[group], SWIZZLED, queries=True)

    def multiply(self, q: Any, k: Any) -> Array:
        """See `multiply`."""
        return multiply(q, k)

    def wait(self, running: int) -> None:
        """Until at most that many of the last products are still running."""
        plgpu.wgmma_wait(running)

    def add(self, dots: Array, weights: Array, sums: Array | None = None) -> Array:
        """Adds 16 heads of each query, two of them a lane, to 32 numbers a lane, in any layout that holds as many."""
        kind = plgpu.ShapeDtypeStruct((ROWS, COLUMNS // 2), jnp.dtype("float32"), layout=_WGMMA)

        def emit(context: Any, dots: Any, weights: Any, *sums: Any) -> Any:
            warp, _ = words()
            # Registers aren't looked at before the wait that came before.
            registers = warp.settled(dots).registers.reshape(COLUMNS // 8, 2, 2)
            found = {
                (half, block, odd): warp.element(registers[block, half, odd], 0)
                for block in range(COLUMNS // 8)
                for half in range(2)
                for odd in range(2)
            }
            of_heads = [warp.element(register, 0) for register in weights.registers.reshape(2)]
            before = warp.unpack(sums[0], COLUMNS // 8) if sums else None
            return warp.pack(add_heads(warp, found, of_heads, before), COLUMNS // 8)

        arguments = (dots, weights) if sums is None else (dots, weights, sums)
        types = (_dots(), _ROW, _WGMMA)[: len(arguments)]
        return plgpu.inline_mgpu(arg_types=types, return_type=kind)(emit)(*arguments)

    def append(self, sums: Array, places: Any, fresh: Any, states: Any, candidates: Any) -> None:
        """Adds what lanes have summed, and appends to four selections what may belong to them."""
        del fresh
        listed = places.shape != ()

        def emit(context: Any, sums: Any, places: Any, states: Any, candidates: Any) -> None:
            warp, place = words()
            mine = warp.offset(place(candidates), warp.mul(warp.number, 2 * self.room.size))
            sums = warp.unpack(sums, COLUMNS // 8)
            scores = add_lanes(warp, sums)
            state = warp.offset(place(states), warp.mul(warp.number, STATE))
            limit = warp.load(state, warp.integer(LIMIT))
            orders, positions = {}, {}
            for (tall, odd), score in scores.items():
                if listed:
                    at = warp.add(warp.add(warp.lane, warp.lane), 64 * tall + odd)
                    position = warp.load(place(places), at)
                else:
                    first = warp.add(places.registers.item(), 64 * tall + odd)
                    position = warp.add(first, warp.add(warp.lane, warp.lane))
                seen = warp.compare("ge", limit, position)
                orders[tall, odd] = warp.select(seen, order(warp, score), INVISIBLE)
                positions[tall, odd] = position
            append(warp, orders, positions, state, mine, self.room)

        inline(emit, (_WGMMA, _REF if listed else _SCALAR, _REF, _REF))(sums, places, states, candidates)

    def make_room(self, states: Any, candidates: Any) -> None:
        """Cuts selections that the next tiles might overflow."""

        def emit(context: Any, states: Any, candidates: Any) -> None:
            warp, place = words()
            mine = warp.offset(place(candidates), warp.mul(warp.number, 2 * self.room.size))
            make_room(warp, place(states), mine, self.room, self.tiles)

        inline(emit, (_REF, _REF))(states, candidates)

    def finish(self, states: Any, candidates: Any, out: Any, first: Array) -> None:
        """Writes four queries' positions."""

        def emit(context: Any, states: Any, candidates: Any, out: Any, first: Any) -> None:
            warp, place = words()
            state = warp.offset(place(states), warp.mul(warp.number, STATE))
            mine = warp.offset(place(candidates), warp.mul(warp.number, 2 * self.room.size))
            query = warp.add(first.registers.item(), warp.number)
            finish(warp, state, mine, warp.row(place(out), query, self.room.top_k), self.room)

        inline(emit, (_REF, _REF, _REF, _SCALAR))(states, candidates, out, first)


def multiply(q: Any, k: Any) -> Array:
    """Starts a product [64, 128] of rows of q and rows of k. It isn't there before it is waited for."""
    kind = plgpu.ShapeDtypeStruct((ROWS, COLUMNS), jnp.dtype("float32"), layout=_dots())
    swizzled = plgpu.RefType(SWIZZLED)

    def emit(context: Any, q: Any, k: Any) -> Any:
        warp, place = words()
        return warp.start_product(place(q), place(k), COLUMNS)

    return plgpu.inline_mgpu(arg_types=(swizzled, swizzled), return_type=kind)(emit)(q, k)


class Plain:
    """The same for the interpreter, which runs array operations only."""

    def __init__(self, room: Room) -> None:
        self.room = room

    def weights(self, weights: Any, first: Array, which: int) -> Array:
        """Weights of the first or the other 16 heads of four queries."""
        return weights[pl.ds(first, QUERIES), which * (HEADS // 2) : (which + 1) * (HEADS // 2)].reshape(-1)

    def begin(self, states: Any, limits: Any, first: Array) -> None:
        """Empty selections of four queries."""
        begin_plainly(states, limits, first)

    def widen(self, raw: Any, scale: Any, q_slots: Any, group: Any) -> None:
        """Four MXFP8 queries as the products want them."""
        wide = widen_plainly(raw[...].reshape(-1, WIDTH), scale[...].reshape(-1, 4))
        wide = wide.reshape(QUERIES, 2, HEADS // 2, WIDTH).swapaxes(0, 1)
        q_slots[group] = wide.reshape(2, ROWS, WIDTH)

    def multiply(self, q: Any, k: Any) -> Array:
        """A product [64, 128] of rows of q and rows of k."""
        return jnp.dot(q[...], k[...].T, preferred_element_type=jnp.float32)

    def wait(self, running: int) -> None:
        """Nothing runs by itself here."""

    def add(self, dots: Array, weights: Array, sums: Array | None = None) -> Array:
        """Adds 16 heads of each query."""
        return add_heads_plainly(dots, weights) + (0 if sums is None else sums)

    def append(self, sums: Array, places: Any, fresh: Array, states: Any, candidates: Any) -> None:
        """Changes four selections."""
        places = places[...] if places.shape else places + jnp.arange(COLUMNS, dtype=jnp.int32)
        absorb_plainly(sums, places, fresh, states, candidates, self.room)

    def make_room(self, states: Any, candidates: Any) -> None:
        """There is always room here."""

    def finish(self, states: Any, candidates: Any, out: Any, first: Array) -> None:
        """Writes four queries' positions."""
        finish_plainly(candidates, out, first, self.room)


def words() -> tuple[Any, Callable[[Any], Any]]:
    """What kernels are written in inside `inline`, and the place of a reference."""
    from pallas_kernels.lightning_indexer.gpu_warp import Warp, place_of

    return Warp(), place_of


def _dots() -> Any:
    """One 32-bit register for each number of a product: pairs would be put together before they are there."""
    return plgpu.Layout._WGMMA_ACC_32BIT


def inline(emit: Callable[..., None], arguments: tuple[Any, ...]) -> Callable[..., None]:
    """Instructions without a result, for arguments of these types."""
    return plgpu.inline_mgpu(arg_types=arguments, return_type=None)(emit)
