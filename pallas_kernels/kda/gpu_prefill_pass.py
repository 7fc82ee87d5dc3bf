"""Second stage on Hopper: the state goes from chunk to chunk, and every chunk's output comes out.

The state is kept as S^T, 64 value channels by 128 key channels a warpgroup, in the registers that the matrix instruction
accumulates in. With the first stage's matrices K, Q, P, A and values V a chunk is

    Y^T = V^T - S^T K^T        O^T = S^T Q^T + Y^T A^T        S'^T = S^T diag(exp G_C) + Y^T P

so that S^T and Y^T are left factors, which the instruction takes from registers, and everything else comes from shared
memory as it was copied there: nothing that depends on the state passes through memory, and warpgroups never meet.
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
    load_pairs,
    load_state,
    load_turned,
    mask_loaded,
    store_rows,
    store_state,
    store_turned,
)

_COPY_REGISTERS, _PRODUCT_REGISTERS = 40, 232
_V_STAGES = 2  # slots for values, which are read early in a step


def advance(
    chunks: Chunks,
    v: jax.Array,
    tokens: jax.Array,
    parts: jax.Array,
    initial_state: jax.Array,
    *,
    groups: int,
    stages: int,
    segments: int = 1,
    stops: jax.Array | None = None,
    kept: int = 0,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Passes over sequences, or segments of them.

    Args:
        chunks: of the first stage.
        v: [B, T, H, 128].
        tokens: as in `Plan`.
        parts: as in `Plan`, of the segments; those of a sequence are neighbours.
        initial_state: float32 [S * segments, H, K, V], or [..., V, K] if there are segments.
        groups: warpgroups that share a head's copies, 1 or 2; each has 64 of the value channels.
        stages: slots of the ring of copies.
        segments: of a sequence.
        stops: int32 [N], where among the `kept` states the one that leaves each chunk goes; negative: nowhere.
        kept: how many states to keep on the way.
        interpret: what Pallas takes to run it without a GPU.

    Returns:
        (o [B, T, H, 128], state [S, H, 128, 128], states [kept, H, 128, 128], undefined where nothing stops, or None).
    """
    heads = v.shape[2]
    halves = WIDTH // CHUNK // groups

    def kda_pass(tokens: Any, parts: Any, *refs: Any, **scratch: Any) -> None:
        after, refs = (None, refs) if stops is None else (refs[0], refs[1:])
        *stored, v, initial, o, final = refs[: len(Chunks._fields) + 4]
        operands = Chunks(*stored)
        group = lax.axis_index("warpgroup")
        head, half, part = (lax.axis_index(name) for name in ("head", "half", "part"))
        begin, count = parts[0, part], parts[1, part]
        full, empty, v_full, v_empty = (scratch[name] for name in ("full", "empty", "v_full", "v_empty"))
        slots = Chunks(*(scratch[name] for name in Chunks._fields))

        @pl.when(group == groups)
        def _() -> None:
            plgpu.set_max_registers(_COPY_REGISTERS, action="decrease")

            def copy(i: jax.Array, carry: tuple[()]) -> tuple[()]:
                slot, chunk = lax.rem(i, stages), begin + i

                @pl.when(i >= stages)
                def _() -> None:
                    plgpu.barrier_wait(empty.at[slot])

                for source, target in zip(operands, slots, strict=True):
                    plgpu.copy_gmem_to_smem(source.at[chunk, head], target.at[slot], full.at[slot])
                row, first, slot = tokens[0, chunk], tokens[1, chunk], lax.rem(i, _V_STAGES)

                @pl.when(i >= _V_STAGES)
                def _() -> None:
                    plgpu.barrier_wait(v_empty.at[slot])

                for index in range(groups):
                    columns = pl.ds((half * groups + index) * CHUNK, CHUNK)
                    source = v.at[row, pl.ds(pl.multiple_of(first, 8), CHUNK), head, columns]
                    plgpu.copy_gmem_to_smem(source, scratch["v"].at[slot, index], v_full.at[slot])
                return carry

            lax.fori_loop(0, count, copy, ())
            for ring, size in ((empty, stages), (v_empty, _V_STAGES)):
                for index in range(size):  # so that barriers are even

                    @pl.when(count + index >= size)
                    def _(ring: Any = ring, size: int = size, index: int = index) -> None:
                        plgpu.barrier_wait(ring.at[lax.rem(count + index, size)])

        @pl.when(group < groups)
        def _() -> None:
            plgpu.set_max_registers(_PRODUCT_REGISTERS, action="increase")
            start = pl.multiple_of((half * groups + group) * CHUNK, CHUNK)
            columns = pl.ds(start, CHUNK)

            def put(chunk: jax.Array, out: jax.Array) -> None:
                """Writes a chunk's O^T."""
                row, first, begins, _, own = (tokens[line, chunk] for line in range(5))
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                store_turned(scratch["turned"].at[group], out, interpret)
                plgpu.commit_smem()
                rows = pl.ds(pl.multiple_of(first, 8), CHUNK)
                source, target = scratch["turned"].at[group], o.at[row, rows, head, columns]
                whole = (begins == 0) & (own == CHUNK)

                # A whole chunk may pass the end of the row, where the copy engine doesn't write.
                pl.when(whole)(lambda: plgpu.copy_smem_to_gmem(source, target))
                pl.when(~whole)(lambda: store_rows(target, source, begins, own, interpret))

            def step(i: jax.Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
                state, before = carry
                slot, v_slot, chunk = lax.rem(i, stages), lax.rem(i, _V_STAGES), begin + i
                begins, ends = tokens[2, chunk], tokens[3, chunk]
                plgpu.barrier_wait(full.at[slot])
                k, q, p, attention, decay = (x.at[slot] for x in slots)
                values = scratch["v"].at[v_slot, group]
                left = state.astype(jnp.bfloat16)

                def put_before() -> None:
                    pl.when(i > 0)(lambda: put(chunk - 1, before))

                if interpret is not None:
                    put_before()
                    plgpu.barrier_wait(v_full.at[v_slot])
                    token = lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), 1)
                    wanted = load_turned(values, interpret).astype(jnp.float32)
                    wanted = jnp.where((begins <= token) & (token < ends), wanted, 0)
                    wanted -= _dot(left, k[...].T)
                    right = wanted.astype(jnp.bfloat16)
                    out = _dot(left, q[...].T) + _dot(right, attention[...])
                    state = state * decay[...] + _dot(right, p[...])
                    plgpu.barrier_arrive(v_empty.at[v_slot])
                else:
                    fade = load(decay, plgpu.Layout.WGMMA.reduce(0), optimized=False)
                    fade = lax.broadcast_in_dim(fade, state.shape, [1])

                    def multiply(refs: Any) -> None:
                        after, out = refs

                        def through(seen: Any) -> None:
                            plgpu.wgmma(seen, left, k.transpose((1, 0)))
                            plgpu.wgmma(out, left, q.transpose((1, 0)))
                            # While these products are on their way.
                            plgpu.barrier_wait(v_full.at[v_slot])
                            wanted = mask_loaded(load_turned(values, interpret), begins, ends)
                            plgpu.barrier_arrive(v_empty.at[v_slot])
                            right = (wanted - plgpu.wgmma_accumulator_load(seen, wait_n=1)).astype(jnp.bfloat16)
                            plgpu.wgmma(after, right, p)
                            plgpu.wgmma(out, right, attention)
                            put_before()  # while these are

                        pl.run_scoped(through, ACC((CHUNK, CHUNK), jnp.float32))

                    nothing = plgpu.layout_cast(jnp.zeros((CHUNK, CHUNK), jnp.float32), plgpu.Layout.WGMMA)
                    starts = ACC.init(state * fade), ACC.init(nothing)
                    state, out = pl.run_state(multiply)(starts)
                plgpu.barrier_arrive(empty.at[slot])
                if after is not None:
                    place = after[chunk]

                    @pl.when(place >= 0)
                    def _() -> None:
                        store_state(refs[-1].at[place, head, :, columns], state, interpret)

                return state, out.astype(o.dtype)

            if segments == 1:
                state = load_state(initial.at[part, head, :, columns], interpret)
            else:
                state = load_pairs(initial.at[part, head, columns], interpret)
            before = jnp.zeros((CHUNK, CHUNK), o.dtype)
            if interpret is None:
                before = plgpu.layout_cast(before, plgpu.Layout.WGMMA)
            state, before = lax.fori_loop(0, count, step, (state, before))
            pl.when(count > 0)(lambda: put(begin + count - 1, before))

            @pl.when(lax.rem(part, segments) == segments - 1)
            def _() -> None:
                store_state(final.at[lax.div(part, segments), head, :, columns], state, interpret)

            plgpu.wait_smem_to_gmem(0)

    scratch: dict[str, Any] = {
        "k": plgpu.SMEM((stages, CHUNK, WIDTH), jnp.bfloat16, transforms=SWIZZLED),
        "q": plgpu.SMEM((stages, CHUNK, WIDTH), jnp.bfloat16, transforms=SWIZZLED),
        "p": plgpu.SMEM((stages, CHUNK, WIDTH), jnp.bfloat16, transforms=SWIZZLED),
        "attention": plgpu.SMEM((stages, CHUNK, CHUNK), jnp.bfloat16, transforms=SWIZZLED),
        "decay": plgpu.SMEM((stages, WIDTH), jnp.float32),
        "v": plgpu.SMEM((_V_STAGES, groups, CHUNK, CHUNK), jnp.bfloat16, transforms=SWIZZLED),
        "turned": plgpu.SMEM((groups, CHUNK, CHUNK), v.dtype, transforms=SWIZZLED),
        "full": plgpu.Barrier(num_arrivals=len(Chunks._fields), num_barriers=stages),
        "empty": plgpu.Barrier(num_arrivals=groups, num_barriers=stages),
        "v_full": plgpu.Barrier(num_arrivals=groups, num_barriers=_V_STAGES),
        "v_empty": plgpu.Barrier(num_arrivals=groups, num_barriers=_V_STAGES),
    }
    sequences, *shape = initial_state.shape
    out = [
        jax.ShapeDtypeStruct(v.shape, v.dtype),
        jax.ShapeDtypeStruct((sequences // segments, *shape), jnp.float32),
    ]
    if stops is not None:
        out.append(jax.ShapeDtypeStruct((kept, *shape), jnp.float32))
    more = () if stops is None else (stops,)
    o, state, *states = plgpu.kernel(
        kda_pass,
        out_type=out,
        grid=(parts.shape[1], heads, halves),
        grid_names=("part", "head", "half"),
        num_threads=groups + 1,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        **({} if interpret is None else {"interpret": interpret}),
    )(tokens, parts, *more, *chunks, v, initial_state)
    return o, state, states[0] if states else None


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.dot(a, b, preferred_element_type=jnp.float32)
