"""Assignments of tokens to experts in the order of experts."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


def sort_by_expert(
    experts: Int[Array, "M k"], num_experts: int
) -> tuple[Int[Array, " A"], Int[Array, " E"], Int[Array, "M k"]]:
    """Numbers of assignments (M·k, row by row) by expert, how many each expert has, and each assignment's place.

    Assignments of an expert keep their order. Those whose expert isn't in 0..num_experts−1 come last and aren't counted.
    """
    flat = experts.reshape(-1).astype(jnp.int32)
    count = flat.size
    flat = jnp.where((flat >= 0) & (flat < num_experts), flat, num_experts)
    numbers = jnp.arange(count, dtype=jnp.int32)
    if (num_experts + 1) * count < 2**31:
        # One array to sort, and no two alike.
        by_expert = jax.lax.sort(flat * count + numbers, is_stable=False)
        sorted_experts, order = by_expert // count, by_expert % count
    else:
        sorted_experts, order = jax.lax.sort((flat, numbers), num_keys=1, is_stable=True)
    del sorted_experts
    place = jnp.zeros_like(order).at[order].set(numbers, unique_indices=True, mode="promise_in_bounds")
    return order, _sizes(flat, num_experts), place.reshape(experts.shape)


def _sizes(flat: Int[Array, " A"], num_experts: int) -> Int[Array, " E"]:
    """How often each expert appears, as sums of comparisons: adding up by scattering takes turns on an address."""
    expert = jnp.arange(num_experts, dtype=jnp.int32)
    return jnp.sum((flat[:, None] == expert[None, :]).astype(jnp.int32), axis=0, dtype=jnp.int32)
