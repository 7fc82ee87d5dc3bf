"""The kernel behind the gradient of sparse MLA: queries' and latents' gradients from one walk over the keys.

A block of threads takes up to 48 heads of one query. Keys are rows of a tile of 64, heads are columns: one product gives
scores and dp, K [Q | dO]ᵀ; from both and the log-sum-exp come p and ds. Queries' gradients, Kᵀ dS, stay in registers until
the last key; latents' gradients, [dS | P]ᵀ [Q | dO], are added to device memory tile by tile, in float32 and in any order.

Four warpgroups: one scores and differentiates, one sums queries' gradients, one makes and adds latents' gradients, one
gathers rows, 64 channels at a time, into a ring of places.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.sparse_mla import gpu_backward_plain, gpu_backward_threads
from pallas_kernels.sparse_mla.gpu import TILE, VALUE, WIDTH
from pallas_kernels.sparse_mla.gpu_backward import Tuning
from pallas_kernels.sparse_mla.gpu_threads import CHUNK, SWIZZLED

_CHUNKS, _VALUE_CHUNKS = WIDTH // CHUNK, VALUE // CHUNK


def differentiate_rows(
    q: Float[Array, "N H K"],
    do: Float[Array, "N H L"],
    latent: Float[Array, "R K"],
    indices: Int[Array, " NC"],
    info: Float[Array, "P two"],
    *,
    batch: int,
    scale: float,
    tuning: Tuning,
    interpret: Any = None,
) -> tuple[Float[Array, "NH K"], Float[Array, "R K"]]:
    """Gradients of N queries over C keys each, and of the R rows, of which `batch` equal parts of queries share equal parts.

    `info` holds, for every query and piece of its heads, log-sum-exps as powers of two and deltas.
    """
    threads: Any = gpu_backward_threads if interpret is None else gpu_backward_plain
    queries, all_heads, _ = q.shape
    heads, slots = tuning.heads, tuning.slots
    pieces, tiles = all_heads // heads, indices.shape[0] // queries // TILE
    num_rows, per_batch = latent.shape[0] // batch, queries // batch

    def kernel(q: Any, do: Any, latent: Any, indices: Any, info: Any, sums: Any, finished: Any, dq: Any) -> None:
        scratch: dict[str, Any] = {
            "keys": plgpu.SMEM((slots, TILE, CHUNK), jnp.bfloat16, transforms=SWIZZLED),
            "both": plgpu.SMEM((_CHUNKS, 2 * heads, CHUNK), jnp.bfloat16, transforms=SWIZZLED),
            "weights": plgpu.SMEM((2, 2 * heads, TILE), jnp.bfloat16, transforms=SWIZZLED),
            "state": plgpu.SMEM((2 * heads,), jnp.float32),
            "full": threads.full_barriers(slots),
            "empty": plgpu.Barrier(num_arrivals=1, num_barriers=slots),
            "asked": plgpu.Barrier(num_arrivals=_CHUNKS + _VALUE_CHUNKS),
            "given": plgpu.Barrier(num_arrivals=1, num_barriers=2),
            "taken": plgpu.Barrier(num_arrivals=2, num_barriers=2),
            **threads.more_scratch(heads),
        }
        if tuning.staged:
            scratch["stage"] = plgpu.SMEM((TILE * threads.stage_pitch(tuning.together),), jnp.float32)
        refs = q, do, latent, indices, info, sums, finished, dq
        pl.run_scoped(functools.partial(block, *refs), collective_axes="warpgroup", **scratch)

    def block(
        q: Any, do: Any, latent: Any, indices: Any, info: Any, sums: Any, finished: Any, dq: Any, **m: Any
    ) -> None:
        group, item = lax.axis_index("warpgroup"), lax.axis_index("item")
        query, piece = lax.div(item, pieces), lax.rem(item, pieces)
        keys_from = query * (tiles * TILE)
        first_row = lax.div(query, per_batch) * num_rows
        threads.start_barriers(m["full"], slots)

        def slot_of(tile: Any, chunk: int) -> tuple[Any, Any, Any]:
            """Number of a chunk among all, its place, and which time around."""
            number = tile * _CHUNKS + chunk
            return number, lax.rem(number, slots), lax.rem(lax.div(number, slots), 2)

        def copy() -> None:
            plgpu.set_max_registers(tuning.registers[3], action="decrease")
            mine = pl.ds(piece * heads, heads)
            for chunk in range(_CHUNKS):
                here, target = pl.ds(chunk * CHUNK, CHUNK), m["both"].at[chunk]
                plgpu.copy_gmem_to_smem(q.at[query, mine, here], target.at[pl.ds(0, heads)], m["asked"])
                if chunk < _VALUE_CHUNKS:
                    plgpu.copy_gmem_to_smem(do.at[query, mine, here], target.at[pl.ds(heads, heads)], m["asked"])

            if tuning.wave:
                threads.await_wave(finished, item, wave=tuning.wave, warpgroup=3)

            def one(tile: Any, carry: tuple[()]) -> tuple[()]:
                rows = threads.rows_to_gather(indices, keys_from + tile * TILE)
                for chunk in range(_CHUNKS):
                    number, slot, _ = slot_of(tile, chunk)

                    @pl.when(number >= slots)
                    def _(slot: Any = slot) -> None:
                        plgpu.barrier_wait(m["empty"].at[slot])

                    begin, target = 2 * CHUNK * chunk, m["keys"].at[slot]
                    threads.gather(latent, rows, first_row, target, m["full"], slot, num_rows=num_rows, begin=begin)
                return carry

            lax.fori_loop(0, tiles, one, ())
            for number in range(max(0, tiles * _CHUNKS - slots), tiles * _CHUNKS):  # barriers must be even
                plgpu.barrier_wait(m["empty"].at[number % slots])

        def score() -> None:
            plgpu.set_max_registers(tuning.registers[0], action="decrease")
            tail = m["both"].at[_CHUNKS - 1, pl.ds(heads, heads)]
            threads.start_query(info, m["state"], item, tail, heads=heads, warpgroup=0)
            plgpu.barrier_wait(m["asked"])

            def one(tile: Any, carry: tuple[()]) -> tuple[()]:
                buffer = lax.rem(tile, 2)

                def all_chunks(products: Any) -> Array:
                    for chunk in range(_CHUNKS):
                        _, slot, parity = slot_of(tile, chunk)
                        threads.wait(m["full"], slot, parity)
                        threads.multiply(products, m["keys"].at[slot], m["both"].at[chunk])
                    threads.until_added(0)
                    return products[...]

                products = threads.accumulate(all_chunks, [2 * heads], m, group, 0)
                rows = threads.rows_to_score(indices, keys_from + tile * TILE)

                @pl.when(tile >= 2)
                def _() -> None:
                    plgpu.barrier_wait(m["taken"].at[buffer])

                threads.differentiate(
                    products,
                    rows,
                    m["state"],
                    m["weights"].at[buffer],
                    heads=heads,
                    num_rows=num_rows,
                    scale=scale,
                )
                plgpu.barrier_arrive(m["given"].at[buffer])
                return carry

            lax.fori_loop(0, tiles, one, ())
            for tile in range(max(0, tiles - 2), tiles):
                plgpu.barrier_wait(m["taken"].at[tile % 2])

        def sum_queries() -> None:
            plgpu.set_max_registers(tuning.registers[1], action="increase")

            def all_tiles(*sums: Any) -> None:
                def one(tile: Any, carry: tuple[()]) -> tuple[()]:
                    buffer = lax.rem(tile, 2)
                    plgpu.barrier_wait(m["given"].at[buffer])
                    threads.fence()
                    before = None
                    for chunk, total in enumerate(sums):
                        _, slot, _ = slot_of(tile, chunk)
                        slopes = m["weights"].at[buffer, pl.ds(0, heads)]
                        threads.multiply_turned(total, m["keys"].at[slot], slopes)
                        if before is not None:
                            threads.until_added(1)  # all but the one just issued
                            plgpu.barrier_arrive(m["empty"].at[before])
                        before = slot
                    threads.until_added(0)
                    plgpu.barrier_arrive(m["empty"].at[before])
                    plgpu.barrier_arrive(m["taken"].at[buffer])
                    return carry

                lax.fori_loop(0, tiles, one, ())
                write(sums, 0)

            threads.accumulate(all_tiles, [heads] * _VALUE_CHUNKS, m, group, 1)

        def sum_latents() -> None:
            """Also the queries' last chunk, for which the other warpgroup has no registers."""
            plgpu.set_max_registers(tuning.registers[2], action="increase" if tuning.registers[2] > 128 else "decrease")
            plgpu.barrier_wait(m["asked"])

            def all_tiles(total: Any) -> None:
                def one(tile: Any, carry: tuple[()]) -> tuple[()]:
                    buffer = lax.rem(tile, 2)
                    _, slot, _ = slot_of(tile, _VALUE_CHUNKS)
                    rows = threads.rows_to_score(indices, keys_from + tile * TILE)
                    weights = m["weights"].at[buffer]
                    plgpu.barrier_wait(m["given"].at[buffer])
                    threads.fence()
                    threads.multiply_turned(total, m["keys"].at[slot], m["weights"].at[buffer, pl.ds(0, heads)])
                    threads.until_added(0)
                    plgpu.barrier_arrive(m["empty"].at[slot])
                    places = weights, m["both"], rows, sums, first_row
                    sizes: dict[str, int] = {"heads": heads, "num_rows": num_rows}
                    if tuning.staged:
                        threads.add_by_copies(*places, m["stage"], **sizes, together=tuning.together)
                    else:
                        threads.add_to_latents(*places, **sizes, together=tuning.together)
                    plgpu.barrier_arrive(m["taken"].at[buffer])
                    return carry

                lax.fori_loop(0, tiles, one, ())
                if tuning.wave:
                    threads.report(finished)
                if tuning.staged:
                    threads.finish_adding()
                write((total,), _VALUE_CHUNKS)

            threads.accumulate(all_tiles, [heads], m, group, 1 + _VALUE_CHUNKS)

        def write(totals: tuple[Any, ...], first: int) -> None:
            row = query * all_heads + piece * heads
            for chunk, total in enumerate(totals, first):
                threads.store_turned(total[...], dq, row, jnp.int32(chunk * CHUNK), heads=heads)

        for which, role in enumerate((score, sum_queries, sum_latents, copy)):
            pl.when(group == which)(role)

    run: Any = pl.kernel(
        kernel,
        out_type=[jax.ShapeDtypeStruct((queries * all_heads, WIDTH), jnp.bfloat16)],
        mesh=plgpu.Mesh(grid=(queries * pieces,), grid_names=("item",), num_threads=4, thread_name="warpgroup"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret or False,
        name="sparse_mla_gradient",
    )
    sums = jax.new_ref(jnp.zeros((latent.shape[0], WIDTH), jnp.float32), memory_space=plgpu.GMEM)
    finished = jax.new_ref(jnp.zeros(1, jnp.int32), memory_space=plgpu.GMEM)
    [dq] = run(q, do, latent, indices, info, sums, finished)
    return dq, jax.freeze(sums)
