"""Mixture of experts: router, routed experts through the grouped matmul, latent width, shared experts."""

import jax
from flax import nnx
from jaxtyping import Array, Bool, Float

from kimi_jax.config import KimiConfig, MoeConfig
from kimi_jax.modules.experts import ExpertStack, Routing
from kimi_jax.modules.linear import linear, side_by_side
from kimi_jax.modules.mlp import MLP, GatedActivation
from kimi_jax.modules.norm import RMSNorm
from kimi_jax.params import param
from kimi_jax.shards import ALONE, Shards
from pallas_kernels.dispatch import Implementation
from pallas_kernels.precision import at_least_float32
from pallas_kernels.router import expert_scores, select_experts


def route(
    scores: Float[Array, "M E"],
    correction_bias: Float[Array, " E"],
    config: MoeConfig,
    implementation: Implementation | None = None,
) -> Routing:
    """Chooses experts by biased scores and weighs them by unbiased ones (see `pallas_kernels.router.select_experts`).

    Args:
        scores: σ of the router logits, float32.
        correction_bias: float32; moves the selection only (unless `config.biased_weights`).
        config: expert counts and scaling.
        implementation: of the operation; None picks.
    """
    experts, weights = select_experts(
        scores,
        correction_bias,
        top_k=config.num_experts_per_token,
        renormalize=config.renormalize,
        scale=config.routed_scaling_factor,
        biased_weights=config.biased_weights,
        num_groups=config.num_expert_group,
        top_groups=config.topk_group,
        # No kernel of TPUs' own chooses experts.
        implementation=None if implementation == "tpu" else implementation,
    )
    return Routing(experts, weights, scores)


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
        scores, inner, gate_up = self._project(rows)
        routing = route(scores, self.correction_bias[...], moe, implementation)
        beside = None if gate_up is None else self.shared.after(gate_up)
        mixed, beside = shards.experts(
            inner, routing, valid.reshape(-1), experts, moe.num_experts, self.activation, implementation, beside
        )
        if moe.latent_size is not None:
            mixed = linear(self.latent_norm(mixed) if moe.latent_norm else mixed, self.latent_up[...])
        return (mixed if beside is None else mixed + beside).reshape(x.shape), routing

    def _project(
        self, rows: Float[Array, "M D"]
    ) -> tuple[Float[Array, "M E"], Float[Array, "M W"], Float[Array, "M G"] | None]:
        """All that is multiplied with the input itself: scores, the experts' input, gate and up of shared experts."""
        moe, router = self.config.moe, self.router[...]
        latent, shared = moe.latent_size is not None, bool(moe.num_shared_experts)
        if router.dtype != rows.dtype:
            # Rounding either would cost the router its float32 products.
            scores = expert_scores(rows, router)
            inner = linear(rows, self.latent_down[...]) if latent else rows
            return scores, inner, linear(rows, self.shared.both()) if shared else None
        # Gate and up first: XLA slices out of a stack and flattens only the first array that it multiplies with.
        weights = [*([self.shared.both()] if shared else []), *([self.latent_down[...]] if latent else []), router]
        outs = [*[rows.dtype] * (len(weights) - 1), at_least_float32(rows)]
        *others, logits = side_by_side(rows, weights, outs)
        return jax.nn.sigmoid(logits), others[-1] if latent else rows, others[0] if shared else None
