"""Which experts a token takes, with what weights, and all assignments in the order of experts."""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.dispatch import Implementation, always, choose
from pallas_kernels.manual_axes import align
from pallas_kernels.precision import at_least_float32, einsum
from pallas_kernels.router import gpu, reference, xla

__all__ = ["Choices", "expert_scores", "router", "select_experts", "sort_by_expert"]

Activation = Literal["sigmoid", "softmax"]


class Choices(NamedTuple):
    """The experts of every token, best first, their weights, and the scores of all experts."""

    experts: Int[Array, "M k"]
    weights: Float[Array, "M k"]
    scores: Float[Array, "M E"]


def router(
    x: Float[Array, "M D"],
    weight: Float[Array, "E _"],
    bias: Float[Array, " _"],
    *,
    top_k: int,
    activation: Activation = "sigmoid",
    renormalize: bool = True,
    scale: float = 1.0,
    biased_weights: bool = False,
    num_groups: int = 1,
    top_groups: int = 1,
    implementation: Implementation | None = None,
) -> Choices:
    """Scores σ(x Wᵀ), or the softmax of the products over experts; then `select_experts`.

    Scores are sums of float32 products in float32 or better. Numbers of 16 bits are multiplied as they are, which is the
    same: the product of two of them is a float32.

    Differentiable in reverse mode, once, in `x`, `weight` and `bias`, through weights and scores.

    Args:
        x: tokens, at full width.
        weight: one row for each expert.
        bias: see `select_experts`; so are the rest.
        top_k: experts of a token.
        activation: what makes scores of logits.
        renormalize: whether a token's weights add up to `scale`.
        scale: factor of the weights.
        biased_weights: whether weights include the bias.
        num_groups: groups of consecutive experts.
        top_groups: groups that a token's experts may come from.
        implementation: of `select_experts`. The product is left to XLA everywhere: it is one of its best cases.

    Raises:
        ValueError: sizes that don't fit each other, or another activation.
        UnsupportedImplementationError: the implementation named can't run.
    """
    scores = expert_scores(x, weight, activation)
    experts, weights = select_experts(
        scores,
        bias,
        top_k=top_k,
        renormalize=renormalize,
        scale=scale,
        biased_weights=biased_weights,
        num_groups=num_groups,
        top_groups=top_groups,
        implementation=implementation,
    )
    return Choices(experts, weights, scores)


def expert_scores(
    x: Float[Array, "M D"], weight: Float[Array, "E _"], activation: Activation = "sigmoid"
) -> Float[Array, "M E"]:
    """σ(x Wᵀ), or its softmax over the experts, in float32 or better (see `router`).

    Raises:
        ValueError: sizes that don't fit each other, or another activation.
    """
    if x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"expert_scores: x has shape {x.shape} and weight {weight.shape}; [M, D] and [E, D] are needed."
        )
    if activation not in ("sigmoid", "softmax"):
        raise ValueError(f"expert_scores: activation is {activation!r}; it must be 'sigmoid' or 'softmax'.")
    logits = einsum("md,ed->me", x, weight, out=at_least_float32(x, weight))
    return jax.nn.sigmoid(logits) if activation == "sigmoid" else jax.nn.softmax(logits, axis=-1)


def select_experts(
    scores: Float[Array, "M E"],
    bias: Float[Array, " _"],
    *,
    top_k: int,
    renormalize: bool = True,
    scale: float = 1.0,
    biased_weights: bool = False,
    num_groups: int = 1,
    top_groups: int = 1,
    implementation: Implementation | None = None,
) -> tuple[Int[Array, "M k"], Float[Array, "M k"]]:
    """The k experts e with the highest score_e + bias_e, best first, of two equal ones the lower; and their weights.

    w_e = score_e, without the bias unless `biased_weights`; renormalised, w_e / (Σ w + 1e-20) over the chosen ones; times
    `scale`. With more groups than may be used, only experts of the `top_groups` groups whose two best add up to the most
    are considered, which no Kimi model asks for. The experts don't depend on the implementation.

    Differentiable in reverse mode, once, through the weights.

    Args:
        scores: float32 or better.
        bias: moves the choice, and leaves the weights alone.
        top_k: experts of a token.
        renormalize: whether a token's weights add up to `scale`.
        scale: factor of the weights.
        biased_weights: whether weights include the bias.
        num_groups: groups of consecutive experts.
        top_groups: groups that a token's experts may come from.
        implementation: None takes the best that can run. "gpu" is for float32 on Hopper; there is no TPU kernel, for XLA
            sorts rows in registers there.

    Raises:
        ValueError: sizes that don't fit each other.
        UnsupportedImplementationError: the implementation named can't run.
    """
    num_experts = scores.shape[1]
    if bias.shape != (num_experts,):
        raise ValueError(f"select_experts: bias has shape {bias.shape}; scores {scores.shape} need ({num_experts},).")
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"select_experts: top_k is {top_k}; it must be 1 to {num_experts}, the number of experts.")
    if num_groups > top_groups and num_experts % num_groups:
        raise ValueError(f"select_experts: num_groups is {num_groups}; it must divide {num_experts}, the experts.")
    choice = choose(
        "router",
        implementation,
        {
            "tpu": lambda: "there is no TPU kernel; XLA sorts rows on chip there.",
            "gpu": lambda: gpu.obstacle(scores, top_k, num_groups, top_groups),
            "xla": always,
            "reference": always,
        },
    )
    settings = (top_k, renormalize, scale, biased_weights)
    if choice.name == "gpu":
        return gpu.select(*align(scores, bias), *settings)
    if choice.name == "reference":
        return reference.select(scores, bias, *settings, num_groups, top_groups)
    return xla.select(scores, bias, *settings, num_groups, top_groups)


def sort_by_expert(
    experts: Int[Array, "M k"],
    num_experts: int,
    valid: Bool[Array, " M"] | None = None,
    *,
    first: int | Int[Array, ""] = 0,
    implementation: Implementation | None = None,
) -> tuple[Int[Array, " A"], Int[Array, " E"], Int[Array, "M k"]]:
    """Numbers of assignments (M·k, row by row) by expert, how many each expert has, and each assignment's place.

    Assignments of an expert keep their order. Those whose expert isn't in first..first + num_experts − 1, or whose token
    isn't valid, come last and aren't counted.

    Args:
        experts: of each token.
        num_experts: E.
        valid: False for tokens without experts; None: all have them.
        first: the first expert of those that are sorted: a device's own; may be traced.
        implementation: None takes the best that can run: "gpu" on Hopper up to 16384 assignments, else "xla".

    Raises:
        UnsupportedImplementationError: the implementation named can't run.
    """
    if valid is None:
        valid = jnp.ones(experts.shape[0], bool)
    choice = choose(
        "sort_by_expert",
        implementation,
        {
            "tpu": lambda: "there is no TPU kernel; XLA sorts on chip there.",
            "gpu": lambda: gpu.sort_obstacle(experts, num_experts),
            "xla": always,
        },
    )
    if choice.name == "gpu":
        return gpu.sort(*align(experts, valid, jnp.asarray(first, jnp.int32)), num_experts)
    own = experts - jnp.asarray(first, experts.dtype)
    return xla.sort(jnp.where(valid[:, None], own, num_experts), num_experts)
