"""The Hopper kernel for gradients of weights: each group's sum over its rows of left ⊗ right.

A block of threads works through a list of (group, 128 columns of left, up to 256 of right). One warpgroup copies 64 rows
of both at a time into a ring of shared-memory slots; each of two others multiplies 64 columns of left, turned by the
matrix instruction's own reading of its operand. Chunks begin at multiples of 8 rows: rows of a neighbour in a group's
first and last chunk are set to zero in left, by the warpgroup that reads them.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_matmul.gpu_tiles import BLOCK, COLUMNS

ROWS = 64
"""Rows multiplied at once."""

_GROUPS, _STAGES = 2, 4
_COPY_REGISTERS, _PRODUCT_REGISTERS = 40, 232
_SWIZZLED = (plgpu.TilingTransform((BLOCK, 64)), plgpu.SwizzleTransform(128))


def outer(
    group_sizes: Int[Array, " G"],
    left: Float[Array, "M F"],
    right: Float[Array, "M D"],
    blocks: int,
    interpret: Any = None,
) -> Float[Array, "G F D"]:
    """Σ_m left[m] ⊗ right[m] over each group's rows, F and D in multiples of 128; rows of right must be numbers."""
    num_groups = group_sizes.shape[0]
    tall, wide = left.shape[1], right.shape[1]
    columns = _GROUPS * COLUMNS
    span = 256 if wide % 256 == 0 else 128
    across = wide // span
    pieces = tall // columns * across
    if interpret is not None:
        # The copy engine gives zeros past the end; the interpreter refuses to read there.
        left, right = (jnp.pad(array, ((0, ROWS), (0, 0))) for array in (left, right))
    sizes = group_sizes.astype(jnp.int32)
    group = jnp.arange(num_groups, dtype=jnp.int32)
    first = jnp.sum(jnp.where(group[:, None] > group[None, :], sizes[None, :], 0), axis=1, dtype=jnp.int32)

    def kernel(
        bounds: Any,
        left: Any,
        right: Any,
        out: Any,
        *,
        left_slots: Any,
        right_slots: Any,
        parts: Any,
        full: Any,
        empty: Any,
    ) -> None:
        warpgroup = lax.axis_index("warpgroup")
        me = lax.axis_index("block")
        mine = lax.div(num_groups * pieces - me + (blocks - 1), blocks)

        def locate(number: Array) -> tuple[Array, ...]:
            """Group, columns of left and of right, first row copied, rows that count, and how many chunks."""
            item = me + number * blocks
            group, piece = lax.div(item, pieces), lax.rem(item, pieces)
            first, last = bounds[0, group], bounds[1, group]
            base = pl.multiple_of(lax.div(first, BLOCK) * BLOCK, BLOCK)
            chunks = jnp.where(last > first, lax.div(last - base + (ROWS - 1), ROWS), 0)
            return group, lax.div(piece, across) * columns, lax.rem(piece, across) * span, base, first, last, chunks

        def copy_item(number: Array, done: Array) -> Array:
            _, column_of_left, column, base, _, _, chunks = locate(number)

            def one(k: Array, carry: tuple[()]) -> tuple[()]:
                slot = lax.rem(done + k, _STAGES)

                @pl.when(done + k >= _STAGES)
                def _() -> None:
                    plgpu.barrier_wait(empty.at[slot])

                rows = pl.ds(pl.multiple_of(base + k * ROWS, BLOCK), ROWS)
                plgpu.copy_gmem_to_smem(
                    left.at[rows, pl.ds(column_of_left, columns)], left_slots.at[slot], full.at[slot]
                )
                plgpu.copy_gmem_to_smem(right.at[rows, pl.ds(column, span)], right_slots.at[slot], full.at[slot])
                return carry

            lax.fori_loop(0, chunks, one, ())
            return done + chunks

        def multiply_item(number: Array, done: Array) -> Array:
            group, column_of_left, column, base, first, last, chunks = locate(number)
            own = pl.ds(warpgroup * COLUMNS, COLUMNS)

            def accumulate(total: Any) -> Array:
                def free(k: Array) -> None:
                    @pl.when(k >= 0)
                    def _() -> None:
                        plgpu.barrier_arrive(empty.at[lax.rem(done + k, _STAGES)])

                def one(k: Array, carry: tuple[()]) -> tuple[()]:
                    slot = lax.rem(done + k, _STAGES)
                    plgpu.barrier_wait(full.at[slot])
                    start = base + k * ROWS

                    @pl.when((start < first) | (start + ROWS > last))
                    def _() -> None:
                        shape = (ROWS, COLUMNS)
                        if interpret is None:
                            layout = plgpu.Layout.WGMMA
                            value = plgpu.load(left_slots.at[slot, :, own], (), layout=layout)
                            row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout)
                        else:
                            value, row = left_slots[slot, :, own], lax.broadcasted_iota(jnp.int32, shape, 0)
                        inside = (row >= first - start) & (row < last - start)
                        left_slots[slot, :, own] = jnp.where(inside, value, jnp.zeros_like(value))
                        plgpu.commit_smem()

                    if interpret is None:
                        turned = left_slots.at[slot, :, own].transpose((1, 0))
                        plgpu.wgmma(total, turned, right_slots.at[slot])
                    else:
                        flipped = parts.at[warpgroup, 0]
                        flipped[...] = left_slots[slot, :, own].T
                        plgpu.wgmma(total, flipped, right_slots.at[slot])
                    plgpu.wgmma_wait(1)  # all but the one just issued
                    free(k - 1)
                    return carry

                lax.fori_loop(0, chunks, one, ())
                plgpu.wgmma_wait(0)
                free(chunks - 1)
                return total[...]

            sums = pl.run_scoped(accumulate, plgpu.WGMMAAccumulatorRef((COLUMNS, span), jnp.float32))
            for which, start in enumerate(range(0, span, COLUMNS)):
                part = parts.at[warpgroup, which % 2]
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                part[...] = sums[:, start : start + COLUMNS].astype(out.dtype)
                plgpu.commit_smem()
                target = pl.ds(column_of_left + warpgroup * COLUMNS, COLUMNS), pl.ds(column + start, COLUMNS)
                plgpu.copy_smem_to_gmem(part, out.at[group, *target])
            if interpret is not None:
                plgpu.wait_smem_to_gmem(0)
            return done + chunks

        @pl.when(warpgroup == _GROUPS)
        def _() -> None:
            plgpu.set_max_registers(_COPY_REGISTERS, action="decrease")
            done = lax.fori_loop(0, mine, copy_item, jnp.int32(0))
            for index in range(_STAGES):

                @pl.when(done + index >= _STAGES)
                def _(index: int = index) -> None:
                    plgpu.barrier_wait(empty.at[lax.rem(done + index, _STAGES)])

        @pl.when(warpgroup < _GROUPS)
        def _() -> None:
            plgpu.set_max_registers(_PRODUCT_REGISTERS, action="increase")
            lax.fori_loop(0, mine, multiply_item, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((num_groups, tall, wide), left.dtype),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=_GROUPS + 1,
        thread_name="warpgroup",
        scratch_types={
            "left_slots": plgpu.SMEM((_STAGES, ROWS, columns), left.dtype, transforms=_SWIZZLED),
            "right_slots": plgpu.SMEM((_STAGES, ROWS, span), right.dtype, transforms=_SWIZZLED),
            "parts": plgpu.SMEM((_GROUPS, 2, COLUMNS, COLUMNS), left.dtype, transforms=_SWIZZLED),
            "full": plgpu.Barrier(num_arrivals=2, num_barriers=_STAGES),
            "empty": plgpu.Barrier(num_arrivals=_GROUPS, num_barriers=_STAGES),
        },
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        **({} if interpret is None else {"interpret": interpret}),
    )(jnp.stack([first, first + sizes]), left, right)
