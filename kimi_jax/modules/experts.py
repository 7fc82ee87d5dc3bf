"""Routed experts: which ones a token takes, and running them."""

from typing import NamedTuple

from jaxtyping import Array, Bool, Float, Int

from kimi_jax.modules.mlp import GatedActivation
from pallas_kernels.dispatch import Implementation
from pallas_kernels.expert_layer import expert_layer
from pallas_kernels.mxfp4 import Mxfp4


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

    See `pallas_kernels.expert_layer`: each token's sum runs over its experts in one fixed order whatever else is in the
    batch.
    """
    return expert_layer(
        x,
        *routing[:2],
        valid,
        stack.gate_up,
        stack.down,
        num_experts=num_experts,
        group_offset=stack.offset,
        gate=activation,
        implementation=implementation,
    )
