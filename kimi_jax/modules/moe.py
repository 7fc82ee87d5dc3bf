"""Mixture of experts: router, routed experts through the grouped matmul, latent width, shared experts."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from kimi_jax.config import KimiConfig, MoeConfig
from kimi_jax.modules.experts import ExpertStack, Routing
from kimi_jax.modules.linear import linear
from kimi_jax.modules.mlp import MLP, GatedActivation
from kimi_jax.modules.norm import RMSNorm
from kimi_jax.params import param
from kimi_jax.shards import ALONE, Shards
from pallas_kernels.dispatch import Implementation
from pallas_kernels.precision import at_least_float32, einsum


def route(scores: Float[Array, "M E"], correction_bias: Float[Array, " E"], config: MoeConfig) -> Routing:
    """Chooses experts by biased scores and weighs them by unbiased ones.

    Weights are s / (Σ s + 1e-20) · routed_scaling_factor over the chosen experts. Ties go to the lower expert index.
    Groups of experts are considered only when there are more of them than may be used, which no Kimi model has.

    Args:
        scores: σ of the router logits, float32.
        correction_bias: float32; moves the selection only (unless `config.biased_weights`).
        config: expert counts and scaling.
    """
    tokens, num_experts = scores.shape
    biased = scores + correction_bias.astype(scores.dtype)
    selectable = biased
    if config.num_expert_group > 1 and config.num_expert_group > config.topk_group:
        grouped = biased.reshape(tokens, config.num_expert_group, -1)
        group_scores = jax.lax.top_k(grouped, 2)[0].sum(-1)
        _, best = jax.lax.top_k(group_scores, config.topk_group)
        allowed = jnp.zeros(group_scores.shape, bool).at[jnp.arange(tokens)[:, None], best].set(True)
        selectable = jnp.where(allowed[..., None], grouped, -jnp.inf).reshape(tokens, num_experts)
    _, experts = jax.lax.top_k(selectable, config.num_experts_per_token)
    weights = jnp.take_along_axis(biased if config.biased_weights else scores, experts, axis=-1)
    if config.renormalize:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    return Routing(experts, weights * config.routed_scaling_factor, scores)


class Experts(nnx.Module):
    """Descriptions of a layer's routed experts (w1 gate, w3 up, w2 down); they're run through `run_experts`."""

    def __init__(self, config: KimiConfig):
        moe = config.moe
        width = moe.latent_size or config.hidden_size
        name = "block_sparse_moe.experts.{expert}"
        self.gate_up = param(
            (moe.num_experts, 2, moe.intermediate_size, width),
            ("experts", None, "expert_mlp", "expert_embed"),
            f"{name}.w1.weight",
            f"{name}.w3.weight",
        )
        self.down = param(
            (moe.num_experts, width, moe.intermediate_size),
            ("experts", "expert_embed", "expert_mlp"),
            f"{name}.w2.weight",
        )


class MixtureOfExperts(nnx.Module):
    """Router, latent projections and shared experts of one layer; the routed experts come as an argument."""

    def __init__(self, config: KimiConfig):
        self.config = config
        self.activation = GatedActivation.of(config)
        moe, hidden, name = config.moe, config.hidden_size, "block_sparse_moe"
        self.router = param((moe.num_experts, hidden), (None, "embed"), f"{name}.gate.weight")
        self.correction_bias = param(
            (moe.num_experts,), (None,), f"{name}.gate.e_score_correction_bias", float32=True, init="zeros"
        )
        if moe.latent_size is not None:
            self.latent_down = param(
                (moe.latent_size, hidden), (None, "embed"), f"{name}.routed_expert_down_proj.weight"
            )
            self.latent_up = param((hidden, moe.latent_size), ("embed", None), f"{name}.routed_expert_up_proj.weight")
            if moe.latent_norm:
                self.latent_norm = RMSNorm(moe.latent_size, config.rms_norm_eps, f"{name}.routed_expert_norm.weight")
        if moe.num_shared_experts:
            self.shared = MLP(config, moe.num_shared_experts * moe.intermediate_size, f"{name}.shared_experts")

    def __call__(
        self,
        x: Float[Array, "B T D"],
        experts: ExpertStack,
        valid: Bool[Array, "B T"],
        implementation: Implementation | None = None,
        shards: Shards = ALONE,
    ) -> tuple[Float[Array, "B T D"], Routing]:
        """Returns the block's output and the routing (B·T rows).

        The router reads the full-width input in float32. With a latent width the experts run on a down-projection and
        their weighted sum is normalised once before the up-projection. Padding contributes nothing.
        """
        moe = self.config.moe
        rows = x.reshape(-1, x.shape[-1])
        dtype = at_least_float32(x)
        logits = einsum("md,ed->me", rows.astype(dtype), self.router[...].astype(dtype))
        routing = route(jax.nn.sigmoid(logits), self.correction_bias[...], moe)

        inner = rows if moe.latent_size is None else linear(rows, self.latent_down[...])
        mixed = shards.experts(
            inner, routing, valid.reshape(-1), experts, moe.num_experts, self.activation, implementation
        )
        if moe.latent_size is not None:
            mixed = linear(self.latent_norm(mixed) if moe.latent_norm else mixed, self.latent_up[...])
        mixed = mixed.reshape(x.shape)
        return (mixed + shards.total(self.shared(x)) if moe.num_shared_experts else mixed), routing
