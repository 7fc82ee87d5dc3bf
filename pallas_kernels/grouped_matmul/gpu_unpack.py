"""MXFP4 weights from shared memory to the registers that a Hopper matrix instruction reads.

The instruction wants thread (r, c) of a warp, r = 0..7 and c = 0..3, to hold inputs 2c, 2c+1 and 8+2c, 9+2c of every 16
of rows r and r+8. Checkpoints keep 32 codes that share a scale in 16 bytes. A sum over inputs doesn't care about their
order as long as both factors have the same one, so a thread takes the 16 bytes of block c of its rows whole, in one
read, and `order_inputs` puts the columns of the other factor where the codes happen to land.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, UInt8

from pallas_kernels.grouped_matmul.gpu_tiles import CHUNK

# Axes of 128 inputs in the checkpoints' order (block, 32-bit word, half word, two bits of the nibble) and the same axes
# in the order of the instruction's registers.
_STORED = (4, 4, 2, 2, 2)
_REGISTERS = (1, 3, 4, 0, 2)


def order_inputs(rows: Float[Array, "M D"]) -> Float[Array, "M D"]:
    """Columns in the order in which unpacked weights have their inputs."""
    num_rows, width = rows.shape
    split = rows.reshape(num_rows, width // CHUNK, *_STORED)
    return split.transpose(0, 1, *(2 + axis for axis in _REGISTERS)).reshape(num_rows, width)


def unpack_plainly(packed: UInt8[Array, "F half"], scale: UInt8[Array, "F blocks"]) -> Float[Array, "F CHUNK"]:
    """What `unpack` returns, in array operations, for the interpreter."""
    count = packed.shape[0]
    words = jax.lax.bitcast_convert_type(packed.reshape(count, 4, 4, 4), jnp.uint32)
    places = [
        _pair(
            words[:, :, place // 4],
            place % 4,
            lambda value, count: value >> count,
            lambda value, bits: value & jnp.uint32(bits),
            lambda value, factor: value * jnp.uint32(factor),
        )
        for place in range(CHUNK // 8)
    ]
    bits = jax.lax.bitcast_convert_type(jnp.stack(places, axis=1), jnp.uint16)  # [F, place, block, half word]
    values = jax.lax.bitcast_convert_type(bits, jnp.bfloat16) * jnp.bfloat16(2.0**126)
    # Spelled out because some processors flush subnormal numbers, which halves are up to here.
    halves = jnp.where(bits >> 15 == 1, -0.5, 0.5).astype(jnp.bfloat16)
    values = jnp.where(bits & 0x7FFF == 0x40, halves, values)
    exponent = scale.astype(jnp.int32)
    bits = jnp.where(exponent == 255, 0x7FC0, jnp.where(exponent < 2, 0, exponent << 7)).astype(jnp.uint16)
    factor = jax.lax.bitcast_convert_type(bits, jnp.bfloat16)
    return (values * factor[:, None, :, None]).reshape(count, CHUNK)


def _pair(word: Any, nibble: int, right: Any, mask: Any, times: Any) -> Any:
    """Codes `nibble` and `nibble` + 4 of a 32-bit word as the bits of two bfloat16, 2^126 times too small.

    A code is a sign, two bits of exponent and one of mantissa. At the lower end of a bfloat16's exponent and the upper
    end of its mantissa they mean the same up to that factor, zeros and subnormal numbers included. One product puts a
    copy of the code where its sign belongs and another where its other bits do: multiplications have a unit of their own
    on the GPU, while shifts wait for the one that masks.
    """
    word = right(word, 8) if nibble >= 2 else word
    low = nibble % 2 == 0
    codes = mask(word, 0x000F000F if low else 0x00F000F0)
    return mask(times(codes, 0x1040 if low else 0x0104), 0x81C081C0)


def unpack(packed_ref: Any, scale_ref: Any, part: int) -> Any:
    """bfloat16 [64, 128] weights in the registers of a matrix instruction's left factor.

    Args:
        packed_ref: uint8 [64, 64 · n] in shared memory.
        scale_ref: uint8 [64, 4] in shared memory.
        part: which 64 bytes of each row.
    """
    layout = plgpu.Layout.WGMMA
    read = plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct((64, CHUNK), jnp.dtype(jnp.bfloat16), layout=layout),
    )(functools.partial(_read, part=part))
    return read(packed_ref, scale_ref)


def _read(context: Any, packed: Any, scale: Any, part: int) -> Any:
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith as arithmetic
    from jaxlib.mlir.dialects import llvm, vector
    from jaxlib.mlir.dialects import scf as structured

    # The generated signatures of dialects leave out how they may be called.
    arith: Any = arithmetic
    scf: Any = structured
    del context
    i8, i32 = ir.IntegerType.get_signless(8), ir.IntegerType.get_signless(32)
    words = ir.VectorType.get((4,), i32)
    pair = ir.VectorType.get((2,), ir.BF16Type.get())

    def constant(value: int) -> Any:
        return arith.constant(i32, ir.IntegerAttr.get(i32, value - (1 << 32) if value >= 1 << 31 else value))

    thread = arith.remui(mgpu.utils.thread_idx(), constant(128))
    lane = arith.remui(thread, constant(32))
    row = arith.addi(arith.muli(arith.divui(thread, constant(32)), constant(16)), arith.shrui(lane, constant(2)))
    block = arith.andi(lane, constant(3))
    packed_ptr, scale_ptr = mgpu.utils.memref_ptr(packed), mgpu.utils.memref_ptr(scale)
    scale_stride = ir.MemRefType(scale.type).get_strides_and_offset()[0][0]
    packed_stride = ir.MemRefType(packed.type).get_strides_and_offset()[0][0]

    def multiply(a: Any, b: Any) -> Any:
        return llvm.inline_asm(i32, [a, b], "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r")

    def vote(condition: Any) -> Any:
        """Whether it holds for a thread of the warp."""
        word = llvm.inline_asm(
            i32,
            [arith.extui(i32, condition)],
            "{ .reg .pred p; setp.ne.b32 p, $1, 0; vote.sync.any.pred p, p, 0xffffffff; selp.b32 $0, 1, 0, p; }",
            "=r,r",
            has_side_effects=True,
        )
        return arith.cmpi(arith.CmpIPredicate.ne, word, constant(0))

    values: list[Any] = []
    rests: list[Any] = []
    large: Any = arith.constant(ir.IntegerType.get_signless(1), ir.BoolAttr.get(False))
    for half in range(2):
        my_row = arith.addi(row, constant(8 * half))
        offset = arith.addi(arith.muli(my_row, constant(packed_stride)), arith.muli(block, constant(16)))
        offset = arith.addi(offset, constant(part * CHUNK // 2))
        address = mgpu.utils.getelementptr(packed_ptr, [offset], i8)
        loaded = llvm.load(words, address, alignment=16)
        offset = arith.addi(arith.muli(my_row, constant(scale_stride)), block)
        byte = arith.extui(i32, llvm.load(i8, mgpu.utils.getelementptr(scale_ptr, [offset], i8)))
        # 2^126 and the scale in one factor, as long as that is finite.
        field = arith.minui(arith.addi(byte, constant(126)), constant(254))
        bits = arith.shli(field, constant(7))
        bits = arith.select(arith.cmpi(arith.CmpIPredicate.ult, byte, constant(2)), constant(0), bits)
        bits = arith.select(arith.cmpi(arith.CmpIPredicate.eq, byte, constant(255)), constant(0x7FC0), bits)
        factor = arith.ori(bits, arith.shli(bits, constant(16)))
        rest = arith.shli(arith.subi(arith.maxui(byte, constant(128)), constant(1)), constant(7))
        rests.append(arith.ori(rest, arith.shli(rest, constant(16))))
        large = arith.ori(large, arith.cmpi(arith.CmpIPredicate.ugt, byte, constant(128)))
        for place in range(CHUNK // 8):
            word = vector.extract(loaded, dynamic_position=[], static_position=[place // 4])
            tiny = _pair(
                word,
                place % 4,
                lambda value, count: arith.shrui(value, constant(count)),
                lambda value, bits: arith.andi(value, constant(bits)),
                lambda value, factor: arith.muli(value, constant(factor)),
            )
            values.append(multiply(tiny, factor))
    # Scales above 2, which real weights don't have, take a second factor.
    branch = scf.IfOp(vote(large), [i32] * len(values), has_else=True)
    with ir.InsertionPoint(branch.then_block):
        half = len(values) // 2
        scf.yield_([multiply(value, rests[index // half]) for index, value in enumerate(values)])
    with ir.InsertionPoint(branch.else_block):
        scf.yield_(values)
    registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape((64, CHUNK)), dtype=object)
    for index, value in enumerate(branch.results):
        # Axes that aren't 1: eight columns at a time, and the two halves of a warp's sixteen rows.
        half, place = divmod(index, CHUNK // 8)
        register = vector.bitcast(pair, vector.broadcast(ir.VectorType.get((1,), i32), value))
        registers[0, place, 0, 0, half, 0, 0, 0, 0] = register
    return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)
