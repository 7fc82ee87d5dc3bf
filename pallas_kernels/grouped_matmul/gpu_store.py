"""How a warpgroup's results leave: turned on their way into shared memory, and the rows that a neighbour's block shares.

The accumulator is [64 columns, rows]; a buffer is [rows, 64 columns], its 16-byte pieces swizzled as the copy engine
wants them. `stmatrix` turns blocks of 8 by 8 on the way, without a bank conflict. Whole blocks of 8 rows then go by the
copy engine; of a group's first and last block, a thread takes 16 bytes of a row.
"""

from typing import Any

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_matmul.gpu_tiles import BLOCK, COLUMNS

SWIZZLED = (plgpu.TilingTransform((BLOCK, 64)), plgpu.SwizzleTransform(128))
_SCALAR, _ROW, _PIECE = plgpu.Layout.WG_SPLAT(()), 2 * COLUMNS, 16


class _Code:
    """Short names for the few instructions here."""

    def __init__(self) -> None:
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import arith, llvm

        # The generated signatures of dialects leave out how they may be called.
        self.ir: Any = ir
        self.arith: Any = arith
        self.llvm: Any = llvm
        self.i8, self.i32, self.i64 = (ir.IntegerType.get_signless(bits) for bits in (8, 32, 64))
        self.thread = arith.remui(mgpu.utils.thread_idx(), self.number(128))

    def number(self, value: int) -> Any:
        return self.arith.constant(self.i32, self.ir.IntegerAttr.get(self.i32, value))

    def add(self, *terms: Any) -> Any:
        total = terms[0]
        for term in terms[1:]:
            total = self.arith.addi(total, term)
        return total

    def times(self, value: Any, factor: int) -> Any:
        return self.arith.muli(value, self.number(factor))

    def over(self, value: Any, divisor: int) -> Any:
        return self.arith.divui(value, self.number(divisor))

    def rest(self, value: Any, divisor: int) -> Any:
        return self.arith.remui(value, self.number(divisor))

    def swizzled(self, row: Any, piece: Any) -> Any:
        """Byte of a row's piece in a buffer."""
        place = self.arith.xori(piece, self.rest(row, BLOCK))
        return self.add(self.times(row, _ROW), self.times(place, _PIECE))

    def less(self, a: Any, b: Any) -> Any:
        return self.arith.cmpi(self.arith.CmpIPredicate.slt, a, b)


def store_turned(buffer: Any, part: Any) -> None:
    """buffer[: rows] = part.T, of bfloat16 [64, rows] as a product leaves it."""
    count = part.shape[1]

    def emit(context: Any, buffer: Any, part: Any) -> None:
        del context
        code = _Code()
        warp, lane = code.over(code.thread, 32), code.rest(code.thread, 32)
        # Of every four 8 by 8 matrices, lanes 8 i to 8 i + 7 say where the rows of the i-th go.
        matrix, row = code.over(lane, BLOCK), code.rest(lane, BLOCK)
        row = code.add(row, code.times(code.over(matrix, 2), BLOCK))
        piece = code.add(code.times(warp, 2), code.rest(matrix, 2))
        start = code.llvm.ptrtoint(code.i32, mgpu.utils.memref_ptr(buffer))
        address = code.add(start, code.swizzled(row, piece))
        flat = [mgpu.utils.bitcast(value, code.i32) for value in np.ravel(_by_block(part, count))]
        for first in range(0, len(flat), 4):
            values = flat[first : first + 4]
            names = ", ".join(f"${1 + index}" for index in range(len(values)))
            code.llvm.inline_asm(
                code.ir.Type.parse("!llvm.void"),
                [address, *values],
                f"stmatrix.sync.aligned.m8n8.x{len(values)}.trans.shared.b16 [$0+{first // 2 * BLOCK * _ROW}], {{{names}}};",
                ",".join(["r"] * (1 + len(values)) + ["~{memory}"]),
                has_side_effects=True,
            )

    plgpu.inline_mgpu(arg_types=(plgpu.RefType(SWIZZLED), plgpu.Layout.WGMMA))(emit)(buffer, part)


def _by_block(part: Any, count: int) -> Any:
    """[rows / 8, 2] registers: of each 8 rows of the result, the warp's lower 8 columns and its upper 8."""
    registers = part.registers.reshape(count // BLOCK, -1)
    assert registers.shape[1] == 2
    return registers


def store_edges(
    out: Any,
    buffer: Any,
    start: int,
    count: int,
    base: Any,
    column: Any,
    first: tuple[Any, Any],
    last: tuple[Any, Any],
) -> None:
    """Rows of `buffer`, which holds `count` of a tile's from `start` on, that go alone: at most eight and eight.

    Args:
        out: device memory, [rows, columns].
        buffer: shared memory that `store_turned` filled.
        start: a multiple of 8.
        count: likewise.
        base: row of `out` at which the tile begins.
        column: of `out`, at which the 64 begin.
        first: rows from .. to of the tile's first 8; from >= to means none.
        last: a multiple of 8 and the row after the last one, at most 8 from there.
    """

    def emit(context: Any, out: Any, buffer: Any, *scalars: Any) -> None:
        del context
        code = _Code()
        base, column, low, stop, tail, high = (scalar.registers.item() for scalar in scalars)
        both = code.arith.andi
        pitch = code.ir.MemRefType(out.type).get_strides_and_offset()[0][0]
        wide = code.ir.VectorType.get((4,), code.i32)
        piece, row = code.rest(code.thread, BLOCK), code.over(code.thread, BLOCK)
        late = code.less(code.number(BLOCK - 1), row)
        there = code.arith.select(late, code.add(tail, row, code.number(-BLOCK)), row)
        begin = code.arith.select(late, tail, low)
        end = code.arith.select(late, high, stop)
        mine = both(code.less(there, end), code.less(begin, code.add(there, code.number(1))))
        within = code.add(there, code.number(-start))
        mine = both(mine, both(code.less(within, code.number(count)), code.less(code.number(-1), within)))
        with mgpu.utils.when(mine):
            source = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(buffer), [code.swizzled(within, piece)], code.i8)
            value = code.llvm.load(wide, source, alignment=_PIECE)
            line = code.arith.extui(code.i64, code.add(base, there))
            place = code.arith.extui(code.i64, code.add(column, code.times(piece, _PIECE // 2)))
            factor = code.arith.constant(code.i64, code.ir.IntegerAttr.get(code.i64, pitch))
            index = code.arith.addi(code.arith.muli(line, factor), place)
            bf16 = code.ir.BF16Type.get()
            target = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(out), [index], bf16)
            code.llvm.store(value, target, alignment=_PIECE)

    types = (plgpu.RefType(), plgpu.RefType(SWIZZLED), *(_SCALAR,) * 6)
    plgpu.inline_mgpu(arg_types=types)(emit)(out, buffer, base, column, *first, *last)
