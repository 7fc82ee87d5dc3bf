"""The Hopper kernel for many queries: scores stay in registers, candidates in a little memory of each block of threads.

A block of threads owns 8 queries at a time and walks over the keys they see. One warpgroup copies queries and tiles of
128 keys into shared memory; two multiply, each 4 queries' 4 x 32 heads by a tile's keys. The heads are laid on the
instruction's 64 rows so that a warp gets all 32 heads of one query, 16 from each of two products. Then a warp sums its
query's heads, and keeps the best keys by itself: no other warp ever sees that query's scores.

Where each 8 queries come with a list of keys, the first warpgroup gathers those, a row at a time, and a tile is the next
128 of the list.
"""

from collections.abc import Callable
from functools import partial
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

LISTED, AHEAD = 16, 5
"""Tiles of listed positions in shared memory, and how many tiles before the keys they are fetched. A warp is at most
three tiles behind what has been given back to the copying warpgroup, which is four ahead, so that LISTED is enough."""

_COPY_REGISTERS, _PRODUCT_REGISTERS = 40, 232
_SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


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
    listed: Int[Array, "N L"] | None = None,
    listed_counts: Int[Array, " N"] | None = None,
    interpret: Any = None,
) -> Int[Array, "B T C"]:
    """Selected positions of a number of queries that divides into tiles of 8; keys past the end are zeros.

    With `listed`, of each 8 queries, only the first `listed_counts` keys of its row are looked at, which ascend. The rest
    of their last 256 must be larger than every position, and rows must be a multiple of that long. Pages aren't listed.
    """
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
    if listed is not None:
        stored = [listed, *stored]
    whole = -(-num_keys // (COLUMNS * together)) * COLUMNS * together
    tiles_of_row = num_queries // TILE
    tiles = batch * tiles_of_row
    blocks = min(blocks, tiles)
    limits = jnp.minimum(q_positions.astype(jnp.int32), num_keys - 1)
    # How many tiles of keys a tile of queries sees.
    lasts = jnp.max(limits.reshape(tiles, TILE), axis=1) if listed_counts is None else listed_counts - 1
    ends = (lasts // (COLUMNS * together) + 1) * together

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
        picks, keys = (None, keys) if listed is None else (keys[0], keys[1:])
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

            def look_up(step: Array) -> None:
                slot = lax.rem(done + step, LISTED)
                assert picks is not None
                places = picks.at[tile, pl.ds(step * COLUMNS, COLUMNS)]
                plgpu.copy_gmem_to_smem(places, more["picked"].at[slot], more["picked_full"].at[slot])

            def gather(step: Array) -> None:
                """Starts copying a tile of listed keys, and looks up a later one; they are there after `act.arrived`."""

                @pl.when(step < count)
                def _() -> None:
                    slot = lax.rem(done + step, LISTED)
                    plgpu.barrier_wait(more["picked_full"].at[slot])
                    places = more["picked"].at[slot]
                    if packed:
                        raw = lax.rem(done + step, RAW)
                        target = [more["raw_slots"].at[raw], more["scale_slots"].at[raw]]
                    else:
                        target = [k_slots.at[room_in(step)]]
                    copies.gather(keys, target, places, row)

                    @pl.when(step + AHEAD < count)
                    def _() -> None:
                        look_up(step + AHEAD)

                copies.commit()

            def hand_on(step: Array, carry: tuple[()]) -> tuple[()]:
                """Of listed bfloat16 keys, the tile before those that are still on their way."""
                gather(step + stages - 2)
                copies.arrived(stages - 2)
                plgpu.commit_smem()
                plgpu.barrier_arrive(full.at[lax.rem(done + step, stages)])
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
                pieces = pieces_of(step + RAW) if listed is None else []
                if listed is None:
                    plgpu.barrier_wait(more["raw_full"].at[raw])
                else:
                    copies.arrived(RAW - 1)
                slot = room_in(step)
                if interpret is None:
                    widen(more["raw_slots"].at[raw], more["scale_slots"].at[raw], k_slots.at[slot], _SWIZZLED)
                else:
                    scale = more["scale_slots"][raw].reshape(COLUMNS, 4)
                    k_slots[slot] = widen_plainly(more["raw_slots"][raw], scale)
                plgpu.commit_smem()
                plgpu.barrier_arrive(full.at[slot])

                if listed is not None:
                    gather(step + RAW)
                    return carry

                @pl.when(step + RAW < count)
                def _() -> None:
                    fetch(step + RAW, pieces)

                return carry

            if listed is not None:
                copies = _PlainCopies() if interpret is not None else _Copies(num_keys, whole)
                for step in range(AHEAD):
                    pl.when(step < count)(partial(look_up, jnp.int32(step)))
                for step in range(RAW if packed else stages - 2):
                    gather(jnp.int32(step))
                lax.fori_loop(0, count, convert if packed else hand_on, ())
                return done + count
            if packed:
                for step in range(RAW):

                    @pl.when(step < count)
                    def _(step: int = step) -> None:
                        fetch(jnp.int32(step), pieces_of(jnp.int32(step)))

            lax.fori_loop(0, count, convert if packed else copy, ())
            return done + count

        def select_tile(number: Array, done: Array) -> Array:
            tile = tile_of(number)
            first = tile * TILE + group * QUERIES  # of this warpgroup's queries, of all batch rows
            count = ends[tile]
            state, room_of = states.at[group], candidates.at[me * GROUPS + group]
            act = _Plain(room) if interpret is not None else _Emit(room, together)
            w_low, w_high = act.weights(weights, first, 0), act.weights(weights, first, 1)
            act.begin(state, limits, first)
            plgpu.barrier_wait(q_full)
            if packed_q:
                raw, scale = more["raw_q"].at[group], more["scale_q"].at[group]
                if interpret is None:
                    widen(raw, scale, q_slots.at[group], _SWIZZLED, queries=True)
                else:
                    wide = widen_plainly(raw[...].reshape(-1, WIDTH), scale[...].reshape(-1, 4))
                    wide = wide.reshape(QUERIES, 2, HEADS // 2, WIDTH).swapaxes(0, 1)
                    q_slots[group] = wide.reshape(2, ROWS, WIDTH)
                plgpu.commit_smem()

            def some(number: Array, carry: tuple[()]) -> tuple[()]:
                """`together` tiles; while heads of one product are summed, the next product runs."""
                step = number * together

                def places_of(tile: int) -> Any:
                    """First position of a tile, or where its positions are."""
                    if listed is None:
                        return (step + tile) * COLUMNS
                    return more["picked"].at[lax.rem(done + step + tile, LISTED)]

                slots = [lax.rem(done + step + tile, stages) for tile in range(together)]
                plgpu.barrier_wait(full.at[slots[0]])
                low = act.multiply(q_slots.at[group, 0], k_slots.at[slots[0]])
                sums: list[Array] = []
                for tile, slot in enumerate(slots):
                    high = act.multiply(q_slots.at[group, 1], k_slots.at[slot])
                    if sums:
                        act.append(sums[-1], places_of(tile - 1), step + tile == 1, state, room_of)
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
                act.append(sums[-1], places_of(together - 1), step + together == 1, state, room_of)
                act.make_room(state, room_of)
                return carry

            lax.fori_loop(0, lax.div(count, together), some, ())
            plgpu.barrier_arrive(q_empty)
            act.finish(state, room_of, out, first)
            return done + count

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
        "q_slots": plgpu.SMEM((GROUPS, 2, ROWS, WIDTH), jnp.bfloat16, transforms=_SWIZZLED),
        "k_slots": plgpu.SMEM((stages, COLUMNS, WIDTH), jnp.bfloat16, transforms=_SWIZZLED),
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
        if listed is None:
            scratch["raw_full"] = plgpu.Barrier(num_arrivals=2 * source.copies(COLUMNS, COLUMNS), num_barriers=RAW)
    if listed is not None:
        scratch["picked"] = plgpu.SMEM((LISTED, COLUMNS), jnp.int32)
        scratch["picked_full"] = plgpu.Barrier(num_barriers=LISTED)
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


_WGMMA, _ROW, _SCALAR = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WG_SPLAT(())
_REF = plgpu.RefType()


class _Emit:
    """The parts of the kernel that a warp does by itself, as instructions."""

    def __init__(self, room: Room, tiles: int) -> None:
        self.room, self.tiles = room, tiles

    def weights(self, weights: Any, first: Array, which: int) -> Array:
        """Weights of the first or the other 16 heads of four queries, as they belong to the rows of a product."""
        layout = _ROW.to_mgpu()

        def emit(context: Any, weights: Any, first: Any) -> Any:
            warp, place = _warp()
            query = warp.add(first.registers.item(), warp.number)
            head = warp.add(warp.mul(query, HEADS), warp.add(warp.shift_down(warp.lane, 2), which * HEADS // 2))
            values = [warp.load_real(place(weights), warp.add(head, 8 * half)) for half in range(2)]
            return warp.array(values, (ROWS,), layout)

        kind = plgpu.ShapeDtypeStruct((ROWS,), jnp.dtype("float32"), layout=_ROW)
        return plgpu.inline_mgpu(arg_types=(_REF, _SCALAR), return_type=kind)(emit)(weights, first)

    def begin(self, states: Any, limits: Any, first: Array) -> None:
        """Empty selections of four queries."""

        def emit(context: Any, states: Any, limits: Any, first: Any) -> None:
            warp, place = _warp()
            query = warp.add(first.registers.item(), warp.number)
            limit = warp.load(place(limits), query)
            begin(warp, warp.offset(place(states), warp.mul(warp.number, STATE)), limit)

        _inline(emit, (_REF, _REF, _SCALAR))(states, limits, first)

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
            warp, _ = _warp()
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
            warp, place = _warp()
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

        _inline(emit, (_WGMMA, _REF if listed else _SCALAR, _REF, _REF))(sums, places, states, candidates)

    def make_room(self, states: Any, candidates: Any) -> None:
        """Cuts selections that the next tiles might overflow."""

        def emit(context: Any, states: Any, candidates: Any) -> None:
            warp, place = _warp()
            mine = warp.offset(place(candidates), warp.mul(warp.number, 2 * self.room.size))
            make_room(warp, place(states), mine, self.room, self.tiles)

        _inline(emit, (_REF, _REF))(states, candidates)

    def finish(self, states: Any, candidates: Any, out: Any, first: Array) -> None:
        """Writes four queries' positions."""

        def emit(context: Any, states: Any, candidates: Any, out: Any, first: Any) -> None:
            warp, place = _warp()
            state = warp.offset(place(states), warp.mul(warp.number, STATE))
            mine = warp.offset(place(candidates), warp.mul(warp.number, 2 * self.room.size))
            query = warp.add(first.registers.item(), warp.number)
            finish(warp, state, mine, warp.offset(place(out), warp.mul(query, self.room.top_k)), self.room)

        _inline(emit, (_REF, _REF, _REF, _SCALAR))(states, candidates, out, first)


def multiply(q: Any, k: Any) -> Array:
    """Starts a product [64, 128] of rows of q and rows of k. It isn't there before it is waited for."""
    kind = plgpu.ShapeDtypeStruct((ROWS, COLUMNS), jnp.dtype("float32"), layout=_dots())
    swizzled = plgpu.RefType(_SWIZZLED)

    def emit(context: Any, q: Any, k: Any) -> Any:
        warp, place = _warp()
        return warp.start_product(place(q), place(k), COLUMNS)

    return plgpu.inline_mgpu(arg_types=(swizzled, swizzled), return_type=kind)(emit)(q, k)


def copy_listed(warp: Any, sources: list[Any], targets: list[Any], places: Any, num_keys: int) -> None:
    """Starts copying this warp's 32 of a tile's listed keys, in the words of `gpu_warp.Warp`.

    Args:
        warp: the words.
        sources: where keys of 256 bytes are, or those of 128 and their scales of 4.
        targets: where a tile of them is in shared memory: the former as tiles of 8 x 64, 128 bytes swizzled.
        places: where the tile's positions are; those past the end are read as the last key, which nobody sees.
        num_keys: in the row.
    """
    packed = len(sources) == 2
    chunks = 8 if packed else 16  # of four integers
    first = warp.mul(warp.number, 32)

    def key_at(which: Any) -> Any:
        return warp.smaller(warp.load(places, which), num_keys - 1)

    for part in range(chunks):
        which = warp.add(warp.add(first, 32 // chunks * part), warp.quotient(warp.lane, chunks))
        chunk = warp.both(warp.lane, chunks - 1)
        begin = warp.add(warp.mul(key_at(which), 4 * chunks), warp.mul(chunk, 4))
        if packed:
            target = warp.add(warp.mul(which, 32), warp.mul(chunk, 4))
        else:
            line = warp.add(warp.mul(warp.quotient(which, 8), 512), warp.mul(warp.both(which, 7), 32))
            column = warp.differ(warp.both(chunk, 7), warp.both(which, 7))
            target = warp.add(line, warp.add(warp.mul(warp.quotient(chunk, 8), 256), warp.mul(column, 4)))
        warp.copy(sources[0], begin, targets[0], target, 4)
    if packed:
        which = warp.add(first, warp.lane)
        warp.copy(sources[1], key_at(which), targets[1], which, 1)


class _Copies:
    """Rows of keys that a warpgroup copies by itself; each warp its own 32 rows of a tile."""

    def __init__(self, num_keys: int, num_scales: int) -> None:
        self.num_keys, self.num_scales = num_keys, num_scales

    def gather(self, keys: list[Any], targets: list[Any], places: Any, row: Array) -> None:
        """Starts copying the keys at 128 places; those past the end are keys that nobody sees."""

        def emit(context: Any, *given: Any) -> None:
            *refs, places, row = given
            warp, place = _warp()
            sources, targets = refs[: len(refs) // 2], refs[len(refs) // 2 :]
            each = [self.num_keys * (WIDTH // 4 if len(sources) == 2 else WIDTH // 2), self.num_scales]
            rows = [
                warp.offset(place(source), warp.mul(row.registers.item(), size))
                for source, size in zip(sources, each, strict=False)
            ]
            copy_listed(warp, rows, [place(target) for target in targets], place(places), self.num_keys)

        swizzled = plgpu.RefType(_SWIZZLED) if len(keys) == 1 else _REF
        types = (*(_REF for _ in keys), *(swizzled for _ in keys), _REF, _SCALAR)
        _inline(emit, types)(*keys, *targets, places, row)

    def commit(self) -> None:
        """Ends a group of copies."""
        _inline(lambda context: _warp()[0].commit_copies(), ())()

    def arrived(self, running: int) -> None:
        """Until at most that many of this warp's last groups are still on their way."""

        def emit(context: Any) -> None:
            warp, _ = _warp()
            warp.wait_for_copies(running)
            warp.meet()

        _inline(emit, ())()


class _PlainCopies:
    """The same for the interpreter, at once."""

    def gather(self, keys: list[Any], targets: list[Any], places: Any, row: Array) -> None:
        """Copies the keys at 128 places."""
        last = keys[0].shape[1] - 1

        def copy(which: Array, carry: tuple[()]) -> tuple[()]:
            at = jnp.minimum(places[which], last)
            targets[0][which] = keys[0][row, at]
            if len(keys) == 2:
                each = WIDTH // 4
                line, begin = lax.div(at, each), lax.rem(at, each) * 4
                scale = keys[1][row, line, pl.ds(begin, 4)]
                targets[1][lax.div(which, each), pl.ds(lax.rem(which, each) * 4, 4)] = scale
            return carry

        # One by one: a gather waits for a thread of XLA's, all of which may be waiting for this one.
        lax.fori_loop(0, COLUMNS, copy, ())

    def commit(self) -> None:
        """Nothing is on its way here."""

    def arrived(self, running: int) -> None:
        """Nothing is on its way here."""


class _Plain:
    """The same for the interpreter, which runs array operations only."""

    def __init__(self, room: Room) -> None:
        self.room = room

    def weights(self, weights: Any, first: Array, which: int) -> Array:
        """Weights of the first or the other 16 heads of four queries."""
        return weights[pl.ds(first, QUERIES), which * (HEADS // 2) : (which + 1) * (HEADS // 2)].reshape(-1)

    def begin(self, states: Any, limits: Any, first: Array) -> None:
        """Empty selections of four queries."""
        begin_plainly(states, limits, first)

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


def _warp() -> tuple[Any, Callable[[Any], Any]]:
    from pallas_kernels.lightning_indexer.gpu_warp import Warp, place_of

    return Warp(), place_of


def _dots() -> Any:
    """One 32-bit register for each number of a product: pairs would be put together before they are there."""
    return plgpu.Layout._WGMMA_ACC_32BIT


def _inline(emit: Callable[..., None], arguments: tuple[Any, ...]) -> Callable[..., None]:
    return plgpu.inline_mgpu(arg_types=arguments, return_type=None)(emit)
