"""The Hopper kernel of `attn_res` (see `pallas_kernels.attn_res.gpu`)."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.attn_res.gpu_sums import SCRATCH, sums


def run(
    partial: Float[Array, "N F C"],
    bank: Float[Array, "R N F C"],
    num_rows: Int[Array, "1"],
    key: Float[Array, "F C"],
    weight: Float[Array, "F C"] | None,
    *,
    eps: float,
    out_eps: float,
    blocks: int,
    stages: int,
    interpret: Any = None,
) -> Float[Array, "N F C"]:
    """Mixtures of N tokens, of width F·C; `key` is the pseudo-query times the norm's weight."""
    tokens, *folds = partial.shape
    width = folds[0] * folds[1]
    layout = plgpu.Layout.WG_STRIDED(tuple(folds), vec_size=8)

    def kernel(
        num_rows: Any, key: Any, partial: Any, bank: Any, *refs: Any, slots: Any, done: Any, scratch: Any, full: Any
    ) -> None:
        weight, out = refs if len(refs) == 2 else (None, refs[0])
        me = lax.axis_index("block")
        mine = lax.div(tokens - me + (blocks - 1), blocks)
        count = num_rows[0] + 1  # rows a token
        total = mine * count

        def spread(x: Any) -> Any:
            if interpret is not None:
                return x
            return plgpu.layout_cast(x, layout)

        def copy(item: Array) -> None:
            """Fetches the block's `item`-th row."""
            token, row = me + lax.div(item, count) * blocks, lax.rem(item, count)
            slot = lax.rem(item, stages)

            @pl.when(row < count - 1)
            def _() -> None:
                plgpu.copy_gmem_to_smem(bank.at[row, token], slots.at[slot], full.at[slot])

            @pl.when(row == count - 1)
            def _() -> None:
                plgpu.copy_gmem_to_smem(partial.at[token], slots.at[slot], full.at[slot])

        for item in range(stages):

            @pl.when(item < total)
            def _(item: int = item) -> None:
                copy(jnp.int32(item))

        keys = spread(key[...])

        def mix_token(number: Array, carry: tuple[()]) -> tuple[()]:
            def add(row: Array, carry: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
                mixture, highest, mass = carry
                item = number * count + row
                slot = lax.rem(item, stages)
                plgpu.barrier_wait(full.at[slot])
                values = spread(slots[slot])
                # Sums over threads synchronise them, so the slot is free after them.
                if interpret is None:
                    square, score = sums(values, keys, scratch, lax.rem(item, 2), layout)
                    values = values.astype(jnp.float32)
                else:
                    values = values.astype(jnp.float32)
                    square, score = jnp.sum(values * values), jnp.sum(values * keys)
                score = score * lax.rsqrt(square / width + eps)

                @pl.when(item + stages < total)
                def _() -> None:
                    copy(item + stages)

                above = jnp.maximum(highest, score)
                kept, new = jnp.exp(highest - above), jnp.exp(score - above)
                return mixture * kept + values * new, above, mass * kept + new

            start = spread(jnp.zeros(folds, jnp.float32)), jnp.float32(-jnp.inf), jnp.float32(0)
            mixture, _, mass = lax.fori_loop(0, count, add, start)
            result = (mixture * (1 / mass)).astype(out.dtype)
            if weight is not None:
                wide = result.astype(jnp.float32)
                scale = lax.rsqrt(jnp.sum(wide * wide) / width + out_eps)
                result = spread(weight[...]) * (wide * scale).astype(out.dtype)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            done[...] = result
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(done, out.at[me + number * blocks])
            return carry

        lax.fori_loop(0, mine, mix_token, ())
        plgpu.wait_smem_to_gmem(0)

    extra: dict[str, Any] = {} if interpret is None else {"interpret": interpret}
    operands = (num_rows, key, partial, bank) if weight is None else (num_rows, key, partial, bank, weight)
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(partial.shape, partial.dtype),
        grid=(blocks,),
        grid_names=("block",),
        scratch_types={
            "slots": plgpu.SMEM((stages, *folds), partial.dtype),
            "done": plgpu.SMEM(tuple(folds), partial.dtype),
            "scratch": plgpu.SMEM(SCRATCH, jnp.float32),
            "full": plgpu.Barrier(num_barriers=stages),
        },
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        **extra,
    )(*operands)
