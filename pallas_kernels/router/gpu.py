"""Pallas Mosaic GPU for Hopper: a warp chooses a token's experts; one block of threads sorts all assignments by expert.

XLA takes a sort of every row for the choice, and for the order a sort, a scatter and sums of comparisons. With a few
tokens each of those is a launch that takes longer than its work.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.manual_axes import axes_left_to_xla
from pallas_kernels.router import xla
from pallas_kernels.target import platform

MOST_EXPERTS = 1022
"""Buckets of the sort are numbered by 32 warps' worth of lanes, and two are for what has no expert."""

MOST_CHOSEN = 32
"""A lane keeps each of a token's experts."""

MOST_SORTED = 1 << 14
"""Assignments up to which one block of threads sorts; far beyond that XLA's sort on all multiprocessors is faster."""


def obstacle(scores: Float[Array, "M E"], top_k: int, num_groups: int, top_groups: int) -> str | None:
    """Why the kernel that chooses can't run for this call, or None."""
    return _no_hopper() or unfit(scores, top_k, num_groups, top_groups)


def unfit(scores: Float[Array, "M E"], top_k: int, num_groups: int, top_groups: int) -> str | None:
    """Why no Hopper GPU could run this call, or None."""
    if scores.dtype != jnp.float32:
        return f"scores are {scores.dtype}; it takes float32."
    if scores.shape[1] > MOST_EXPERTS or top_k > MOST_CHOSEN:
        return f"it takes {MOST_CHOSEN} of {MOST_EXPERTS} experts at most, and these are {top_k} of {scores.shape[1]}."
    if num_groups > top_groups:
        return f"experts come from {top_groups} of {num_groups} groups; it doesn't choose groups."
    return "there are no tokens." if scores.shape[0] == 0 else None


def sort_obstacle(experts: Int[Array, "M k"], num_experts: int) -> str | None:
    """Why the kernel that sorts can't run for this call, or None."""
    return _no_hopper() or sort_unfit(experts, num_experts)


def sort_unfit(experts: Int[Array, "M k"], num_experts: int) -> str | None:
    """Why no Hopper GPU could sort these, or None."""
    if num_experts > MOST_EXPERTS:
        return f"there are {num_experts} experts; it takes {MOST_EXPERTS} at most."
    if not 0 < experts.size <= MOST_SORTED:
        return f"there are {experts.size} assignments; it takes 1 to {MOST_SORTED}."
    return None


def _no_hopper() -> str | None:
    if platform() != "gpu":
        return f"it runs on NVIDIA Hopper GPUs, and the platform is {platform()!r}."
    capability = getattr(jax.devices()[0], "compute_capability", "unknown")
    if capability != "9.0":
        return f"it is compiled for compute capability 9.0 (Hopper), and this device has {capability}."
    return axes_left_to_xla()


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4, 5))
def select(
    scores: Float[Array, "M E"],
    bias: Float[Array, " E"],
    top_k: int,
    renormalize: bool,
    scale: float,
    biased_weights: bool,
) -> tuple[Int[Array, "M k"], Float[Array, "M k"]]:
    """See `pallas_kernels.router.select_experts`. The gradient of the weights is that of `xla`."""
    from pallas_kernels.router.gpu_kernel import choose

    return choose(scores, bias.astype(jnp.float32), top_k, renormalize, scale, biased_weights)


def _forward(scores: Array, bias: Array, *settings: Any) -> tuple[tuple[Array, Array], tuple[Array, Array, Array]]:
    found: Any = select(scores, bias, *settings)
    return found, (scores, bias, found[0])


def _backward(
    top_k: int, renormalize: bool, scale: float, biased: bool, residuals: Any, cotangents: Any
) -> tuple[Array, Array]:
    del top_k
    scores, bias, experts = residuals
    _, pull = jax.vjp(lambda scores, bias: xla.weigh(scores, bias, experts, renormalize, scale, biased), scores, bias)
    return pull(cotangents[1])


select.defvjp(_forward, _backward)


def sort(
    experts: Int[Array, "M k"], valid: Bool[Array, " M"], first: Int[Array, ""], num_experts: int
) -> tuple[Int[Array, " A"], Int[Array, " E"], Int[Array, "M k"]]:
    """See `pallas_kernels.router.sort_by_expert`."""
    from pallas_kernels.router.gpu_kernel import sort as run

    flat, first = experts.astype(jnp.int32).reshape(-1), first.astype(jnp.int32).reshape(1)
    order, sizes, place = run(flat, valid.astype(jnp.int32), first, num_experts)
    return order, sizes, place.reshape(experts.shape)
