"""Plain JAX: `lax.top_k`, which takes the lower of two equal experts, and one sort of all assignments."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def select(
    scores: Float[Array, "M E"],
    bias: Float[Array, " E"],
    top_k: int,
    renormalize: bool,
    scale: float,
    biased_weights: bool,
    num_groups: int = 1,
    top_groups: int = 1,
) -> tuple[Int[Array, "M k"], Float[Array, "M k"]]:
    """See `pallas_kernels.router.select_experts`."""
    tokens, num_experts = scores.shape
    biased = scores + bias.astype(scores.dtype)
    selectable = biased
    if num_groups > top_groups:
        grouped = biased.reshape(tokens, num_groups, -1)
        group_scores = jax.lax.top_k(grouped, 2)[0].sum(-1)
        _, best = jax.lax.top_k(group_scores, top_groups)
        allowed = jnp.zeros(group_scores.shape, bool).at[jnp.arange(tokens)[:, None], best].set(True)
        selectable = jnp.where(allowed[..., None], grouped, -jnp.inf).reshape(tokens, num_experts)
    _, experts = jax.lax.top_k(selectable, top_k)
    return experts, weigh(scores, bias, experts, renormalize, scale, biased_weights)


def weigh(
    scores: Float[Array, "M E"],
    bias: Float[Array, " E"],
    experts: Int[Array, "M k"],
    renormalize: bool,
    scale: float,
    biased_weights: bool,
) -> Float[Array, "M k"]:
    """The chosen experts' weights."""
    weights = jnp.take_along_axis(scores + bias.astype(scores.dtype) if biased_weights else scores, experts, axis=-1)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    return weights * scale


def sort(experts: Int[Array, "M k"], num_experts: int) -> tuple[Int[Array, " A"], Int[Array, " E"], Int[Array, "M k"]]:
    """See `pallas_kernels.router.sort_by_expert`."""
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
