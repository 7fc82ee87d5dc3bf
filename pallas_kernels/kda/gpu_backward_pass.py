"""Passes over a sequence's chunks for the gradient on Hopper: forward again for the states, and backward for theirs.

With the matrices K, Q, P, N = (A T)^T of `gpu_prefill_chunk`, R the gradient of the state that leaves a chunk and S the
one that enters it,

    Y^T = V^T - S^T K^T               S'^T = S^T diag(exp G_C) + Y^T P
    dY^T = R^T P^T + dO^T N^T         dS^T = R^T diag(exp G_C) + dO^T Q - dY^T K

so that the way back has the shape of the way there: the state and its gradient stay in registers, as left factors, and
everything else comes from shared memory as it was copied there.
"""

from typing import Any, NamedTuple

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
    store_state,
    store_turned,
)

_COPY_REGISTERS, _PRODUCT_REGISTERS = 40, 232


class Passed(NamedTuple):
    """What a pass leaves.

    Attributes:
        states: [N, H, V, K], S^T that enters each chunk or R^T of the one that leaves it.
        values: [N, H, 64, V], Y or dY.
        last: float32 [S, H, K, V], what the pass ends with.
    """

    states: Any
    values: Any
    last: Any


def pass_over(
    chunks: Chunks,
    v: jax.Array,
    tokens: jax.Array,
    parts: jax.Array,
    start: jax.Array,
    *,
    back: bool,
    groups: int,
    stages: int,
    interpret: Any = None,
) -> Passed:
    """Passes over sequences.

    Args:
        chunks: of the first stage.
        v: [B, T, H, 128], values, or on the way back the gradient of o.
        tokens: as in `gpu_prefill.Plan`.
        parts: as in `gpu_prefill.Plan`.
        start: float32 [S, H, 128, 128], the state before, or on the way back the gradient of the state after.
        back: from the last chunk to the first one.
        groups: warpgroups that share a head's copies, 1 or 2; each has 64 of the value channels.
        stages: slots of the ring of copies.
        interpret: what Pallas takes to run it without a GPU.
    """
    number, heads = chunks.k.shape[:2]
    halves = WIDTH // CHUNK // groups
    names = ("k", "q", "p", "attention", "decay") if back else ("k", "p", "decay")
    operands = [getattr(chunks, name) for name in names]

    def kda_pass(tokens: Any, parts: Any, *refs: Any, **scratch: Any) -> None:
        *sources, v, first_state, states, values, last = refs
        group = lax.axis_index("warpgroup")
        head, half, part = (lax.axis_index(name) for name in ("head", "half", "part"))
        begin, count = parts[0, part], parts[1, part]
        full, empty = scratch["full"], scratch["empty"]

        def chunk_of(i: Any) -> Any:
            return begin + count - 1 - i if back else begin + i

        @pl.when(group == groups)
        def _() -> None:
            plgpu.set_max_registers(_COPY_REGISTERS, action="decrease")

            def copy(i: jax.Array, carry: tuple[()]) -> tuple[()]:
                slot, chunk = lax.rem(i, stages), chunk_of(i)

                @pl.when(i >= stages)
                def _() -> None:
                    plgpu.barrier_wait(empty.at[slot])

                for name, source in zip(names, sources, strict=True):
                    plgpu.copy_gmem_to_smem(source.at[chunk, head], scratch[name].at[slot], full.at[slot])
                row, first = tokens[0, chunk], tokens[1, chunk]
                for index in range(groups):
                    columns = pl.ds((half * groups + index) * CHUNK, CHUNK)
                    source = v.at[row, pl.ds(pl.multiple_of(first, 8), CHUNK), head, columns]
                    plgpu.copy_gmem_to_smem(source, scratch["v"].at[slot, index], full.at[slot])
                return carry

            lax.fori_loop(0, count, copy, ())
            for index in range(stages):  # so that barriers are even

                @pl.when(count + index >= stages)
                def _(index: int = index) -> None:
                    plgpu.barrier_wait(empty.at[lax.rem(count + index, stages)])

        @pl.when(group < groups)
        def _() -> None:
            plgpu.set_max_registers(_PRODUCT_REGISTERS, action="increase")
            start = pl.multiple_of((half * groups + group) * CHUNK, CHUNK)
            columns = pl.ds(start, CHUNK)
            state_tile, turned = scratch["state_tile"].at[group], scratch["turned"].at[group]

            def put_state(chunk: jax.Array, left: jax.Array) -> None:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                state_tile[...] = left
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(state_tile, states.at[chunk, head, columns])

            def put_values(chunk: jax.Array, right: jax.Array) -> None:
                store_turned(turned, right, interpret)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(turned, values.at[chunk, head, :, columns])

            def step(i: jax.Array, state: Any) -> Any:
                slot, chunk = lax.rem(i, stages), chunk_of(i)
                begins, ends = tokens[2, chunk], tokens[3, chunk]
                plgpu.barrier_wait(full.at[slot])
                tiles = {name: scratch[name].at[slot] for name in names}
                given_tile = scratch["v"].at[slot, group]
                left = state.astype(jnp.bfloat16)
                put_state(chunk, left)

                if interpret is not None:
                    token = lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), 1)
                    given = load_turned(given_tile, interpret)
                    given = jnp.where((begins <= token) & (token < ends), given, 0).astype(jnp.bfloat16)
                    state = state * tiles["decay"][...]
                    if back:
                        right = _dot(left, tiles["p"][...].T) + _dot(given, tiles["attention"][...].T)
                        right = right.astype(jnp.bfloat16)
                        state += _dot(given, tiles["q"][...]) - _dot(right, tiles["k"][...])
                    else:
                        right = (given.astype(jnp.float32) - _dot(left, tiles["k"][...].T)).astype(jnp.bfloat16)
                        state += _dot(right, tiles["p"][...])
                    put_values(chunk, right)
                else:
                    token = plgpu.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), 1, layout=plgpu.Layout.WGMMA)
                    fade = load(tiles["decay"], plgpu.Layout.WGMMA.reduce(0), optimized=False)
                    fade = lax.broadcast_in_dim(fade, state.shape, [1])
                    given = load_turned(given_tile, interpret)
                    given = jnp.where((begins <= token) & (token < ends), given.astype(jnp.float32), 0)
                    if back:
                        given = given.astype(jnp.bfloat16)

                    def multiply(after: Any) -> None:
                        def through(seen: Any) -> None:
                            if back:
                                plgpu.wgmma(seen, left, tiles["p"].transpose((1, 0)))
                                plgpu.wgmma(seen, given, tiles["attention"].transpose((1, 0)))
                                plgpu.wgmma(after, given, tiles["q"])
                                right = plgpu.wgmma_accumulator_load(seen, wait_n=1)
                                plgpu.wgmma(after, (-right).astype(jnp.bfloat16), tiles["k"])
                                put_values(chunk, right.astype(jnp.bfloat16))
                            else:
                                plgpu.wgmma(seen, left, tiles["k"].transpose((1, 0)))
                                right = (given - plgpu.wgmma_accumulator_load(seen)).astype(jnp.bfloat16)
                                plgpu.wgmma(after, right, tiles["p"])
                                put_values(chunk, right)

                        pl.run_scoped(through, ACC((CHUNK, CHUNK), jnp.float32))

                    state = pl.run_state(multiply)(ACC.init(state * fade))
                plgpu.barrier_arrive(empty.at[slot])
                return state

            state = lax.fori_loop(0, count, step, load_state(first_state.at[part, head, :, columns], interpret))
            store_state(last.at[part, head, :, columns], state, interpret)
            plgpu.wait_smem_to_gmem(0)

    def ring(columns: int, *leading: int) -> Any:
        return plgpu.SMEM((stages, *leading, CHUNK, columns), jnp.bfloat16, transforms=SWIZZLED)

    scratch: dict[str, Any] = {name: ring(WIDTH) for name in names if name in ("k", "q", "p")}
    if back:
        scratch["attention"] = ring(CHUNK)
    scratch |= {
        "decay": plgpu.SMEM((stages, WIDTH), jnp.float32),
        "v": ring(CHUNK, groups),
        "state_tile": plgpu.SMEM((groups, CHUNK, WIDTH), jnp.bfloat16, transforms=SWIZZLED),
        "turned": plgpu.SMEM((groups, CHUNK, CHUNK), jnp.bfloat16, transforms=SWIZZLED),
        "full": plgpu.Barrier(num_arrivals=len(names) + groups, num_barriers=stages),
        "empty": plgpu.Barrier(num_arrivals=groups, num_barriers=stages),
    }
    out = Passed(
        jax.ShapeDtypeStruct((number, heads, WIDTH, WIDTH), jnp.bfloat16),
        jax.ShapeDtypeStruct((number, heads, CHUNK, WIDTH), jnp.bfloat16),
        jax.ShapeDtypeStruct(start.shape, jnp.float32),
    )
    return Passed(
        *plgpu.kernel(
            kda_pass,
            out_type=list(out),
            grid=(parts.shape[1], heads, halves),
            grid_names=("part", "head", "half"),
            num_threads=groups + 1,
            thread_name="warpgroup",
            scratch_types=scratch,
            compiler_params=plgpu.CompilerParams(
                lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
            ),
            **({} if interpret is None else {"interpret": interpret}),
        )(tokens, parts, *operands, v, start)
    )


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    # XLA's CPU has no product of some shapes of bfloat16.
    return jnp.dot(a.astype(jnp.float32), b.astype(jnp.float32))
