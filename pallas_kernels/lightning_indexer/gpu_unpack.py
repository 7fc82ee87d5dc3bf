"""MXFP8 keys from shared memory to the registers that a Hopper matrix instruction reads.

The instruction wants thread (r, c) of a warp, r = 0..7 and c = 0..3, to hold inputs 2c, 2c+1 and 8+2c, 9+2c of every 16
of rows r and r+8. A sum over inputs doesn't care about their order as long as both factors have the same one, so a
thread takes the 32 bytes of block c of its rows, which share a scale, and `order_inputs` puts the queries' columns where
those bytes happen to land. Elements that are NaN, which quantisation never makes, count as 480.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith as _arith
from jaxlib.mlir.dialects import llvm as _llvm
from jaxlib.mlir.dialects import scf as _scf
from jaxlib.mlir.dialects import vector as _vector
from jaxtyping import Array, Float, UInt8

# The generated signatures of dialects leave out how they may be called.
arith: Any = _arith
llvm: Any = _llvm
scf: Any = _scf
vector: Any = _vector

WIDTH = 128

# Axes of a key's 128 channels in memory (block, 32-bit word, byte pair, byte of the pair) and the same axes in the order
# of the instruction's registers.
_STORED = (4, 8, 2, 2)
_REGISTERS = (1, 3, 0, 2)


def order_inputs(rows: Float[Array, "*N K"]) -> Float[Array, "*N K"]:
    """Channels in the order in which unpacked keys have them."""
    *outer, width = rows.shape
    axes = len(outer)
    split = rows.reshape(*outer, *_STORED)
    return split.transpose(*range(axes), *(axes + axis for axis in _REGISTERS)).reshape(*outer, width)


def unpack_plainly(elements: UInt8[Array, "S K"], scale: UInt8[Array, "S G"]) -> Float[Array, "S K"]:
    """What `unpack` returns, in array operations, for the interpreter."""
    words = elements.astype(jnp.uint32).reshape(-1, 4, 8, 2, 2)
    bits = (words & 0x80) << 8 | (words & 0x7F) << 4
    tiny = jax.lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.bfloat16).astype(jnp.float32)
    # Spelled out because some processors flush subnormal numbers.
    tiny = jnp.where(words & 0x78 == 0, jnp.where(words & 0x80 != 0, -1.0, 1.0) * (words & 7) / 512, tiny * 2.0**120)
    factor = jax.lax.bitcast_convert_type(scale.astype(jnp.uint32) << 23, jnp.float32)
    factor = jnp.where(scale == 255, jnp.nan, jnp.where(scale == 0, 2.0**-127, factor))
    values = (tiny * factor[:, :, None, None, None]).astype(jnp.bfloat16)
    return values.transpose(0, *(1 + axis for axis in _REGISTERS)).reshape(-1, WIDTH)


def widen_plainly(elements: UInt8[Array, "S K"], scale: UInt8[Array, "S G"]) -> Float[Array, "S K"]:
    """What `widen` writes, in array operations, for the interpreter."""
    found = unpack_plainly(elements, scale).reshape(-1, *(_STORED[axis] for axis in _REGISTERS))
    back = sorted(range(len(_REGISTERS)), key=lambda axis: _REGISTERS[axis])
    return found.transpose(0, *(1 + axis for axis in back)).reshape(-1, WIDTH)


def unpack(elements_ref: Any, scale_ref: Any) -> Any:
    """bfloat16 [64, 128] keys in the registers of a matrix instruction's left factor.

    Args:
        elements_ref: uint8 [64, 128] in shared memory, rows 128 bytes apart.
        scale_ref: uint8 [2, 128] in shared memory, 4 a key.
    """
    read = plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct((64, WIDTH), jnp.dtype(jnp.bfloat16), layout=plgpu.Layout.WGMMA),
    )(_read)
    return read(elements_ref, scale_ref)


def _read(context: Any, elements: Any, scale: Any) -> Any:
    del context
    i8, i32 = ir.IntegerType.get_signless(8), ir.IntegerType.get_signless(32)
    words = ir.VectorType.get((4,), i32)
    pair = ir.VectorType.get((2,), ir.BF16Type.get())
    thread = arith.remui(mgpu.utils.thread_idx(), constant(128))
    lane = arith.remui(thread, constant(32))
    row = arith.addi(arith.muli(arith.divui(thread, constant(32)), constant(16)), arith.shrui(lane, constant(2)))
    block = arith.andi(lane, constant(3))
    elements_ptr, scale_ptr = mgpu.utils.memref_ptr(elements), mgpu.utils.memref_ptr(scale)

    values, rests, scales, places = [], [], [], []
    for half in range(2):
        my_row = arith.addi(row, constant(8 * half))
        offset = arith.addi(arith.muli(my_row, constant(4)), block)
        byte = arith.extui(i32, llvm.load(i8, mgpu.utils.getelementptr(scale_ptr, [offset], i8)))
        factor, rest = _factor(byte), _rest(byte)
        scales.append(byte)
        for quarter in range(2):
            offset = arith.addi(arith.muli(my_row, constant(WIDTH)), arith.muli(block, constant(32)))
            offset = arith.addi(offset, constant(16 * quarter))
            loaded = llvm.load(words, mgpu.utils.getelementptr(elements_ptr, [offset], i8), alignment=16)
            for which in range(4):
                word = vector.extract(loaded, dynamic_position=[], static_position=[which])
                for odd, which_half in enumerate(("even", "odd")):
                    values.append(_pair(word, factor, which_half))
                    rests.append(rest)
                    places.append((2 * (4 * quarter + which) + odd, half))
    registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape((64, WIDTH)), dtype=object)
    for value, (place, half) in zip(_scaled(values, rests, _some_large(scales)), places, strict=True):
        # Axes that aren't 1: eight columns at a time, and the two halves of a warp's sixteen rows.
        register = vector.bitcast(pair, vector.broadcast(ir.VectorType.get((1,), i32), value))
        registers[0, place, 0, 0, half, 0, 0, 0, 0] = register
    return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)


def widen(
    elements_ref: Any, scale_ref: Any, wide_ref: Any, transforms: tuple[Any, ...], *, queries: bool = False
) -> None:
    """128 rows as bfloat16 for a matrix instruction that reads shared memory; a warpgroup does it, a thread a row.

    Args:
        elements_ref: uint8 in shared memory, 128 rows of 128.
        scale_ref: uint8 in shared memory, 4 a row.
        wide_ref: bfloat16 in shared memory, 128 rows of 128.
        transforms: of `wide_ref`: tiles of 8 x 64, 128 bytes swizzled.
        queries: rows are 32 heads of 4 queries, and 16 heads of all of them come before the other 16.
    """
    plain = plgpu.RefType()
    plgpu.inline_mgpu(arg_types=(plain, plain, plgpu.RefType(transforms)), return_type=None)(
        functools.partial(_widen, queries=queries)
    )(elements_ref, scale_ref, wide_ref)


def _widen(context: Any, elements: Any, scale: Any, wide: Any, queries: bool) -> None:
    del context
    i8, i32 = ir.IntegerType.get_signless(8), ir.IntegerType.get_signless(32)
    words = ir.VectorType.get((4,), i32)
    thread = mgpu.utils.thread_idx()
    row, lane = arith.remui(thread, constant(128)), arith.andi(thread, constant(7))
    elements_ptr, scale_ptr, wide_ptr = (mgpu.utils.memref_ptr(ref) for ref in (elements, scale, wide))
    scales = llvm.load(i32, mgpu.utils.getelementptr(scale_ptr, [row], i32))
    each = [arith.andi(arith.shrui(scales, constant(8 * i)), constant(255)) for i in range(4)]
    some = _some_large(each)
    block = arith.shrui(row, constant(3))  # of 8 rows, which stay together
    if queries:
        of_head = arith.andi(block, constant(3))
        of_query = arith.shli(arith.shrui(block, constant(2)), constant(1))
        low = arith.ori(of_query, arith.andi(of_head, constant(1)))
        block = arith.ori(arith.shli(arith.shrui(of_head, constant(1)), constant(3)), low)
    line = arith.addi(arith.muli(block, constant(2048)), arith.muli(lane, constant(128)))
    for turn in range(8):
        # Neighbouring rows read and write different parts of a row, so different banks.
        part = arith.andi(arith.addi(lane, constant(turn)), constant(7))
        offset = arith.addi(arith.muli(row, constant(WIDTH)), arith.muli(part, constant(16)))
        loaded = llvm.load(words, mgpu.utils.getelementptr(elements_ptr, [offset], i8), alignment=16)
        shift = arith.shli(arith.shrui(part, constant(1)), constant(3))
        byte = arith.andi(arith.shrui(scales, shift), constant(255))
        factor, rest = _factor(byte), _rest(byte)
        target = arith.addi(line, arith.shli(arith.shrui(part, constant(2)), constant(10)))
        for half in range(2):
            values = []
            for which in range(2):
                word = vector.extract(loaded, dynamic_position=[], static_position=[2 * half + which])
                values += [_pair(word, factor, place) for place in ("low", "high")]
            values = _scaled(values, [rest] * 4, some)
            column = arith.ori(arith.shli(arith.andi(part, constant(3)), constant(1)), constant(half))
            at = arith.addi(target, arith.shli(arith.xori(column, lane), constant(4)))
            stored = vector.from_elements(words, values)
            llvm.store(stored, mgpu.utils.getelementptr(wide_ptr, [at], i8), alignment=16)


def constant(value: int) -> Any:
    """A 32-bit integer."""
    i32 = ir.IntegerType.get_signless(32)
    return arith.constant(i32, ir.IntegerAttr.get(i32, value - (1 << 32) if value >= 1 << 31 else value))


_LARGE = 134


def _factor(byte: Any) -> Any:
    """Two bfloat16 of 2^(byte - 7), up to byte 134, whose factor is the largest power of two; NaN for byte 255."""
    bits = arith.shli(arith.addi(arith.minui(byte, constant(_LARGE)), constant(120)), constant(7))
    return _twice(arith.select(_is(byte, constant(255)), constant(0x7FC0), bits))


def _rest(byte: Any) -> Any:
    """Two bfloat16 of what `_factor` lacks to 2^(byte - 7)."""
    bits = arith.shli(arith.subi(arith.maxui(byte, constant(_LARGE)), constant(_LARGE - 127)), constant(7))
    return _twice(bits)


def _twice(bits: Any) -> Any:
    return arith.ori(bits, arith.shli(bits, constant(16)))


def _is(a: Any, b: Any) -> Any:
    return arith.cmpi(arith.CmpIPredicate.eq, a, b)


def _pair(word: Any, factor: Any, place: str) -> Any:
    """Two bfloat16 from bytes 0 and 2 ("even") or 1 and 3 ("odd") of a word, or from its "low" or "high" half.

    The sign goes to the top; exponent and mantissa go to the lower end of a bfloat16's exponent and the upper end of its
    mantissa, where they mean 2^-120 times as much, subnormal numbers included. The factor makes up for it.
    """
    align = {
        "even": "mul.lo.u32 m, $1, 16; mul.lo.u32 s, $1, 256;",  # shifts that the multipliers do, which have time
        "odd": "shr.u32 m, $1, 4; mov.b32 s, $1;",
        "low": "prmt.b32 s, $1, 0, 0x1404; shr.u32 m, s, 4;",
        "high": "prmt.b32 s, $1, 0, 0x3424; shr.u32 m, s, 4;",
    }[place]
    return llvm.inline_asm(
        ir.IntegerType.get_signless(32),
        [word, factor],
        "{ .reg .b32 m, s, t; " + align + " and.b32 m, m, 0x07F007F0; "
        "lop3.b32 t, s, 0x80008000, m, 0xEA; mul.rn.bf16x2 $0, t, $2; }",
        "=r,r,r",
    )


def _some_large(scales: list[Any]) -> Any:
    """Whether a lane of the warp has a scale of more than 2^7, which index keys don't have as a rule."""
    i1, i32 = ir.IntegerType.get_signless(1), ir.IntegerType.get_signless(32)
    large = arith.constant(i1, ir.IntegerAttr.get(i1, 0))
    for byte in scales:
        large = arith.ori(large, arith.cmpi(arith.CmpIPredicate.ugt, byte, constant(_LARGE)))
    some = llvm.inline_asm(
        i32,
        [arith.extui(i32, large)],
        "{ .reg .pred p, q; setp.ne.b32 p, $1, 0; vote.sync.any.pred q, p, 0xffffffff; selp.b32 $0, 1, 0, q; }",
        "=r,r",
        has_side_effects=True,
    )
    return arith.cmpi(arith.CmpIPredicate.ne, some, constant(0))


def _scaled(values: list[Any], rests: list[Any], some: Any) -> list[Any]:
    """The values times the rests, where there is a rest."""
    i32 = ir.IntegerType.get_signless(32)
    branch = scf.IfOp(some, [i32] * len(values), has_else=True)
    with ir.InsertionPoint(branch.then_block):
        scf.yield_(
            [
                llvm.inline_asm(i32, [value, rest], "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r")
                for value, rest in zip(values, rests, strict=True)
            ]
        )
    with ir.InsertionPoint(branch.else_block):
        scf.yield_(values)
    return list(branch.results)
