"""What the threads of a warpgroup do one by one: gathering rows, the softmax of a tile, writing results.

A tile is 64 keys on the rows and the heads on the columns of a matrix instruction's accumulator. Thread `lane` of warp w
holds rows 16 w + lane / 4 and that + 8, and of every eight columns 2 (lane % 4) and the next.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.sparse_mla.gpu import TILE

CHUNK = 64
"""Channels that are copied together: the 128 bytes of a swizzled row."""

FLOOR = -1e30
"""Reference of a head that has seen no key."""

SLACK = 40.0
"""Powers of two by which a score may exceed its head's reference before sums are scaled down."""

SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
SCALAR = plgpu.Layout.WG_SPLAT(())
RAW, TILED = plgpu.RefType(), plgpu.RefType(SWIZZLED)


def per_thread(count: int) -> Any:
    """Layout of an int32 [128 * count] array that holds `count` private numbers of every thread."""
    return plgpu.Layout.WG_STRIDED((128 * count,), vec_size=1)


def _private(count: int) -> Any:
    return plgpu.ShapeDtypeStruct((128 * count,), jnp.dtype(jnp.int32), layout=per_thread(count))


class _Code:
    """Short names for the instructions that are written here."""

    def __init__(self) -> None:
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import arith, llvm

        # The generated signatures of dialects leave out how they may be called.
        self.ir: Any = ir
        self.arith: Any = arith
        self.llvm: Any = llvm
        self.i1 = ir.IntegerType.get_signless(1)
        self.i8 = ir.IntegerType.get_signless(8)
        self.i32 = ir.IntegerType.get_signless(32)
        self.i64 = ir.IntegerType.get_signless(64)
        self.f32 = ir.F32Type.get()

    def integer(self, value: int, kind: Any = None) -> Any:
        kind = self.i32 if kind is None else kind
        return self.arith.constant(kind, self.ir.IntegerAttr.get(kind, value))

    def number(self, value: float) -> Any:
        return self.arith.constant(self.f32, self.ir.FloatAttr.get(self.f32, value))

    def asm(self, result: Any, code: str, constraints: str, *args: Any) -> Any:
        kind = self.ir.Type.parse("!llvm.void") if result is None else result
        out = self.llvm.inline_asm(kind, list(args), code, constraints, has_side_effects=True)
        return None if result is None else out

    def pure(self, result: Any, code: str, constraints: str, *args: Any) -> Any:
        return self.llvm.inline_asm(result, list(args), code, constraints, has_side_effects=False)

    def add(self, *terms: Any) -> Any:
        return functools.reduce(self.arith.addi, (self.integer(t) if isinstance(t, int) else t for t in terms))

    def mul(self, a: Any, b: int) -> Any:
        return self.arith.muli(a, self.integer(b))

    def div(self, a: Any, b: int) -> Any:
        return self.arith.shrui(a, self.integer(b.bit_length() - 1))

    def rem(self, a: Any, b: int) -> Any:
        return self.arith.andi(a, self.integer(b - 1))

    def shared(self, ref: Any) -> Any:
        """32-bit address in shared memory."""
        pointer = mgpu.utils.memref_ptr(ref)
        return self.llvm.ptrtoint(self.i32, pointer)

    def memory(self, ref: Any) -> Any:
        """64-bit address in device memory."""
        return self.llvm.ptrtoint(self.i64, mgpu.utils.memref_ptr(ref))

    def thread(self) -> Any:
        return self.rem(self.asm(self.i32, "mov.u32 $0, %tid.x;", "=r"), 128)

    def wide(self, value: Any) -> Any:
        return self.arith.extsi(self.i64, value)

    def load_shared(self, address: Any, offset: int = 0) -> Any:
        return self.asm(self.f32, f"ld.shared.f32 $0, [$1+{offset}];", "=f,r", address)

    def load_pair(self, address: Any, offset: int) -> tuple[Any, Any]:
        kind = self.llvm.StructType.get_literal([self.f32, self.f32])
        pair = self.asm(kind, f"ld.shared.v2.f32 {{$0, $1}}, [$2+{offset}];", "=f,=f,r", address)
        return self.llvm.extractvalue(self.f32, pair, [0]), self.llvm.extractvalue(self.f32, pair, [1])

    def store_shared(self, address: Any, value: Any, offset: int = 0) -> None:
        self.asm(None, f"st.shared.f32 [$0+{offset}], $1;", "r,f", address, value)

    def sync(self, warpgroup: int) -> None:
        """Barrier of the warpgroup, the one that Mosaic gives it."""
        self.asm(None, f"bar.sync {warpgroup + 1}, 128;", "~{memory}")

    def shuffle(self, value: Any, mask: int) -> Any:
        return self.asm(self.f32, f"shfl.sync.bfly.b32 $0, $1, {mask}, 31, -1;", "=f,f", value)

    def exp2(self, value: Any) -> Any:
        return self.pure(self.f32, "ex2.approx.ftz.f32 $0, $1;", "=f,f", value)

    def larger(self, a: Any, b: Any) -> Any:
        return self.pure(self.f32, "max.f32 $0, $1, $2;", "=f,f,f", a, b)

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        return self.pure(self.f32, "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", a, b, c)

    def pack(self, low: Any, high: Any) -> Any:
        return self.pure(self.i32, "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f", high, low)

    def when(self, condition: Any, then: Callable[[], None], otherwise: Callable[[], None] | None = None) -> None:
        from jaxlib.mlir.dialects import scf as structured

        scf: Any = structured
        branch = scf.IfOp(condition, has_else=otherwise is not None)
        with self.ir.InsertionPoint(branch.then_block):
            then()
            scf.yield_([])
        if otherwise is not None:
            with self.ir.InsertionPoint(branch.else_block):
                otherwise()
                scf.yield_([])

    def below(self, a: Any, b: Any) -> Any:
        """Unsigned a < b."""
        return self.arith.cmpi(self.arith.CmpIPredicate.ult, a, self.integer(b) if isinstance(b, int) else b)

    def private(self, values: list[Any]) -> Any:
        import numpy as np
        from jaxlib.mlir.dialects import vector

        kind = self.ir.VectorType.get((1,), self.i32)
        registers = np.empty((len(values),), dtype=object)
        for i, value in enumerate(values):
            registers[i] = vector.broadcast(kind, value)
        layout = mgpu.WGStridedFragLayout((128 * len(values),), 1)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=True)

    def element(self, register: Any, place: int) -> Any:
        from jaxlib.mlir.dialects import vector

        return vector.extract(register, dynamic_position=[], static_position=[place])

    def scalar(self, value: Any) -> Any:
        return value.registers.item()


def full_barriers(count: int, parts: int = 1) -> Any:
    """What keeps the barriers that rows arrive at: Pallas' own can't be had in instructions written here."""
    del parts
    return plgpu.SMEM((2 * count,), jnp.int32)


def more_scratch(heads: int) -> dict[str, Any]:
    """Shared memory that these functions need besides: none."""
    del heads
    return {}


def accumulate(body: Callable[..., Any], widths: list[int], scratch: dict[str, Any], warpgroup: Any, first: int) -> Any:
    """body(float32 [64, width] of zeros for each width), in the registers of a matrix instruction's accumulator."""
    del scratch, warpgroup, first
    return pl.run_scoped(body, *[plgpu.WGMMAAccumulatorRef((TILE, width), jnp.float32) for width in widths])


def multiply(total: Any, left: Any, right: Any) -> None:
    """Total += left · rightᵀ, some time later."""
    plgpu.wgmma(total, left, right.transpose((1, 0)))


def multiply_turned(total: Any, left: Any, right: Any) -> None:
    """Total += leftᵀ · rightᵀ, some time later."""
    plgpu.wgmma(total, left.transpose((1, 0)), right.transpose((1, 0)))


def until_added(count: int) -> None:
    """Waits until at most the last `count` of the products of this warpgroup aren't added."""
    plgpu.wgmma_wait(count)


def start_barriers(barriers: Any, count: int, parts: int = 1) -> None:
    """Barriers that all threads of the copying warpgroups arrive at; every thread of the block calls this once."""

    def emit(context: Any, barriers: Any) -> None:
        from jaxlib.mlir.dialects import gpu

        del context
        e = _Code()
        first = e.arith.cmpi(e.arith.CmpIPredicate.eq, mgpu.utils.thread_idx(), e.integer(0))
        base = e.shared(barriers)

        def init() -> None:
            for i in range(count):
                e.asm(None, f"mbarrier.init.shared::cta.b64 [$0+{8 * i}], {128 * parts};", "r", base)
            e.asm(None, "fence.proxy.async.shared::cta;", "")

        e.when(first, init)
        gpu.barrier()

    plgpu.inline_mgpu(arg_types=(RAW,))(emit)(barriers)


def wait(barriers: Any, slot: Any, parity: Any, *, shown: bool = False) -> None:
    """Waits until rows of a slot are there, and shows them to the matrix unit unless who wrote them did."""

    def emit(context: Any, barriers: Any, slot: Any, parity: Any) -> None:
        del context
        e = _Code()
        address = e.add(e.shared(barriers), e.mul(e.scalar(slot), 8))
        e.asm(
            None,
            "{ .reg .pred p; WAIT_${:uid}: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1; "
            "@p bra DONE_${:uid}; bra WAIT_${:uid}; DONE_${:uid}: "
            + ("}" if shown else "fence.proxy.async.shared::cta; }"),
            "r,r,~{memory}",
            address,
            e.scalar(parity),
        )

    plgpu.inline_mgpu(arg_types=(RAW, SCALAR, SCALAR))(emit)(barriers, slot, parity)


def fence() -> None:
    """Orders shared memory that threads wrote before what the matrix unit reads."""

    def emit(context: Any) -> None:
        del context
        _Code().asm(None, "fence.proxy.async.shared::cta;", "~{memory}")

    plgpu.inline_mgpu(arg_types=())(emit)()


def rows_to_gather(indices: Any, base: Any, part: Any = None, parts: int = 1) -> Any:
    """Private row numbers of one of `parts` warpgroups that copy a tile, the one that begins at indices[base].

    They are those of rows thread / 8 + 16 i of the warpgroup's part of it.
    """
    count = TILE // 16 // parts

    def emit(context: Any, indices: Any, base: Any, part: Any) -> Any:
        del context
        e = _Code()
        place = e.add(e.scalar(base), _first_row(e, part, parts))
        address = e.arith.addi(e.memory(indices), e.arith.muli(e.wide(place), e.integer(4, e.i64)))
        return e.private([e.asm(e.i32, f"ld.global.nc.b32 $0, [$1+{64 * i}];", "=r,l", address) for i in range(count)])

    return plgpu.inline_mgpu(arg_types=(RAW, SCALAR, SCALAR), return_type=_private(count))(emit)(
        indices, base, _scalar(part)
    )


def _scalar(part: Any) -> Any:
    return jnp.int32(0) if part is None else part


def _first_row(e: _Code, part: Any, parts: int) -> Any:
    """The first row of a tile that a thread of a copying warpgroup takes care of; the others come after 16 each."""
    return e.add(e.mul(e.scalar(part), TILE // parts), e.div(e.thread(), 8))


def gather(
    latent: Any,
    rows: Any,
    first_row: Any,
    slot: Any,
    barriers: Any,
    number: Any,
    part: Any = None,
    *,
    parts: int = 1,
    num_rows: int,
    begin: int,
) -> None:
    """Copies 128 bytes of each of a tile's rows, zeros for rows that don't exist, and has the barrier arrive after it.

    Args:
        latent: [rows, width] in device memory.
        rows: from `rows_to_gather`.
        first_row: of the batch row.
        slot: bf16 [64, 64] in shared memory, swizzled.
        barriers: of the ring.
        number: of the slot.
        part: which of the copying warpgroups this is.
        parts: how many there are.
        num_rows: of a batch row.
        begin: first byte of a row.
    """
    row_bytes = latent.shape[1] * jnp.dtype(latent.dtype).itemsize

    def emit(
        context: Any, latent: Any, rows: Any, first: Any, slot: Any, barriers: Any, number: Any, part: Any
    ) -> None:
        del context
        e = _Code()
        unit, row = e.rem(e.thread(), 8), _first_row(e, part, parts)
        target = e.add(e.shared(slot), e.mul(row, 128), e.mul(e.arith.xori(unit, e.rem(row, 8)), 16))
        source = e.arith.addi(e.memory(latent), e.wide(e.mul(unit, 16)))
        first = e.scalar(first)
        for i, register in enumerate(rows.registers.flat):
            index = e.element(register, 0)
            exists = e.below(index, num_rows)
            index = e.arith.select(exists, index, e.integer(0))
            count = e.arith.select(exists, e.integer(16), e.integer(0))
            offset = e.arith.muli(e.wide(e.add(index, first)), e.integer(row_bytes, e.i64))
            e.asm(
                None,
                f"cp.async.cg.shared.global [$0+{2048 * i}], [$1+{begin}], 16, $2;",
                "r,l,r",
                target,
                e.arith.addi(source, offset),
                count,
            )
        barrier = e.add(e.shared(barriers), e.mul(e.scalar(number), 8))
        e.asm(None, "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [$0];", "r,~{memory}", barrier)

    kinds = (RAW, per_thread(TILE // 16 // parts), SCALAR, TILED, RAW, SCALAR, SCALAR)
    plgpu.inline_mgpu(arg_types=kinds)(emit)(latent, rows, first_row, slot, barriers, number, _scalar(part))


def copy_codes(
    latent: Any,
    rows: Any,
    first_row: Any,
    room: Any,
    scales: Any,
    part: Any,
    *,
    parts: int,
    num_rows: int,
    begin: int,
    scale: int | None,
) -> None:
    """Copies 128 e4m3 codes of each of a tile's rows, zeros for rows that don't exist, as one group of copies.

    Args:
        latent: bytes [rows, width] in device memory.
        rows: from `rows_to_gather`.
        first_row: of the batch row.
        room: a slot of the ring, whose bytes are those codes until they're unpacked.
        scales: float32 [64, 4] in shared memory.
        part: which of the copying warpgroups this is.
        parts: how many there are.
        num_rows: of a batch row.
        begin: first byte of a row.
        scale: byte of a row where its four scales begin, if they're to be copied too.
    """
    row_bytes = latent.shape[1]

    def emit(context: Any, latent: Any, rows: Any, first: Any, room: Any, scales: Any, part: Any) -> None:
        del context
        e = _Code()
        unit, row = e.rem(e.thread(), 8), _first_row(e, part, parts)
        target = e.add(e.shared(room), e.mul(row, 128), e.mul(unit, 16))
        scale_target = e.add(e.shared(scales), e.mul(row, 16))
        memory, offset_in_row = e.memory(latent), e.wide(e.mul(unit, 16))
        leader = e.arith.extui(e.i32, e.below(unit, 1))
        first = e.scalar(first)
        for i, register in enumerate(rows.registers.flat):
            index = e.element(register, 0)
            exists = e.below(index, num_rows)
            index = e.arith.select(exists, index, e.integer(0))
            count = e.arith.select(exists, e.integer(16), e.integer(0))
            offset = e.arith.muli(e.wide(e.add(index, first)), e.integer(row_bytes, e.i64))
            line = e.arith.addi(memory, offset)
            e.asm(
                None,
                f"cp.async.cg.shared.global [$0+{2048 * i}], [$1+{begin}], 16, $2;",
                "r,l,r,~{memory}",
                target,
                e.arith.addi(line, offset_in_row),
                count,
            )
            if scale is not None:
                e.asm(
                    None,
                    "{ .reg .pred p; setp.ne.b32 p, $3, 0; "
                    f"@p cp.async.cg.shared.global [$0+{256 * i}], [$1+{scale}], 16, $2; }}",
                    "r,l,r,r,~{memory}",
                    scale_target,
                    line,
                    count,
                    leader,
                )
        e.asm(None, "cp.async.commit_group;", "~{memory}")

    kinds = (RAW, per_thread(TILE // 16 // parts), SCALAR, TILED, RAW, SCALAR)
    plgpu.inline_mgpu(arg_types=kinds)(emit)(latent, rows, first_row, room, scales, part)


def expect(latent: Any, rows: Any, first_row: Any, *, parts: int, num_rows: int) -> None:
    """Has the second-level cache fetch a tile's rows."""
    row_bytes = latent.shape[1] * jnp.dtype(latent.dtype).itemsize

    def emit(context: Any, latent: Any, rows: Any, first: Any) -> None:
        del context
        e = _Code()
        memory, first = e.memory(latent), e.scalar(first)
        inside = e.mul(e.rem(e.thread(), 8), 32)  # of a row, as the cache fetches as little as 32 bytes
        for register in rows.registers.flat:
            index = e.element(register, 0)
            exists = e.below(index, num_rows)
            offset = e.arith.muli(e.wide(e.add(index, first)), e.integer(row_bytes, e.i64))
            address = e.arith.addi(e.arith.addi(memory, offset), e.wide(inside))
            for begin in range(0, row_bytes, 256):
                wanted = (
                    exists if begin + 256 <= row_bytes else e.arith.andi(exists, e.below(inside, row_bytes - begin))
                )
                code = f"{{ .reg .pred p; setp.ne.b32 p, $1, 0; @p prefetch.global.L2 [$0+{begin}]; }}"
                e.asm(None, code, "l,r", address, e.arith.extui(e.i32, wanted))

    plgpu.inline_mgpu(arg_types=(RAW, per_thread(TILE // 16 // parts), SCALAR))(emit)(latent, rows, first_row)


def unpack_codes(
    slots: tuple[Any, Any],
    scales: Any,
    barriers: Any,
    numbers: tuple[Any, Any],
    part: Any,
    *,
    parts: int,
    scale: int,
    pending: int,
) -> None:
    """Turns the codes in the second slot into bf16 values, 64 channels in each slot, and has their barriers arrive.

    Waits until at most `pending` later groups of copies aren't there. Of a row, whose codes and half of whose values take
    the same 128 bytes, eight threads of one warp take care: nothing else is between them and the copies.
    """

    def emit(context: Any, low: Any, high: Any, scales: Any, barriers: Any, first: Any, second: Any, part: Any) -> None:
        del context
        e = _Code()
        e.asm(None, f"cp.async.wait_group {pending};", "~{memory}")
        e.asm(None, "bar.warp.sync -1;", "~{memory}")  # for the scales, which one of the eight copies
        unit, row = e.rem(e.thread(), 8), _first_row(e, part, parts)
        upper = e.below(e.integer(3), unit)
        # Of its 16 codes a thread takes 8 first and 8 then. Which of them is first is such that the eight threads that
        # store together, and the sixteen that load together, touch all banks.
        swap = e.arith.xori(e.arith.extui(e.i32, upper), e.rem(row, 2))
        source = e.add(e.shared(high), e.mul(row, 128), e.mul(unit, 16))
        sources = [e.add(source, e.mul(e.arith.xori(swap, e.integer(i)), 8)) for i in range(2)]
        base = e.add(e.arith.select(upper, e.shared(high), e.shared(low)), e.mul(row, 128))
        column = e.arith.xori(e.add(e.mul(e.rem(unit, 4), 2), swap), e.rem(row, 8))
        targets = [e.add(base, e.mul(e.arith.xori(column, e.integer(i)), 16)) for i in range(2)]
        scale_at = e.add(e.shared(scales), e.mul(row, 16))
        pair = e.llvm.StructType.get_literal([e.i32, e.i32])
        for begin in range(0, TILE // 16 // parts, 2):
            loaded = []
            for i in range(begin, begin + 2):  # before any store, behind which the compiler would leave them
                factor = e.load_shared(scale_at, 256 * i + 4 * scale)
                code = f"ld.shared.v2.b32 {{$0, $1}}, [$2+{2048 * i}];"
                loaded.append((i, factor, [e.asm(pair, code, "=r,=r,r,~{memory}", source) for source in sources]))
            e.asm(None, "bar.warp.sync -1;", "~{memory}")
            for i, factor, halves in loaded:
                for target, words in zip(targets, halves, strict=True):
                    codes = [e.llvm.extractvalue(e.i32, words, [j]) for j in range(2)]
                    values = [value for word in codes for value in _four_values(e, word, factor)]
                    code = f"st.shared.v4.b32 [$0+{2048 * i}], {{$1, $2, $3, $4}};"
                    e.asm(None, code, "r,r,r,r,r,~{memory}", target, *values)
        e.asm(None, "fence.proxy.async.shared::cta;", "~{memory}")
        for number in (first, second):
            barrier = e.add(e.shared(barriers), e.mul(e.scalar(number), 8))
            e.asm(None, "mbarrier.arrive.release.cta.shared::cta.b64 _, [$0];", "r,~{memory}", barrier)

    kinds = (TILED, TILED, RAW, RAW, SCALAR, SCALAR, SCALAR)
    plgpu.inline_mgpu(arg_types=kinds)(emit)(*slots, scales, barriers, *numbers, part)


def _four_values(e: _Code, codes: Any, scale: Any) -> list[Any]:
    """bfloat16 products of four e4m3 codes and a scale, two in a register: float32 products, rounded once."""
    pair = e.llvm.StructType.get_literal([e.i32, e.i32])
    two = "cvt.rn.f16x2.e4m3x2 t, {}; mov.b32 {{a, b}}, t; cvt.f32.f16 x, a; cvt.f32.f16 y, b; "
    two += "mul.f32 x, x, $3; mul.f32 y, y, $3; cvt.rn.bf16x2.f32 {}, y, x; "
    code = "{ .reg .b16 l, h, a, b; .reg .f32 x, y; .reg .b32 t; mov.b32 {l, h}, $2; "
    code += two.format("l", "$0") + two.format("h", "$1") + "}"
    both = e.pure(pair, code, "=&r,=&r,r,f", codes, scale)
    return [e.llvm.extractvalue(e.i32, both, [j]) for j in range(2)]


def rows_to_score(indices: Any, base: Any) -> Any:
    """Two private row numbers: those of the rows of the tile whose scores the thread gets."""

    def emit(context: Any, indices: Any, base: Any) -> Any:
        del context
        e = _Code()
        thread = e.thread()
        row = e.add(e.mul(e.div(thread, 32), 16), e.div(e.rem(thread, 32), 4))
        place = e.add(e.scalar(base), row)
        address = e.arith.addi(e.memory(indices), e.arith.muli(e.wide(place), e.integer(4, e.i64)))
        return e.private([e.asm(e.i32, f"ld.global.nc.b32 $0, [$1+{32 * i}];", "=r,l", address) for i in range(2)])

    return plgpu.inline_mgpu(arg_types=(RAW, SCALAR), return_type=_private(2))(emit)(indices, base)


def sums_per_thread(heads: int) -> int:
    """Partial sums of probabilities that a thread keeps."""
    return functools.reduce(lambda count, _: (count + 1) // 2, range(3), heads // 4)


def softmax_start(state: Any, heads: int, warpgroup: int) -> None:
    """Sets references and sums of a query. `state` is float32 in shared memory: see `_state`."""

    def emit(context: Any, state: Any) -> None:
        del context
        e = _Code()
        at = _state(e, state, heads)
        thread = e.thread()
        own = e.add(at["sums"], e.mul(thread, 4))
        for i in range(sums_per_thread(heads)):
            e.store_shared(own, e.number(0.0), 512 * i)
        e.when(
            e.below(thread, heads), lambda: e.store_shared(e.add(at["reference"], e.mul(thread, 4)), e.number(FLOOR))
        )
        e.sync(warpgroup)

    plgpu.inline_mgpu(arg_types=(RAW,))(emit)(state)


def state_size(heads: int) -> int:
    """Numbers in a state."""
    return 4 * heads + 4 * heads + 128 * sums_per_thread(heads)


def _state(e: _Code, state: Any, heads: int) -> dict[str, Any]:
    """Addresses of a state's parts.

    For each head the factors of the last two tiles, the reference as a power of two and 1 / sum; a row for each warp; sums.
    """
    base = e.shared(state)
    return {
        "factors": base,
        "reference": e.add(base, 8 * heads),
        "inverse": e.add(base, 12 * heads),
        "warps": e.add(base, 16 * heads),
        "sums": e.add(base, 32 * heads),
    }


def softmax(
    scores: Any,
    rows: Any,
    state: Any,
    changed: Any,
    probabilities: Any,
    turn: Any,
    *,
    heads: int,
    num_rows: int,
    scale: float,
    warpgroup: int,
) -> Any:
    """Writes exp2(score - reference) of a tile to shared memory, keys contiguous; returns parts of their sums.

    A head's reference is the largest score that it had when it was last set: sums are floating-point numbers, so nothing
    is lost until a score exceeds it by many powers of two. Then `changed` is set, and what was summed has to be
    multiplied by the factors in `state`, in its place number `turn` of two.
    """
    groups, unit = heads // 8, scale * math.log2(math.e)

    def emit(context: Any, scores: Any, rows: Any, state: Any, changed: Any, probabilities: Any, turn: Any) -> Any:
        del context
        e = _Code()
        at = _state(e, state, heads)
        factors = e.add(at["factors"], e.mul(e.scalar(turn), 4 * heads))
        thread = e.thread()
        warp, lane = e.div(thread, 32), e.rem(thread, 32)
        column = e.mul(e.rem(lane, 4), 2)
        reference = e.add(at["reference"], e.mul(column, 4))
        factor = e.number(unit)
        nothing = e.number(-math.inf)
        s: list[list[list[Any]]] = []
        seen = [e.below(e.element(register, 0), num_rows) for register in rows.registers.flat]
        flat = scores.registers.reshape(groups, 2)
        most = nothing
        for g in range(groups):
            refs = [e.arith.negf(value) for value in e.load_pair(reference, 32 * g)]
            s.append([])
            for half in range(2):
                s[g].append([])
                for place in range(2):
                    value = e.arith.select(seen[half], e.element(flat[g, half], place), nothing)
                    s[g][half].append(value)
                    most = e.larger(most, e.fma(value, factor, refs[place]))
        over = e.arith.cmpf(e.arith.CmpFPredicate.OGT, most, e.number(SLACK))
        any_over = e.asm(
            e.i32,
            f"{{ .reg .pred p, q; setp.ne.b32 p, $1, 0; bar.red.or.pred q, {warpgroup + 1}, 128, p; selp.b32 $0, 1, 0, q; }}",
            "=r,r",
            e.arith.extui(e.i32, over),
        )
        raised = e.arith.cmpi(e.arith.CmpIPredicate.ne, any_over, e.integer(0))
        own_sums = e.add(at["sums"], e.mul(thread, 4))
        flag = e.shared(changed)
        first = e.arith.cmpi(e.arith.CmpIPredicate.eq, thread, e.integer(0))

        def raise_references() -> None:
            scratch = e.add(at["warps"], e.mul(warp, 4 * heads), e.mul(column, 4))
            for g in range(groups):
                for place in range(2):
                    value = e.larger(s[g][0][place], s[g][1][place])
                    for mask in (16, 8, 4):
                        value = e.larger(value, e.shuffle(value, mask))
                    value = e.arith.mulf(value, factor)
                    e.when(
                        e.below(lane, 4),
                        functools.partial(e.store_shared, scratch, value, 32 * g + 4 * place),
                    )
            e.sync(warpgroup)

            def one() -> None:
                mine = e.mul(thread, 4)
                old = e.load_shared(e.add(at["reference"], mine))
                new = old
                for w in range(4):
                    new = e.larger(new, e.load_shared(e.add(at["warps"], mine), 4 * heads * w))
                e.store_shared(e.add(at["reference"], mine), new)
                e.store_shared(e.add(factors, mine), e.exp2(e.arith.subf(old, new)))

            e.when(e.below(thread, heads), one)
            e.when(first, lambda: e.asm(None, "st.shared.b32 [$0], $1;", "r,r", flag, e.integer(1)))
            e.sync(warpgroup)
            for i in range(sums_per_thread(heads)):
                head, _ = _owned(e, lane, i, groups)
                by = e.load_shared(e.add(factors, e.mul(head, 4)))
                e.store_shared(own_sums, e.arith.mulf(e.load_shared(own_sums, 512 * i), by), 512 * i)

        def keep_references() -> None:
            e.when(first, lambda: e.asm(None, "st.shared.b32 [$0], $1;", "r,r", flag, e.integer(0)))

        e.when(raised, raise_references, keep_references)

        matrix, row = e.div(lane, 8), e.rem(lane, 8)
        address = e.add(
            e.shared(probabilities),
            e.mul(e.div(matrix, 2), 1024),
            e.mul(row, 128),
            e.mul(e.arith.xori(e.add(e.mul(warp, 2), e.rem(matrix, 2)), row), 16),
        )
        sums: list[Any] = []
        packed: list[Any] = []
        for g in range(groups):
            refs = [e.arith.negf(value) for value in e.load_pair(reference, 32 * g)]
            p = [[e.exp2(e.fma(s[g][h][c], factor, refs[c])) for c in range(2)] for h in range(2)]
            sums += [e.arith.addf(p[0][c], p[1][c]) for c in range(2)]
            packed += [e.pack(*p[0]), e.pack(*p[1])]
            if len(packed) == 4:
                e.asm(
                    None,
                    f"stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [$0+{1024 * (g - 1)}], {{$1, $2, $3, $4}};",
                    "r,r,r,r,r,~{memory}",
                    address,
                    *packed,
                )
                packed = []
        e.asm(None, "fence.proxy.async.shared::cta;", "~{memory}")
        return e.private([e.arith.bitcast(e.i32, value) for value in sums])

    kinds = (plgpu.Layout.WGMMA, per_thread(2), RAW, RAW, TILED, SCALAR)
    return plgpu.inline_mgpu(arg_types=kinds, return_type=_private(2 * groups))(emit)(
        scores, rows, state, changed, probabilities, turn
    )


def softmax_add(parts: Any, state: Any, *, heads: int) -> None:
    """Adds a tile's sums, as `softmax` returns their parts, to those in `state`."""
    groups = heads // 8

    def emit(context: Any, parts: Any, state: Any) -> None:
        del context
        e = _Code()
        lane = e.rem(e.thread(), 32)
        own_sums = e.add(_state(e, state, heads)["sums"], e.mul(e.thread(), 4))
        sums = [e.arith.bitcast(e.f32, e.element(register, 0)) for register in parts.registers.flat]
        for bit, size in zip((16, 8, 4), _halvings(2 * groups), strict=True):
            sums += [e.number(0.0)] * (2 * size - len(sums))
            upper = e.arith.cmpi(e.arith.CmpIPredicate.ne, e.arith.andi(lane, e.integer(bit)), e.integer(0))
            sums = [
                e.arith.addf(
                    e.arith.select(upper, sums[i + size], sums[i]),
                    e.shuffle(e.arith.select(upper, sums[i], sums[i + size]), bit),
                )
                for i in range(size)
            ]
        for i, value in enumerate(sums):
            e.store_shared(own_sums, e.arith.addf(e.load_shared(own_sums, 512 * i), value), 512 * i)

    plgpu.inline_mgpu(arg_types=(per_thread(2 * groups), RAW))(emit)(parts, state)


def _owned(e: _Code, lane: Any, index: int, groups: int) -> tuple[Any, Any]:
    """Head of a thread's sum number `index`, and whether it has so many.

    Lanes that hold parts of the same 2 * groups sums halve the list three times: a lane whose bit is set keeps the upper
    half, of which an odd list lacks the last.
    """
    counts = [2 * groups, *_halvings(2 * groups)]
    which, there = e.integer(index), e.below(lane, 32)
    for bit, size, of in reversed(list(zip((16, 8, 4), counts[1:], counts, strict=False))):
        has = e.arith.cmpi(e.arith.CmpIPredicate.ne, e.arith.andi(lane, e.integer(bit)), e.integer(0))
        which = e.add(which, e.arith.select(has, e.integer(size), e.integer(0)))
        there = e.arith.andi(there, e.below(which, of))
    which = e.arith.select(there, which, e.integer(0))
    return e.add(e.mul(e.div(which, 2), 8), e.mul(e.rem(lane, 4), 2), e.rem(which, 2)), there


def _halvings(count: int) -> list[int]:
    sizes = []
    for _ in range(3):
        count = (count + 1) // 2
        sizes.append(count)
    return sizes


def softmax_end(state: Any, lse: Any, base: Any, *, heads: int, warpgroup: int) -> None:
    """Writes 1 / sum of each head to `state` and its log-sum-exp to lse[base + head]."""
    groups = heads // 8

    def emit(context: Any, state: Any, lse: Any, base: Any) -> None:
        del context
        e = _Code()
        at = _state(e, state, heads)
        thread = e.thread()
        warp, lane = e.div(thread, 32), e.rem(thread, 32)
        own = e.add(at["sums"], e.mul(thread, 4))
        for i in range(sums_per_thread(heads)):
            head, there = _owned(e, lane, i, groups)
            target = e.add(at["warps"], e.mul(warp, 4 * heads), e.mul(head, 4))
            value = e.load_shared(own, 512 * i)
            e.when(there, functools.partial(e.store_shared, target, value))
        e.sync(warpgroup)

        def one() -> None:
            mine = e.mul(thread, 4)
            total = e.number(0.0)
            for w in range(4):
                total = e.arith.addf(total, e.load_shared(e.add(at["warps"], mine), 4 * heads * w))
            none = e.arith.cmpf(e.arith.CmpFPredicate.OEQ, total, e.number(0.0))
            inverse = e.arith.divf(e.number(1.0), total)
            e.store_shared(e.add(at["inverse"], mine), e.arith.select(none, e.number(0.0), inverse))
            log = e.pure(e.f32, "lg2.approx.f32 $0, $1;", "=f,f", total)
            log = e.arith.mulf(e.arith.addf(log, e.load_shared(e.add(at["reference"], mine))), e.number(math.log(2)))
            log = e.arith.select(none, e.number(-math.inf), log)
            place = e.wide(e.add(e.scalar(base), thread))
            address = e.arith.addi(e.memory(lse), e.arith.muli(place, e.integer(4, e.i64)))
            e.asm(None, "st.global.f32 [$0], $1;", "l,f", address, log)

        e.when(e.below(thread, heads), one)

    plgpu.inline_mgpu(arg_types=(RAW, RAW, SCALAR))(emit)(state, lse, base)


def scale_down(values: Any, state: Any, turn: Any, *, heads: int, begin: int = 0, column: int = 0) -> Any:
    """float32 [64, N] sums of heads column..column + N, those of begin..begin + heads times the factors in `state`.

    A pair of columns at a time, to save registers.
    """
    width = values.shape[1]

    def emit(context: Any, values: Any, state: Any, turn: Any) -> Any:
        from jaxlib.mlir.dialects import vector

        del context
        e = _Code()
        factor = e.add(
            _state(e, state, heads)["factors"], e.mul(e.scalar(turn), 4 * heads), e.mul(e.rem(e.thread(), 4), 8)
        )
        out = values.registers.copy()
        result = out.reshape(width // 8, 2)
        assert result.base is out
        kind = e.ir.VectorType.get((2,), e.f32)
        for g in range(width // 8):
            local = column // 8 + g - begin // 8
            if not 0 <= local < heads // 8:
                continue
            by = e.load_pair(factor, 32 * local)
            for half in range(2):
                register = result[g, half]
                pair = [e.arith.mulf(e.element(register, c), by[c]) for c in range(2)]
                result[g, half] = vector.from_elements(kind, pair)
        return mgpu.FragmentedArray(_registers=out, _layout=values.layout, _is_signed=None)

    kind = plgpu.ShapeDtypeStruct((CHUNK, width), jnp.dtype(jnp.float32), layout=plgpu.Layout.WGMMA)
    return plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, RAW, SCALAR), return_type=kind)(emit)(values, state, turn)


def put_aside(values: Any, aside: Any) -> None:
    """Keeps the registers of float32 [64, N] in shared memory [64 * N]."""

    def emit(context: Any, values: Any, aside: Any) -> None:
        del context
        e = _Code()
        address = e.add(e.shared(aside), e.mul(e.thread(), 16))
        flat = values.registers.flat
        for i in range(len(flat) // 2):
            four = [e.element(flat[2 * i + c // 2], c % 2) for c in range(4)]
            e.asm(None, f"st.shared.v4.f32 [$0+{2048 * i}], {{$1, $2, $3, $4}};", "r,f,f,f,f", address, *four)

    plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, RAW))(emit)(values, aside)


def take_back(aside: Any, width: int) -> Any:
    """What `put_aside` kept."""

    def emit(context: Any, aside: Any) -> Any:
        import numpy as np
        from jaxlib.mlir.dialects import vector

        del context
        e = _Code()
        address = e.add(e.shared(aside), e.mul(e.thread(), 16))
        registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape((CHUNK, width)), dtype=object)
        kind, four = e.ir.VectorType.get((2,), e.f32), e.llvm.StructType.get_literal([e.f32] * 4)
        for i in range(registers.size // 2):
            loaded = e.asm(four, f"ld.shared.v4.f32 {{$0, $1, $2, $3}}, [$4+{2048 * i}];", "=f,=f,=f,=f,r", address)
            values = [e.llvm.extractvalue(e.f32, loaded, [c]) for c in range(4)]
            registers.flat[2 * i] = vector.from_elements(kind, values[:2])
            registers.flat[2 * i + 1] = vector.from_elements(kind, values[2:])
        return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)

    kind = plgpu.ShapeDtypeStruct((CHUNK, width), jnp.dtype(jnp.float32), layout=plgpu.Layout.WGMMA)
    return plgpu.inline_mgpu(arg_types=(RAW,), return_type=kind)(emit)(aside)


def store(
    values: Any, state: Any, out: Any, row: Any, first: Any, *, heads: int, width: int, begin: int = 0, column: int = 0
) -> None:
    """out[row + head, first + channel] = values[channel, head] / sum of the head, for 64 channels, as `scale_down`.

    Args:
        values: float32 [64, N] in the accumulator's registers.
        state: from `softmax_end`.
        out: bf16 [rows, width] in device memory.
        row: of head 0.
        first: channel.
        heads: that `state` is about.
        width: of a row.
        begin: the first of them.
        column: head of the first column of `values`.
    """

    def emit(context: Any, values: Any, state: Any, out: Any, row: Any, first: Any) -> None:
        del context
        e = _Code()
        thread = e.thread()
        warp, lane = e.div(thread, 32), e.rem(thread, 32)
        inverse = e.add(_state(e, state, heads)["inverse"], e.mul(e.rem(lane, 4), 8))
        # Once turned, a lane has head lane / 4 of eight and two channels.
        channel, head = e.add(e.mul(warp, 16), e.mul(e.rem(lane, 4), 2)), e.div(lane, 4)
        place = e.arith.muli(e.wide(e.add(e.scalar(row), head, column)), e.integer(width, e.i64))
        place = e.arith.addi(place, e.wide(e.add(e.scalar(first), channel)))
        address = e.arith.addi(e.memory(out), e.arith.muli(place, e.integer(2, e.i64)))
        flat = values.registers.reshape(-1, 2)
        for g in range(flat.shape[0]):
            local = column // 8 + g - begin // 8
            if not 0 <= local < heads // 8:
                continue
            by = e.load_pair(inverse, 32 * local)
            for half in range(2):
                pair = [e.arith.mulf(e.element(flat[g, half], c), by[c]) for c in range(2)]
                turned = e.asm(e.i32, "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", e.pack(*pair))
                offset = 2 * (8 * g * width + 8 * half)
                e.asm(None, f"st.global.b32 [$0+{offset}], $1;", "l,r", address, turned)

    plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, RAW, RAW, SCALAR, SCALAR))(emit)(values, state, out, row, first)
