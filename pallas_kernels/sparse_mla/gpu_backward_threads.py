"""What the threads of a warpgroup do one by one in the gradient of sparse MLA. See `gpu_threads`, whose layout this shares."""

import math
from collections.abc import Iterator
from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.sparse_mla import gpu_threads
from pallas_kernels.sparse_mla.gpu import WIDTH
from pallas_kernels.sparse_mla.gpu_threads import CHUNK, RAW, SCALAR, TILED, _Code, per_thread

accumulate = gpu_threads.accumulate
fence = gpu_threads.fence
full_barriers = gpu_threads.full_barriers
gather = gpu_threads.gather
multiply = gpu_threads.multiply
multiply_turned = gpu_threads.multiply_turned
rows_to_gather = gpu_threads.rows_to_gather
rows_to_score = gpu_threads.rows_to_score
start_barriers = gpu_threads.start_barriers
until_added = gpu_threads.until_added
wait = gpu_threads.wait


def more_scratch(heads: int) -> dict[str, Any]:
    """Shared memory that these functions need besides: none."""
    del heads
    return {}


def await_wave(finished: Any, item: Any, *, wave: int, warpgroup: int) -> None:
    """Waits until the blocks of threads before this one's wave are through, but not for long.

    Blocks that begin together walk over ascending keys side by side, so what they add to lies in the second-level cache.
    """

    def emit(context: Any, finished: Any, item: Any) -> None:
        del context
        e = _Code()
        before = e.arith.muli(e.arith.divui(e.scalar(item), e.integer(wave)), e.integer(wave))
        code = (
            "{ .reg .pred p, q; .reg .b32 n, seen; mov.b32 n, 0; "
            "POLL_${:uid}: ld.relaxed.gpu.global.b32 seen, [$0]; setp.ge.s32 p, seen, $1; @p bra GO_${:uid}; "
            "nanosleep.u32 200; add.s32 n, n, 1; setp.lt.s32 q, n, 400; @q bra POLL_${:uid}; GO_${:uid}: }"
        )
        e.when(e.below(e.thread(), 1), lambda: e.asm(None, code, "l,r,~{memory}", e.memory(finished), before))
        e.sync(warpgroup)

    plgpu.inline_mgpu(arg_types=(RAW, SCALAR))(emit)(finished, item)


def report(finished: Any) -> None:
    """Counts a block of threads that is through."""

    def emit(context: Any, finished: Any) -> None:
        del context
        e = _Code()
        code, one = "red.relaxed.gpu.global.add.s32 [$0], $1;", e.integer(1)
        e.when(e.below(e.thread(), 1), lambda: e.asm(None, code, "l,r,~{memory}", e.memory(finished), one))

    plgpu.inline_mgpu(arg_types=(RAW,))(emit)(finished)


def start_query(info: Any, state: Any, row: Any, tail: Any, *, heads: int, warpgroup: int) -> None:
    """Copies info[row], two numbers of each head, to `state`, and writes zeros to `tail`.

    Args:
        info: float32 [rows, 2 * heads] in device memory: log-sum-exps as powers of two, then deltas.
        state: float32 [2 * heads] in shared memory.
        row: of info.
        tail: bf16 [heads, 64] in shared memory.
        heads: of a block of threads.
        warpgroup: which one this is.
    """

    def emit(context: Any, info: Any, state: Any, row: Any, tail: Any) -> None:
        del context
        e = _Code()
        thread = e.thread()

        def copy() -> None:
            place = e.add(e.mul(e.scalar(row), 2 * heads), thread)
            address = e.arith.addi(e.memory(info), e.arith.muli(e.wide(place), e.integer(4, e.i64)))
            value = e.asm(e.f32, "ld.global.nc.f32 $0, [$1];", "=f,l", address)
            e.store_shared(e.add(e.shared(state), e.mul(thread, 4)), value)

        e.when(e.below(thread, 2 * heads), copy)
        zero, target = e.integer(0), e.add(e.shared(tail), e.mul(thread, 16))
        for i in range(heads * CHUNK * 2 // 2048):
            e.asm(None, f"st.shared.v4.b32 [$0+{2048 * i}], {{$1, $1, $1, $1}};", "r,r,~{memory}", target, zero)
        e.asm(None, "fence.proxy.async.shared::cta;", "~{memory}")
        e.sync(warpgroup)

    plgpu.inline_mgpu(arg_types=(RAW, RAW, SCALAR, TILED))(emit)(info, state, row, tail)


def start_shares(info: Any, state: Any, row: Any, *, heads: int, warpgroup: int) -> None:
    """Copies info[row], a number of each head, to `state`."""

    def emit(context: Any, info: Any, state: Any, row: Any) -> None:
        del context
        e = _Code()
        thread = e.thread()

        def copy() -> None:
            place = e.add(e.mul(e.scalar(row), heads), thread)
            address = e.arith.addi(e.memory(info), e.arith.muli(e.wide(place), e.integer(4, e.i64)))
            value = e.asm(e.f32, "ld.global.nc.f32 $0, [$1];", "=f,l", address)
            e.store_shared(e.add(e.shared(state), e.mul(thread, 4)), value)

        e.when(e.below(thread, heads), copy)
        e.sync(warpgroup)

    plgpu.inline_mgpu(arg_types=(RAW, RAW, SCALAR))(emit)(info, state, row)


def store_shares(
    scores: Any, rows: Any, state: Any, out: Any, place: Any, *, heads: int, num_rows: int, scale: float, by: float
) -> None:
    """out[place + key] = by Σ_heads 2^(scale log2(e) s - lse), for 64 keys; 0 for those that don't exist.

    Args:
        scores: float32 [64, heads] in the accumulator's registers.
        rows: from `rows_to_score`.
        state: from `start_shares`: log-sum-exps as powers of two, infinite for heads that don't count.
        out: float32 [keys] in device memory.
        place: of the first key.
        heads: of a block of threads.
        num_rows: of a batch row.
        scale: of the scores.
        by: one over the number of heads.
    """
    unit = scale * math.log2(math.e)

    def emit(context: Any, scores: Any, rows: Any, state: Any, out: Any, place: Any) -> None:
        del context
        e = _Code()
        thread = e.thread()
        warp, lane = e.div(thread, 32), e.rem(thread, 32)
        numbers = e.add(e.shared(state), e.mul(e.rem(lane, 4), 8))
        flat, factor = scores.registers.reshape(heads // 8, 2), e.number(unit)
        sums = [e.number(0.0), e.number(0.0)]
        for g in range(heads // 8):
            lse = [e.arith.negf(value) for value in e.load_pair(numbers, 32 * g)]
            for half in range(2):
                for c in range(2):
                    value = e.exp2(e.fma(e.element(flat[g, half], c), factor, lse[c]))
                    sums[half] = e.arith.addf(sums[half], value)
        row = e.add(e.mul(warp, 16), e.div(lane, 4))
        for half, register in enumerate(rows.registers.flat):
            total = sums[half]
            for mask in (1, 2):
                total = e.arith.addf(total, e.shuffle(total, mask))
            there = e.below(e.element(register, 0), num_rows)
            total = e.arith.select(there, e.arith.mulf(total, e.number(by)), e.number(0.0))
            at = e.arith.muli(e.wide(e.add(e.scalar(place), row, 8 * half)), e.integer(4, e.i64))
            address = e.arith.addi(e.memory(out), at)

            def write(address: Any = address, total: Any = total) -> None:
                e.asm(None, "st.global.f32 [$0], $1;", "l,f,~{memory}", address, total)

            e.when(e.below(e.rem(lane, 4), 1), write)

    kinds = (plgpu.Layout.WGMMA, per_thread(2), RAW, RAW, SCALAR)
    plgpu.inline_mgpu(arg_types=kinds)(emit)(scores, rows, state, out, place)


def differentiate(
    products: Any, rows: Any, state: Any, weights: Any, *, heads: int, num_rows: int, scale: float
) -> None:
    """Writes scores' gradients and probabilities of a tile to shared memory, keys contiguous.

    p = 2^(scale log2(e) s - lse), ds = scale p (dp - delta); both are 0 for keys that don't exist.

    Args:
        products: float32 [64, 2 * heads] in the accumulator's registers: scores s, then dp.
        rows: from `rows_to_score`.
        state: from `start_query`.
        weights: bf16 [2 * heads, 64] in shared memory, swizzled: ds, then p.
        heads: of a block of threads, a multiple of 16.
        num_rows: of a batch row.
        scale: of the scores.
    """
    groups, unit = heads // 8, scale * math.log2(math.e)

    def emit(context: Any, products: Any, rows: Any, state: Any, weights: Any) -> None:
        del context
        e = _Code()
        thread = e.thread()
        warp, lane = e.div(thread, 32), e.rem(thread, 32)
        numbers = e.add(e.shared(state), e.mul(e.rem(lane, 4), 8))
        seen = [e.below(e.element(register, 0), num_rows) for register in rows.registers.flat]
        flat = products.registers.reshape(2 * groups, 2)
        matrix, row = e.div(lane, 8), e.rem(lane, 8)
        address = e.add(
            e.shared(weights),
            e.mul(e.div(matrix, 2), 1024),
            e.mul(row, 128),
            e.mul(e.arith.xori(e.add(e.mul(warp, 2), e.rem(matrix, 2)), row), 16),
        )
        nothing, by, factor = e.number(0.0), e.number(scale), e.number(unit)
        packed: tuple[list[Any], list[Any]] = ([], [])
        for g in range(groups):
            lse = [e.arith.negf(value) for value in e.load_pair(numbers, 32 * g)]
            delta = e.load_pair(numbers, 4 * heads + 32 * g)
            for half in range(2):
                p, ds = [], []
                for c in range(2):
                    score, dp = e.element(flat[g, half], c), e.element(flat[groups + g, half], c)
                    value = e.exp2(e.fma(score, factor, lse[c]))
                    p.append(e.arith.select(seen[half], value, nothing))
                    slope = e.arith.mulf(e.arith.mulf(value, by), e.arith.subf(dp, delta[c]))
                    ds.append(e.arith.select(seen[half], slope, nothing))
                packed[0].append(e.pack(*ds))
                packed[1].append(e.pack(*p))
            if g % 2:
                for part, values in enumerate(packed):
                    e.asm(
                        None,
                        f"stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [$0+{1024 * (g - 1 + part * groups)}], "
                        "{$1, $2, $3, $4};",
                        "r,r,r,r,r,~{memory}",
                        address,
                        *values,
                    )
                packed = ([], [])
        e.asm(None, "fence.proxy.async.shared::cta;", "~{memory}")

    plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, per_thread(2), RAW, TILED))(emit)(products, rows, state, weights)


def add_to_latents(
    weights: Any, both: Any, rows: Any, out: Any, first_row: Any, *, heads: int, num_rows: int, together: int
) -> None:
    """out[first_row + rows] += weightsᵀ · both, for 64 keys: one product after the other, each added once it's there.

    Args:
        weights: bf16 [2 * heads, 64] from `differentiate`.
        both: bf16 [9, 2 * heads, 64] in shared memory: queries and the results' gradients, 64 channels at a time.
        rows: from `rows_to_score`.
        out: float32 [rows, 576] in device memory.
        first_row: of the batch row.
        heads: of a block of threads.
        num_rows: of a batch row.
        together: chunks in one accumulator.
    """

    def emit(context: Any, weights: Any, both: Any, rows: Any, out: Any, first: Any) -> None:
        del context
        e = _Code()
        targets, exists = _targets(e, rows, out, first, num_rows)
        for begin, _, values in _products(e, weights, both, heads, together):
            _add_rows(e, values, targets, exists, 4 * begin)

    plgpu.inline_mgpu(arg_types=(TILED, TILED, per_thread(2), RAW, SCALAR))(emit)(weights, both, rows, out, first_row)


def add_by_copies(
    weights: Any,
    both: Any,
    rows: Any,
    out: Any,
    first_row: Any,
    stage: Any,
    *,
    heads: int,
    num_rows: int,
    together: int,
) -> None:
    """`add_to_latents` by way of `stage`, float32 [64 * pitch] in shared memory, from where bulk copies add rows."""
    pitch = 4 * stage_pitch(together)

    def emit(context: Any, weights: Any, both: Any, rows: Any, out: Any, first: Any, stage: Any) -> None:
        del context
        e = _Code()
        thread = e.thread()
        warp, lane = e.div(thread, 32), e.rem(thread, 32)
        # Lanes 0 and 1 of the four that share two rows send one each.
        which = e.rem(lane, 2)
        odd = e.arith.cmpi(e.arith.CmpIPredicate.ne, which, e.integer(0))
        index = e.arith.select(odd, *(e.element(register, 0) for register in rows.registers.flat[::-1]))
        sends = e.arith.andi(e.below(e.rem(lane, 4), 2), e.below(index, num_rows))
        offset = e.arith.muli(e.wide(e.add(index, e.scalar(first))), e.integer(4 * WIDTH, e.i64))
        target = e.arith.addi(e.memory(out), offset)
        row = e.add(e.shared(stage), e.mul(e.add(e.mul(warp, 16), e.div(lane, 4)), pitch))
        mine, source = e.add(row, e.mul(e.rem(lane, 4), 8)), e.add(row, e.mul(which, 8 * pitch))
        for begin, size, values in _products(e, weights, both, heads, together):
            e.asm(None, "cp.async.bulk.wait_group.read 0; bar.warp.sync -1;", "~{memory}")
            for g in range(size // 8):
                for half in range(2):
                    e.asm(
                        None,
                        f"st.shared.v2.f32 [$0+{32 * g + 8 * half * pitch}], {{$1, $2}};",
                        "r,f,f,~{memory}",
                        mine,
                        *values[4 * g + 2 * half : 4 * g + 2 * half + 2],
                    )
            e.asm(None, "fence.proxy.async.shared::cta; bar.warp.sync -1;", "~{memory}")

            def send(begin: int = begin, size: int = size) -> None:
                code = "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32"
                e.asm(None, f"{code} [$0+{4 * begin}], [$1], {4 * size};", "l,r,~{memory}", target, source)

            e.when(sends, send)
            e.asm(None, "cp.async.bulk.commit_group;", "~{memory}")

    kinds = (TILED, TILED, per_thread(2), RAW, SCALAR, RAW)
    plgpu.inline_mgpu(arg_types=kinds)(emit)(weights, both, rows, out, first_row, stage)


def stage_pitch(together: int) -> int:
    """Numbers from row to row of a stage: eight banks further."""
    return together * CHUNK + 8


def _targets(e: _Code, rows: Any, out: Any, first: Any, num_rows: int) -> tuple[list[Any], list[Any]]:
    """Addresses of a thread's two rows, of four channels of one of two groups of eight, and whether they exist."""
    quad = e.rem(e.thread(), 4)
    offset = e.wide(e.add(e.mul(e.rem(quad, 2), 32), e.mul(e.div(quad, 2), 16)))
    targets, exists = [], []
    for register in rows.registers.flat:
        index = e.element(register, 0)
        there = e.below(index, num_rows)
        index = e.add(e.arith.select(there, index, e.integer(0)), e.scalar(first))
        place = e.arith.addi(e.memory(out), e.arith.muli(e.wide(index), e.integer(4 * WIDTH, e.i64)))
        targets.append(e.arith.addi(place, offset))
        exists.append(e.arith.extui(e.i32, there))
    return targets, exists


def _add_rows(e: _Code, values: list[Any], targets: list[Any], exists: list[Any], begin: int) -> None:
    """Adds an accumulator to rows in device memory: lanes swap halves, so that each adds four numbers side by side."""
    odd = e.arith.cmpi(e.arith.CmpIPredicate.ne, e.rem(e.thread(), 2), e.integer(0))
    for g in range(0, len(values) // 4, 2):
        for half in range(2):
            low = values[4 * g + 2 * half : 4 * g + 2 * half + 2]
            high = values[4 * g + 4 + 2 * half : 4 * g + 4 + 2 * half + 2]
            given = [e.shuffle(e.arith.select(odd, low[c], high[c]), 1) for c in range(2)]
            kept = [e.arith.select(odd, high[c], low[c]) for c in range(2)]
            pairs = [e.arith.select(odd, given[c], kept[c]) for c in range(2)]
            pairs += [e.arith.select(odd, kept[c], given[c]) for c in range(2)]
            e.asm(
                None,
                "{ .reg .pred p; setp.ne.b32 p, $5, 0; "
                f"@p red.relaxed.gpu.global.add.v4.f32 [$0+{begin + 32 * g}], {{$1, $2, $3, $4}}; }}",
                "l,f,f,f,f,r,~{memory}",
                targets[half],
                *pairs,
                exists[half],
            )


def finish_adding() -> None:
    """Waits until the bulk copies of this thread have added what they read."""
    plgpu.inline_mgpu(arg_types=())(lambda context: _Code().asm(None, "cp.async.bulk.wait_group 0;", "~{memory}"))()


def _products(e: _Code, weights: Any, both: Any, heads: int, together: int) -> Iterator[tuple[int, int, list[Any]]]:
    """First channel, channels and registers of one product after the other."""
    chunk = 2 * heads * CHUNK * 2
    # 8 rows further is 1024 bytes, 64 channels further a chunk.
    right, left = _matrix(e, e.shared(both), chunk), _matrix(e, e.shared(weights), 1024)
    for begin in range(0, WIDTH, together * CHUNK):
        size = min(together * CHUNK, WIDTH - begin)
        start = e.arith.addi(right, e.integer(begin // CHUNK * chunk // 16, e.i64))
        yield begin, size, _product(e, left, start, size, 2 * heads // 16)


def _matrix(e: _Code, address: Any, leading: int) -> Any:
    """How the matrix unit finds rows of 64 numbers, swizzled, of which it takes the transpose."""
    low = e.arith.shrui(e.arith.andi(address, e.integer(0x3FFFF)), e.integer(4))
    wide = e.arith.extui(e.i64, low)
    shape = (leading // 16 << 16) | (1024 // 16 << 32)
    high = e.arith.shli(e.integer(1, e.i64), e.integer(62, e.i64))
    return e.arith.ori(e.arith.ori(wide, e.integer(shape, e.i64)), high)


def _product(e: _Code, left: Any, right: Any, size: int, steps: int) -> list[Any]:
    """The registers of an accumulator [64, size] of leftᵀ · right over 16 * `steps` rows, once they're there."""
    count = size // 2
    places = ", ".join(f"${i}" for i in range(count))
    code = "{ .reg .pred p; .reg .b64 a, b; wgmma.fence.sync.aligned; "
    code += f"mov.b64 a, ${count}; mov.b64 b, ${count + 1}; setp.ne.b32 p, 0, 0; "
    for step in range(steps):
        code += f"wgmma.mma_async.sync.aligned.m64n{size}k16.f32.bf16.bf16 {{{places}}}, a, b, p, 1, 1, 1, 1; "
        if not step:
            code += "setp.eq.b32 p, 0, 0; "
        if step + 1 < steps:  # 16 rows are 2048 bytes
            code += "add.s64 a, a, 128; add.s64 b, b, 128; "
    code += "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0; }"
    kind = e.llvm.StructType.get_literal([e.f32] * count)
    sums = e.asm(kind, code, ",".join(["=&f"] * count + ["l", "l", "~{memory}"]), left, right)
    return [e.llvm.extractvalue(e.f32, sums, [i]) for i in range(count)]


def store_turned(values: Any, out: Any, row: Any, first: Any, *, heads: int) -> None:
    """out[row + head, first + channel] = values[channel, head], for 64 channels.

    Args:
        values: float32 [64, heads] in the accumulator's registers.
        out: bf16 [rows, 576] in device memory.
        row: of head 0.
        first: channel.
        heads: columns.
    """

    def emit(context: Any, values: Any, out: Any, row: Any, first: Any) -> None:
        del context
        e = _Code()
        thread = e.thread()
        warp, lane = e.div(thread, 32), e.rem(thread, 32)
        # Once turned, a lane has head lane / 4 of eight and two channels.
        channel, head = e.add(e.mul(warp, 16), e.mul(e.rem(lane, 4), 2)), e.div(lane, 4)
        place = e.arith.muli(e.wide(e.add(e.scalar(row), head)), e.integer(WIDTH, e.i64))
        place = e.arith.addi(place, e.wide(e.add(e.scalar(first), channel)))
        address = e.arith.addi(e.memory(out), e.arith.muli(place, e.integer(2, e.i64)))
        flat = values.registers.reshape(-1, 2)
        for g in range(heads // 8):
            for half in range(2):
                pair = [e.element(flat[g, half], c) for c in range(2)]
                turned = e.asm(e.i32, "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", e.pack(*pair))
                offset = 2 * (8 * g * WIDTH + 8 * half)
                e.asm(None, f"st.global.b32 [$0+{offset}], $1;", "l,r", address, turned)

    plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, RAW, SCALAR, SCALAR))(emit)(values, out, row, first)
