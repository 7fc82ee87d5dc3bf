"""The Hopper kernel of the first stage: which keys some of 8 neighbouring queries want to see, as bits.

A block of threads has 256 queries, one vector each, and a part of the keys. One warpgroup copies tiles of 128 keys, or two
take turns to make bfloat16 of MXFP8; two multiply, 64 queries at a time, and compare with each query's threshold. Bits of 8
queries that share a warp's rows are put together in registers: nothing else leaves the chip. Where a row has few queries,
one warpgroup multiplies 64, most of them nobody's.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.lightning_indexer.gpu_listed import WORD, words_of
from pallas_kernels.lightning_indexer.gpu_prefill import multiply
from pallas_kernels.lightning_indexer.gpu_select import COLUMNS
from pallas_kernels.lightning_indexer.gpu_unpack import widen, widen_plainly
from pallas_kernels.mxfp8 import Mxfp8

TOGETHER = 8
"""Neighbouring queries that share what they want to see."""

GROUPS, HALVES, ROWS, WIDTH = 2, 2, 64, 128
QUERIES = GROUPS * HALVES * ROWS
"""Queries of a block of threads, where there are many."""

ROUNDS = 4
"""Of few queries, how often each block of threads has a turn: rows and blocks needn't divide evenly."""

_COPY_REGISTERS, _PRODUCT_REGISTERS, _FEWER_REGISTERS = 40, 232, 216  # fewer where there are four warpgroups
_SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
_ROW, _SCALAR, _REF = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WG_SPLAT(()), plgpu.RefType()


def wanted_bits(
    vectors: Float[Array, "B T K"],
    k: Float[Array, "R S K"] | Mxfp8,
    thresholds: Float[Array, "B T"],
    limits: Int[Array, "B T"],
    first_row: Int[Array, ""],
    *,
    kept: int | None = None,
    blocks: int = 132,
    interpret: Any = None,
) -> Int[Array, "N W"]:
    """Bit i of word j of 8 queries: whether one of them has vector · key > threshold for key 32 j + i.

    Args:
        vectors: of rows first_row .. first_row + B - 1 of the keys; a multiple of 256 or, if `kept` is given, 64 of a row.
        k: all keys.
        thresholds: of the queries.
        limits: their last visible positions. Words past a block's last one may be anything.
        first_row: see vectors.
        kept: of a row's queries, for how many times 8 there are bits in the result; None: for all of them.
        blocks: of threads.
        interpret: what Pallas takes to run it elsewhere.
    """
    batch, num_queries, _ = vectors.shape
    num_keys = k.shape[1]
    packed = isinstance(k, Mxfp8)
    groups, halves = (GROUPS, HALVES) if kept is None else (1, 1)
    queries = groups * halves * ROWS
    lines = num_queries // TOGETHER if kept is None else kept
    # One warpgroup that makes bfloat16 of MXFP8 keeps up with neither products nor memory; two take turns.
    copiers = 2 if packed else 1
    raws = 2 * copiers
    stages = 2 if packed and kept is None else 4
    missing = ((0, 0), (0, -num_keys % COLUMNS), (0, 0))
    words = words_of(num_keys)
    stored: list[Array] = []
    if isinstance(k, Mxfp8):
        scale = jnp.pad(k.scale, missing) if missing[1][1] else k.scale
        stored += [lax.bitcast_convert_type(k.elements, jnp.uint8), scale.reshape(k.shape[0], -1, WIDTH)]
    else:
        stored += [k]
    if interpret is not None:  # it refuses to read past the end, where the copy engine finds zeros
        stored[0] = jnp.pad(stored[0], missing)
    tiles_of_row = num_queries // queries
    tiles = batch * tiles_of_row
    parts = max(1, blocks * (1 if kept is None else ROUNDS) // tiles)
    ends = jnp.max(limits.reshape(tiles, queries), axis=1) // COLUMNS + 1
    numbers = jnp.concatenate([ends, first_row.reshape(1)]).astype(jnp.int32)

    def kernel(numbers: Any, thresholds: Any, *refs: Any, **scratch: Any) -> None:
        *keys, vectors, out = refs
        q_slots, k_slots = scratch["q_slots"], scratch["k_slots"]
        q_full, full, empty = scratch["q_full"], scratch["full"], scratch["empty"]
        group = lax.axis_index("warpgroup")
        tile, part = lax.axis_index("tile"), lax.axis_index("part")
        row, first = lax.div(tile, tiles_of_row), lax.rem(tile, tiles_of_row) * queries
        end = numbers[tile]
        each = lax.div(end + (parts - 1), parts)
        begin = part * each
        count = jnp.clip(end - begin, 0, each)

        def copy_queries() -> None:
            for which in range(groups):
                for half in range(halves):
                    source = vectors.at[row, pl.ds(first + (halves * which + half) * ROWS, ROWS)]
                    plgpu.copy_gmem_to_smem(source, q_slots.at[which, half], q_full)

        def copy_all(which: int) -> None:
            """Every tile, or every other one; slots and barriers of a tile are those of one warpgroup."""
            key_row = numbers[tiles] + row

            def room_in(step: Array) -> Array:
                slot = lax.rem(step, stages)

                @pl.when(step >= stages)
                def _() -> None:
                    plgpu.barrier_wait(empty.at[slot])

                return slot

            def fetch(step: Array, slot: Array, elements: Any, barrier: Any) -> None:
                at = begin + step
                plgpu.copy_gmem_to_smem(keys[0].at[key_row, pl.ds(at * COLUMNS, COLUMNS)], elements, barrier)
                if packed:
                    scales = COLUMNS * 4 // WIDTH
                    source = keys[1].at[key_row, pl.ds(at * scales, scales)]
                    plgpu.copy_gmem_to_smem(source, scratch["scale_slots"].at[slot], barrier)

            def copy(number: Array, carry: tuple[()]) -> tuple[()]:
                step = which + copiers * number
                slot = room_in(step)
                fetch(step, slot, k_slots.at[slot], full.at[slot])
                return carry

            def fetch_raw(step: Any) -> None:
                @pl.when(step < count)
                def _() -> None:
                    slot = lax.rem(step, raws)
                    fetch(step, slot, scratch["raw_slots"].at[slot], scratch["raw_full"].at[slot])

            def convert(number: Array, carry: tuple[()]) -> tuple[()]:
                step = which + copiers * number
                raw = lax.rem(step, raws)
                plgpu.barrier_wait(scratch["raw_full"].at[raw])
                slot = room_in(step)
                elements, scales = scratch["raw_slots"].at[raw], scratch["scale_slots"].at[raw]
                if interpret is None:
                    widen(elements, scales, k_slots.at[slot], _SWIZZLED)
                else:
                    k_slots[slot] = widen_plainly(elements[...], scales[...].reshape(COLUMNS, 4))
                plgpu.commit_smem()
                plgpu.barrier_arrive(full.at[slot])
                fetch_raw(step + raws)
                return carry

            if packed:
                for step in range(which, raws, copiers):
                    fetch_raw(jnp.int32(step))
            mine = lax.div(count + (copiers - 1 - which), copiers)
            lax.fori_loop(0, mine, convert if packed else copy, ())
            # Stay until everything was read: barriers must be even in the end.
            for index in range(stages):

                @pl.when((count + index >= stages) & (lax.rem(count + index, copiers) == which))
                def _(index: int = index) -> None:
                    plgpu.barrier_wait(empty.at[lax.rem(count + index, stages)])

        def compare_all() -> None:
            act = _Plain() if interpret is not None else _Emit()
            # Of this warpgroup's queries in its row; thresholds are those of all rows.
            mine = first + group * halves * ROWS
            limits = [act.thresholds(thresholds, row * num_queries + mine + half * ROWS) for half in range(halves)]
            plgpu.barrier_wait(q_full)

            def put(half: int, dots: Array, step: Array) -> None:
                line = lax.div(mine + half * ROWS, TOGETHER)
                act.put(dots, limits[half], out, row * lines + line, lines - line, begin + step)

            def one(step: Array, carry: tuple[()]) -> tuple[()]:
                slot = lax.rem(step, stages)
                plgpu.barrier_wait(full.at[slot])
                dots = [act.multiply(q_slots.at[group, half], k_slots.at[slot]) for half in range(halves)]
                for half in range(halves):
                    act.wait(halves - 1 - half)
                    if half == halves - 1:
                        plgpu.barrier_arrive(empty.at[slot])
                    put(half, dots[half], step)
                return carry

            lax.fori_loop(0, count, one, ())

        for which in range(copiers):

            @pl.when(group == groups + which)
            def _(which: int = which) -> None:
                plgpu.set_max_registers(_COPY_REGISTERS, action="decrease")
                if not which:
                    copy_queries()
                copy_all(which)

        @pl.when(group < groups)
        def _() -> None:
            plgpu.set_max_registers(_PRODUCT_REGISTERS if groups + copiers < 4 else _FEWER_REGISTERS, action="increase")
            compare_all()

    scratch: dict[str, Any] = {
        "q_slots": plgpu.SMEM((groups, halves, ROWS, WIDTH), jnp.bfloat16, transforms=_SWIZZLED),
        "k_slots": plgpu.SMEM((stages, COLUMNS, WIDTH), jnp.bfloat16, transforms=_SWIZZLED),
        "q_full": plgpu.Barrier(num_arrivals=halves * groups),
        "full": plgpu.Barrier(num_barriers=stages),
        "empty": plgpu.Barrier(num_arrivals=groups, num_barriers=stages),
    }
    if packed:
        scratch["raw_slots"] = plgpu.SMEM((raws, COLUMNS, WIDTH), jnp.uint8)
        scratch["scale_slots"] = plgpu.SMEM((raws, COLUMNS * 4 // WIDTH, WIDTH), jnp.uint8)
        scratch["raw_full"] = plgpu.Barrier(num_arrivals=2, num_barriers=raws)
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((batch * lines, words), jnp.int32),
        grid=(parts, tiles),
        grid_names=("part", "tile"),
        num_threads=groups + copiers,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        **({} if interpret is None else {"interpret": interpret}),
    )(numbers, thresholds.reshape(-1), *stored, vectors)


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

    def put(self, dots: Array, thresholds: Array, out: Any, line: Array, room: Array, tile: Array) -> None:
        """Writes the bits of 64 queries and a tile's keys, from a line of the result on, of which `room` are left."""
        words = out.shape[1]

        def emit(context: Any, dots: Any, thresholds: Any, out: Any, line: Any, room: Any, tile: Any) -> None:
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
            mine = warp.add(warp.add(warp.number, warp.number), warp.both(warp.shift_down(warp.lane, 2), 1))
            at = warp.add(warp.mul(tile.registers.item(), COLUMNS // WORD), warp.both(warp.lane, 3))
            at = warp.add(warp.mul(warp.add(line.registers.item(), mine), words), at)
            inside = warp.both(warp.compare("lt", warp.lane, 8), warp.compare("lt", mine, room.registers.item()))
            warp.store(place_of(out), at, word, inside)

        types = plgpu.Layout._WGMMA_ACC_32BIT, _ROW, _REF, _SCALAR, _SCALAR, _SCALAR
        plgpu.inline_mgpu(arg_types=types, return_type=None)(emit)(dots, thresholds, out, line, room, tile)


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

    def put(self, dots: Array, thresholds: Array, out: Any, line: Array, room: Array, tile: Array) -> None:
        """Writes the bits of 64 queries and a tile's keys."""
        above = (dots > thresholds[:, None]).reshape(ROWS // TOGETHER, TOGETHER, COLUMNS // WORD, WORD).any(axis=1)
        weights = jnp.left_shift(jnp.uint32(1), jnp.arange(WORD, dtype=jnp.uint32))
        words = jnp.sum(jnp.where(above, weights, jnp.uint32(0)), axis=-1, dtype=jnp.uint32)
        words = lax.bitcast_convert_type(words, jnp.int32)
        for mine in range(ROWS // TOGETHER):

            @pl.when(mine < room)
            def _(mine: int = mine) -> None:
                out[line + mine, pl.ds(tile * (COLUMNS // WORD), COLUMNS // WORD)] = words[mine]
