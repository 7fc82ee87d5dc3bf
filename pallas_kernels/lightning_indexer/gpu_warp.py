"""What the 32 lanes of a warp do together on an NVIDIA GPU, as operations on one value a lane.

`gpu_select` is written in these words alone; its tests say them in NumPy, with an array of 32 numbers for a value.
Conditions and counts of loops must be the same in all lanes.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith as _arith
from jaxlib.mlir.dialects import llvm as _llvm
from jaxlib.mlir.dialects import scf as _scf
from jaxlib.mlir.dialects import vector as _vector

# The generated signatures of dialects leave out how they may be called.
arith: Any = _arith
llvm: Any = _llvm
scf: Any = _scf
vector: Any = _vector
Value = Any

_COMPARISONS = {"eq": "eq", "ne": "ne", "gt": "sgt", "ge": "sge", "lt": "slt"}


class Warp:
    """Emits instructions where it is called: 32-bit integers, float32 and truth values, one of each a lane."""

    def __init__(self) -> None:
        self.i32 = ir.IntegerType.get_signless(32)
        self.f32 = ir.F32Type.get()
        thread = mgpu.utils.thread_idx()
        self.lane = arith.andi(thread, self.integer(31))
        self.below = arith.subi(arith.shli(self.integer(1), self.lane), self.integer(1))
        self.of_block = arith.shrui(thread, self.integer(5))
        self.number = arith.andi(self.of_block, self.integer(3))

    def integer(self, value: int) -> Value:
        """A constant, the same in all lanes."""
        return arith.constant(self.i32, ir.IntegerAttr.get(self.i32, value - (1 << 32) if value >= 1 << 31 else value))

    def real(self, value: float) -> Value:
        """A float32 constant."""
        return arith.constant(self.f32, ir.FloatAttr.get(self.f32, value))

    def _int(self, value: Value | int) -> Value:
        return self.integer(value) if isinstance(value, int) else value

    def add(self, a: Value, b: Value | int) -> Value:
        """The sum of two integers."""
        return arith.addi(self._int(a), self._int(b))

    def sub(self, a: Value, b: Value | int) -> Value:
        """The difference of two integers."""
        return arith.subi(self._int(a), self._int(b))

    def mul(self, a: Value, b: Value | int) -> Value:
        """The product of two integers, its lower 32 bits."""
        return arith.muli(self._int(a), self._int(b))

    def both(self, a: Value, b: Value | int) -> Value:
        """Bits set in a and b; of truth values as well."""
        return arith.andi(a, self._int(b))

    def either(self, a: Value, b: Value) -> Value:
        """Bits set in a or b; of truth values as well."""
        return arith.ori(a, b)

    def differ(self, a: Value, b: Value | int) -> Value:
        """Bits set in one of a and b."""
        return arith.xori(a, self._int(b))

    def halve(self, a: Value) -> Value:
        """⌊a / 2⌋ of a signed integer."""
        return arith.shrsi(a, self.integer(1))

    def quotient(self, a: Value, b: int) -> Value:
        """⌊a / b⌋ of a non-negative integer."""
        return arith.divui(a, self.integer(b))

    def whole_ratio(self, a: Value, b: Value) -> Value:
        """⌊a / b⌋ of non-negative integers."""
        return arith.divui(a, b)

    def shift_down(self, a: Value, count: int) -> Value:
        """The bits of a non-negative integer, `count` places lower."""
        return arith.shrui(a, self.integer(count))

    def shift_up(self, a: Value, count: Value | int) -> Value:
        """The bits of an integer, `count` places higher, of which there are less than 32."""
        return arith.shli(self._int(a), self._int(count))

    def first_one(self, a: Value) -> Value:
        """Place of the lowest set bit of an integer that isn't 0."""
        return self._assembly(
            self.i32, [a], "{ .reg .b32 t; brev.b32 t, $1; bfind.shiftamt.u32 $0, t; }", "=r,r", False
        )

    def sign_mask(self, a: Value) -> Value:
        """-1 where a < 0, else 0."""
        return arith.shrsi(a, self.integer(31))

    def larger(self, a: Value, b: Value | int) -> Value:
        """The larger of two signed integers."""
        return arith.maxsi(a, self._int(b))

    def smaller(self, a: Value, b: Value | int) -> Value:
        """The smaller of two signed integers."""
        return arith.minsi(a, self._int(b))

    def compare(self, how: str, a: Value, b: Value | int) -> Value:
        """Truth of "eq", "ne", "gt", "ge" or "lt" between signed integers."""
        return arith.cmpi(getattr(arith.CmpIPredicate, _COMPARISONS[how]), a, self._int(b))

    def select(self, condition: Value, a: Value | int, b: Value | int) -> Value:
        """A where the condition holds, else b."""
        return arith.select(condition, self._int(a), self._int(b))

    def count_of(self, condition: Value) -> Value:
        """1 where the condition holds, else 0."""
        return arith.extui(self.i32, condition)

    def relu(self, a: Value) -> Value:
        """max(a, 0) of float32; NaN stays NaN."""
        return self._assembly(self.f32, [a, self.real(0.0)], "max.NaN.f32 $0, $1, $2;", "=f,f,f", False)

    def multiply_add(self, a: Value, b: Value, c: Value) -> Value:
        """The sum of c and the product of a and b, float32 rounded once."""
        return self._assembly(self.f32, [a, b, c], "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", False)

    def add_real(self, a: Value, b: Value) -> Value:
        """The sum of two float32."""
        return arith.addf(a, b)

    def mul_real(self, a: Value, b: Value) -> Value:
        """The product of two float32."""
        return arith.mulf(a, b)

    def ratio(self, a: Value, b: Value) -> Value:
        """The quotient of two float32, rounded correctly."""
        return self._assembly(self.f32, [a, b], "div.rn.f32 $0, $1, $2;", "=f,f,f", False)

    def above(self, a: Value, b: Value) -> Value:
        """Truth of a > b between float32; a NaN is above nothing."""
        return arith.cmpf(arith.CmpFPredicate.OGT, a, b)

    def byte_of(self, a: Value, which: Value) -> Value:
        """Byte `which` of an integer, the lowest first."""
        return arith.andi(arith.shrui(a, self.shift_up(which, 3)), self.integer(255))

    def bits(self, a: Value) -> Value:
        """The bits of a float32."""
        return arith.bitcast(self.i32, a)

    def from_lane_xor(self, a: Value, distance: int) -> Value:
        """The value of lane (lane xor distance)."""
        kind = "f" if a.type == self.f32 else "r"
        text = f"shfl.sync.bfly.b32 $0, $1, {distance}, 31, 0xffffffff;"
        return self._assembly(a.type, [a], text, f"={kind},{kind}", True)

    def from_lane(self, a: Value, lane: Value) -> Value:
        """The integer of another lane; anything where there is no such lane."""
        return self._assembly(self.i32, [a, lane], "shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;", "=r,r,r", True)

    def ballot(self, condition: Value) -> Value:
        """Bit i is the truth in lane i."""
        return self._assembly(self.i32, [condition], "vote.sync.ballot.b32 $0, $1, 0xffffffff;", "=r,b", True)

    def alike(self, a: Value) -> Value:
        """Bit i is whether lane i has the same integer."""
        return self._assembly(self.i32, [a], "match.any.sync.b32 $0, $1, 0xffffffff;", "=r,r", True)

    def ones(self, a: Value) -> Value:
        """Number of set bits."""
        return self._assembly(self.i32, [a], "popc.b32 $0, $1;", "=r,r", False)

    def total(self, a: Value) -> Value:
        """Sum over lanes of an integer."""
        return self._assembly(self.i32, [a], "redux.sync.add.s32 $0, $1, 0xffffffff;", "=r,r", True)

    def upto(self, a: Value) -> Value:
        """Sum of an integer over this lane and those before it."""
        for distance in (1, 2, 4, 8, 16):
            other = self.from_lane(a, self.sub(self.lane, distance))
            a = self.add(a, self.select(self.compare("ge", self.lane, distance), other, 0))
        return a

    def largest(self, a: Value) -> Value:
        """Largest signed integer of all lanes."""
        return self._assembly(self.i32, [a], "redux.sync.max.s32 $0, $1, 0xffffffff;", "=r,r", True)

    def meet(self) -> None:
        """Lanes wait for one another and see what others have stored."""
        mgpu.utils.warp_barrier()

    def meet_all(self) -> None:
        """All threads of the block wait for one another and see what others have stored."""
        llvm.inline_asm(ir.Type.parse("!llvm.void"), [], "barrier.sync 0;", "", has_side_effects=True)

    def offset(self, place: Value, count: Value) -> Value:
        """The place `count` integers further on."""
        return mgpu.utils.getelementptr(place, [count], self.i32)

    def row(self, place: Value, number: Value, size: int) -> Value:
        """The place of a row of `size` integers; counted in 64 bits, since an array may have more than 2^31."""
        i64 = ir.IntegerType.get_signless(64)
        start = arith.muli(arith.extsi(i64, number), arith.constant(i64, ir.IntegerAttr.get(i64, size)))
        return mgpu.utils.getelementptr(place, [start], self.i32)

    def element(self, register: Value, index: int) -> Value:
        """One number of a register that holds one or several."""
        if not isinstance(register.type, ir.VectorType):
            return register
        return vector.extract(register, dynamic_position=[], static_position=[index])

    def start_product(self, left: Value, right: Value, columns: int) -> Any:
        """Starts left · rightᵀ of bfloat16 [64, 128] and [columns, 128] in shared memory, and returns where it will be.

        Both are tiles of 8 x 64, swizzled over 128 bytes, in rows of two. The library's own product adds to numbers that
        must be there beforehand; this one needs none.
        """
        count = columns // 2
        i64 = ir.IntegerType.get_signless(64)

        def describe(place: Value) -> Value:
            # Address / 16, 8 rows 2048 bytes apart, 128 bytes swizzled.
            address = arith.shrui(llvm.ptrtoint(self.i32, place), self.integer(4))
            address = arith.extui(i64, arith.andi(address, self.integer(0x3FFF)))
            return arith.ori(address, arith.constant(i64, ir.IntegerAttr.get(i64, 1 << 62 | 2048 // 16 << 32)))

        registers = "{" + ", ".join(f"${i}" for i in range(count)) + "}"
        lines = [
            "{ .reg .b64 a, b; .reg .pred p;",
            "wgmma.fence.sync.aligned;",
        ]
        for step in range(8):
            # 16 inputs are 32 bytes, and the second tile of a row is 1024 bytes after the first.
            at = (step // 4 * 1024 + step % 4 * 32) // 16
            lines += [
                f"add.s64 a, ${count}, {at}; add.s64 b, ${count + 1}, {at}; setp.ne.b32 p, {int(step > 0)}, 0;",
                f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16 {registers}, a, b, p, 1, 1, 0, 0;",
            ]
        lines += ["wgmma.commit_group.sync.aligned; }"]
        kinds = llvm.StructType.get_literal([self.f32] * count)
        constraints = ",".join(["=f"] * count + ["l", "l"])
        found = llvm.inline_asm(
            kinds, [describe(left), describe(right)], "\n".join(lines), constraints, has_side_effects=True
        )
        values = [llvm.extractvalue(self.f32, found, [i]) for i in range(count)]
        return self.array(values, (64, columns), mgpu.fragmented_array.WGMMA_LAYOUT_ACC_32BIT)

    def splat(self, value: Value) -> Any:
        """An integer that is the same in all lanes, as a fragmented array without axes."""
        return mgpu.FragmentedArray.splat(value, (), is_signed=True)

    def array(self, values: list[Value], shape: tuple[int, ...], layout: Any) -> Any:
        """A fragmented array of float32 numbers, one a register."""
        registers = np.empty(len(values), dtype=object)
        for i, value in enumerate(values):
            registers[i] = vector.broadcast(ir.VectorType.get((1,), self.f32), value)
        registers = registers.reshape(layout.registers_shape(shape))
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    def settled(self, array: Any) -> Any:
        """A fragmented array that isn't looked at before what was emitted so far is done."""
        return mgpu.fragmented_array.optimization_barrier(array)

    def pack(self, values: dict[tuple[int, int], Value], blocks: int) -> Any:
        """Float32 numbers by (block, odd) as a fragmented array that is only good for `unpack`."""
        shape = mgpu.WGMMA_LAYOUT.registers_shape((64, 4 * blocks))
        registers = np.empty(blocks, dtype=object)
        for block in range(blocks):
            registers[block] = vector.from_elements(
                ir.VectorType.get((2,), self.f32), [values[block, 0], values[block, 1]]
            )
        return mgpu.FragmentedArray(_registers=registers.reshape(shape), _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)

    def unpack(self, array: Any, blocks: int) -> dict[tuple[int, int], Value]:
        """What `pack` packed."""
        registers = array.registers.reshape(blocks)
        return {(block, odd): self.element(registers[block], odd) for block in range(blocks) for odd in range(2)}

    def load(self, place: Value, index: Value) -> Value:
        """The integer at `index` of a place in memory."""
        return llvm.load(self.i32, mgpu.utils.getelementptr(place, [index], self.i32))

    def load_four(self, place: Value, index: Value, condition: Value) -> list[Value]:
        """The four integers from `index` on, both a multiple of four, where the condition holds."""
        four = ir.VectorType.get((4,), self.i32)
        branch = scf.IfOp(condition, [four], has_else=True)
        with ir.InsertionPoint(branch.then_block):
            scf.yield_([llvm.load(four, mgpu.utils.getelementptr(place, [index], self.i32), alignment=16)])
        with ir.InsertionPoint(branch.else_block):
            scf.yield_([vector.broadcast(four, self.integer(0))])
        return [self.element(branch.results[0], i) for i in range(4)]

    def load_real(self, place: Value, index: Value) -> Value:
        """The float32 at `index` of a place in memory."""
        return llvm.load(self.f32, mgpu.utils.getelementptr(place, [index], self.f32))

    def copy(self, source: Value, begin: Value, target: Value, to: Value, count: int) -> None:
        """Starts copying 1 or 4 integers from `begin` on of a place in device memory to `to` of one in shared memory."""
        shared = llvm.ptrtoint(self.i32, mgpu.utils.getelementptr(target, [to], self.i32))
        memory = mgpu.utils.getelementptr(source, [begin], self.i32)
        kept = "cg" if count == 4 else "ca"
        text = f"cp.async.{kept}.shared.global [$0], [$1], {4 * count};"
        llvm.inline_asm(ir.Type.parse("!llvm.void"), [shared, memory], text, "r,l", has_side_effects=True)

    def commit_copies(self) -> None:
        """Makes a group of this lane's copies since the last one."""
        llvm.inline_asm(ir.Type.parse("!llvm.void"), [], "cp.async.commit_group;", "", has_side_effects=True)

    def wait_for_copies(self, running: int) -> None:
        """Until at most that many of this lane's last groups of copies are running."""
        text = f"cp.async.wait_group {running};"
        llvm.inline_asm(ir.Type.parse("!llvm.void"), [], text, "~{memory}", has_side_effects=True)

    def store(self, place: Value, index: Value, value: Value, condition: Value | None = None) -> None:
        """Puts an integer at `index` of a place in memory, where the condition holds."""
        if condition is None:
            llvm.store(value, mgpu.utils.getelementptr(place, [index], self.i32))
        else:
            self.when(condition, lambda: self.store(place, index, value))

    def store_real(self, place: Value, index: Value, value: Value, condition: Value) -> None:
        """Puts a float32 at `index` of a place in memory, where the condition holds."""
        self.when(condition, lambda: llvm.store(value, mgpu.utils.getelementptr(place, [index], self.f32)))

    def when(self, condition: Value, act: Callable[[], None]) -> None:
        """Acts if the condition holds."""
        branch = scf.IfOp(condition)
        with ir.InsertionPoint(branch.then_block):
            act()
            scf.yield_([])

    def loop(self, count: Value, step: Callable[..., Sequence[Value]], state: Sequence[Value]) -> Sequence[Value]:
        """`state = step(i, *state)` for i = 0 .. count - 1."""
        loop = scf.ForOp(self.integer(0), self._int(count), self.integer(1), list(state))
        with ir.InsertionPoint(loop.body):
            scf.yield_(list(step(loop.induction_variable, *loop.inner_iter_args)))
        return list(loop.results)

    def repeat(
        self, going: Callable[..., Value], step: Callable[..., Sequence[Value]], state: Sequence[Value]
    ) -> Sequence[Value]:
        """`state = step(*state)` while `going(*state)`."""
        types = [value.type for value in state]
        loop = scf.WhileOp(types, list(state))
        before = loop.before.blocks.append(*types)
        with ir.InsertionPoint(before):
            scf.condition(going(*before.arguments), list(before.arguments))
        after = loop.after.blocks.append(*types)
        with ir.InsertionPoint(after):
            scf.yield_(list(step(*after.arguments)))
        return list(loop.results)

    def _assembly(self, result: Any, values: list[Value], text: str, constraints: str, together: bool) -> Value:
        return llvm.inline_asm(result, values, text, constraints, has_side_effects=together)


def place_of(ref: Any) -> Value:
    """The address of a reference's first element."""
    return mgpu.utils.memref_ptr(ref)
