"""Quantile balancing: expert biases set so that each expert would have been chosen by its share of a batch's tokens.

For token i let τ_i be the (k+1)-th largest of s_i + b: expert j is chosen when s_ij + b_j > τ_i, that is when its margin
r_ij = τ_i − s_ij lies below b_j. Setting b_j to the (k/E)-quantile of r_·j gives expert j the load k/E, with no step size
to tune. The quantile comes from a histogram, which adds up over devices and micro-batches.

Experimental: known from public training frameworks (Megatron-LM pull request 6637, torchtitan 4412), not from the
vendor's code. At inference the bias is a constant.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

BINS = 1000
"""Bins of the histogram, over the range that margins can take: [min b − 1, max b + 1]."""


def margin_histogram(
    scores: Float[Array, "M E"], bias: Float[Array, " E"], num_chosen: int, valid: Bool[Array, " M"]
) -> Int[Array, "E bins"]:
    """How many of each expert's margins fall into each bin.

    Args:
        scores: σ of the router logits.
        bias: the current biases.
        num_chosen: experts a token uses, less than E.
        valid: tokens that count.

    Raises:
        ValueError: every expert is chosen anyway.
    """
    num_experts = scores.shape[1]
    if not 0 < num_chosen < num_experts:
        raise ValueError(f"num_chosen={num_chosen}; it must be at least 1 and less than the {num_experts} experts.")
    bias = bias.astype(scores.dtype)
    threshold = jax.lax.top_k(scores + bias, num_chosen + 1)[0][:, -1:]
    low, width = _bins(bias)
    bin_of = jnp.clip((threshold - scores - low) / width, 0, BINS - 1).astype(jnp.int32)
    # Tokens that don't count go past the end, where they are dropped.
    place = jnp.where(valid[:, None], jnp.arange(num_experts) * BINS + bin_of, num_experts * BINS)
    counts = jnp.zeros(num_experts * BINS, jnp.int32).at[place.reshape(-1)].add(1, mode="drop")
    return counts.reshape(num_experts, BINS)


def quantile_bias(
    histogram: Int[Array, "*L E bins"], bias: Float[Array, "*L E"], num_chosen: int
) -> Float[Array, "*L E"]:
    """The balancing biases, less their mean over experts; linear inside a bin. Without any token: `bias` as it is."""
    counts = histogram.astype(bias.dtype)
    upto = jnp.cumsum(counts, axis=-1)
    total = upto[..., -1]
    wanted = total * (num_chosen / histogram.shape[-2])
    index = jnp.sum(upto < wanted[..., None], axis=-1, keepdims=True)
    inside = jnp.take_along_axis(counts, index, axis=-1)[..., 0]
    before = jnp.take_along_axis(upto, index, axis=-1)[..., 0] - inside
    low, width = _bins(bias)
    quantile = low + width * (index[..., 0] + (wanted - before) / jnp.maximum(inside, 1))
    quantile = quantile - jnp.mean(quantile, axis=-1, keepdims=True)
    return jnp.where(total > 0, quantile, bias)


def _bins(bias: Float[Array, "*L E"]) -> tuple[Float[Array, "*L 1"], Float[Array, "*L 1"]]:
    """Lower end of the histogram and width of a bin."""
    low = jnp.min(bias, axis=-1, keepdims=True) - 1
    return low, (jnp.max(bias, axis=-1, keepdims=True) + 1 - low) / BINS
