"""The Hopper kernel: weights on the instruction's 64-row side, rows on its other side, which may be as narrow as 8.

A block of threads works through a list of (tile of rows, 64·G columns of the result). One warpgroup copies weights and
rows into a ring of shared-memory slots; each of the G others multiplies 64 columns' weights by the tile's rows. A tile
takes the narrowest product that holds it, so the rows that a group lacks to a full tile cost little, and an expert's
weights come once for up to 256 of its rows.

Products leave transposed: the accumulator [64 columns, rows] is turned on its way into shared memory (`gpu_store.py`).
Whole blocks of 8 rows go out as such; a group's first and last block, which a neighbour may share, go row by row.

Every output is one sum over the inputs in ascending steps, whatever the tile's width or place: its bits depend on its
own row and weights alone.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.gate import Gate
from pallas_kernels.grouped_matmul.gpu_store import SWIZZLED, store_edges, store_turned
from pallas_kernels.grouped_matmul.gpu_tiles import BLOCK, CHUNK, COLUMNS, WIDEST, Tuning, Work
from pallas_kernels.grouped_matmul.gpu_unpack import unpack, unpack_plainly
from pallas_kernels.mxfp4 import Mxfp4

_COPY_REGISTERS = 40
_PRODUCT_REGISTERS = {1: 232, 2: 232, 3: 152, 4: 104}  # by warpgroups that multiply; a block keeps what it starts with
_ALTERNATING = {1: 32, 2: 32, 3: 16, 4: 16}
"""Rows up to which unpacked weights have two sets of registers; the assembler serialises products of wider tiles then."""


def multiply(
    work: Work,
    rows: Float[Array, "M D"],
    weights: Float[Array, "E _ _"] | Mxfp4,
    num_rows: int,
    out_dtype: Any,
    tuning: Tuning,
    interpret: Any = None,
    gate: Gate | None = None,
    transposed: bool = False,
) -> Float[Array, "N F"]:
    """[num_rows, F] products; `rows` may have more rows than that, which nobody owns.

    With `gate`, F is half of the weights' outputs: the first half's products and the second's go through it together.
    `transposed` weights, arrays only, are [E, D, F].
    """
    packed = isinstance(weights, Mxfp4)
    _, out_width, width = weights.shape
    if transposed:
        out_width, width = width, out_width
    stages, step, groups, cluster, tall = tuning.stages, tuning.step, tuning.warpgroups, tuning.cluster, tuning.tall
    widest = tuning.widths[-1]
    if gate is not None:
        out_width //= 2
    results = 1 if gate is not None else tall  # blocks of 64 columns that a warpgroup writes
    block_columns = results * groups * COLUMNS
    pieces = out_width // (block_columns * cluster)  # of a tile's columns
    copies = 1 if gate is None else 2  # of array weights to a slot
    stored_blocks = tall * groups
    outputs = COLUMNS if packed else stored_blocks // copies * COLUMNS  # of a copy
    taken = step // 2 if packed else step  # numbers of a copy along the inputs
    clusters = tuning.blocks // cluster
    steps = width // step
    parts = step // CHUNK if packed else 1  # of a slot's inputs, multiplied one after the other
    part_rows = min(tuning.part, widest)

    def kernel(
        tiles: Any,
        used: Any,
        rows: Any,
        *refs: Any,
        weight_slots: Any,
        row_slots: Any,
        turned: Any,
        full: Any,
        empty: Any,
        **more: Any,
    ) -> None:
        *stored, out = refs
        weights, scales = stored[0], stored[-1]
        scale_slots: Any = more.get("scale_slots")
        scale_full: Any = more.get("scale_full")
        scale_empty: Any = more.get("scale_empty")
        plain: Any = more.get("plain")
        flipped: Any = more.get("flipped")
        group = lax.axis_index("warpgroup")
        me, peer = lax.axis_index("block"), lax.axis_index("cluster") if cluster > 1 else 0
        mine = lax.div(used[work.used.shape[0] - 1] * pieces - me + (clusters - 1), clusters)

        def locate(number: Array) -> tuple[Array, Array]:
            item = me + number * clusters
            return lax.div(item, pieces), (lax.rem(item, pieces) * cluster + peer) * block_columns

        def stored_at(column: Array, which: int | Array) -> Array:
            """First of the weights' outputs in block `which` of tall · groups: with a gate, those of the second half."""
            if gate is None:
                return column + which * COLUMNS
            return column + which % groups * COLUMNS + which // groups * out_width

        def stored_parts(expert: Array, column: Array, k: Array) -> list[Any]:
            """A slot's weights, as many of them as are copied at once."""
            found = []
            for part in range(stored_blocks if packed else copies):
                there = pl.ds(stored_at(column, part * (outputs // COLUMNS)), outputs)
                inputs = pl.ds(k * taken, taken)
                found.append(weights.at[(expert, inputs, there) if transposed else (expert, there, inputs)])
            return found

        def for_each_width(kind: Array, act: Callable[[int], None]) -> None:
            for index, size in enumerate(tuning.widths):
                pl.when(kind == index)(functools.partial(act, size))

        def copy_item(number: Array, done: Array) -> Array:
            """Fills slots done, done + 1, ... of the ring with an item's operands."""
            tile, column = locate(number)
            base, expert, kind, busy = tiles[0, tile], tiles[3, tile], tiles[4, tile], tiles[5, tile]
            if packed:
                slot = lax.rem(number, 2)

                @pl.when(number >= 2)
                def _() -> None:
                    plgpu.barrier_wait(scale_empty.at[slot])

                for which in range(tall * groups):
                    source = scales.at[expert, pl.ds(stored_at(column, which), COLUMNS)]
                    plgpu.copy_gmem_to_smem(source, scale_slots.at[slot, which], scale_full.at[slot])

            def copy(size: int) -> None:
                def one(k: Array, carry: tuple[()]) -> tuple[()]:
                    slot = lax.rem(done + k, stages)

                    @pl.when(done + k >= stages)
                    def _() -> None:
                        plgpu.barrier_wait(empty.at[slot])

                    for part, source in enumerate(stored_parts(expert, column, k)):
                        if packed:
                            target = weight_slots.at[slot, part]
                        else:
                            there = pl.ds(part * outputs, outputs)
                            target = weight_slots.at[(slot, slice(None), there) if transposed else (slot, there)]
                        plgpu.copy_gmem_to_smem(source, target, full.at[slot])
                    source = rows.at[pl.ds(pl.multiple_of(base, BLOCK), size), pl.ds(k * step, step)]
                    shared: dict[str, Any] = {"collective_axes": "cluster"} if cluster > 1 else {}
                    plgpu.copy_gmem_to_smem(source, row_slots.at[slot, pl.ds(0, size)], full.at[slot], **shared)
                    return carry

                lax.fori_loop(0, busy * steps, one, ())

            for_each_width(kind, copy)
            return done + busy * steps

        def multiply_item(number: Array, done: Array) -> Array:
            tile, column = locate(number)
            base, first, last, kind, busy = (tiles[row, tile] for row in (0, 1, 2, 4, 5))
            scale_slot = lax.rem(number, 2)
            if packed:
                plgpu.barrier_wait(scale_full.at[scale_slot])

            def weight_of(slot: Array, k: Array, block: int, part: int) -> Any:
                which = block * groups + group
                columns = pl.ds(which * COLUMNS, COLUMNS)
                if transposed and interpret is not None:
                    plain[which] = weight_slots[slot, :, columns].T
                    return plain.at[which]
                if transposed:
                    return weight_slots.at[slot, :, columns].transpose((1, 0))
                if not packed:
                    return weight_slots.at[slot, columns]
                first, count = (k * parts + part) * (CHUNK // 32), CHUNK // 32
                if interpret is None:
                    scale = scale_slots.at[scale_slot, which, pl.ds(0, COLUMNS), pl.ds(first, count)]
                    return unpack(weight_slots.at[slot, which], scale, part)
                scale = lax.dynamic_slice_in_dim(scale_slots[scale_slot, which], first, count, axis=1)
                codes = weight_slots[slot, which, :, part * CHUNK // 2 : (part + 1) * CHUNK // 2]
                plain[which] = unpack_plainly(codes, scale)
                return plain.at[which]

            def product(size: int) -> None:
                share = size if size <= WIDEST else size // 2  # rows of one instruction
                starts = range(0, size, share)
                # Two sets of registers for weights; a wider product leaves none for the second.
                even = tall * parts % 2 == 0  # a slot's products end with the set that they didn't begin with
                alternate = packed and tall * size <= _ALTERNATING[groups] and (even or steps % 2 == 0)

                def accumulate(*totals: Any) -> tuple[Array, ...]:
                    def rows_of(slot: Array, start: int, part: int) -> Any:
                        count = step // parts
                        if interpret is None:
                            there = row_slots.at[slot, pl.ds(start, share), pl.ds(part * count, count)]
                            return there.transpose((1, 0))
                        # The interpreter of jax 0.10 turns no references.
                        there = row_slots[slot, start : start + share, part * count : (part + 1) * count]
                        flipped[group, :count, :share] = there.T
                        return flipped.at[group, pl.ds(0, count), pl.ds(0, share)]

                    def one(k: Array, carry: tuple[()]) -> tuple[()]:
                        slot = lax.rem(done + k, stages)
                        plgpu.barrier_wait(full.at[slot])
                        for block, part in itertools.product(range(tall), range(parts)):
                            weight = weight_of(slot, k, block, part)
                            if alternate:
                                # The product before still ran while these were unpacked into other registers.
                                plgpu.wgmma_wait(0)
                                if block == part == 0:
                                    free(k - 1)
                            of_block = totals[block * len(starts) : (block + 1) * len(starts)]
                            for start, total in zip(starts, of_block, strict=True):
                                plgpu.wgmma(total, weight, rows_of(slot, start, part))
                            if packed and not alternate:
                                plgpu.wgmma_wait(0)
                        if packed and not alternate:
                            free(k)
                        elif not packed:
                            plgpu.wgmma_wait(len(totals))  # all but those just issued
                            free(k - 1)
                        return carry

                    def free(k: Array) -> None:
                        @pl.when(k >= 0)
                        def _() -> None:
                            plgpu.barrier_arrive(empty.at[lax.rem(done + k, stages)])

                    def two(pair: Array, carry: tuple[()]) -> tuple[()]:
                        return one(2 * pair + 1, one(2 * pair, carry))

                    if alternate and not even:
                        lax.fori_loop(0, busy * (steps // 2), two, ())
                    else:
                        lax.fori_loop(0, busy * steps, one, ())
                    plgpu.wgmma_wait(0)
                    if alternate or not packed:
                        free(busy * steps - 1)
                    return tuple(total[...] for total in totals)

                totals = [plgpu.WGMMAAccumulatorRef((COLUMNS, share), jnp.float32) for _ in range(tall * len(starts))]
                sums = pl.run_scoped(accumulate, *totals)

                def rounded(block: int, start: int, count: int) -> Array:
                    """Some rows' results in a block of columns."""
                    which, at = divmod(start, share)
                    blocks = (block,) if gate is None else (0, 1)
                    found = [sums[one * len(starts) + which][:, at : at + count] for one in blocks]
                    return (found[0] if gate is None else gate.quickly(*found)).astype(out.dtype)

                low, high = first - base, last - base
                # Blocks that are this tile's from end to end: head..tail-1.
                head, tail = lax.div(low + (BLOCK - 1), BLOCK), lax.div(high, BLOCK)
                some, rest = low < high, high - tail * BLOCK
                begins, ends = some & (head > 0), some & (rest > 0) & (tail >= head)
                narrower = max((width for width in tuning.widths if width < size), default=0)
                first_rows = low, jnp.where(begins, jnp.minimum(high, BLOCK), 0)
                last_rows = tail * BLOCK, jnp.where(ends, high, 0)

                def put_part(turn: int, block: int, start: int) -> None:
                    """Turns some rows, sends off the whole blocks, and stores the rows of those that are shared."""
                    count, buffer = min(part_rows, share - start % share), turned.at[group, turn % 2]
                    target_column = column + (block * groups + group) * COLUMNS
                    part = rounded(block, start, count)
                    if turn != 1:  # At first none of both buffers may be read any more, then not that of two turns ago.
                        plgpu.wait_smem_to_gmem(min(turn, 1), wait_read_only=True)
                    if interpret is None:
                        store_turned(buffer, part)
                    else:
                        turned[group, turn % 2, :count] = part.T
                    plgpu.commit_smem()
                    there = pl.ds(target_column, COLUMNS)
                    # A tile that a narrower width would hold isn't here, so rows between the first part and there are ours.
                    if start > 0 and start + count <= narrower:
                        target = out.at[pl.ds(pl.multiple_of(base + start, BLOCK), count), there]
                        plgpu.copy_smem_to_gmem(buffer.at[pl.ds(0, count)], target)
                        return
                    begin = jnp.clip(head - start // BLOCK, 0, count // BLOCK)
                    blocks = jnp.maximum(jnp.minimum(tail - start // BLOCK, count // BLOCK) - begin, 0)
                    for power in reversed(range((count // BLOCK).bit_length())):

                        @pl.when((blocks & (1 << power)) != 0)
                        def _(begin: Array = begin, power: int = power) -> None:
                            at = pl.multiple_of(begin * BLOCK, BLOCK)
                            target = pl.ds(pl.multiple_of(base + start + at, BLOCK), BLOCK << power)
                            plgpu.copy_smem_to_gmem(
                                buffer.at[pl.ds(at, BLOCK << power)], out.at[target, there], commit_group=False
                            )

                        begin = begin + (blocks & (1 << power))
                    plgpu.commit_smem_to_gmem_group()
                    edges = first_rows, last_rows
                    if interpret is None:
                        store_edges(out, buffer, start, count, base, target_column, *edges)
                        return
                    for begin, end in edges:
                        begin, end = jnp.maximum(begin, start), jnp.minimum(end, start + count)

                        def one(row: Array, carry: tuple[()]) -> tuple[()]:
                            out[pl.ds(base + row, 1), there] = turned[group, turn % 2, pl.ds(row - start, 1)]
                            return carry

                        lax.fori_loop(begin, jnp.maximum(begin, end), one, ())

                places = [begin + start for begin in starts for start in range(0, share, part_rows)]
                for turn, (block, start) in enumerate(itertools.product(range(results), places)):
                    put_part(turn, block, start)

            for_each_width(kind, product)
            if packed:
                plgpu.barrier_arrive(scale_empty.at[scale_slot])
            return done + busy * steps

        @pl.when(group == groups)
        def _() -> None:
            plgpu.set_max_registers(_COPY_REGISTERS, action="decrease")
            done = lax.fori_loop(0, mine, copy_item, jnp.int32(0))
            # Stay until everything was read: a neighbour in the cluster writes here, and barriers must be even.
            for index in range(stages):

                @pl.when(done + index >= stages)
                def _(index: int = index) -> None:
                    plgpu.barrier_wait(empty.at[lax.rem(done + index, stages)])

            if packed:
                for index in range(2):

                    @pl.when(mine + index >= 2)
                    def _(index: int = index) -> None:
                        plgpu.barrier_wait(scale_empty.at[lax.rem(mine + index, 2)])

        @pl.when(group < groups)
        def _() -> None:
            plgpu.set_max_registers(_PRODUCT_REGISTERS[groups], action="increase")
            lax.fori_loop(0, mine, multiply_item, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0)

    scratch: dict[str, Any] = {}
    if packed:
        scratch["weight_slots"] = plgpu.SMEM((stages, stored_blocks, COLUMNS, step // 2), jnp.uint8)
        scratch["scale_slots"] = plgpu.SMEM((2, stored_blocks, COLUMNS, width // 32), jnp.uint8)
    else:
        slot = (step, stored_blocks * COLUMNS) if transposed else (stored_blocks * COLUMNS, step)
        scratch["weight_slots"] = plgpu.SMEM((stages, *slot), rows.dtype, transforms=SWIZZLED)
    if interpret is not None and (packed or transposed):
        scratch["plain"] = plgpu.SMEM((stored_blocks, COLUMNS, step // parts), jnp.bfloat16)
    scratch["row_slots"] = plgpu.SMEM((stages, widest, step), rows.dtype, transforms=SWIZZLED)
    scratch["turned"] = plgpu.SMEM((groups, 2, part_rows, COLUMNS), out_dtype, transforms=SWIZZLED)
    if interpret is not None:
        scratch["flipped"] = plgpu.SMEM((groups, step, widest), rows.dtype)
    scratch["full"] = plgpu.Barrier(num_arrivals=1 + (stored_blocks if packed else copies), num_barriers=stages)
    if cluster > 1:
        scratch["empty"] = plgpu.ClusterBarrier(collective_axes=("cluster",), num_arrivals=groups, num_barriers=stages)
    else:
        scratch["empty"] = plgpu.Barrier(num_arrivals=groups, num_barriers=stages)
    if packed:
        scratch["scale_full"] = plgpu.Barrier(num_arrivals=stored_blocks, num_barriers=2)
        scratch["scale_empty"] = plgpu.Barrier(num_arrivals=groups, num_barriers=2)

    mesh: dict[str, Any] = {"cluster": (cluster,), "cluster_names": ("cluster",)} if cluster > 1 else {}
    if interpret is not None:
        mesh["interpret"] = interpret
    operands = (weights.packed, weights.scale) if isinstance(weights, Mxfp4) else (weights,)
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((num_rows, out_width), out_dtype),
        grid=(clusters,),
        grid_names=("block",),
        num_threads=groups + 1,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, approx_math=gate is not None
        ),
        **mesh,
    )(*work, rows, *operands)
