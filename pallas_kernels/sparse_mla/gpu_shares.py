"""Which share each selected key has of a query's attention, on Hopper: the mean over heads of its probabilities."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.sparse_mla import gpu_backward_plain, gpu_backward_threads
from pallas_kernels.sparse_mla.gpu import TILE, WIDTH
from pallas_kernels.sparse_mla.gpu_threads import CHUNK, SWIZZLED

_CHUNKS, _WIDEST = WIDTH // CHUNK, 96


@functools.partial(jax.jit, static_argnums=(4, 5))
def mean_probabilities(
    q: Float[Array, "B T H LR"],
    latent: Float[Array, "B S LR"],
    indices: Int[Array, "B T C"],
    lse: Float[Array, "B T H"],
    scale: float,
    interpret: Any = None,
) -> Float[Array, "B T C"]:
    """Mean over heads of e^(scale q . latent[index] - lse); 0 for keys that don't exist.

    A block of threads takes up to 96 heads of a query: one warpgroup gathers rows, one scores and adds the heads up.
    """
    batch, tokens, heads, width = q.shape
    queries, keys = batch * tokens, indices.shape[2]
    pieces = -(-heads // _WIDEST)
    share = -(-heads // (16 * pieces)) * 16
    spare = pieces * share - heads
    powers = jnp.where(lse == -jnp.inf, 0, lse).astype(jnp.float32).reshape(queries, heads) * math.log2(math.e)
    q = q.reshape(queries, heads, width)
    if spare:
        q = jnp.pad(q, ((0, 0), (0, spare), (0, 0)))
        powers = jnp.pad(powers, ((0, 0), (0, spare)), constant_values=jnp.inf)
    tail = -keys % TILE
    if tail:
        indices = jnp.pad(indices, ((0, 0), (0, 0), (0, tail)), constant_values=-1)
    out = _run(
        q,
        latent.reshape(-1, width),
        indices.reshape(-1),
        powers.reshape(queries * pieces, share),
        per_batch=tokens,
        by=1 / heads,
        scale=scale,
        interpret=interpret,
    )
    return jnp.sum(out.reshape(pieces, batch, tokens, keys + tail), axis=0)[..., :keys]


def _run(
    q: Float[Array, "N H K"],
    latent: Float[Array, "R K"],
    indices: Int[Array, " NC"],
    powers: Float[Array, "P share"],
    *,
    per_batch: int,
    by: float,
    scale: float,
    interpret: Any,
) -> Float[Array, " PC"]:
    threads: Any = gpu_backward_threads if interpret is None else gpu_backward_plain
    queries, all_heads, _ = q.shape
    heads = powers.shape[1]
    pieces, tiles = all_heads // heads, indices.shape[0] // queries // TILE
    num_rows = latent.shape[0] * per_batch // queries
    slots = min(18, (226 * 1024 - _CHUNKS * heads * 2 * CHUNK) // (TILE * 2 * CHUNK))

    def kernel(q: Any, latent: Any, indices: Any, powers: Any, out: Any, **m: Any) -> None:
        group, item = lax.axis_index("warpgroup"), lax.axis_index("item")
        query, piece = lax.div(item, pieces), lax.rem(item, pieces)
        keys_from = query * (tiles * TILE)
        first_row = lax.div(query, per_batch) * num_rows
        threads.start_barriers(m["full"], slots)

        def copy() -> None:
            for chunk in range(_CHUNKS):
                source = q.at[query, pl.ds(piece * heads, heads), pl.ds(chunk * CHUNK, CHUNK)]
                plgpu.copy_gmem_to_smem(source, m["queries"].at[chunk], m["asked"])

            def one(tile: Any, carry: tuple[()]) -> tuple[()]:
                rows = threads.rows_to_gather(indices, keys_from + tile * TILE)
                for chunk in range(_CHUNKS):
                    number = tile * _CHUNKS + chunk
                    slot = lax.rem(number, slots)

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
            threads.start_shares(powers, m["state"], item, heads=heads, warpgroup=0)
            plgpu.barrier_wait(m["asked"])

            def one(tile: Any, carry: tuple[()]) -> tuple[()]:
                def all_chunks(scores: Any) -> Array:
                    before = None
                    for chunk in range(_CHUNKS):
                        number = tile * _CHUNKS + chunk
                        slot = lax.rem(number, slots)
                        threads.wait(m["full"], slot, lax.rem(lax.div(number, slots), 2))
                        threads.multiply(scores, m["keys"].at[slot], m["queries"].at[chunk])
                        if before is not None:
                            threads.until_added(1)  # all but the one just issued
                            plgpu.barrier_arrive(m["empty"].at[before])
                        before = slot
                    threads.until_added(0)
                    plgpu.barrier_arrive(m["empty"].at[before])
                    return scores[...]

                scores = threads.accumulate(all_chunks, [heads], m, group, 0)
                rows = threads.rows_to_score(indices, keys_from + tile * TILE)
                place = (piece * queries + query) * (tiles * TILE) + tile * TILE
                threads.store_shares(
                    scores, rows, m["state"], out, place, heads=heads, num_rows=num_rows, scale=scale, by=by
                )
                return carry

            lax.fori_loop(0, tiles, one, ())

        pl.when(group == 0)(score)
        pl.when(group == 1)(copy)

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((pieces * indices.shape[0],), jnp.float32),
        grid=(queries * pieces,),
        grid_names=("item",),
        num_threads=2,
        thread_name="warpgroup",
        scratch_types={
            "keys": plgpu.SMEM((slots, TILE, CHUNK), jnp.bfloat16, transforms=SWIZZLED),
            "queries": plgpu.SMEM((_CHUNKS, heads, CHUNK), jnp.bfloat16, transforms=SWIZZLED),
            "state": plgpu.SMEM((heads,), jnp.float32),
            "full": threads.full_barriers(slots),
            "empty": plgpu.Barrier(num_arrivals=1, num_barriers=slots),
            "asked": plgpu.Barrier(num_arrivals=_CHUNKS),
            **threads.more_scratch(heads),
        },
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        **({} if interpret is None else {"interpret": interpret}),
    )(q, latent, indices, powers)
