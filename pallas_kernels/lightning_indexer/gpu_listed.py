"""The Hopper kernel of the second stage: the exact indexer over the keys that bits name, one row of bits for 8 queries.

It works like `gpu_prefill`, but for where keys come from. The copying warpgroup turns bits into positions, in a ring in
shared memory, a little ahead of the keys that it gathers; a tile is the next 128 positions. So no list lies in memory. MXFP8
keys become bfloat16 by another warpgroup, since one has no time for both.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.lightning_indexer.gpu_gathered import Copies, PlainCopies
from pallas_kernels.lightning_indexer.gpu_prefill import (
    GROUPS,
    HEADS,
    QUERIES,
    RAW,
    ROWS,
    TILE,
    WIDTH,
    Emit,
    Plain,
    select_from,
)
from pallas_kernels.lightning_indexer.gpu_select import COLUMNS, STATE, Room
from pallas_kernels.lightning_indexer.gpu_unpack import widen, widen_plainly
from pallas_kernels.mxfp8 import Mxfp8

WORD, WORDS = 32, 128
"""Keys of a word of bits, and words that are turned into positions together, four a lane."""

BEYOND = 2**31 - 1
"""Fills the last two tiles: a position that nobody sees."""

LISTED, ROUND = 16, 384
"""Tiles of positions in the ring, and positions that are added at most before it is asked again whether there are enough.

When positions for a tile are made, that of four before has its place in shared memory, which it got from one two or more
before itself; warps read positions up to three tiles behind what has been given back. So nine tiles before may be read yet, and
what is made reaches less than 128 + 384 + 256 further: five tiles.
"""

_FETCHED = 4
"""Runs of words on their way."""

_COPY_REGISTERS = 40
_PRODUCT_REGISTERS = {1: 232, 2: 216}
"""By how many warpgroups copy: all together have 512 of 128 threads."""

_SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
_SCALAR, _REF = plgpu.Layout.WG_SPLAT(()), plgpu.RefType()


def words_of(num_keys: int) -> int:
    """Words of a row of bits: whole runs."""
    return -(-num_keys // (WORD * WORDS)) * WORDS


def listed(
    q: Float[Array, "B T H K"] | Mxfp8,
    k: Float[Array, "R S K"] | Mxfp8,
    w: Float[Array, "B T H"],
    q_positions: Int[Array, "B T"],
    bits: Int[Array, "N W"],
    counts: Int[Array, " N"],
    edges: Int[Array, "N 2"],
    first_row: Int[Array, ""],
    room: Room,
    *,
    blocks: int = 132,
    together: int = 2,
    stages: int | None = None,
    interpret: Any = None,
) -> Int[Array, "B T C"]:
    """Selected positions of a number of queries that divides into tiles of 8.

    Args:
        q: of rows first_row .. first_row + B - 1 of the keys.
        k: all keys.
        w: head weights.
        q_positions: last visible positions.
        bits: of each 8 queries, which keys they look at: bit i of word j is key 32 j + i.
        counts: how many keys these are, edges applied.
        edges: of each 8 queries, (first, last): the last position that all of them see, or 0 where all keys are to be
            looked at, and the last one that any of them sees. Key 0 and its word are looked at anyway, so are the last 33
            to 64 up to `first` and everything between both; nothing beyond `last`.
        first_row: see q.
        room: for candidates.
        blocks: of threads.
        together: tiles of keys whose products are started together.
        stages: tiles of keys in shared memory.
        interpret: what Pallas takes to run it elsewhere.
    """
    batch, num_queries, _, _ = q.shape
    num_keys = k.shape[1]
    packed, packed_q = isinstance(k, Mxfp8), isinstance(q, Mxfp8)
    stages = stages or (2 if packed else 3 if packed_q else 4)
    whole = -(-num_keys // (COLUMNS * together)) * COLUMNS * together
    missing = ((0, 0), (0, whole - num_keys), (0, 0))
    stored: list[Array] = []
    if isinstance(k, Mxfp8):
        scale = jnp.pad(k.scale, missing) if whole > num_keys else k.scale
        stored += [lax.bitcast_convert_type(k.elements, jnp.uint8), scale.reshape(k.shape[0], -1, WIDTH)]
    else:
        stored += [k]
    if isinstance(q, Mxfp8):
        stored += [lax.bitcast_convert_type(q.elements, jnp.uint8), q.scale.reshape(batch, num_queries, -1)]
    else:
        stored += [q]
    tiles_of_row = num_queries // TILE
    tiles = batch * tiles_of_row
    blocks = min(blocks, tiles)
    ahead = (RAW if packed else stages) - 1  # tiles that are on their way
    apart = packed and interpret is None  # the interpreter hasn't always four threads: there, who copies widens as well
    limits = jnp.minimum(q_positions.astype(jnp.int32), num_keys - 1)
    ends = -(-counts // (COLUMNS * together)) * together
    numbers = jnp.concatenate([ends, edges[:, 0], edges[:, 1], first_row.reshape(1)]).astype(jnp.int32)

    def kernel(
        numbers: Any,
        limits: Any,
        weights: Any,
        bits: Any,
        *refs: Any,
        q_slots: Any,
        k_slots: Any,
        states: Any,
        picked: Any,
        bit_slots: Any,
        q_full: Any,
        q_empty: Any,
        full: Any,
        empty: Any,
        bits_full: Any,
        **more: Any,
    ) -> None:
        *keys, out, candidates = refs
        keys, (q, *q_scale) = (keys[:-2], keys[-2:]) if packed_q else (keys[:-1], keys[-1:])
        group = lax.axis_index("warpgroup")
        me = lax.axis_index("block")
        mine = lax.div(tiles - me + (blocks - 1), blocks)

        def tile_of(number: Array) -> Array:
            return tiles - 1 - (me + number * blocks)  # the longest first

        def copy_queries(number: Array, row: Array, first: Array) -> None:
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
                        source = q.at[row, mine + query, pl.ds(half * (HEADS // 2), HEADS // 2)]
                        target = q_slots.at[which, half, pl.ds(query * (HEADS // 2), HEADS // 2)]
                        plgpu.copy_gmem_to_smem(source, target, q_full)

        def copy_tile(number: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            done, runs_done = carry  # tiles of keys, and runs of words, of earlier tiles of queries
            tile = tile_of(number)
            row = lax.div(tile, tiles_of_row)
            copy_queries(number, row, lax.rem(tile, tiles_of_row) * TILE)
            row += numbers[3 * tiles]
            count, first, last = numbers[tile], numbers[tiles + tile], numbers[2 * tiles + tile]
            runs = lax.div(last + WORD * WORDS, WORD * WORDS)
            act = _PlainList() if interpret is not None else _List()
            copies = PlainCopies() if interpret is not None else Copies(num_keys, whole)

            def fetch_bits(run: Any) -> None:
                @pl.when(run < runs)
                def _() -> None:
                    slot = lax.rem(runs_done + run, _FETCHED)
                    source = bits.at[tile, pl.ds(run * WORDS, WORDS)]
                    plgpu.copy_gmem_to_smem(source, bit_slots.at[slot], bits_full.at[slot])

            def list_upto(target: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
                """Adds positions until there are `target`, as long as there are words."""

                def going(state: tuple[Array, Array, Array]) -> Array:
                    run, _, written = state
                    return (written < target) & (run < runs)

                def add(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
                    run, rank, written = state
                    slot = lax.rem(runs_done + run, _FETCHED)

                    @pl.when(rank == 0)
                    def _() -> None:
                        plgpu.barrier_wait(bits_full.at[slot])

                    start = done * COLUMNS + written
                    total = act.add(bit_slots.at[slot], picked, first, last, run * WORDS, rank, start)
                    added = jnp.minimum(total - rank, ROUND)
                    over = total - rank <= ROUND

                    @pl.when(over & (run + 1 == runs))
                    def _() -> None:
                        act.fill(picked, start + added, (done + count) * COLUMNS)

                    act.meet()

                    @pl.when(over)
                    def _() -> None:
                        fetch_bits(run + _FETCHED)

                    return jnp.where(over, run + 1, run), jnp.where(over, 0, rank + ROUND), written + added

                return lax.while_loop(going, add, state)

            def gather(step: Any, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
                """Starts copying a tile of listed keys."""
                state = list_upto(jnp.minimum(step + 1, count) * COLUMNS, state)

                @pl.when(step < count)
                def _() -> None:
                    places = picked.at[lax.rem(done + step, LISTED)]
                    if packed:
                        raw = room_in(more["raw_empty"], done + step, RAW) if apart else lax.rem(done + step, RAW)
                        target = [more["raw_slots"].at[raw], more["scale_slots"].at[raw]]
                    else:
                        target = [k_slots.at[room_in(empty, done + step, stages)]]
                    copies.gather(keys, target, places, row)

                copies.commit()
                return state

            def hand_on(step: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
                """A tile that has arrived, before there is room for another one."""
                copies.arrived(ahead - 1)
                if apart:
                    act.meet()
                    plgpu.barrier_arrive(more["raw_full"].at[lax.rem(done + step, RAW)])
                elif packed:
                    convert(done + step)
                else:
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(full.at[lax.rem(done + step, stages)])
                return gather(step + ahead, state)

            for run in range(_FETCHED):
                fetch_bits(jnp.int32(run))
            zero = jnp.int32(0)
            state = zero, zero, zero
            for step in range(ahead):
                state = gather(jnp.int32(step), state)
            state = lax.fori_loop(0, count, hand_on, state)
            # Words without bits behind the last position: barriers must be even in the end.
            list_upto(jnp.int32(BEYOND), state)
            return done + count, runs_done + runs

        def convert(number: Array) -> None:
            raw, slot = lax.rem(number, RAW), room_in(empty, number, stages)
            if interpret is None:
                widen(more["raw_slots"].at[raw], more["scale_slots"].at[raw], k_slots.at[slot], _SWIZZLED)
            else:
                k_slots[slot] = widen_plainly(more["raw_slots"][raw], more["scale_slots"][raw].reshape(COLUMNS, 4))
            plgpu.commit_smem()
            plgpu.barrier_arrive(full.at[slot])

        def widen_tile(number: Array, done: Array) -> Array:
            count = numbers[tile_of(number)]

            def one(step: Array, carry: tuple[()]) -> tuple[()]:
                raw = lax.rem(done + step, RAW)
                plgpu.barrier_wait(more["raw_full"].at[raw])
                convert(done + step)
                plgpu.barrier_arrive(more["raw_empty"].at[raw])
                return carry

            lax.fori_loop(0, count, one, ())
            return done + count

        def select_tile(number: Array, done: Array) -> Array:
            tile = tile_of(number)
            act = Plain(room) if interpret is not None else Emit(room, together)
            return select_from(
                act,
                lambda step, tile: picked.at[lax.rem(done + step + tile, LISTED)],
                group,
                tile * TILE + group * QUERIES,  # of this warpgroup's queries, of all batch rows
                numbers[tile],
                done,
                (weights, limits, out),
                (q_slots, k_slots, states.at[group], candidates.at[me * GROUPS + group]),
                (q_full, q_empty, full, empty),
                (more["raw_q"], more["scale_q"]) if packed_q else None,
                stages=stages,
                together=together,
            )

        # Who copies and who widens stay until everything was read: barriers must be even in the end.
        @pl.when(group == GROUPS)
        def _() -> None:
            plgpu.set_max_registers(_COPY_REGISTERS, action="decrease")
            done, _ = lax.fori_loop(0, mine, copy_tile, (jnp.int32(0), jnp.int32(0)))
            plgpu.barrier_wait(q_empty)
            if apart:
                drain(more["raw_empty"], done, RAW)
            else:
                drain(empty, done, stages)

        def widen_all() -> None:
            plgpu.set_max_registers(_COPY_REGISTERS, action="decrease")
            drain(empty, lax.fori_loop(0, mine, widen_tile, jnp.int32(0)), stages)

        if apart:
            pl.when(group == GROUPS + 1)(widen_all)

        @pl.when(group < GROUPS)
        def _() -> None:
            plgpu.set_max_registers(_PRODUCT_REGISTERS[1 + apart], action="increase")
            lax.fori_loop(0, mine, select_tile, jnp.int32(0))

    scratch: dict[str, Any] = {
        "q_slots": plgpu.SMEM((GROUPS, 2, ROWS, WIDTH), jnp.bfloat16, transforms=_SWIZZLED),
        "k_slots": plgpu.SMEM((stages, COLUMNS, WIDTH), jnp.bfloat16, transforms=_SWIZZLED),
        "states": plgpu.SMEM((GROUPS, QUERIES * STATE), jnp.int32),
        "picked": plgpu.SMEM((LISTED, COLUMNS), jnp.int32),
        "bit_slots": plgpu.SMEM((_FETCHED, WORDS), jnp.int32),
        "q_full": plgpu.Barrier(num_arrivals=GROUPS * 2 * (1 if packed_q else QUERIES)),
        "q_empty": plgpu.Barrier(num_arrivals=GROUPS),
        "full": plgpu.Barrier(num_barriers=stages),
        "empty": plgpu.Barrier(num_arrivals=GROUPS, num_barriers=stages),
        "bits_full": plgpu.Barrier(num_barriers=_FETCHED),
    }
    if packed_q:
        scratch["raw_q"] = plgpu.SMEM((GROUPS, QUERIES, HEADS, WIDTH), jnp.uint8)
        scratch["scale_q"] = plgpu.SMEM((GROUPS, QUERIES, HEADS * 4), jnp.uint8)
    if packed:
        scratch["raw_slots"] = plgpu.SMEM((RAW, COLUMNS, WIDTH), jnp.uint8)
        scratch["scale_slots"] = plgpu.SMEM((RAW, COLUMNS * 4 // WIDTH, WIDTH), jnp.uint8)
    if apart:
        scratch |= {name: plgpu.Barrier(num_barriers=RAW) for name in ("raw_full", "raw_empty")}
    out, _ = plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct((batch * num_queries, room.top_k), jnp.int32),
            jax.ShapeDtypeStruct((blocks * GROUPS, QUERIES, 2, room.size), jnp.int32),
        ),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=GROUPS + 1 + apart,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        **({} if interpret is None else {"interpret": interpret}),
    )(numbers, limits.reshape(-1), w.reshape(-1, HEADS), bits, *stored)
    return out.reshape(batch, num_queries, room.top_k)


def room_in(empty: Any, number: Array, slots: int) -> Array:
    """The slot of the tile of that number, once it is free."""
    slot = lax.rem(number, slots)

    @pl.when(number >= slots)
    def _() -> None:
        plgpu.barrier_wait(empty.at[slot])

    return slot


def drain(empty: Any, count: Array, slots: int) -> None:
    """Waits until all slots that `count` tiles have had are free."""
    for index in range(slots):

        @pl.when(count + index >= slots)
        def _(index: int = index) -> None:
            plgpu.barrier_wait(empty.at[lax.rem(count + index, slots)])


def masked_word(warp: Any, word: Any, index: Any, first: Any, last: Any) -> Any:
    """Word `index` of a row of bits with what is always looked at, and without what is past `last`."""
    forced = warp.either(
        warp.compare("eq", index, 0), warp.compare("ge", index, warp.sub(warp.shift_down(first, 5), 1))
    )
    number = warp.smaller(warp.larger(warp.sub(warp.add(last, 1), warp.mul(index, WORD)), 0), WORD)
    upto = warp.sub(warp.shift_up(1, warp.smaller(number, WORD - 1)), 1)
    upto = warp.select(warp.compare("eq", number, WORD), -1, upto)
    return warp.both(warp.select(forced, -1, word), upto)


def add_positions(warp: Any, bits: Any, ring: Any, edges: tuple[Any, Any], word: Any, rank: Any, start: Any) -> Any:
    """Positions of a run's set bits from the rank-th on, at most `ROUND`, go to the ring; how many bits there are.

    Each of four warps counts all 128 words, four a lane, and adds the positions of one word of each lane.

    Args:
        warp: the words in which this is written, those of `gpu_warp.Warp`.
        bits: where the run is.
        ring: where positions go.
        edges: see `listed`.
        word: number of the run's first word.
        rank: see above.
        start: where the first of these positions belongs in the ring, if that never ended.
    """
    true = warp.compare("eq", warp.lane, warp.lane)
    place = warp.mul(warp.lane, 4)
    loaded = warp.load_four(bits, place, true)
    words = [masked_word(warp, loaded[i], warp.add(warp.add(word, place), i), *edges) for i in range(4)]
    own, before, mine = words[0], warp.integer(0), warp.ones(words[0])
    for i in range(1, 4):
        here = warp.compare("eq", warp.number, i)
        own, before = warp.select(here, words[i], own), warp.select(here, mine, before)
        mine = warp.add(mine, warp.ones(words[i]))
    upto = warp.upto(mine)
    at = warp.add(before, warp.sub(upto, mine))
    position = warp.mul(warp.add(warp.add(word, place), warp.number), WORD)

    def more(left: Any, at: Any) -> Any:
        del at
        return warp.compare("ne", warp.ballot(warp.compare("ne", left, 0)), 0)

    def put(left: Any, at: Any) -> list[Any]:
        for _ in range(2):  # asking whether there are more takes as long
            some = warp.compare("ne", left, 0)
            value = warp.add(position, warp.first_one(warp.select(some, left, 1)))
            now = warp.both(warp.compare("ge", at, rank), warp.compare("lt", at, warp.add(rank, ROUND)))
            target = warp.both(warp.add(start, warp.sub(at, rank)), LISTED * COLUMNS - 1)
            warp.store(ring, target, value, warp.both(some, now))
            left, at = warp.both(left, warp.sub(left, 1)), warp.add(at, 1)
        return [left, at]

    warp.repeat(more, put, [own, at])
    return warp.total(mine)


class _List:
    """What makes positions of bits, as instructions."""

    def add(self, bits: Any, ring: Any, first: Array, last: Array, word: Array, rank: Array, start: Array) -> Array:
        """See `add_positions`."""

        def emit(context: Any, bits: Any, ring: Any, *numbers: Any) -> Any:
            from pallas_kernels.lightning_indexer.gpu_warp import Warp, place_of

            del context
            warp = Warp()
            first, last, word, rank, start = (number.registers.item() for number in numbers)
            total = add_positions(warp, place_of(bits), place_of(ring), (first, last), word, rank, start)
            return warp.splat(total)

        kind = plgpu.ShapeDtypeStruct((), jnp.dtype("int32"), layout=_SCALAR)
        types = _REF, _REF, *(_SCALAR for _ in range(5))
        return plgpu.inline_mgpu(arg_types=types, return_type=kind)(emit)(bits, ring, first, last, word, rank, start)

    def meet(self) -> None:
        """Threads of the warpgroup wait for one another and see what others have stored."""

        def emit(context: Any) -> None:
            from jax.experimental.mosaic import gpu as mgpu

            del context
            mgpu.utils.warpgroup_barrier()

        plgpu.inline_mgpu(arg_types=(), return_type=None)(emit)()

    def fill(self, ring: Any, start: Array, end: Array) -> None:
        """`BEYOND` from start to end, which are less than 256 apart."""

        def emit(context: Any, ring: Any, start: Any, end: Any) -> None:
            from pallas_kernels.lightning_indexer.gpu_warp import Warp, place_of

            del context
            warp = Warp()
            for part in range(2):
                at = warp.add(warp.add(warp.mul(warp.number, 32), warp.lane), 128 * part)
                at = warp.add(start.registers.item(), at)
                target = warp.both(at, LISTED * COLUMNS - 1)
                inside = warp.compare("lt", at, end.registers.item())
                warp.store(place_of(ring), target, warp.integer(BEYOND), inside)

        plgpu.inline_mgpu(arg_types=(_REF, _SCALAR, _SCALAR), return_type=None)(emit)(ring, start, end)


class _PlainList:
    """The same for the interpreter."""

    def add(self, bits: Any, ring: Any, first: Array, last: Array, word: Array, rank: Array, start: Array) -> Array:
        """See `add_positions`."""
        index = word + jnp.arange(WORDS, dtype=jnp.int32)
        words = jnp.where((index == 0) | (index >= lax.div(first, WORD) - 1), -1, bits[...])
        places = (index[:, None] * WORD + jnp.arange(WORD)).reshape(-1)
        wanted = ((jnp.right_shift(words[:, None], jnp.arange(WORD)) & 1) != 0).reshape(-1) & (places <= last)
        places = jnp.sort(jnp.where(wanted, places, BEYOND))
        total = jnp.sum(wanted, dtype=jnp.int32)

        def put(i: Array, carry: tuple[()]) -> tuple[()]:
            at = start + i
            slot, column = lax.rem(lax.div(at, COLUMNS), LISTED), lax.rem(at, COLUMNS)
            ring[slot, column] = lax.dynamic_index_in_dim(places, rank + i, keepdims=False)
            return carry

        lax.fori_loop(0, jnp.minimum(total - rank, ROUND), put, ())
        return total

    def meet(self) -> None:
        """A warpgroup is one thread here."""

    def fill(self, ring: Any, start: Array, end: Array) -> None:
        """`BEYOND` from start to end."""

        def put(at: Array, carry: tuple[()]) -> tuple[()]:
            ring[lax.rem(lax.div(at, COLUMNS), LISTED), lax.rem(at, COLUMNS)] = jnp.int32(BEYOND)
            return carry

        lax.fori_loop(start, end, put, ())
