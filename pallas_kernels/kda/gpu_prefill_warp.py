"""Pieces of the Hopper kernels that array operations can't say, spelled for the threads of a warpgroup.

A [64, n] array lies in registers as the matrix instructions leave it: warp w has rows 16 w to 16 w + 15, which is one run
of tokens, and thread (r, c) of it, r = 0..7 and c = 0..3, has columns 2c and 2c + 1 of every eight, of rows r and r + 8.
Every function here has a twin in array operations, which the interpreter runs.
"""

import inspect
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

CHUNK = 64
RUN = 16
HALF = 32
WIDTH = 128
PITCH = 40  # of rows of 32 float32 numbers: no two threads of a warp meet in a bank
SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))

ACC: Any = plgpu.WGMMAAccumulatorRef
_WIDE = plgpu.Layout.WGMMA
_LOAD_INDEX = inspect.signature(plgpu.load).parameters.get("idx")


def _array(columns: int, dtype: Any = jnp.float32) -> Any:
    return plgpu.ShapeDtypeStruct((CHUNK, columns), jnp.dtype(dtype), layout=_WIDE)


class _Int:
    """A 32-bit number known at run time."""

    def __init__(self, value: Any):
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import arith as arithmetic

        arith: Any = arithmetic
        self.arith = arith
        if isinstance(value, int):
            i32 = ir.IntegerType.get_signless(32)
            value = arith.constant(i32, ir.IntegerAttr.get(i32, value))
        self.value = value

    def _with(self, operation: Any, other: Any) -> "_Int":
        return _Int(operation(self.value, (other if isinstance(other, _Int) else _Int(other)).value))

    def __add__(self, other: Any) -> "_Int":
        return self._with(self.arith.addi, other)

    def __sub__(self, other: Any) -> "_Int":
        return self._with(self.arith.subi, other)

    def __mul__(self, other: Any) -> "_Int":
        return self._with(self.arith.muli, other)

    def __and__(self, other: Any) -> "_Int":
        return self._with(self.arith.andi, other)

    def __xor__(self, other: Any) -> "_Int":
        return self._with(self.arith.xori, other)

    def __rshift__(self, other: Any) -> "_Int":
        return self._with(self.arith.shrui, other)

    def less(self, other: Any) -> Any:
        """A truth value."""
        other = other if isinstance(other, _Int) else _Int(other)
        return self.arith.cmpi(self.arith.CmpIPredicate.ult, self.value, other.value)

    def equals(self, other: Any) -> Any:
        """A truth value."""
        other = other if isinstance(other, _Int) else _Int(other)
        return self.arith.cmpi(self.arith.CmpIPredicate.eq, self.value, other.value)


class _Thread:
    def __init__(self) -> None:
        self.number = _Int(mgpu.utils.thread_idx()) & 127
        self.warp = self.number >> 5
        self.lane = self.number & 31
        self.row = self.lane >> 2
        self.column = (self.lane & 3) * 2


def _types() -> tuple[Any, Any, Any, Any, Any]:
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, llvm, vector

    return ir, arith, llvm, vector, ir.F32Type.get()


def _at(pointer: Any, offset: _Int, dtype: Any) -> Any:
    return mgpu.utils.getelementptr(pointer, [offset.value], dtype)


def _registers(columns: int) -> Any:
    return np.empty(mgpu.WGMMA_LAYOUT.registers_shape((CHUNK, columns)), dtype=object)


def _fragmented(registers: Any) -> Any:
    return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)


def _place(place: int, half: int) -> tuple[int, ...]:
    """Where columns 8 place + 2c, 2c + 1 of row r + 8 half are."""
    return (0, place, 0, 0, half, 0, 0, 0, 0)


def load(at: Any, layout: Any, optimized: bool = True) -> Any:
    """An array from memory in a layout; jax 0.10 wants an index."""
    needed = _LOAD_INDEX is not None and _LOAD_INDEX.default is inspect.Parameter.empty
    arguments: tuple[Any, ...] = (at, ()) if needed else (at,)
    return plgpu.load(*arguments, layout=layout, optimized=optimized)


def meet(interpret: Any) -> None:
    """The threads of the warpgroup wait for each other; each of them runs on its own in the interpreter, too."""
    if interpret is None:
        plgpu.inline_mgpu()(lambda context: mgpu.warpgroup_barrier())()


def reciprocal(x: Any, interpret: Any) -> Any:
    """1 / x of float32 [64, 128], to 23 bits, in one instruction."""
    if interpret is not None:
        return 1 / x

    def divide(context: Any, x: Any) -> Any:
        _, _, llvm, vector, f32 = _types()
        registers = x.registers.copy()
        for where, pair in np.ndenumerate(registers):
            parts = [vector.extract(pair, dynamic_position=[], static_position=[one]) for one in range(2)]
            parts = [llvm.inline_asm(f32, [part], "rcp.approx.ftz.f32 $0, $1;", "=f,f") for part in parts]
            registers[where] = vector.from_elements(pair.type, parts)
        return _fragmented(registers)

    return plgpu.inline_mgpu(arg_types=(_WIDE,), return_type=_array(x.shape[1]))(divide)(x)


def fetch_betas(source: Any, begin: Any, count: Any, logits: bool, interpret: Any) -> Any:
    """[128] with source[begin : begin + count], or its σ, in these places, and 0 in the others.

    The source is [64] in device memory, of which places outside of the range may not exist.
    """
    if interpret is not None:
        place = lax.broadcasted_iota(jnp.int32, (1, CHUNK), 1)[0]
        value = source[...].astype(jnp.float32)
        value = 1 / (1 + jnp.exp(-value)) if logits else value
        return jnp.concatenate(
            [jnp.where((begin <= place) & (place < begin + count), value, 0), jnp.zeros(CHUNK, jnp.float32)]
        )

    def fetch(context: Any, source: Any, begin: Any, count: Any) -> Any:
        ir, arith, llvm, vector, f32 = _types()
        thread = _Thread()
        source_type = ir.MemRefType(source.type)
        pitch = source_type.get_strides_and_offset()[0][0]
        begin, count = (_Int(x.registers.item()) for x in (begin, count))
        mine = (thread.number - begin).less(count)
        # Threads that have no place read the first one that has.
        place = _Int(arith.select(mine, thread.number.value, begin.value))
        address = _at(mgpu.utils.memref_ptr(source), place * pitch, source_type.element_type)
        value = llvm.load(source_type.element_type, address)
        if source_type.element_type != f32:
            value = arith.extf(f32, value)
        if logits:
            scaled = arith.mulf(value, arith.constant(f32, ir.FloatAttr.get(f32, -math.log2(math.e))))
            value = llvm.inline_asm(
                f32,
                [scaled],
                "{ .reg .f32 e; ex2.approx.ftz.f32 e, $1; add.f32 e, e, 0f3F800000; rcp.approx.ftz.f32 $0, e; }",
                "=f,f",
            )
        value = arith.select(mine, value, arith.constant(f32, ir.FloatAttr.get(f32, 0.0)))
        layout = mgpu.WGStridedFragLayout(shape=(2 * CHUNK,), vec_size=1)
        registers = np.array([vector.broadcast(ir.VectorType.get((1,), f32), value)], dtype=object)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    layout = plgpu.Layout.WG_STRIDED((2 * CHUNK,), vec_size=1)
    return plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), *(plgpu.Layout.WG_SPLAT(()),) * 2),
        return_type=plgpu.ShapeDtypeStruct((2 * CHUNK,), jnp.dtype(jnp.float32), layout=layout),
    )(fetch)(source, begin, count)


def put_run_sums(sums: Any, first: int, upto: Any, interpret: Any) -> None:
    """sums[first + J] = upto[16 J + 15], of [n, 128] in shared memory."""
    if interpret is not None:
        sums[first : first + CHUNK // RUN] = upto.reshape(CHUNK // RUN, RUN, WIDTH)[:, RUN - 1]
        return

    def put(context: Any, sums: Any, upto: Any) -> None:
        _, _, llvm, _, f32 = _types()
        thread = _Thread()
        pointer = mgpu.utils.memref_ptr(sums)
        with mgpu.when(thread.row.equals(7)):
            for place in range(WIDTH // 8):
                offset = (thread.warp + first) * WIDTH + thread.column + 8 * place
                llvm.store(upto.registers[_place(place, 1)], _at(pointer, offset, f32))
        mgpu.warpgroup_barrier()

    plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _WIDE))(put)(sums, upto)


def run_factors(table: Any, first: int, interpret: Any) -> Any:
    """[64, 128], of which rows 16 J to 16 J + 15 are table[first + J], of [n, 128] in shared memory."""
    if interpret is not None:
        return jnp.repeat(table[first : first + CHUNK // RUN], RUN, axis=0)

    def read(context: Any, table: Any) -> Any:
        ir, _, llvm, _, f32 = _types()
        thread = _Thread()
        pointer = mgpu.utils.memref_ptr(table)
        registers = _registers(WIDTH)
        for place in range(WIDTH // 8):
            offset = (thread.warp + first) * WIDTH + thread.column + 8 * place
            value = llvm.load(ir.VectorType.get((2,), f32), _at(pointer, offset, f32), alignment=8)
            registers[_place(place, 0)] = registers[_place(place, 1)] = value
        return _fragmented(registers)

    return plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=_array(WIDTH))(read)(table)


def put_between(rows: Any, value: Any, which: int, interpret: Any) -> None:
    """Rows of run J of a bfloat16 [64, 128] go to rows 32 J + 16 which + ... of [128, 128], held as two tiles [2, 64, 128]."""
    if interpret is not None:
        tiles = value.reshape(2, 2, RUN, WIDTH)
        for tile in range(2):
            for run in range(2):
                start = 2 * RUN * run + RUN * which
                rows[tile, start : start + RUN, :] = tiles[tile, run]
        return

    def put(context: Any, rows: Any, value: Any) -> None:
        from jaxlib.mlir.dialects import nvvm

        ir, _, _, _, _ = _types()
        i8, i32 = ir.IntegerType.get_signless(8), ir.IntegerType.get_signless(32)
        thread = _Thread()
        pointer = mgpu.utils.memref_ptr(rows)
        start = (thread.warp >> 1) * (CHUNK * WIDTH * 2) + ((thread.warp & 1) * 4 + 2 * which) * 2048
        # Eight threads give the addresses of the rows of each of four 8 x 8 blocks.
        row = thread.lane & 7
        start = start + row * 128
        for place in range(0, WIDTH // 8, 4):
            chunk = (row ^ ((thread.lane >> 3) + place % 8)) * 16
            for half in range(2):
                address = _at(pointer, start + chunk + (2048 * half + 1024 * (place // 8)), i8)
                parts = [mgpu.utils.bitcast(value.registers[_place(place + one, half)], i32) for one in range(4)]
                nvvm.stmatrix(
                    address,
                    parts,
                    nvvm.MMALayout.row,
                    ir.Attribute.parse("#nvvm.ld_st_matrix_shape<m=8, n=8>"),
                    nvvm.LdStMatrixEltType.B16,
                )

    plgpu.inline_mgpu(arg_types=(plgpu.RefType(SWIZZLED), _WIDE))(put)(rows, value)


def sort_product(product: Any, run: int, betas: Any, lower: Any, corner: Any, attention: Any, interpret: Any) -> None:
    """Takes a [64 keys, 16 key rows | 16 query rows] of rows 16 run, 16 run + 1, ... apart.

    Args:
        product: float32.
        run: which rows.
        betas: float32 [64] in shared memory; key rows are multiplied by it.
        lower: [2, 32, 40] in shared memory; of lower[b, j, i], what key j and key row i of the same 32 tokens b make is
            set. Places with i <= j may hold anything.
        corner: float16 [64, 64] in shared memory, keys by key rows, 0 but for the first 32 keys and the last 32 rows.
        attention: float16 [64, 64] in shared memory, keys by query rows, 0 where the key is later.
        interpret: what Pallas takes to run it without a GPU.
    """
    if interpret is not None:
        row = lax.broadcasted_iota(jnp.int32, (CHUNK, RUN), 0)
        column = lax.broadcasted_iota(jnp.int32, (CHUNK, RUN), 1) + RUN * run
        half = run // 2
        betas = betas[RUN * run : RUN * (run + 1)]
        product = product * jnp.concatenate([betas, jnp.ones_like(betas)])
        rows, columns = slice(HALF * half, HALF * (half + 1)), slice(RUN * run, RUN * (run + 1))
        lower[half, :, RUN * (run % 2) : RUN * (run % 2 + 1)] = product[rows, :RUN]
        corner[:, columns] = jnp.where((row < HALF) & (run >= 2), product[:, :RUN], 0).astype(corner.dtype)
        attention[:, columns] = jnp.where(row <= column, product[:, RUN:], 0).astype(attention.dtype)
        return

    def sort(context: Any, product: Any, betas: Any, lower: Any, corner: Any, attention: Any) -> None:
        ir, arith, llvm, vector, f32 = _types()
        i8, pair = ir.IntegerType.get_signless(8), ir.VectorType.get((2,), ir.F16Type.get())
        thread = _Thread()
        nothing = arith.constant(f32, ir.FloatAttr.get(f32, 0.0))
        nothings = vector.broadcast(pair, arith.constant(ir.F16Type.get(), ir.FloatAttr.get(ir.F16Type.get(), 0.0)))
        early = thread.warp.less(2)
        keys = {}
        for place in range(2):
            address = _at(mgpu.utils.memref_ptr(betas), thread.column + (RUN * run + 8 * place), f32)
            beta = llvm.load(ir.VectorType.get((2,), f32), address, alignment=8)
            for half in range(2):
                keys[place, half] = arith.mulf(product.registers[_place(place, half)], beta)
        with mgpu.when((thread.warp >> 1).equals(run // 2)):
            pointer = mgpu.utils.memref_ptr(lower)
            for place in range(2):
                for half in range(2):
                    key = (thread.warp & 1) * RUN + thread.row + 8 * half
                    offset = key * PITCH + thread.column + (8 * place + RUN * (run % 2) + run // 2 * HALF * PITCH)
                    llvm.store(keys[place, half], _at(pointer, offset, f32), alignment=8)
        for place in range(2):
            for half in range(2):
                key = thread.warp * RUN + thread.row + 8 * half
                kept = []
                for one in range(2):
                    column = thread.column + (RUN * run + 8 * place + one + 1)
                    element = product.registers[_place(2 + place, half)]
                    element = vector.extract(element, dynamic_position=[], static_position=[one])
                    kept.append(arith.select(key.less(column), element, nothing))
                kept = arith.truncf(pair, vector.from_elements(ir.VectorType.get((2,), f32), kept))
                value = nothings
                if run >= 2:
                    value = arith.truncf(pair, keys[place, half])
                    value = arith.select(early, value, nothings)
                for target, stored in ((corner, value), (attention, kept)):
                    strides, _ = ir.MemRefType(target.type).get_strides_and_offset()
                    offset = (thread.warp * 2 + half) * (strides[0] * 2) + thread.row * 128
                    offset = offset + (thread.row ^ (2 * run + place)) * 16 + thread.column * 2
                    llvm.store(stored, _at(mgpu.utils.memref_ptr(target), offset, i8), alignment=4)

    plgpu.inline_mgpu(
        arg_types=(_WIDE, plgpu.RefType(), plgpu.RefType(), plgpu.RefType(SWIZZLED), plgpu.RefType(SWIZZLED))
    )(sort)(product, betas, lower, corner, attention)


def solve(lower: Any, inverse: Any, interpret: Any) -> None:
    """inverse[32 b + c, 32 b + i] = ((I + L_b)^-1)[i, c], of [64, 64] float16 in shared memory, zero elsewhere.

    L_b[i, j] = lower[b, j, i] for i > j; what the other places hold doesn't matter.
    """
    if interpret is not None:
        row = lax.broadcasted_iota(jnp.int32, (HALF, HALF), 0)
        column = lax.broadcasted_iota(jnp.int32, (HALF, HALF), 1)
        blocks = []
        for half in range(2):
            matrix, columns = lower[half, :, :HALF].T, jnp.where(row == column, 1.0, 0.0)
            size = 1
            while size < HALF:
                pairs = (row // (2 * size) == column // (2 * size)) & (row // size > column // size)
                columns -= columns @ (jnp.where(pairs, matrix, 0) @ columns)
                size *= 2
            blocks.append(columns.T)
        zero = jnp.zeros_like(blocks[0])
        whole = jnp.concatenate(
            [jnp.concatenate([blocks[0], zero], axis=1), jnp.concatenate([zero, blocks[1]], axis=1)]
        )
        inverse[...] = whole.astype(inverse.dtype)
        return

    def substitute(context: Any, lower: Any, inverse: Any) -> None:
        ir, arith, llvm, vector, f32 = _types()
        i8, f16 = ir.IntegerType.get_signless(8), ir.F16Type.get()
        four, eight = ir.VectorType.get((4,), f32), ir.VectorType.get((8,), f16)
        thread = _Thread()
        strides, _ = ir.MemRefType(inverse.type).get_strides_and_offset()
        one, nothing = (arith.constant(f32, ir.FloatAttr.get(f32, value)) for value in (1.0, 0.0))
        source, target = mgpu.utils.memref_ptr(lower), mgpu.utils.memref_ptr(inverse)
        with mgpu.when(thread.warp.less(2)):
            x = [arith.select(thread.lane.equals(i), one, nothing) for i in range(HALF)]
            start = thread.warp * (HALF * PITCH)
            for j in range(HALF - 1):
                minus = arith.negf(x[j])
                for first in range((j + 1) // 4 * 4, HALF, 4):
                    loaded = llvm.load(four, _at(source, start + (j * PITCH + first), f32), alignment=16)
                    for i in range(max(first, j + 1), first + 4):
                        factor = vector.extract(loaded, dynamic_position=[], static_position=[i - first])
                        x[i] = llvm.intr_fma(factor, minus, x[i])
            row = thread.number  # the column of the block, counted on
            base = (row >> 3) * (strides[0] * 2) + (row & 7) * 128
            zeros = vector.broadcast(eight, arith.constant(f16, ir.FloatAttr.get(f16, 0.0)))
            for part in range(4):
                wide = vector.from_elements(ir.VectorType.get((8,), f32), x[8 * part : 8 * part + 8])
                mine, other = thread.warp * 4 + part, (thread.warp ^ 1) * 4 + part
                for value, chunk in ((arith.truncf(eight, wide), mine), (zeros, other)):
                    offset = base + (chunk ^ (row & 7)) * 16
                    llvm.store(value, _at(target, offset, i8), alignment=16)

    plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(SWIZZLED)))(substitute)(lower, inverse)


def load_state(state: Any, interpret: Any) -> Any:
    """S^T [64 values, 128 keys] of S [128 keys, 64 values] in device memory, whose rows are 128 apart."""
    if interpret is not None:
        return state[...].T

    def read(context: Any, state: Any) -> Any:
        ir, _, llvm, vector, f32 = _types()
        thread = _Thread()
        pitch = ir.MemRefType(state.type).get_strides_and_offset()[0][0]
        pointer = mgpu.utils.memref_ptr(state)
        registers = _registers(WIDTH)
        for place in range(WIDTH // 8):
            for half in range(2):
                value = thread.warp * RUN + thread.row + 8 * half
                pair = [
                    llvm.load(f32, _at(pointer, (thread.column + (8 * place + one)) * pitch + value, f32))
                    for one in range(2)
                ]
                registers[_place(place, half)] = vector.from_elements(ir.VectorType.get((2,), f32), pair)
        return _fragmented(registers)

    return plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=_array(WIDTH))(read)(state)


def store_state(state: Any, value: Any, interpret: Any) -> None:
    """What `load_state` reads."""
    if interpret is not None:
        state[...] = value.T
        return

    def write(context: Any, state: Any, array: Any) -> None:
        ir, _, llvm, vector, f32 = _types()
        thread = _Thread()
        pitch = ir.MemRefType(state.type).get_strides_and_offset()[0][0]
        pointer = mgpu.utils.memref_ptr(state)
        for place in range(WIDTH // 8):
            for half in range(2):
                value = thread.warp * RUN + thread.row + 8 * half
                for one in range(2):
                    element = vector.extract(
                        array.registers[_place(place, half)], dynamic_position=[], static_position=[one]
                    )
                    llvm.store(element, _at(pointer, (thread.column + (8 * place + one)) * pitch + value, f32))

    plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _WIDE))(write)(state, value)


def store_pairs(target: Any, value: Any, interpret: Any) -> None:
    """target[...] = value, of [64, 128] in device memory whose rows are 128 apart."""
    if interpret is not None:
        target[...] = value
        return

    def write(context: Any, target: Any, array: Any) -> None:
        ir, _, llvm, _, _ = _types()
        thread = _Thread()
        target_type = ir.MemRefType(target.type)
        pitch = target_type.get_strides_and_offset()[0][0]
        pointer = mgpu.utils.memref_ptr(target)
        for place in range(WIDTH // 8):
            for half in range(2):
                offset = (thread.warp * RUN + thread.row + 8 * half) * pitch + thread.column + 8 * place
                address = _at(pointer, offset, target_type.element_type)
                llvm.store(array.registers[_place(place, half)], address)

    plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _WIDE))(write)(target, value)


def load_pairs(source: Any, interpret: Any) -> Any:
    """What `store_pairs` writes, of float32."""
    if interpret is not None:
        return source[...]

    def read(context: Any, source: Any) -> Any:
        ir, _, llvm, _, f32 = _types()
        thread = _Thread()
        pitch = ir.MemRefType(source.type).get_strides_and_offset()[0][0]
        pointer = mgpu.utils.memref_ptr(source)
        registers = _registers(WIDTH)
        for place in range(WIDTH // 8):
            for half in range(2):
                offset = (thread.warp * RUN + thread.row + 8 * half) * pitch + thread.column + 8 * place
                address = _at(pointer, offset, f32)
                registers[_place(place, half)] = llvm.load(ir.VectorType.get((2,), f32), address, alignment=8)
        return _fragmented(registers)

    return plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=_array(WIDTH))(read)(source)


def _turned_blocks(tile: Any, address: Any) -> Any:
    """Yields (address, where in the registers) of four 8 x 8 blocks at a time, rows of the tile being columns there."""
    ir, _, _, _, _ = _types()
    i8 = ir.IntegerType.get_signless(8)
    thread = _Thread()
    pointer = mgpu.utils.memref_ptr(tile)
    row, block = thread.lane & 7, thread.lane >> 3
    chunk = (thread.warp * 2 + (block & 1)) ^ row
    start = (block >> 1) * 1024 + row * 128 + chunk * 16
    for place in range(0, CHUNK // 8, 2):
        where = [_place(place + one // 2, one % 2) for one in range(4)]
        yield address(pointer, start + 1024 * place, i8), where


def load_turned(tile: Any, interpret: Any) -> Any:
    """The transpose of a bfloat16 [64, 64] in shared memory."""
    if interpret is not None:
        return tile[...].T

    def read(context: Any, tile: Any) -> Any:
        from jaxlib.mlir.dialects import nvvm

        ir, _, llvm, _, _ = _types()
        i32, pair = ir.IntegerType.get_signless(32), ir.VectorType.get((2,), ir.BF16Type.get())
        registers = _registers(CHUNK)
        for address, where in _turned_blocks(tile, _at):
            loaded = nvvm.ldmatrix(
                address,
                layout=nvvm.MMALayout.col,
                num=4,
                shape=ir.Attribute.parse("#nvvm.ld_st_matrix_shape<m=8, n=8>"),
                elt_type=nvvm.LdStMatrixEltType.B16,
            )
            for one, place in enumerate(where):
                registers[place] = mgpu.utils.bitcast(llvm.extractvalue(i32, loaded, [one]), pair)
        return _fragmented(registers)

    return plgpu.inline_mgpu(arg_types=(plgpu.RefType(SWIZZLED),), return_type=_array(CHUNK, jnp.bfloat16))(read)(tile)


def conceal(value: Any, zero: Any, interpret: Any) -> Any:
    """A bfloat16 [64, 64] in registers, of which no compiler knows any number.

    A left factor whose registers hold constants, such as a mask, isn't safe: ptxas 13.0 was seen to write such a register
    after the instruction that reads it. `zero` is where four bytes of zeros lie in shared memory; the value is joined with them.
    """
    if interpret is not None:
        return value

    def join(context: Any, value: Any, zero: Any) -> Any:
        ir, arith, llvm, _, _ = _types()
        i32, pair = ir.IntegerType.get_signless(32), ir.VectorType.get((2,), ir.BF16Type.get())
        nothing = llvm.load(i32, mgpu.utils.memref_ptr(zero), alignment=4)
        registers = value.registers.copy()
        for where, register in np.ndenumerate(registers):
            joined = arith.xori(mgpu.utils.bitcast(register, i32), nothing)
            registers[where] = mgpu.utils.bitcast(joined, pair)
        return _fragmented(registers)

    transforms = () if len(zero.shape) == 1 else SWIZZLED
    return plgpu.inline_mgpu(arg_types=(_WIDE, plgpu.RefType(transforms)), return_type=_array(CHUNK, jnp.bfloat16))(
        join
    )(value, zero)


def mask_loaded(loaded: Any, begin: Any, end: Any) -> Any:
    """A bfloat16 [64, 64] of `load_turned` in float32, 0 outside of columns begin to end.

    It takes a branch, behind which the compiler can't put off what should be done before something is waited for.
    """

    def mask() -> Any:
        token = plgpu.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), 1, layout=_WIDE)
        return jnp.where((begin <= token) & (token < end), loaded.astype(jnp.float32), 0)

    return lax.cond((begin == 0) & (end == CHUNK), lambda: loaded.astype(jnp.float32), mask)


def store_turned(tile: Any, value: Any, interpret: Any) -> None:
    """What `load_turned` reads."""
    if interpret is not None:
        tile[...] = value.T
        return

    def write(context: Any, tile: Any, value: Any) -> None:
        from jaxlib.mlir.dialects import nvvm

        ir, _, _, _, _ = _types()
        i32 = ir.IntegerType.get_signless(32)
        for address, where in _turned_blocks(tile, _at):
            nvvm.stmatrix(
                address,
                [mgpu.utils.bitcast(value.registers[place], i32) for place in where],
                nvvm.MMALayout.col,
                ir.Attribute.parse("#nvvm.ld_st_matrix_shape<m=8, n=8>"),
                nvvm.LdStMatrixEltType.B16,
            )

    plgpu.inline_mgpu(arg_types=(plgpu.RefType(SWIZZLED), _WIDE))(write)(tile, value)


def store_rows(target: Any, source: Any, begin: Any, end: Any, interpret: Any) -> None:
    """target[begin:end] = source[begin:end], of [64, 64] bfloat16 from shared memory to device memory."""
    if interpret is not None:

        def one(row: Any, carry: tuple[()]) -> tuple[()]:
            target[pl.ds(row, 1)] = source[pl.ds(row, 1)]
            return carry

        lax.fori_loop(begin, end, one, ())
        return

    def store(context: Any, target: Any, source: Any, begin: Any, end: Any) -> None:
        ir, _, llvm, _, _ = _types()
        i8, wide = ir.IntegerType.get_signless(8), ir.VectorType.get((4,), ir.IntegerType.get_signless(32))
        thread = _Thread()
        pitch = ir.MemRefType(target.type).get_strides_and_offset()[0][0]
        begin, count = (_Int(x.registers.item()) for x in (begin, end - begin))
        piece = thread.number & 7
        for part in range(4):
            row = (thread.number >> 3) + RUN * part
            offset = row * 128 + (piece ^ (row & 7)) * 16
            value = llvm.load(wide, _at(mgpu.utils.memref_ptr(source), offset, i8), alignment=16)
            with mgpu.when((row - begin).less(count)):
                address = _at(mgpu.utils.memref_ptr(target), row * (2 * pitch) + piece * 16, i8)
                llvm.store(value, address, alignment=16)

    plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(SWIZZLED), *(plgpu.Layout.WG_SPLAT(()),) * 2))(store)(
        target, source, begin, end
    )
