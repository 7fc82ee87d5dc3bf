"""The definition of `pallas_kernels.router`: a stable sort of each token's biased scores."""

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
    biased = scores + bias.astype(scores.dtype)
    selectable = biased
    if num_groups > top_groups:
        groups = biased.reshape(scores.shape[0], num_groups, -1)
        two_best = jnp.sort(groups, axis=-1)[..., -2:].sum(-1)
        rank = jnp.argsort(jnp.argsort(-two_best, axis=-1, stable=True), axis=-1)
        selectable = jnp.where(rank[..., None] < top_groups, groups, -jnp.inf).reshape(scores.shape)
    experts = jnp.argsort(-selectable, axis=-1, stable=True)[:, :top_k].astype(jnp.int32)
    weights = jnp.take_along_axis(biased if biased_weights else scores, experts, axis=-1)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    return experts, weights * scale
