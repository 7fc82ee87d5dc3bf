"""The Hopper kernels of `pallas_kernels.router.gpu`; what warps do is in `gpu_words`."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.router import gpu_words

_WARPS = 4  # of a warpgroup
_REF, _SCALAR = plgpu.RefType(), plgpu.Layout.WG_SPLAT(())
_LANES = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)


@partial(jax.jit, static_argnums=(2, 3, 4, 5))
def choose(
    scores: Float[Array, "M E"],
    bias: Float[Array, " E"],
    top_k: int,
    renormalize: bool,
    scale: float,
    biased_weights: bool,
) -> tuple[Int[Array, "M k"], Float[Array, "M k"]]:
    """Four tokens to a block of threads."""
    tokens, num_experts = scores.shape

    def emit(context: Any, scores: Any, bias: Any, experts: Any, weights: Any, block: Any) -> None:
        from pallas_kernels.lightning_indexer.gpu_warp import Warp, place_of

        del context
        warp = Warp()
        token = warp.add(warp.mul(block.registers.item(), _WARPS), warp.of_block)

        def act() -> None:
            gpu_words.select(
                warp,
                token,
                place_of(scores),
                place_of(bias),
                place_of(experts),
                place_of(weights),
                num_experts=num_experts,
                top_k=top_k,
                renormalize=renormalize,
                scale=scale,
                biased_weights=biased_weights,
            )

        warp.when(warp.compare("lt", token, tokens), act)

    def router_choose(scores: Any, bias: Any, experts: Any, weights: Any) -> None:
        call = plgpu.inline_mgpu(arg_types=(_REF, _REF, _REF, _REF, _SCALAR), return_type=None)(emit)
        call(scores, bias, experts, weights, lax.axis_index("block"))

    return plgpu.kernel(
        router_choose,
        out_type=(
            jax.ShapeDtypeStruct((tokens, top_k), jnp.int32),
            jax.ShapeDtypeStruct((tokens, top_k), jnp.float32),
        ),
        grid=(-(-tokens // _WARPS),),
        grid_names=("block",),
        compiler_params=_LANES,
    )(scores, bias)


def warps_for(count: int) -> int:
    """As many as have at least two steps of 32 assignments each: steps follow each other, and all warps meet thrice."""
    warps = _WARPS
    while warps < 32 and count > 64 * warps:
        warps *= 2
    return warps


@partial(jax.jit, static_argnums=3)
def sort(
    experts: Int[Array, " A"], valid: Int[Array, " M"], first: Int[Array, "1"], num_experts: int
) -> tuple[Int[Array, " A"], Int[Array, " E"], Int[Array, " A"]]:
    """One block of threads."""
    count, per_token = experts.shape[0], experts.shape[0] // valid.shape[0]
    warps = warps_for(count)

    def emit(context: Any, experts: Any, valid: Any, first: Any, order: Any, sizes: Any, place: Any, room: Any) -> None:
        from pallas_kernels.lightning_indexer.gpu_warp import Warp, place_of

        del context
        places = map(place_of, (experts, valid, first, order, sizes, place, room))
        gpu_words.sort(Warp(), *places, count=count, per_token=per_token, num_experts=num_experts, warps=warps)

    def router_sort(experts: Any, valid: Any, first: Any, order: Any, sizes: Any, place: Any, *, room: Any) -> None:
        plgpu.inline_mgpu(arg_types=(_REF,) * 7, return_type=None)(emit)(
            experts, valid, first, order, sizes, place, room
        )

    assignments = jax.ShapeDtypeStruct((count,), jnp.int32)
    return plgpu.kernel(
        router_sort,
        out_type=(assignments, jax.ShapeDtypeStruct((num_experts,), jnp.int32), assignments),
        grid=(1,),
        grid_names=("block",),
        num_threads=warps // _WARPS,
        thread_name="warpgroup",
        scratch_types={"room": plgpu.SMEM((gpu_words.room_for(num_experts, warps),), jnp.int32)},
        compiler_params=_LANES,
    )(experts, valid, first)
