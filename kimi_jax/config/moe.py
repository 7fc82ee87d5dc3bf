"""Mixture-of-experts layers."""

from dataclasses import dataclass
from typing import Any

from kimi_jax.config.fields import Section

ROUTER_ACTIVATION = "sigmoid"
SELECTION = "noaux_tc"


@dataclass(frozen=True, kw_only=True)
class MoeConfig:
    """Mixture-of-experts layers; every other layer has a dense MLP.

    Attributes:
        layers: zero-based numbers of the MoE layers, ascending.
        num_experts: routed experts E.
        num_experts_per_token: experts chosen for each token.
        num_shared_experts: shared experts, fused in one MLP of num_shared_experts * intermediate_size.
        intermediate_size: inner width F of one expert.
        latent_size: width at which routed experts work; None for hidden_size.
        latent_norm: whether an RMSNorm follows the weighted sum of latent expert outputs.
        renormalize: whether the chosen weights are divided by their sum.
        router_activation: how router logits become scores.
        routed_scaling_factor: factor on the chosen weights.
        num_expert_group: groups of experts; 1 switches group selection off.
        topk_group: groups that may be chosen from.
        biased_weights: whether weights are taken from the biased scores, as the first 48B remote code did.
    """

    layers: tuple[int, ...]
    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int
    intermediate_size: int
    latent_size: int | None
    latent_norm: bool
    renormalize: bool
    router_activation: str
    routed_scaling_factor: float
    num_expert_group: int
    topk_group: int
    biased_weights: bool = False

    @property
    def shared_intermediate_size(self) -> int:
        """Inner width of the one MLP that holds all shared experts."""
        return self.num_shared_experts * self.intermediate_size


def read_moe(text: Section, num_layers: int | None, *, k3_shaped: bool, biased_weights: bool) -> MoeConfig:
    """Reads the expert keys of the text configuration; `num_layers` is None when it couldn't be read."""
    first = text.integer("first_k_dense_replace", minimum=0)
    every = text.integer("moe_layer_freq")
    if num_layers is not None and text.has("first_k_dense_replace") and first > num_layers:
        text.problem("first_k_dense_replace", f"is {first}, more than num_hidden_layers = {num_layers}.")
    needed_by = "a K3 configuration must give it" if k3_shaped else None
    text.exactly("topk_method", SELECTION, "bias-corrected selection is the only one.", required=False)
    moe = MoeConfig(
        layers=tuple(layer for layer in range(num_layers or 0) if layer >= first and layer % every == 0),
        num_experts=text.integer("num_experts"),
        num_experts_per_token=text.integer("num_experts_per_token"),
        num_shared_experts=text.integer("num_shared_experts"),
        intermediate_size=text.integer("moe_intermediate_size"),
        latent_size=text.optional_integer("routed_expert_hidden_size", needed_by=needed_by),
        latent_norm=text.optional_boolean("latent_moe_use_norm", needed_by=needed_by),
        renormalize=text.boolean("moe_renormalize"),
        router_activation=text.one_of((ROUTER_ACTIVATION,), "moe_router_activation_func"),
        routed_scaling_factor=text.number("routed_scaling_factor"),
        num_expert_group=text.integer("num_expert_group"),
        topk_group=text.integer("topk_group"),
        biased_weights=biased_weights,
    )
    _check_groups(text, moe, grouped=text.optional_boolean("use_grouped_topk", default=True))
    if biased_weights and k3_shaped:
        text.problems.append(
            "biased_router_weights=True is for Kimi-Linear-48B, whose first remote code took weights from the biased "
            "scores; K3 takes them from the unbiased ones."
        )
    return moe


def _check_groups(text: Section, moe: MoeConfig, *, grouped: bool) -> None:
    if text.has("num_experts", "num_experts_per_token") and moe.num_experts_per_token > moe.num_experts:
        text.problem(
            "num_experts_per_token", f"is {moe.num_experts_per_token}, more than num_experts = {moe.num_experts}."
        )
    if not text.has("num_experts", "num_experts_per_token", "num_expert_group", "topk_group"):
        return
    if moe.topk_group > moe.num_expert_group:
        text.problem("topk_group", f"is {moe.topk_group}, more than num_expert_group = {moe.num_expert_group}.")
    if moe.num_experts % moe.num_expert_group:
        text.problem(
            "num_expert_group", f"is {moe.num_expert_group}, which doesn't divide num_experts = {moe.num_experts}."
        )
        return
    if moe.num_expert_group <= moe.topk_group:
        return
    size = moe.num_experts // moe.num_expert_group
    if not grouped:
        text.problem("use_grouped_topk", "is false, but num_expert_group and topk_group ask for selection by groups.")
    if size < 2:
        text.problem("num_expert_group", "leaves one expert in a group; a group is scored by its two best experts.")
    if moe.num_experts_per_token > moe.topk_group * size:
        text.problem(
            "num_experts_per_token",
            f"is {moe.num_experts_per_token}, more than the {moe.topk_group * size} experts of topk_group = "
            f"{moe.topk_group} groups.",
        )


def _layer_rule(layers: tuple[int, ...], num_layers: int) -> tuple[int, int]:
    """The (k, f) for which the MoE layers are those from k on that f divides."""
    if not layers:
        return num_layers, 1
    first, *others = layers
    if others:
        return first, max(1, others[0] - first)
    # One layer: f keeps the next multiple outside the model.
    return first, 1 if first == num_layers - 1 else first or num_layers


def write_moe(moe: MoeConfig, num_layers: int, *, k3_shaped: bool) -> dict[str, Any]:
    """The expert keys of the public file."""
    first, every = _layer_rule(moe.layers, num_layers)
    json: dict[str, Any] = {
        "first_k_dense_replace": first,
        "moe_intermediate_size": moe.intermediate_size,
        "moe_layer_freq": every,
        "moe_renormalize": moe.renormalize,
        "moe_router_activation_func": moe.router_activation,
        "num_expert_group": moe.num_expert_group,
        "num_experts": moe.num_experts,
        "num_experts_per_token": moe.num_experts_per_token,
        "num_shared_experts": moe.num_shared_experts,
        "routed_scaling_factor": moe.routed_scaling_factor,
        "topk_group": moe.topk_group,
        "use_grouped_topk": True,
    }
    if moe.latent_size is not None:
        json["routed_expert_hidden_size"] = moe.latent_size
    if k3_shaped:
        json["latent_moe_use_norm"] = moe.latent_norm
        json["topk_method"] = SELECTION
    return json
