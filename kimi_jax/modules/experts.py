"""Routed experts: which ones a token takes, and running them through the grouped matmul."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kimi_jax.modules.mlp import GatedActivation
from pallas_kernels.dispatch import Implementation
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.mxfp4 import Mxfp4
from pallas_kernels.precision import einsum


class Routing(NamedTuple):
    """The experts of every token and their weights, both [M, k], out of the scores [M, E] of all experts."""

    experts: Int[Array, "M k"]
    weights: Float[Array, "M k"]
    scores: Float[Array, "M E"]


class ExpertStack(NamedTuple):
    """Routed experts of one or of all layers.

    Attributes:
        gate_up: [G, 2·F, D], each expert's gate rows, then its up rows.
        down: [G, D, F].
        offset: group of the first expert of the layer that is being run.
    """

    gate_up: Float[Array, "G F D"] | Mxfp4
    down: Float[Array, "G D F"] | Mxfp4
    offset: Int[Array, ""] | int


def run_experts(
    x: Float[Array, "M D"],
    routing: Routing,
    valid: Bool[Array, " M"],
    stack: ExpertStack,
    num_experts: int,
    activation: GatedActivation,
    implementation: Implementation | None = None,
) -> Float[Array, "M D"]:
    """Σ_e w_e · E_e(x) over each token's experts, summed in float32; rows that aren't valid come back 0.

    Assignments are sorted by expert, run as two grouped products, and put back in place, so each token's sum runs over
    its experts in one fixed order whatever else is in the batch. Tokens that aren't valid come after the last group.
    """
    tokens, per_token = routing.experts.shape
    expert_of = jnp.where(valid[:, None], routing.experts, num_experts).reshape(-1)
    order = jnp.argsort(expert_of, stable=True)
    group_sizes = jnp.bincount(expert_of, length=num_experts)
    rows = x[order // per_token]
    hidden = grouped_matmul(rows, stack.gate_up, group_sizes, group_offset=stack.offset, implementation=implementation)
    width = hidden.shape[-1] // 2
    inner = activation(hidden[:, :width], hidden[:, width:])
    outputs = grouped_matmul(inner, stack.down, group_sizes, group_offset=stack.offset, implementation=implementation)
    place = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=order.dtype))
    by_token = outputs[place].reshape(tokens, per_token, -1)
    weights = jnp.where(valid[:, None], routing.weights, 0)
    return einsum("mkd,mk->md", by_token.astype(weights.dtype), weights, out=x.dtype)
