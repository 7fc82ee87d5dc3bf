"""Two sums over the 128 threads of a block at once, with one barrier."""

from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

SCRATCH = (2, 8)
"""float32 numbers in shared memory: for each parity the two sums of four warps."""


def sums(rows: Any, keys: Any, scratch: Any, parity: Any, layout: Any) -> tuple[Any, Any]:
    """(Σ rows², Σ rows · keys) in float32, the same in every thread.

    All threads have read their part of both before any returns. Calls take turns with the parity, so that a thread may
    write the next call's sums while another still reads this one's.

    Args:
        rows: bfloat16, spread over the threads by `layout`.
        keys: float32, spread alike.
        scratch: float32 SCRATCH in shared memory.
        parity: 0 and 1 in turn.
        layout: of both, in vectors of 8.
    """
    scalar = plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.float32), layout=plgpu.Layout.WG_SPLAT(()))
    call = plgpu.inline_mgpu(arg_types=(layout, layout, plgpu.RefType()), return_type=(scalar, scalar))(_sums)
    return call(rows, keys, scratch.at[parity])


def _sums(context: Any, rows: Any, keys: Any, scratch: Any) -> tuple[Any, Any]:
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith as arithmetic
    from jaxlib.mlir.dialects import llvm, vector
    from jaxlib.mlir.dialects import scf as structured

    # The generated signatures of dialects leave out how they may be called.
    arith: Any = arithmetic
    scf: Any = structured
    math: Any = mgpu.utils
    del context
    i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
    lanes = ir.VectorType.get((8,), f32)

    def fma(a: Any, b: Any, c: Any) -> Any:
        return arith.addf(arith.mulf(a, b, fastmath=contract), c, fastmath=contract)

    contract = arith.FastMathFlags.contract
    zero = arith.constant(lanes, ir.DenseElementsAttr.get_splat(lanes, ir.FloatAttr.get(f32, 0.0)))
    totals = [zero, zero]
    for row, key in zip(rows.registers.flat, keys.registers.flat, strict=True):
        wide = arith.extf(lanes, row)
        totals = [fma(wide, wide, totals[0]), fma(wide, key, totals[1])]

    def extract(value: Any, index: int) -> Any:
        return vector.extract(value, dynamic_position=[], static_position=[index])

    sums = []
    for total in totals:
        parts = [extract(total, index) for index in range(8)]
        while len(parts) > 1:
            parts = [arith.addf(a, b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
        sums.append(parts[0])
    for distance in (16, 8, 4, 2, 1):
        sums = [arith.addf(value, math.shfl_bfly(value, distance)) for value in sums]

    def constant(value: int) -> Any:
        return arith.constant(i32, ir.IntegerAttr.get(i32, value))

    thread = mgpu.utils.thread_idx()
    pointer = mgpu.utils.memref_ptr(scratch)
    first = arith.cmpi(arith.CmpIPredicate.eq, arith.andi(thread, constant(31)), constant(0))
    branch = scf.IfOp(first)
    with ir.InsertionPoint(branch.then_block):
        warp = arith.shrui(thread, constant(5))
        for index, value in enumerate(sums):
            place = mgpu.utils.getelementptr(pointer, [arith.addi(warp, constant(4 * index))], f32)
            llvm.store(value, place)
        scf.yield_([])
    mgpu.utils.warpgroup_barrier()
    results = []
    for index in range(2):
        place = mgpu.utils.getelementptr(pointer, [constant(4 * index)], f32)
        loaded = llvm.load(ir.VectorType.get((4,), f32), place, alignment=16)
        parts = [extract(loaded, warp) for warp in range(4)]
        total = arith.addf(arith.addf(parts[0], parts[1]), arith.addf(parts[2], parts[3]))
        results.append(mgpu.FragmentedArray.splat(total, (), is_signed=None))
    return results[0], results[1]
