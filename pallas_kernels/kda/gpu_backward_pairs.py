"""What states and pairs of tokens add to the gradients inside a chunk, in one kernel: nothing between them is stored."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.kda.gpu_prefill_warp import ACC, CHUNK, RUN, SWIZZLED, WIDTH, conceal, load, load_turned, meet
from pallas_kernels.kda.gpu_registers import store

RUNS = CHUNK // RUN
BALANCE = 2.0**60  # between two factors of a pair inside a run, whose exponents reach ±16 · 5.5
INTO, AFTER = 0, RUNS
BETWEEN = {1: 2 * RUNS, 2: 2 * RUNS + 2, 3: 2 * RUNS + 5}
TABLE = 2 * RUNS + 9
"""Rows of a chunk's factors between runs. Four from INTO on: from the chunk's begin to each run's. From AFTER on: from each
run's begin to the chunk's end. From BETWEEN[J] on: from the begins of runs 0, 1, ... to that of run J, closed by a one."""


class Given(NamedTuple):
    """Of all chunks; [N, H, 64, 128] if nothing else is said.

    Attributes:
        q: normalised, times the scale.
        k: normalised.
        upto: float32, the sum of g from the begin of the token's run to itself.
        table: float32 [N, H, TABLE, 128].
        pairs: [2, N, H, 64, 64], dA and dl, strictly lower.
        d_o: as in `gpu_backward_chunk.Around`.
        d_y: dY.
        x: X.
        states: S^T, [N, H, V, K].
        d_states: R^T, [N, H, V, K].
    """

    q: Any
    k: Any
    upto: Any
    table: Any
    pairs: Any
    d_o: Any
    d_y: Any
    x: Any
    states: Any
    d_states: Any


class Found(NamedTuple):
    """float32 [N, H, 64, 128].

    Attributes:
        q: gradient of the scaled q.
        k: gradient of k.
        g: gradient of g, but for the state that only decays.
    """

    q: Any
    k: Any
    g: Any


def gather(given: Given, interpret: Any = None) -> Found:
    """Adds up for every chunk."""
    number, heads = given.k.shape[:2]

    def kda_pairs(*refs: Any, **scratch: Any) -> None:
        source, target = Given(*refs[: len(Given._fields)]), Found(*refs[len(Given._fields) :])
        chunk, head, half = (lax.axis_index(name) for name in ("chunk", "head", "half"))
        columns = pl.ds(pl.multiple_of(half * CHUNK, CHUNK), CHUNK)
        if interpret is None:
            wide, factors = scratch["first"]
            narrow, (upto, keys) = scratch["second"]
        else:
            wide, factors, narrow, upto, keys = (
                scratch[name] for name in ("wide", "factors", "narrow", "upto", "keys")
            )
        table, pairs, early, late = (scratch[name] for name in ("table", "pairs", "early", "late"))
        for index, name in enumerate(("d_o", "d_y", "x")):
            plgpu.copy_gmem_to_smem(getattr(source, name).at[chunk, head], wide.at[index], early)
        for index, name in enumerate(("states", "d_states")):
            plgpu.copy_gmem_to_smem(getattr(source, name).at[chunk, head, :, columns], narrow.at[index], early)
        plgpu.copy_gmem_to_smem(source.table.at[chunk, head, :, columns], table, late)
        for index in range(2):
            plgpu.copy_gmem_to_smem(source.pairs.at[index, chunk, head], pairs.at[index], late)

        def tile_of(at: Any) -> Any:
            value = at[...] if interpret is not None else load(at, plgpu.Layout.WGMMA)
            return value.astype(jnp.float32)

        def iota(axis: int) -> Any:
            shape = (CHUNK, CHUNK)
            if interpret is not None:
                return lax.broadcasted_iota(jnp.int32, shape, axis)
            return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)

        def of_runs(first: int) -> Any:
            """[64, 64], of which rows of run J are row first + J of the table."""
            run, result = iota(0) >> 4, None
            for index in range(RUNS):
                if interpret is not None:
                    row = table[first + index]
                else:
                    row = load(table.at[first + index], plgpu.Layout.WGMMA.reduce(0), optimized=False)
                row = lax.broadcast_in_dim(row, (CHUNK, CHUNK), [1])
                result = row if result is None else jnp.where(run == index, row, result)
            return result

        def products(*sums: Any) -> list[Any]:
            """float32 [64, 64] sums of products, all on their way at once."""
            if interpret is not None:
                return [sum(_dot(left[...], right[...]) for left, right in terms) for terms in sums]

            def accumulate(*totals: Any) -> list[Any]:
                for total, terms in zip(totals, sums, strict=True):
                    for left, right in terms:
                        plgpu.wgmma(total, left, right)
                plgpu.wgmma_wait(0)
                return [total[...] for total in totals]

            return pl.run_scoped(accumulate, *(ACC((CHUNK, CHUNK), jnp.float32) for _ in sums))

        plgpu.barrier_wait(early)
        d_o, d_y, x = (wide.at[index] for index in range(3))
        of_q, of_k, of_after = products([(d_o, narrow.at[0])], [(d_y, narrow.at[0])], [(x, narrow.at[1])])
        meet(interpret)  # nobody reads these tiles any more
        plgpu.commit_smem()
        plgpu.copy_gmem_to_smem(source.upto.at[chunk, head, :, columns], upto, late)
        for index, name in enumerate(("q", "k")):
            plgpu.copy_gmem_to_smem(getattr(source, name).at[chunk, head, :, columns], keys.at[index], late)
        plgpu.barrier_wait(late)

        def split(at: Any, value: Any) -> None:
            """Two bfloat16 numbers hold 16 bits."""
            high = lax.bitcast_convert_type(lax.bitcast_convert_type(value, jnp.int32) & -65536, jnp.float32)
            at[0] = high.astype(jnp.bfloat16)
            at[1] = (value - high).astype(jnp.bfloat16)

        decay = tile_of(upto)
        rows, back = jnp.exp(decay) * BALANCE, jnp.exp(-decay) * (1 / BALANCE)
        q, k = tile_of(keys.at[0]), tile_of(keys.at[1])
        factors[0] = (q * rows).astype(jnp.bfloat16)
        factors[1] = (k * rows).astype(jnp.bfloat16)
        for run in range(RUNS):
            reached = k * back if run == 0 else k * back * of_runs(BETWEEN[run])
            factors[2 + run] = reached.astype(jnp.bfloat16)
        into = rows * of_runs(INTO)
        d_q, d_k = of_q * into, -of_k * into
        d_total = q * d_q + k * d_k
        of_after *= back * of_runs(AFTER)
        d_k += of_after
        meet(interpret)
        split(keys, k * of_after)
        plgpu.commit_smem()

        def masked(value: Any, axis: int, run: int) -> Any:
            kept = jnp.where((iota(axis) >> 4) == run, value, 0.0).astype(jnp.bfloat16)
            return conceal(kept, pairs.at[0], interpret)  # whose first row is 0

        for which in range(2):
            pair = tile_of(pairs.at[which])
            (found,) = products([(masked(pair, 0, run), factors.at[2 + run]) for run in range(RUNS)])
            d_total += tile_of(factors.at[which]) * found
            if which == 0:
                store(target.q.at[chunk, head, :, columns], d_q + found * rows)
            else:
                d_k += found * rows
        turned = [load_turned(pairs.at[which], interpret).astype(jnp.float32) for which in range(2)]
        for run in range(RUNS):
            (found,) = products([(masked(turned[which], 1, run), factors.at[which]) for which in range(2)])
            d_total -= tile_of(factors.at[2 + run]) * found
            d_k += found * back if run == 0 else found * back * of_runs(BETWEEN[run])
        store(target.k.at[chunk, head, :, columns], d_k)
        meet(interpret)
        split(factors, d_total)
        # In shared memory, since constants in registers aren't safe as left factors; see `conceal`.
        upto_here, from_here = (pairs.at[index] for index in range(2))
        upto_here[...] = jnp.where(iota(1) < iota(0), 1.0, 0.0).astype(jnp.bfloat16)
        from_here[...] = jnp.where(iota(1) < iota(0), 0.0, 1.0).astype(jnp.bfloat16)
        plgpu.commit_smem()
        sums = [(from_here, factors.at[part]) for part in range(2)] + [(upto_here, keys.at[part]) for part in range(2)]
        store(target.g.at[chunk, head, :, columns], products(sums)[0])

    def tile(rows: int, columns: int, *leading: int) -> Any:
        return plgpu.SMEM((*leading, rows, columns), jnp.bfloat16, transforms=SWIZZLED)

    wide, narrow, keys = tile(CHUNK, WIDTH, 3), tile(WIDTH, CHUNK, 2), tile(CHUNK, CHUNK, 2)
    factors = tile(CHUNK, CHUNK, 2 + RUNS)
    transforms = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))
    upto = plgpu.SMEM((CHUNK, CHUNK), jnp.float32, transforms=transforms)
    scratch: dict[str, Any] = {
        "table": plgpu.SMEM((TABLE, CHUNK), jnp.float32),
        "pairs": tile(CHUNK, CHUNK, 2),
        "early": plgpu.Barrier(num_arrivals=5),
        "late": plgpu.Barrier(num_arrivals=6),
    }
    if interpret is None:
        scratch |= {"first": plgpu.RefUnion(wide, factors), "second": plgpu.RefUnion(narrow, (upto, keys))}
    else:
        scratch |= {"wide": wide, "factors": factors, "narrow": narrow, "upto": upto, "keys": keys}
    out = jax.ShapeDtypeStruct(given.upto.shape, jnp.float32)
    return Found(
        *plgpu.kernel(
            kda_pairs,
            out_type=[out] * len(Found._fields),
            grid=(number, heads, WIDTH // CHUNK),
            grid_names=("chunk", "head", "half"),
            scratch_types=scratch,
            compiler_params=plgpu.CompilerParams(
                lowering_semantics=plgpu.LoweringSemantics.Lane, approx_math=True, unsafe_no_auto_barriers=True
            ),
            **({} if interpret is None else {"interpret": interpret}),
        )(*given)
    )


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.dot(a.astype(jnp.float32), b.astype(jnp.float32))
