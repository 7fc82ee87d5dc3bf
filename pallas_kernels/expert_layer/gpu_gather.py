"""Rows by index on Hopper: the copy engine moves whole rows, a few at a time, through shared memory.

XLA's own gather moves an element a thread: 200 µs for 65536 rows of 2304 on an H200, whose memory takes 70 µs to write.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

ROWS = 8
"""Rows that leave together."""

_LINE = 256
"""Elements: the copy engine's longest stretch."""

_MOST_SLOTS, _SHARED_BYTES = 6, 220 * 1024


def gather(x: Float[Array, "T D"], index: Int[Array, " A"], blocks: int, interpret: Any = None) -> Float[Array, "A D"]:
    """x[index] of bfloat16 rows; every index must be that of a row.

    Args:
        x: of a width in multiples of 256 up to 7040, so that two slots fit.
        index: in multiples of 8.
        blocks: of threads, one a multiprocessor.
        interpret: what Pallas takes to run it without a GPU.
    """
    tokens, width = x.shape
    count, lines = index.shape[0], width // _LINE
    slots = min(_MOST_SLOTS, _SHARED_BYTES // (ROWS * width * x.dtype.itemsize))
    lag = slots // 2  # chunks on their way in
    chunks = count // ROWS

    def gather_rows(index: Any, x: Any, out: Any, *, held: Any, full: Any) -> None:
        me = lax.axis_index("block")
        mine = lax.div(chunks - me + (blocks - 1), blocks)

        def step(number: Array, carry: tuple[()]) -> tuple[()]:
            @pl.when(number < mine)
            def _() -> None:
                slot = lax.rem(number, slots)
                plgpu.wait_smem_to_gmem(slots - 1 - lag, wait_read_only=True)
                first = (me + number * blocks) * ROWS
                rows = [index[first + row] for row in range(ROWS)]
                for row, token in enumerate(rows):
                    plgpu.copy_gmem_to_smem(x.at[token], held.at[slot, row], full.at[slot])

            @pl.when(number >= lag)
            def _() -> None:
                before = number - lag
                slot = lax.rem(before, slots)
                plgpu.barrier_wait(full.at[slot])
                first = (me + before * blocks) * ROWS
                plgpu.copy_smem_to_gmem(held.at[slot], out.at[pl.ds(first, ROWS)])

            return carry

        lax.fori_loop(0, jnp.where(mine > 0, mine + lag, 0), step, ())
        plgpu.wait_smem_to_gmem(0)

    gathered = plgpu.kernel(
        gather_rows,
        out_type=jax.ShapeDtypeStruct((count, lines, _LINE), x.dtype),
        grid=(blocks,),
        grid_names=("block",),
        scratch_types={
            "held": plgpu.SMEM((slots, ROWS, lines, _LINE), x.dtype),
            "full": plgpu.Barrier(num_arrivals=ROWS, num_barriers=slots),
        },
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        **({} if interpret is None else {"interpret": interpret}),
    )(index, x.reshape(tokens, lines, _LINE))
    return gathered.reshape(count, width)
