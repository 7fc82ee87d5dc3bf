"""X = T Y inside every chunk, and what meets it: the gradients of A and of l, in one kernel."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.kda.gpu_backward_pairs import BALANCE, BETWEEN, RUNS, TABLE
from pallas_kernels.kda.gpu_prefill_warp import (
    ACC,
    CHUNK,
    HALF,
    PITCH,
    RUN,
    SWIZZLED,
    WIDTH,
    load,
    load_turned,
    meet,
    put_between,
    run_factors,
    solve,
    sort_product,
)
from pallas_kernels.kda.gpu_registers import store


class Solved(NamedTuple):
    """Of all chunks, bfloat16.

    Attributes:
        x: X, [N, H, 64, V].
        pairs: [2, N, H, 64, 64], the strictly lower triangles of dO X^T and -dY X^T.
        meets: float32 [2, N, H, 64], <dO_i, X_i> and <dY_i, X_i>.
    """

    x: Any
    pairs: Any
    meets: Any


def correct(
    k: jax.Array,
    upto: jax.Array,
    table: jax.Array,
    beta: jax.Array,
    y: jax.Array,
    d_o: jax.Array,
    d_y: jax.Array,
    interpret: Any = None,
) -> Solved:
    """Solves all chunks.

    Args:
        k: normalised, bfloat16 [N, H, 64, 128].
        upto: as in `gpu_backward_pairs.Given`, as table.
        table: factors between runs.
        beta: float32 [N, H, 64].
        y: Y, bfloat16 [N, H, 64, 128].
        d_o: gradient of o.
        d_y: dY.
        interpret: what Pallas takes to run it without a GPU.
    """
    number, heads = k.shape[:2]

    def kda_corrected(
        k: Any, upto: Any, table: Any, beta: Any, y: Any, d_o: Any, d_y: Any, *rest: Any, **scratch: Any
    ) -> None:
        x, pairs, meets = rest
        chunk, head = lax.axis_index("chunk"), lax.axis_index("head")
        if interpret is None:
            (sums, keys), tiles, spare = scratch["first"]
            rows, (inverse, step, out) = scratch["second"]
        else:
            names = ("sums", "keys", "tiles", "spare", "rows", "inverse", "step", "out")
            sums, keys, tiles, spare, rows, inverse, step, out = (scratch[name] for name in names)
        corner, lower, factors, betas = (scratch[name] for name in ("corner", "lower", "factors", "betas"))
        early, late = scratch["early"], scratch["late"]
        values, given_o, given_y = (tiles.at[index] for index in range(3))
        for source, target in ((k, keys), (upto, sums), (beta, betas)):
            plgpu.copy_gmem_to_smem(source.at[chunk, head], target, early)
        between = pl.ds(BETWEEN[1], TABLE - BETWEEN[1])
        plgpu.copy_gmem_to_smem(table.at[chunk, head, between], factors, early)

        def tile_of(at: Any) -> Any:
            value = at[...] if interpret is not None else load(at, plgpu.Layout.WGMMA)
            return value.astype(jnp.float32)

        def iota(axis: int) -> Any:
            shape = (CHUNK, CHUNK)
            if interpret is not None:
                return lax.broadcasted_iota(jnp.int32, shape, axis)
            return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)

        def product(left: Any, right: Any, columns: int, turned: bool = False) -> Any:
            if interpret is not None:
                right = right[...].astype(jnp.float32)
                return jnp.dot(left[...].astype(jnp.float32), right.T if turned else right)

            def accumulate(total: Any) -> Any:
                plgpu.wgmma(total, left, right.transpose((1, 0)) if turned else right)
                plgpu.wgmma_wait(0)
                return total[...]

            return pl.run_scoped(accumulate, ACC((CHUNK, columns), jnp.float32))

        plgpu.barrier_wait(early)
        decay, key = tile_of(sums), tile_of(keys)
        row = (key * (jnp.exp(decay) * BALANCE)).astype(jnp.bfloat16)
        for which in range(2):  # the second one only fills places
            put_between(rows, row, which, interpret)
        key *= jnp.exp(-decay) * (1 / BALANCE)
        plgpu.commit_smem()
        for run in range(RUNS):
            reached = key if run == 0 else key * run_factors(factors, BETWEEN[run] - BETWEEN[1], interpret)
            of_run = rows.at[run // 2, pl.ds(2 * RUN * (run % 2), 2 * RUN)]
            met = product(reached.astype(jnp.bfloat16), of_run, 2 * RUN, turned=True)
            sort_product(met, run, betas, lower, corner, spare, interpret)
        meet(interpret)  # nobody reads what these copies overwrite any more
        plgpu.commit_smem()
        for index, source in enumerate((y, d_o, d_y)):
            plgpu.copy_gmem_to_smem(source.at[chunk, head], tiles.at[index], late)
        solve(lower, inverse, interpret)
        plgpu.commit_smem()
        step[...] = product(corner, inverse, CHUNK).astype(jnp.float16)
        plgpu.commit_smem()
        rest = product(inverse, step, CHUNK)
        strength = betas[...] if interpret is not None else load(betas, plgpu.Layout.WGMMA.reduce(1), optimized=False)
        strength = lax.broadcast_in_dim(strength, (CHUNK, CHUNK), [0])
        out[0] = ((tile_of(inverse) - rest) * strength).astype(jnp.bfloat16)
        meet(interpret)
        plgpu.barrier_wait(late)
        found = product(load_turned(out.at[0], interpret), values, WIDTH).astype(jnp.bfloat16)
        meet(interpret)
        values[...] = found
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(values, x.at[chunk, head])
        below, itself = iota(1) < iota(0), iota(1) == iota(0)
        for which, given in enumerate((given_o, given_y)):
            met = product(given, values, CHUNK, turned=True)
            store(meets.at[which, chunk, head], jnp.sum(jnp.where(itself, met, 0.0), axis=1))
            out[which] = jnp.where(below, met if which == 0 else -met, 0.0).astype(jnp.bfloat16)
        plgpu.commit_smem()
        for which in range(2):
            plgpu.copy_smem_to_gmem(out.at[which], pairs.at[which, chunk, head])
        plgpu.wait_smem_to_gmem(0)

    def tile(columns: int, *leading: int, dtype: Any = jnp.bfloat16) -> Any:
        return plgpu.SMEM((*leading, CHUNK, columns), dtype, transforms=SWIZZLED)

    square = tile(CHUNK, dtype=jnp.float16)
    transforms = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))
    sums = plgpu.SMEM((CHUNK, WIDTH), jnp.float32, transforms=transforms)
    keys, tiles, rows, out = tile(WIDTH), tile(WIDTH, 3), tile(WIDTH, 2), tile(CHUNK, 2)
    scratch: dict[str, Any] = {
        "corner": square,
        "lower": plgpu.SMEM((2, HALF, PITCH), jnp.float32),
        "factors": plgpu.SMEM((TABLE - BETWEEN[1], WIDTH), jnp.float32),
        "betas": plgpu.SMEM((CHUNK,), jnp.float32),
        "early": plgpu.Barrier(num_arrivals=4),
        "late": plgpu.Barrier(num_arrivals=3),
    }
    if interpret is None:
        scratch |= {
            "first": plgpu.RefUnion((sums, keys), tiles, square),
            "second": plgpu.RefUnion(rows, (square, square, out)),
        }
    else:
        scratch |= {"sums": sums, "keys": keys, "tiles": tiles, "rows": rows, "out": out}
        scratch |= dict.fromkeys(("spare", "inverse", "step"), square)
    result = Solved(
        jax.ShapeDtypeStruct(k.shape, jnp.bfloat16),
        jax.ShapeDtypeStruct((2, number, heads, CHUNK, CHUNK), jnp.bfloat16),
        jax.ShapeDtypeStruct((2, number, heads, CHUNK), jnp.float32),
    )
    return Solved(
        *plgpu.kernel(
            kda_corrected,
            out_type=list(result),
            grid=(number, heads),
            grid_names=("chunk", "head"),
            scratch_types=scratch,
            compiler_params=plgpu.CompilerParams(
                lowering_semantics=plgpu.LoweringSemantics.Lane, approx_math=True, unsafe_no_auto_barriers=True
            ),
            **({} if interpret is None else {"interpret": interpret}),
        )(k, upto, table, beta, y, d_o, d_y)
    )
