"""The Hopper kernels of the first stage: which keys some of 8 neighbouring queries want to see, as bits, then as lists.

A block of threads has 256 queries, one vector each, and a part of the keys. One warpgroup copies tiles of 128 keys, two
multiply, 64 queries at a time, and compare with each query's threshold. Bits of 8 queries that share a warp's rows are put
together in registers: nothing else leaves the chip.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.lightning_indexer.gpu_prefill import RAW, multiply
from pallas_kernels.lightning_indexer.gpu_select import COLUMNS
from pallas_kernels.lightning_indexer.gpu_unpack import widen, widen_plainly
from pallas_kernels.mxfp8 import Mxfp8

TOGETHER = 8
"""Neighbouring queries that share what they want to see."""

GROUPS, ROWS, WIDTH = 2, 64, 128
QUERIES = GROUPS * 2 * ROWS
"""Queries of a block of threads."""

WORD = 32
WARPS = 16
BEYOND = 2**31 - 1
"""Fills the end of a list: a position that nobody sees."""

_COPY_REGISTERS, _PRODUCT_REGISTERS = 40, 232
_SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
_ROW, _SCALAR, _REF = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WG_SPLAT(()), plgpu.RefType()


def wanted_bits(
    vectors: Float[Array, "B T K"],
    k: Float[Array, "B S K"] | Mxfp8,
    thresholds: Float[Array, "B T"],
    limits: Int[Array, "B T"],
    *,
    blocks: int = 132,
    interpret: Any = None,
) -> Int[Array, "B G W"]:
    """Bit i of word j of 8 queries: whether one of them has vector · key > threshold for key 32 j + i.

    The number of queries is a multiple of 256; `limits` are last visible positions. Anything past a tile's last one.
    """
    batch, num_queries, _ = vectors.shape
    num_keys = k.shape[1]
    packed = isinstance(k, Mxfp8)
    stages = 3 if packed else 4
    missing = ((0, 0), (0, -num_keys % COLUMNS), (0, 0))
    words = (num_keys + missing[1][1]) // WORD
    stored: list[Array] = []
    if isinstance(k, Mxfp8):
        scale = jnp.pad(k.scale, missing) if missing[1][1] else k.scale
        stored += [lax.bitcast_convert_type(k.elements, jnp.uint8), scale.reshape(batch, -1, WIDTH)]
    else:
        stored += [k]
    if interpret is not None:  # it refuses to read past the end, where the copy engine finds zeros
        stored[0] = jnp.pad(stored[0], missing)
    tiles_of_row = num_queries // QUERIES
    tiles = batch * tiles_of_row
    parts = max(1, blocks // tiles)
    ends = jnp.max(limits.reshape(tiles, QUERIES), axis=1) // COLUMNS + 1

    def kernel(ends: Any, thresholds: Any, *refs: Any, **scratch: Any) -> None:
        *keys, vectors, out = refs
        q_slots, k_slots = scratch["q_slots"], scratch["k_slots"]
        q_full, full, empty = scratch["q_full"], scratch["full"], scratch["empty"]
        group = lax.axis_index("warpgroup")
        tile, part = lax.axis_index("tile"), lax.axis_index("part")
        row, first = lax.div(tile, tiles_of_row), lax.rem(tile, tiles_of_row) * QUERIES
        end = ends[tile]
        each = lax.div(end + (parts - 1), parts)
        begin = part * each
        count = jnp.clip(end - begin, 0, each)

        def copy_all() -> None:
            for which in range(GROUPS):
                for half in range(2):
                    source = vectors.at[row, pl.ds(first + (2 * which + half) * ROWS, ROWS)]
                    plgpu.copy_gmem_to_smem(source, q_slots.at[which, half], q_full)

            def room_in(step: Array) -> Array:
                slot = lax.rem(step, stages)

                @pl.when(step >= stages)
                def _() -> None:
                    plgpu.barrier_wait(empty.at[slot])

                return slot

            def fetch(step: Array, slot: Array, elements: Any, barrier: Any) -> None:
                at = begin + step
                plgpu.copy_gmem_to_smem(keys[0].at[row, pl.ds(at * COLUMNS, COLUMNS)], elements, barrier)
                if packed:
                    lines = COLUMNS * 4 // WIDTH
                    source = keys[1].at[row, pl.ds(at * lines, lines)]
                    plgpu.copy_gmem_to_smem(source, scratch["scale_slots"].at[slot], barrier)

            def copy(step: Array, carry: tuple[()]) -> tuple[()]:
                slot = room_in(step)
                fetch(step, slot, k_slots.at[slot], full.at[slot])
                return carry

            def fetch_raw(step: Any) -> None:
                @pl.when(step < count)
                def _() -> None:
                    slot = lax.rem(step, RAW)
                    fetch(step, slot, scratch["raw_slots"].at[slot], scratch["raw_full"].at[slot])

            def convert(step: Array, carry: tuple[()]) -> tuple[()]:
                raw = lax.rem(step, RAW)
                plgpu.barrier_wait(scratch["raw_full"].at[raw])
                slot = room_in(step)
                elements, scales = scratch["raw_slots"].at[raw], scratch["scale_slots"].at[raw]
                if interpret is None:
                    widen(elements, scales, k_slots.at[slot], _SWIZZLED)
                else:
                    k_slots[slot] = widen_plainly(elements[...], scales[...].reshape(COLUMNS, 4))
                plgpu.commit_smem()
                plgpu.barrier_arrive(full.at[slot])
                fetch_raw(step + RAW)
                return carry

            if packed:
                for step in range(RAW):
                    fetch_raw(jnp.int32(step))
            lax.fori_loop(0, count, convert if packed else copy, ())
            # Stay until everything was read: barriers must be even in the end.
            for index in range(stages):

                @pl.when(count + index >= stages)
                def _(index: int = index) -> None:
                    plgpu.barrier_wait(empty.at[lax.rem(count + index, stages)])

        def compare_all() -> None:
            act = _Plain() if interpret is not None else _Emit()
            # Of this warpgroup's queries, of all batch rows.
            mine = tile * QUERIES + group * 2 * ROWS
            limits = [act.thresholds(thresholds, mine + half * ROWS) for half in range(2)]
            plgpu.barrier_wait(q_full)

            def one(step: Array, carry: tuple[()]) -> tuple[()]:
                slot = lax.rem(step, stages)
                plgpu.barrier_wait(full.at[slot])
                low = act.multiply(q_slots.at[group, 0], k_slots.at[slot])
                high = act.multiply(q_slots.at[group, 1], k_slots.at[slot])
                act.wait(1)
                act.put(low, limits[0], out, mine, begin + step)
                act.wait(0)
                plgpu.barrier_arrive(empty.at[slot])
                act.put(high, limits[1], out, mine + ROWS, begin + step)
                return carry

            lax.fori_loop(0, count, one, ())

        @pl.when(group == GROUPS)
        def _() -> None:
            plgpu.set_max_registers(_COPY_REGISTERS, action="decrease")
            copy_all()

        @pl.when(group < GROUPS)
        def _() -> None:
            plgpu.set_max_registers(_PRODUCT_REGISTERS, action="increase")
            compare_all()

    scratch: dict[str, Any] = {
        "q_slots": plgpu.SMEM((GROUPS, 2, ROWS, WIDTH), jnp.bfloat16, transforms=_SWIZZLED),
        "k_slots": plgpu.SMEM((stages, COLUMNS, WIDTH), jnp.bfloat16, transforms=_SWIZZLED),
        "q_full": plgpu.Barrier(num_arrivals=2 * GROUPS),
        "full": plgpu.Barrier(num_barriers=stages),
        "empty": plgpu.Barrier(num_arrivals=GROUPS, num_barriers=stages),
    }
    if packed:
        scratch["raw_slots"] = plgpu.SMEM((RAW, COLUMNS, WIDTH), jnp.uint8)
        scratch["scale_slots"] = plgpu.SMEM((RAW, COLUMNS * 4 // WIDTH, WIDTH), jnp.uint8)
        scratch["raw_full"] = plgpu.Barrier(num_arrivals=2, num_barriers=RAW)
    bits = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((batch * num_queries // TOGETHER, words), jnp.int32),
        grid=(parts, tiles),
        grid_names=("part", "tile"),
        num_threads=GROUPS + 1,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        **({} if interpret is None else {"interpret": interpret}),
    )(ends, thresholds.reshape(-1), *stored, vectors)
    return bits.reshape(batch, num_queries // TOGETHER, words)


def lists(bits: Int[Array, "N W"], length: int, *, interpret: Any = None) -> Int[Array, "N L"]:
    """Places of each row's set bits, ascending; `BEYOND` up to the next multiple of 256. There is room for them all."""
    rows, words = bits.shape
    if interpret is not None:
        return _interpreted_lists(bits, length, interpret)

    def kernel(bits: Any, out: Any, *, shared: Any) -> None:
        me = lax.axis_index("block")

        def emit(context: Any, bits: Any, out: Any, shared: Any, me: Any) -> None:
            from pallas_kernels.lightning_indexer.gpu_warp import Warp, place_of

            del context
            warp = Warp()
            me = me.registers.item()
            mine = warp.offset(place_of(bits), warp.mul(me, words))
            write_list(warp, mine, warp.offset(place_of(out), warp.mul(me, length)), place_of(shared), words, length)

        plgpu.inline_mgpu(arg_types=(_REF, _REF, _REF, _SCALAR), return_type=None)(emit)(bits, out, shared, me)

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((rows, length), jnp.int32),
        grid=(rows,),
        grid_names=("block",),
        num_threads=WARPS // 4,
        thread_name="warpgroup",
        scratch_types={"shared": plgpu.SMEM((WARPS,), jnp.int32)},
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(bits)


def write_list(warp: Any, bits: Any, out: Any, shared: Any, words: int, length: int) -> None:
    """One row of `lists` by 16 warps, in the words of `gpu_warp.Warp`; each has a run of words, a lane every 32nd."""
    rows = -(-words // (32 * WARPS))
    first = warp.add(warp.mul(warp.of_block, 32 * rows), warp.lane)

    def word_at(at: Any) -> Any:
        return warp.select(warp.compare("lt", at, words), warp.load(bits, warp.smaller(at, words - 1)), 0)

    def count(row: Any, mine: Any) -> list[Any]:
        return [warp.add(mine, warp.ones(word_at(warp.add(first, warp.mul(row, 32)))))]

    mine = warp.total(warp.loop(warp.integer(rows), count, [warp.integer(0)])[0])
    warp.store(shared, warp.of_block, mine, warp.compare("eq", warp.lane, 0))
    warp.meet_all()
    everyone = warp.load(shared, warp.both(warp.lane, WARPS - 1))
    everyone = warp.select(warp.compare("lt", warp.lane, WARPS), everyone, 0)
    before = warp.total(warp.select(warp.compare("lt", warp.lane, warp.of_block), everyone, 0))
    total = warp.total(everyone)

    def write(row: Any, kept: Any) -> list[Any]:
        word = warp.add(first, warp.mul(row, 32))
        value = word_at(word)
        number = warp.ones(value)
        upto = warp.upto(number)
        start = warp.mul(word, WORD)

        def more(left: Any, at: Any) -> Any:
            del at
            return warp.compare("ne", warp.ballot(warp.compare("ne", left, 0)), 0)

        def put(left: Any, at: Any) -> list[Any]:
            some = warp.compare("ne", left, 0)
            position = warp.add(start, warp.first_one(warp.select(some, left, 1)))
            warp.store(out, at, position, warp.both(some, warp.compare("lt", at, length)))
            return [warp.both(left, warp.sub(left, 1)), warp.add(at, 1)]

        warp.repeat(more, put, [value, warp.add(kept, warp.sub(upto, number))])
        return [warp.add(kept, warp.total(number))]

    warp.loop(warp.integer(rows), write, [before])
    end = warp.mul(warp.shift_down(warp.add(total, 255), 8), 256)
    at = warp.add(total, warp.add(warp.mul(warp.of_block, 32), warp.lane))
    inside = warp.both(warp.compare("lt", at, end), warp.compare("lt", at, length))
    warp.store(out, at, warp.integer(BEYOND), inside)


def wanted_word(warp: Any, dots: Any, thresholds: Any) -> Any:
    """Of a product's 16 rows in a warp, of 128 keys: lane 4 h + c, h = 0, 1, gets word c of the 8 rows of half h.

    Args:
        warp: the words.
        dots: dots[half, block, odd] of row 8 half + lane // 4 and key 8 block + 2 (lane % 4) + odd.
        thresholds: thresholds[half] of the same row.
    """
    words = []
    for half in range(2):
        parts = [warp.integer(0) for _ in range(4)]
        for block in range(COLUMNS // 8):
            for odd in range(2):
                above = warp.above(dots[half, block, odd], thresholds[half])
                part = warp.select(above, 1 << (2 * block + odd), 0)
                parts[block % 4] = warp.either(parts[block % 4], part)
        word = warp.either(warp.either(parts[0], parts[1]), warp.either(parts[2], parts[3]))
        for distance in (4, 8, 16):
            word = warp.either(word, warp.from_lane_xor(word, distance))
        words.append(word)
    # A lane's word has two neighbouring keys of every 8. Four lanes swap bytes, so that each gets 32 in a row.
    upper = warp.compare("ne", warp.both(warp.lane, 4), 0)
    mine = warp.select(upper, words[1], words[0])
    column = warp.both(warp.lane, 3)
    found = warp.integer(0)
    for other in range(4):
        theirs = warp.from_lane(mine, warp.add(warp.both(warp.lane, 28), other))
        byte = warp.byte_of(theirs, column)
        spread = warp.either(warp.both(byte, 3), warp.shift_up(warp.both(byte, 12), 6))
        spread = warp.either(spread, warp.shift_up(warp.both(byte, 48), 12))
        spread = warp.either(spread, warp.shift_up(warp.both(byte, 192), 18))
        found = warp.either(found, warp.shift_up(spread, 2 * other))
    return found


class _Emit:
    """What warps do, as instructions."""

    def thresholds(self, thresholds: Any, first: Array) -> Array:
        """Those of 64 queries, as they belong to the rows of a product."""
        layout = _ROW.to_mgpu()

        def emit(context: Any, thresholds: Any, first: Any) -> Any:
            from pallas_kernels.lightning_indexer.gpu_warp import Warp, place_of

            warp = Warp()
            query = warp.add(first.registers.item(), warp.mul(warp.number, 16))
            query = warp.add(query, warp.shift_down(warp.lane, 2))
            values = [warp.load_real(place_of(thresholds), warp.add(query, 8 * half)) for half in range(2)]
            return warp.array(values, (ROWS,), layout)

        kind = plgpu.ShapeDtypeStruct((ROWS,), jnp.dtype("float32"), layout=_ROW)
        return plgpu.inline_mgpu(arg_types=(_REF, _SCALAR), return_type=kind)(emit)(thresholds, first)

    def multiply(self, q: Any, k: Any) -> Array:
        """Starts a product."""
        return multiply(q, k)

    def wait(self, running: int) -> None:
        """Until at most that many of the last products are still running."""
        plgpu.wgmma_wait(running)

    def put(self, dots: Array, thresholds: Array, out: Any, first: Array, tile: Array) -> None:
        """Writes the bits of 64 queries and a tile's keys."""
        words = out.shape[1]

        def emit(context: Any, dots: Any, thresholds: Any, out: Any, first: Any, tile: Any) -> None:
            from pallas_kernels.lightning_indexer.gpu_warp import Warp, place_of

            warp = Warp()
            # Registers aren't looked at before the wait that came before.
            registers = warp.settled(dots).registers.reshape(COLUMNS // 8, 2, 2)
            found = {
                (half, block, odd): warp.element(registers[block, half, odd], 0)
                for block in range(COLUMNS // 8)
                for half in range(2)
                for odd in range(2)
            }
            limits = [warp.element(register, 0) for register in thresholds.registers.reshape(2)]
            word = wanted_word(warp, found, limits)
            line = warp.add(warp.shift_down(first.registers.item(), 3), warp.add(warp.number, warp.number))
            line = warp.add(line, warp.both(warp.shift_down(warp.lane, 2), 1))
            at = warp.add(warp.mul(tile.registers.item(), COLUMNS // WORD), warp.both(warp.lane, 3))
            at = warp.add(warp.mul(line, words), at)
            warp.store(place_of(out), at, word, warp.compare("lt", warp.lane, 8))

        types = plgpu.Layout._WGMMA_ACC_32BIT, _ROW, _REF, _SCALAR, _SCALAR
        plgpu.inline_mgpu(arg_types=types, return_type=None)(emit)(dots, thresholds, out, first, tile)


class _Plain:
    """The same for the interpreter, which runs array operations only."""

    def thresholds(self, thresholds: Any, first: Array) -> Array:
        """Those of 64 queries."""
        return thresholds[pl.ds(first, ROWS)]

    def multiply(self, q: Any, k: Any) -> Array:
        """A product."""
        return jnp.dot(q[...], k[...].T, preferred_element_type=jnp.float32)

    def wait(self, running: int) -> None:
        """Nothing runs by itself here."""

    def put(self, dots: Array, thresholds: Array, out: Any, first: Array, tile: Array) -> None:
        """Writes the bits of 64 queries and a tile's keys."""
        above = (dots > thresholds[:, None]).reshape(ROWS // TOGETHER, TOGETHER, COLUMNS // WORD, WORD).any(axis=1)
        weights = jnp.left_shift(jnp.uint32(1), jnp.arange(WORD, dtype=jnp.uint32))
        words = jnp.sum(jnp.where(above, weights, jnp.uint32(0)), axis=-1, dtype=jnp.uint32)
        place = pl.ds(lax.div(first, TOGETHER), ROWS // TOGETHER), pl.ds(tile * (COLUMNS // WORD), COLUMNS // WORD)
        out[place] = lax.bitcast_convert_type(words, jnp.int32)


def _interpreted_lists(bits: Array, length: int, interpret: Any) -> Int[Array, "N L"]:
    """The same lists for the interpreter, a row at a time."""
    rows, words = bits.shape

    def kernel(bits: Any, out: Any) -> None:
        row = lax.axis_index("block")
        set_ = jnp.right_shift(bits[row][:, None], jnp.arange(WORD)) & 1
        places = jnp.where(set_.reshape(-1) != 0, jnp.arange(words * WORD, dtype=jnp.int32), BEYOND)
        places = jnp.sort(places)[:length]
        out[row] = jnp.pad(places, (0, length - places.shape[0]), constant_values=BEYOND)

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((rows, length), jnp.int32),
        grid=(rows,),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )(bits)
