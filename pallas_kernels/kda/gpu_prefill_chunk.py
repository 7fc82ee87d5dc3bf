"""First stage on Hopper: all that a chunk of 64 tokens does to whatever state enters it, every chunk on its own."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.kda.gate import L2_EPS, log_decay
from pallas_kernels.kda.gpu_prefill_warp import (
    ACC,
    CHUNK,
    HALF,
    PITCH,
    RUN,
    SWIZZLED,
    WIDTH,
    conceal,
    fetch_betas,
    load,
    meet,
    put_between,
    put_run_sums,
    reciprocal,
    run_factors,
    solve,
    sort_product,
)

_LOG2E = math.log2(math.e)
_BALANCE = 60.0  # of two factors of opposite exponents, up to 16 tokens' decay, in powers of 2
_RUNS = CHUNK // RUN
# First rows of the table's factors. Those between runs: from runs 0, 1, ... to run 1, 2 and 3, closed by a one.
_INTO, _AFTER, _BETWEEN, _ROWS = 0, _RUNS, {1: 2 * _RUNS, 2: 2 * _RUNS + 2, 3: 2 * _RUNS + 5}, 2 * _RUNS + 9


class Form(NamedTuple):
    """What the kernel is compiled for.

    Attributes:
        scale: of q.
        raw: g are raw numbers that the gate is computed from, and q and k need to be normalised.
        lower_bound: of the gate, or None.
        bounded: sums of 16 tokens' g stay above -88, so that one reference serves a run.
    """

    scale: float
    raw: bool
    lower_bound: float | None
    bounded: bool


class Chunks(NamedTuple):
    """What chunks do to a state S, in the letters of `xla`, with P = diag(β) (I + L)^-T (K * exp(G_C - G)).

    Attributes:
        k: K * exp G, [N, H, 64, 128].
        q: scale Q * exp G.
        p: P.
        attention: (A (I + L)^-1 diag(β))^T, [N, H, 64, 64].
        decay: exp G_C, float32 [N, H, 128].
    """

    k: Any
    q: Any
    p: Any
    attention: Any
    decay: Any


def prepare(
    q: jax.Array,
    k: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    rates: jax.Array,
    bias: jax.Array,
    tokens: jax.Array,
    length: int | None,
    form: Form,
    interpret: Any = None,
) -> Chunks:
    """Prepares all chunks.

    Args:
        q: [B, T, H, 128], as k and g.
        k: keys.
        g: log decay, or raw numbers.
        beta: [B, T, H].
        rates: [H], A_log.
        bias: [H, 128], dt_bias.
        tokens: as in `Plan`.
        length: of every row, where chunks simply follow the rows; None where `tokens` has to be looked at.
        form: what to compile.
        interpret: what Pallas takes to run it without a GPU.
    """
    batch, _, heads, _ = q.shape
    number = tokens.shape[1]
    balance = _BALANCE if form.bounded else 0.0
    per_row = number // batch

    def kda_chunks(
        tokens: Any, rates: Any, q: Any, k: Any, g: Any, beta: Any, bias: Any, *rest: Any, **scratch: Any
    ) -> None:
        outputs = Chunks(*rest)
        chunk, head = lax.axis_index("chunk"), lax.axis_index("head")
        if length is not None:  # a load less to wait for before the first copy
            row = lax.div(chunk, per_row)
            first = (chunk - row * per_row) * CHUNK
            begin, end = jnp.int32(0), jnp.minimum(length - first, CHUNK)
        else:
            row, first, begin, end = (tokens[line, chunk] for line in range(4))
        if interpret is None:
            rows, (faded, inverse, between) = scratch["rows"]
            (key_tile, (corner,)), (attended, (turned,)) = scratch["key_tile"], scratch["square"]
        else:
            names = ("rows", "faded", "inverse", "between", "key_tile", "corner", "attended", "turned")
            rows, faded, inverse, between, key_tile, corner, attended, turned = (scratch[name] for name in names)
        tiles = (scratch["query_tile"], key_tile, scratch["g_tile"])
        g_tile = tiles[2] if form.raw else scratch["given"]
        lower, table, betas = scratch["lower"], scratch["table"], scratch["betas"]
        biases, early, late = scratch["biases"], scratch["early"], scratch["late"]
        span = pl.ds(pl.multiple_of(first, 8), CHUNK)
        plgpu.copy_gmem_to_smem(g.at[row, span, head], g_tile, early)
        plgpu.copy_gmem_to_smem(bias.at[head], biases, early)
        plgpu.copy_gmem_to_smem(k.at[row, span, head], tiles[1], late)
        plgpu.copy_gmem_to_smem(q.at[row, span, head], tiles[0], late)

        def iota(columns: int, axis: int) -> jax.Array:
            if interpret is not None:
                return lax.broadcasted_iota(jnp.int32, (CHUNK, columns), axis)
            return plgpu.broadcasted_iota(jnp.int32, (CHUNK, columns), axis, layout=plgpu.Layout.WGMMA)

        def part(run: int) -> Any:
            """Key rows and query rows of a run."""
            return rows.at[run // 2, pl.ds(2 * RUN * (run % 2), 2 * RUN)]

        tile_of = partial(_tile, interpret=interpret)

        strengths = fetch_betas(beta.at[row, span, head], begin, jnp.maximum(end - begin, 0), form.raw, interpret)
        plgpu.barrier_wait(early)
        if form.raw:
            z = tile_of(g_tile).astype(jnp.float32) + _along(biases, 0, interpret)
            # Everything in powers of 2 from here on.
            bound = None if form.lower_bound is None else form.lower_bound * _LOG2E
            sigmoid = partial(_sigmoid_of_log2, interpret=interpret)
            decay = log_decay(z, jnp.exp(rates[head]) * _LOG2E, bound, softplus=_softplus, sigmoid=sigmoid)
        else:
            decay = tile_of(g_tile) * _LOG2E
        # Two bfloat16 numbers hold 16 bits of it; cut off, because rounding takes a slow instruction.
        high = lax.bitcast_convert_type(lax.bitcast_convert_type(decay, jnp.int32) & -65536, jnp.float32)
        summands = rows if form.bounded else scratch["summands"]
        summands[0] = high.astype(jnp.bfloat16)
        summands[1] = (decay - high).astype(jnp.bfloat16)
        betas[...] = strengths
        incomplete = (begin > 0) | (end < CHUNK)

        def clear(tile: Any) -> None:
            """Sets to 0 what isn't the sequence's, and may be NaN."""
            valid = (begin <= iota(WIDTH, 0)) & (iota(WIDTH, 0) < end)
            tile[...] = jnp.where(valid, tile_of(tile), 0).astype(tile.dtype)

        @pl.when(incomplete)
        def _() -> None:
            for which in range(2):
                clear(summands.at[which])

        plgpu.commit_smem()

        def sum_over(which: Callable[[jax.Array, jax.Array], jax.Array]) -> jax.Array:
            """For every token, the sum over the tokens of its run that `which` says of places in the run."""
            row, column = iota(CHUNK, 0), iota(CHUNK, 1)
            mask = which(row & (RUN - 1), column & (RUN - 1)) & ((row >> 4) == (column >> 4))
            mask = jnp.where(mask, 1.0, 0.0).astype(jnp.bfloat16)
            if not form.bounded:
                mask = conceal(mask, betas.at[pl.ds(CHUNK, 2)], interpret)
            return _product([(mask, summands.at[1]), (mask, summands.at[0])], WIDTH, interpret)

        upto = sum_over(lambda row, column: column <= row)
        put_run_sums(table, _AFTER, upto, interpret)
        _fill_table(table, outputs.decay.at[chunk, head], form.bounded, interpret)
        meet(interpret)

        plgpu.barrier_wait(late)

        @pl.when(incomplete)
        def _() -> None:
            for which in range(2):
                clear(tiles[which])

        def read(which: int) -> jax.Array:
            return tile_of(tiles[which]).astype(jnp.float32)

        def norm(which: int) -> Any:
            """What to multiply rows of q (0) or k (1) by."""
            factor = (form.scale, 1.0)[which]
            if not form.raw:
                return factor
            x = read(which)
            return _over(lax.rsqrt(jnp.sum(x * x, axis=1) + L2_EPS) * factor, WIDTH)

        within = None
        if not form.bounded:
            # Joins neighbours of 1, 2, 4 and 8 tokens. A token of the earlier one decays over what follows it there, a
            # token of the later one over what precedes it there and itself, so that no exponent is positive.
            row, column = iota(2 * RUN, 0), iota(2 * RUN, 1)
            of_run, row, queries, column = row >> 4, row & (RUN - 1), column >= RUN, column & (RUN - 1)
            itself = jnp.sum((read(0) * norm(0)) * (read(1) * norm(1)), axis=1)
            within = jnp.where(queries & (row == column), _over(itself, 2 * RUN), 0)
            for shift in range(4):
                decay = jnp.exp2(sum_over(partial(_toward_middle, shift=shift)))
                query, key = (read(which) * (decay * norm(which)) for which in range(2))
                put_between(rows, query.astype(jnp.bfloat16), 1, interpret)
                put_between(rows, key.astype(jnp.bfloat16), 0, interpret)
                plgpu.commit_smem()
                joined = ((row >> (shift + 1)) == (column >> (shift + 1))) & ((row >> shift) < (column >> shift))
                for run in range(_RUNS):
                    product = _product([(key.astype(jnp.bfloat16), part(run))], 2 * RUN, interpret, turned=True)
                    within = jnp.where(joined & (of_run == run), product, within)
                meet(interpret)

        into = jnp.exp2(upto + balance)
        query = read(0) * (into * norm(0))
        put_between(rows, query.astype(jnp.bfloat16), 1, interpret)
        tiles[0][...] = (query * run_factors(table, _INTO, interpret)).astype(jnp.bfloat16)
        key = read(1) * norm(1)
        later = key * into
        put_between(rows, later.astype(jnp.bfloat16), 0, interpret)
        tiles[2][...] = (later * run_factors(table, _INTO, interpret)).astype(jnp.bfloat16)
        key *= jnp.exp2(-balance - upto if form.bounded else sum_over(lambda row, column: column > row))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tiles[0], outputs.q.at[chunk, head])
        plgpu.copy_smem_to_gmem(tiles[2], outputs.k.at[chunk, head])

        def reach(run: int) -> jax.Array:
            # Keys of earlier runs decay over what lies between; those of later ones don't count.
            reached = key if run == 0 else key * run_factors(table, _BETWEEN[run], interpret)
            return reached.astype(jnp.bfloat16)

        def sort(run: int, product: jax.Array) -> None:
            if within is not None:
                product = jnp.where((iota(2 * RUN, 0) >> 4) == run, within, product)
            sort_product(product, run, betas, lower, corner, turned, interpret)

        def start(run: int, before: Any) -> None:
            def go_on(product: Any) -> None:
                plgpu.wgmma(product, reach(run), part(run).transpose((1, 0)))
                if run > 0:
                    sort(run - 1, plgpu.wgmma_accumulator_load(before, wait_n=1))
                if run < _RUNS - 1:
                    start(run + 1, product)
                else:
                    sort(run, plgpu.wgmma_accumulator_load(product))

            pl.run_scoped(go_on, ACC((CHUNK, 2 * RUN), jnp.float32))

        if interpret is None:
            start(0, None)  # each run's product is on its way while the next one's factor is worked out
        else:
            for run in range(_RUNS):
                sort(run, _product([(reach(run), part(run))], 2 * RUN, interpret, turned=True))
        meet(interpret)  # Nobody reads `rows` any more.
        # From here on numbers are at most 1, and float16 holds them better.
        faded[...] = (key * run_factors(table, _AFTER, interpret)).astype(jnp.float16)
        solve(lower, inverse, interpret)
        plgpu.commit_smem()
        step = _product([(corner, inverse)], CHUNK, interpret)
        between[...] = step.astype(jnp.float16)
        plgpu.commit_smem()
        step = _product([(inverse, between)], CHUNK, interpret)
        strength = _over(_along(betas.at[pl.ds(0, CHUNK)], 1, interpret), CHUNK)
        meet(interpret)
        inverse[...] = ((tile_of(inverse).astype(jnp.float32) - step) * strength).astype(jnp.float16)
        plgpu.commit_smem()
        p = _product([(inverse, faded)], WIDTH, interpret)
        attention = _product([(inverse, turned)], CHUNK, interpret)
        meet(interpret)
        tiles[1][...] = p.astype(jnp.bfloat16)
        attended[...] = attention.astype(jnp.bfloat16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tiles[1], outputs.p.at[chunk, head])
        plgpu.copy_smem_to_gmem(attended, outputs.attention.at[chunk, head])
        plgpu.wait_smem_to_gmem(0)

    wide = jax.ShapeDtypeStruct((number, heads, CHUNK, WIDTH), jnp.bfloat16)
    outputs = Chunks(
        k=wide,
        q=wide,
        p=wide,
        attention=jax.ShapeDtypeStruct((number, heads, CHUNK, CHUNK), jnp.bfloat16),
        decay=jax.ShapeDtypeStruct((number, heads, WIDTH), jnp.float32),
    )

    def tile(columns: int, dtype: Any = jnp.bfloat16, *leading: int) -> Any:
        return plgpu.SMEM((*leading, CHUNK, columns), dtype, transforms=SWIZZLED)

    rows, key_tile, attended = tile(WIDTH, jnp.bfloat16, 2), tile(WIDTH), tile(CHUNK)
    faded, square = tile(WIDTH, jnp.float16), tile(CHUNK, jnp.float16)
    scratch = {
        "query_tile": tile(WIDTH),
        "g_tile": tile(WIDTH),
        "lower": plgpu.SMEM((2, HALF, PITCH), jnp.float32),
        "table": plgpu.SMEM((_ROWS, WIDTH), jnp.float32),
        "betas": plgpu.SMEM((2 * CHUNK,), jnp.float32),
        "biases": plgpu.SMEM((WIDTH,), jnp.float32),
        "early": plgpu.Barrier(num_arrivals=2),
        "late": plgpu.Barrier(num_arrivals=2),
    }
    if interpret is None:
        # Each line's groups take turns with the same memory.
        scratch["rows"] = plgpu.RefUnion(rows, (faded, square, square))
        scratch["key_tile"] = plgpu.RefUnion(key_tile, (square,))
        scratch["square"] = plgpu.RefUnion(attended, (square,))
    else:
        scratch |= {"rows": rows, "faded": faded, "key_tile": key_tile, "attended": attended}
        scratch |= dict.fromkeys(("inverse", "between", "corner", "turned"), square)
    if not form.bounded:
        scratch["summands"] = plgpu.SMEM((2, CHUNK, WIDTH), jnp.bfloat16, transforms=SWIZZLED)
    if not form.raw:
        transforms = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))
        scratch["given"] = plgpu.SMEM((CHUNK, WIDTH), jnp.float32, transforms=transforms)
    return Chunks(
        *plgpu.kernel(
            kda_chunks,
            out_type=list(outputs),
            grid=(number, heads),
            grid_names=("chunk", "head"),
            scratch_types=scratch,
            compiler_params=plgpu.CompilerParams(
                lowering_semantics=plgpu.LoweringSemantics.Lane, approx_math=True, unsafe_no_auto_barriers=True
            ),
            **({} if interpret is None else {"interpret": interpret}),
        )(tokens, rates, q, k, g, beta, bias)
    )


def _fill_table(table: Any, decay: Any, bounded: bool, interpret: Any) -> None:
    """Powers of 2 of sums of g over whole runs, a column a channel; and exp G_C to device memory.

    A key's own factor goes up to the end of its run; with a bounded gate it goes back to the run's begin instead, and the
    run itself counts here.
    """

    def column(at: Any) -> Any:
        return at[...] if interpret is not None else load(at, _by_channel())

    balance = _BALANCE if bounded else 0.0
    total = [column(table.at[_AFTER + run]) for run in range(_RUNS)]

    def sum_of(begin: int, end: int) -> Any:
        result = jnp.zeros_like(total[0])
        for x in total[begin:end]:
            result = result + x
        return result

    for run in range(_RUNS):
        own = run if bounded else run + 1
        table[_INTO + run] = jnp.exp2(sum_of(0, run) - balance)
        table[_AFTER + run] = jnp.exp2(sum_of(own, _RUNS) + balance)
        for later in range(run + 1, _RUNS):
            table[_BETWEEN[later] + run] = jnp.exp2(sum_of(own, later))
        if run > 0:
            table[_BETWEEN[run] + run] = jnp.ones_like(total[0])
    decay[...] = jnp.exp2(sum_of(0, _RUNS))


def _toward_middle(row: jax.Array, column: jax.Array, shift: int) -> jax.Array:
    """Whether a token lies between another one of the same 2^(shift + 1) and the middle of these."""
    same = (row >> (shift + 1)) == (column >> (shift + 1))
    middle = ((row >> (shift + 1)) << (shift + 1)) + (1 << shift)
    earlier, later = (row < column) & (column < middle), (middle <= column) & (column <= row)
    return same & (earlier | later)


def _softplus(x: jax.Array) -> jax.Array:
    # log(1 + e), whose sum would lose a small e.
    e = jnp.exp2(-_LOG2E * jnp.abs(x))
    small = e * (1 - e * (0.5 - e * (1 / 3 - e * 0.25)))
    return jnp.maximum(x, 0) + jnp.where(e < 2**-5, small, jnp.log2(1 + e) * math.log(2))


def _sigmoid_of_log2(x: jax.Array, interpret: Any) -> jax.Array:
    """σ(x ln 2)."""
    return reciprocal(1 + jnp.exp2(-x), interpret)


def _by_channel() -> Any:
    return plgpu.Layout.WG_STRIDED((WIDTH,), vec_size=1)


def _tile(at: Any, interpret: Any) -> jax.Array:
    return at[...] if interpret is not None else load(at, plgpu.Layout.WGMMA)


def _along(at: Any, axis: int, interpret: Any) -> jax.Array:
    """A number for each column (axis 0, as an array [64, n]) or each row (axis 1, as [64])."""
    if interpret is not None:
        return jnp.broadcast_to(at[...], (CHUNK, at.shape[0])) if axis == 0 else at[...]
    value = load(at, plgpu.Layout.WGMMA.reduce(axis), optimized=False)
    return lax.broadcast_in_dim(value, (CHUNK, at.shape[0]), [1]) if axis == 0 else value


def _over(value: jax.Array, columns: int) -> jax.Array:
    return lax.broadcast_in_dim(value, (CHUNK, columns), [0])


def _product(terms: Sequence[tuple[Any, Any]], columns: int, interpret: Any, turned: bool = False) -> jax.Array:
    """Sum of float32 [64, columns] products of left factors, in registers or shared memory, and right ones, in shared memory."""
    if interpret is not None:
        total = jnp.zeros((CHUNK, columns), jnp.float32)
        for left, right in terms:
            right = right[...].T if turned else right[...]
            total += jnp.dot(left[...], right, preferred_element_type=jnp.float32)
        return total

    def accumulate(total: Any) -> jax.Array:
        for left, right in terms:
            plgpu.wgmma(total, left, right.transpose((1, 0)) if turned else right)
        plgpu.wgmma_wait(0)
        return total[...]

    return pl.run_scoped(accumulate, ACC((CHUNK, columns), jnp.float32))
