"""Recorded tokens of KDA folded into the states of a pool on a Hopper GPU, in place; cut as `gpu_decode` is."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.kda.gpu_registers import CHANNELS, WIDTH, Registers, layouts, store


@partial(jax.jit, static_argnames=("columns", "interpret"))
def commit(
    pool: jax.Array,
    recorded: tuple[jax.Array, jax.Array, jax.Array],
    slots: jax.Array,
    counts: jax.Array,
    *,
    columns: int,
    interpret: Any = None,
) -> jax.Array:
    """The pool with the first `counts` records (k, u, g), each [P, H, R, ·], of every slot folded into its state."""
    batch, capacity = slots.shape[0], recorded[0].shape[2]
    heads, values = pool.shape[1], pool.shape[-1]
    pieces = values // columns
    piece = layouts(columns)
    rows = piece.rows
    parts = [pl.ds(part * rows, rows) for part in range(WIDTH // rows)]
    registers = Registers(interpret)
    load = registers.load

    def over_columns(x: Any) -> Any:
        return registers.spread(x, (rows, columns), (0,), piece.block)

    def kernel(*refs: Any) -> None:
        pl.run_scoped(
            partial(fold_all, *refs),
            plgpu.SMEM((capacity, WIDTH), jnp.float32),
            plgpu.SMEM((capacity, WIDTH), jnp.float32),
        )

    def fold_all(
        slots: Any, counts: Any, past_k: Any, past_u: Any, past_g: Any, pool: Any, decays: Any, keys: Any
    ) -> None:
        unit = lax.axis_index("block")
        row, head = lax.div(unit, heads * pieces), lax.rem(lax.div(unit, pieces), heads)
        mine = pl.ds(pl.multiple_of(lax.rem(unit, pieces) * columns, columns), columns)
        slot, count = slots[row], counts[row]

        def spread_out(token: Any, carry: tuple[()]) -> tuple[()]:
            store(decays.at[token], jnp.exp(load(past_g.at[slot, head, token], CHANNELS)))
            store(keys.at[token], load(past_k.at[slot, head, token], CHANNELS).astype(jnp.float32))
            return carry

        def fold(token: Any, state: Any) -> Any:
            u = load(past_u.at[slot, head, token, mine], piece.column)
            written = registers.spread(u, (rows, columns), (1,), piece.block)
            after = []
            for here, entries in zip(parts, state, strict=True):
                decayed = over_columns(load(decays.at[token, here], piece.row)) * entries
                after.append(decayed + over_columns(load(keys.at[token, here], piece.row)) * written)
            return tuple(after)

        @pl.when((slot >= 0) & (count > 0))
        def _() -> None:
            state = tuple(load(pool.at[slot, head, here, mine], piece.block) for here in parts)
            lax.fori_loop(0, count, spread_out, ())
            plgpu.commit_smem()
            for here, entries in zip(parts, lax.fori_loop(0, count, fold, state), strict=True):
                store(pool.at[slot, head, here, mine], entries)

    run: Any = pl.kernel(
        kernel,
        out_type=[],
        mesh=plgpu.Mesh(grid=(batch * heads * pieces,), grid_names=("block",)),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            unsafe_no_auto_barriers=True,  # the one barrier stands where the records change hands
        ),
        interpret=interpret or False,
        name="kda_commit",
    )
    place = jax.new_ref(pool, memory_space=plgpu.GMEM)
    run(slots.astype(jnp.int32), counts.astype(jnp.int32), *recorded, place)
    return jax.freeze(place)
