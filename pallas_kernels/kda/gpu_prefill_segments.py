"""Segments of a sequence side by side on Hopper: what each does to a state, and the state that enters each.

Over a segment the state goes from S to M S + B. B is where it ends from zeros, and the columns of M are where it ends from
those of the identity when all values are zero: both are passes over the first stage's matrices, without outputs. M is
handed over in two bfloat16 halves, which hold 16 bits of it, so that combining segments costs the states no digits that
passing over chunks keeps.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.kda.gpu_prefill_chunk import Chunks
from pallas_kernels.kda.gpu_prefill_warp import (
    ACC,
    CHUNK,
    SWIZZLED,
    WIDTH,
    load,
    load_state,
    load_turned,
    mask_loaded,
    meet,
    store_pairs,
)

_COPY_REGISTERS, _PRODUCT_REGISTERS = 40, 232
_COPYING = 2  # the warpgroup behind the one that has 64 columns of B and the one that has those of M
_WIDE = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))  # of float32


def summarise(
    chunks: Chunks,
    v: jax.Array,
    tokens: jax.Array,
    parts: jax.Array,
    segments: int,
    *,
    stages: int = 4,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """What the segments of every sequence do to a state, but for the last ones, after which nothing has to be combined.

    Args:
        chunks: of the first stage.
        v: [B, T, H, 128].
        tokens: as in `gpu_prefill.Plan`.
        parts: as there, of all segments: those of a sequence are neighbours.
        segments: of a sequence, at least 2.
        stages: slots of the ring of copies.
        interpret: what Pallas takes to run it without a GPU.

    Returns:
        (B^T, float32 [n, H, V, K], M^T in halves, bfloat16 [2, n, H, K, K]) of n = sequences * (segments - 1).
    """
    heads = v.shape[2]
    number = parts.shape[1] // segments * (segments - 1)
    names = ("k", "p", "decay")
    stored = [getattr(chunks, name) for name in names]

    def kda_summarise(tokens: Any, parts: Any, *refs: Any, **scratch: Any) -> None:
        *sources, v, ends, transitions = refs
        group = lax.axis_index("warpgroup")
        head, half, index = (lax.axis_index(name) for name in ("head", "half", "part"))
        part = index + lax.div(index, segments - 1)  # skips every sequence's last one
        begin, count = parts[0, part], parts[1, part]
        full, empty = scratch["full"], scratch["empty"]
        start = pl.multiple_of(half * CHUNK, CHUNK)
        columns = pl.ds(start, CHUNK)

        @pl.when(group == _COPYING)
        def _() -> None:
            plgpu.set_max_registers(_COPY_REGISTERS, action="decrease")

            def copy(i: jax.Array, carry: tuple[()]) -> tuple[()]:
                slot, chunk = lax.rem(i, stages), begin + i

                @pl.when(i >= stages)
                def _() -> None:
                    plgpu.barrier_wait(empty.at[slot])

                for name, source in zip(names, sources, strict=True):
                    plgpu.copy_gmem_to_smem(source.at[chunk, head], scratch[name].at[slot], full.at[slot])
                row, first = tokens[0, chunk], tokens[1, chunk]
                source = v.at[row, pl.ds(pl.multiple_of(first, 8), CHUNK), head, columns]
                plgpu.copy_gmem_to_smem(source, scratch["v"].at[slot], full.at[slot])
                return carry

            lax.fori_loop(0, count, copy, ())
            for index in range(stages):  # so that barriers are even

                @pl.when(count + index >= stages)
                def _(index: int = index) -> None:
                    plgpu.barrier_wait(empty.at[lax.rem(count + index, stages)])

        @pl.when(group < _COPYING)
        def _() -> None:
            plgpu.set_max_registers(_PRODUCT_REGISTERS, action="increase")
            with_values = group == 0

            def iota(columns: int, axis: int) -> jax.Array:
                if interpret is not None:
                    return lax.broadcasted_iota(jnp.int32, (CHUNK, columns), axis)
                return plgpu.broadcasted_iota(jnp.int32, (CHUNK, columns), axis, layout=plgpu.Layout.WGMMA)

            def step(i: jax.Array, state: Any) -> Any:
                slot, chunk = lax.rem(i, stages), begin + i
                begins, stop = tokens[2, chunk], tokens[3, chunk]
                stop = jnp.where(with_values, stop, begins)
                plgpu.barrier_wait(full.at[slot])
                k, p, decay = (scratch[name].at[slot] for name in names)
                values = scratch["v"].at[slot]
                left = state.astype(jnp.bfloat16)

                if interpret is not None:
                    token, given = iota(CHUNK, 1), load_turned(values, interpret).astype(jnp.float32)
                    given = jnp.where((begins <= token) & (token < stop), given, 0)
                    right = (given - _dot(left, k[...].T)).astype(jnp.bfloat16)
                    state = state * decay[...] + _dot(right, p[...])
                else:
                    fade = load(decay, plgpu.Layout.WGMMA.reduce(0), optimized=False)
                    fade = lax.broadcast_in_dim(fade, state.shape, [1])

                    def multiply(after: Any) -> None:
                        def through(seen: Any) -> None:
                            plgpu.wgmma(seen, left, k.transpose((1, 0)))
                            # While the product is on its way.
                            given = mask_loaded(load_turned(values, interpret), begins, stop)
                            right = (given - plgpu.wgmma_accumulator_load(seen)).astype(jnp.bfloat16)
                            plgpu.wgmma(after, right, p)

                        pl.run_scoped(through, ACC((CHUNK, CHUNK), jnp.float32))

                    state = pl.run_state(multiply)(ACC.init(state * fade))
                plgpu.barrier_arrive(empty.at[slot])
                return state

            diagonal = jnp.where(with_values, WIDTH, start)  # zeros, or columns of the identity
            state = jnp.where(iota(WIDTH, 0) + diagonal == iota(WIDTH, 1), 1.0, 0.0).astype(jnp.float32)
            state = lax.fori_loop(0, count, step, state)

            @pl.when(with_values)
            def _() -> None:
                store_pairs(ends.at[index, head, columns], state, interpret)

            @pl.when(~with_values)
            def _() -> None:
                high = state.astype(jnp.bfloat16)
                low = (state - high.astype(jnp.float32)).astype(jnp.bfloat16)
                store_pairs(transitions.at[0, index, head, columns], high, interpret)
                store_pairs(transitions.at[1, index, head, columns], low, interpret)

    def ring(columns: int) -> Any:
        return plgpu.SMEM((stages, CHUNK, columns), jnp.bfloat16, transforms=SWIZZLED)

    ends, transitions = plgpu.kernel(
        kda_summarise,
        out_type=[
            jax.ShapeDtypeStruct((number, heads, WIDTH, WIDTH), jnp.float32),
            jax.ShapeDtypeStruct((2, number, heads, WIDTH, WIDTH), jnp.bfloat16),
        ],
        grid=(number, heads, WIDTH // CHUNK),
        grid_names=("part", "head", "half"),
        num_threads=_COPYING + 1,
        thread_name="warpgroup",
        scratch_types={
            "k": ring(WIDTH),
            "p": ring(WIDTH),
            "decay": plgpu.SMEM((stages, WIDTH), jnp.float32),
            "v": ring(CHUNK),
            "full": plgpu.Barrier(num_arrivals=len(names) + 1, num_barriers=stages),
            "empty": plgpu.Barrier(num_arrivals=_COPYING, num_barriers=stages),
        },
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        **({} if interpret is None else {"interpret": interpret}),
    )(tokens, parts, *stored, v)
    return ends, transitions


def combine(
    first: jax.Array, ends: jax.Array, transitions: jax.Array, segments: int, interpret: Any = None
) -> jax.Array:
    """S^T of the states that enter all segments, one after the other: S' = M S + B with 16 bits of every factor.

    Args:
        first: float32 [S, H, 128, 128], the states that enter the sequences.
        ends: B^T of `summarise`.
        transitions: M^T of `summarise`.
        segments: of a sequence.
        interpret: what Pallas takes to run it without a GPU.

    Returns:
        float32 [S * segments, H, V, K].
    """
    sequences, heads = first.shape[:2]

    def kda_combine(first: Any, ends: Any, transitions: Any, starts: Any, m: Any, b: Any, full: Any) -> None:
        sequence, head, half = (lax.axis_index(name) for name in ("sequence", "head", "half"))
        columns = pl.ds(pl.multiple_of(half * CHUNK, CHUNK), CHUNK)

        def copy(segment: Any) -> None:
            slot, part = lax.rem(segment, 2), sequence * (segments - 1) + segment
            for which in range(2):
                plgpu.copy_gmem_to_smem(transitions.at[which, part, head], m.at[slot, which], full.at[slot])
            plgpu.copy_gmem_to_smem(ends.at[part, head, columns], b.at[slot], full.at[slot])

        def put(segment: Any, state: Any) -> None:
            store_pairs(starts.at[sequence * segments + segment, head, columns], state, interpret)

        def step(segment: Any, state: Any) -> Any:
            slot = lax.rem(segment, 2)
            pl.when(segment < segments - 2)(lambda: copy(segment + 1))
            high = state.astype(jnp.bfloat16)
            low = (state - high.astype(jnp.float32)).astype(jnp.bfloat16)
            plgpu.barrier_wait(full.at[slot])
            if interpret is not None:
                state = b[slot]
                for left, which in ((high, 0), (low, 0), (high, 1)):
                    state = state + _dot(left, m[slot, which])
            else:

                def multiply(state: Any) -> None:
                    for left, which in ((high, 0), (low, 0), (high, 1)):
                        plgpu.wgmma(state, left, m.at[slot, which])

                state = pl.run_state(multiply)(ACC.init(load(b.at[slot], plgpu.Layout.WGMMA)))
            meet(interpret)  # before the next copy into this slot
            put(segment + 1, state)
            return state

        copy(jnp.int32(0))
        state = load_state(first.at[sequence, head, :, columns], interpret)
        put(0, state)
        lax.fori_loop(0, segments - 1, step, state)

    starts = plgpu.kernel(
        kda_combine,
        out_type=jax.ShapeDtypeStruct((sequences * segments, heads, WIDTH, WIDTH), jnp.float32),
        grid=(sequences, heads, WIDTH // CHUNK),
        grid_names=("sequence", "head", "half"),
        scratch_types=[
            plgpu.SMEM((2, 2, WIDTH, WIDTH), jnp.bfloat16, transforms=SWIZZLED),
            plgpu.SMEM((2, CHUNK, WIDTH), jnp.float32, transforms=_WIDE),
            plgpu.Barrier(num_arrivals=3, num_barriers=2),
        ],
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        **({} if interpret is None else {"interpret": interpret}),
    )(first, ends, transitions)
    return starts


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    # XLA's CPU has no product of some shapes of bfloat16.
    return jnp.dot(a.astype(jnp.float32), b.astype(jnp.float32))
