"""A layer's routed experts: each token through the gated MLPs that it is routed to, and their weighted sum."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.dispatch import Implementation, always, choose
from pallas_kernels.expert_layer import gpu
from pallas_kernels.expert_layer.rows import combine, spread
from pallas_kernels.gate import SWIGLU, Gate
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.manual_axes import align
from pallas_kernels.mxfp4 import Mxfp4
from pallas_kernels.router import sort_by_expert

__all__ = ["Gate", "expert_layer", "expert_mlp", "sort_by_expert"]

Weights = Float[Array, "_ _ _"] | Mxfp4


def expert_layer(
    x: Float[Array, "M D"],
    experts: Int[Array, "M k"],
    weights: Float[Array, "M k"],
    valid: Bool[Array, " M"],
    gate_up: Weights,
    down: Weights,
    *,
    num_experts: int,
    group_offset: int | Int[Array, ""] = 0,
    gate: Gate = SWIGLU,
    implementation: Implementation | None = None,
) -> Float[Array, "M D"]:
    """Σ_j weights[m, j] · E_e(x[m]) with e = experts[m, j] and E_e(x) = W_down,e · gate(W_gate,e · x, W_up,e · x).

    One row for each of a token's experts is gathered, in the order of experts; the rows go through `expert_mlp`, and each
    token gathers its own results and adds them up in float32 or better, in the order in which `experts` names them. A
    token's bits don't depend on what else is in the batch. Tokens that aren't valid touch nothing and come back 0.

    Differentiable in reverse mode, once, in `x`, `weights` and array stacks.

    Args:
        x: tokens.
        experts: numbers in 0..num_experts−1.
        weights: of each of a token's experts, float32 or better.
        valid: False for padding, which may hold anything.
        gate_up: [E, 2·F, D], each expert's gate rows, then its up rows; E may be more than one layer's.
        down: [E, D, F].
        num_experts: of one layer.
        group_offset: expert of the stacks that is expert 0; may be traced.
        gate: what joins the two branches.
        implementation: see `expert_mlp`.

    Raises:
        ValueError: sizes that don't fit each other.
        UnsupportedImplementationError: the implementation named can't run.
    """
    tokens = experts.shape[0]
    if x.shape[0] != tokens or weights.shape != experts.shape or valid.shape != (tokens,):
        raise ValueError(
            f"expert_layer: x has shape {x.shape}, experts {experts.shape}, weights {weights.shape} and valid "
            f"{valid.shape}; {tokens} tokens need [{tokens}, D], [{tokens}, k] twice and [{tokens}]."
        )
    _check("expert_layer", x, gate_up, down, num_experts)
    plainly = implementation in ("xla", "reference")
    order, group_sizes, place = sort_by_expert(experts, num_experts, valid, implementation="xla" if plainly else None)
    by_kernel = implementation in (None, "gpu") and gpu.obstacle(x, gate_up, down) is None
    x, order, place, weights = align(x, order, place, jnp.where(valid[:, None], weights, 0))
    # A token is put in order once, and not once for each of its experts.
    ordered = by_kernel and isinstance(gate_up, Mxfp4)
    rows: Any = spread(gpu.products.order(x) if ordered else x, order, place, by_kernel)
    outputs = _mlp(rows, gate_up, down, group_sizes, group_offset, gate, implementation, ordered)
    outputs, weights, order, place = align(outputs, weights, order, place)
    return combine(outputs, weights, order, place)


def expert_mlp(
    rows: Float[Array, "M D"],
    gate_up: Weights,
    down: Weights,
    group_sizes: Int[Array, " G"],
    *,
    group_offset: int | Int[Array, ""] = 0,
    gate: Gate = SWIGLU,
    implementation: Implementation | None = None,
) -> Float[Array, "M D"]:
    """W_down,e · gate(W_gate,e · x, W_up,e · x) for every row x, sorted by its expert e.

    Rows past Σ group_sizes come back exactly 0 and get a zero gradient, whatever they hold. See `grouped_matmul` for
    groups, offsets, precision and differentiation.

    On Hopper, gate and up are one product with the gate in its last step: nothing of 2·F columns is written, and the gate
    sees float32 sums. Elsewhere these are two grouped products with the gate between them.

    Args:
        rows: sorted by group.
        gate_up: [E, 2·F, D], each expert's gate rows, then its up rows.
        down: [E, D, F].
        group_sizes: rows of each group, Σ n <= M.
        group_offset: expert of group 0; may be traced.
        gate: what joins the two branches.
        implementation: None takes the best that can run. "gpu" is for bfloat16 rows on Hopper; others are those of
            `grouped_matmul`.

    Raises:
        ValueError: sizes that don't fit each other.
        UnsupportedImplementationError: the implementation named can't run.
    """
    _check("expert_mlp", rows, gate_up, down, group_sizes.shape[0])
    return _mlp(rows, gate_up, down, group_sizes, group_offset, gate, implementation, ordered=False)


def _mlp(
    rows: Float[Array, "M D"],
    gate_up: Weights,
    down: Weights,
    group_sizes: Int[Array, " G"],
    group_offset: int | Int[Array, ""],
    gate: Gate,
    implementation: Implementation | None,
    ordered: bool,
) -> Float[Array, "M D"]:
    """`expert_mlp`; rows that are `ordered` are for the Hopper kernels."""
    if implementation in (None, "gpu", "xla"):
        choice = choose(
            "expert_mlp",
            implementation,
            {"gpu": lambda: gpu.obstacle(rows, gate_up, down), "xla": always},
        )
        if choice.name == "gpu" and rows.shape[0]:
            offset = jnp.asarray(group_offset, jnp.int32)
            rows, gate_up, down, group_sizes, offset = align(rows, gate_up, down, group_sizes, offset)
            return gpu.expert_mlp(rows, gate_up, down, group_sizes, offset, gate, ordered)

    def product(rows: Array, weights: Weights) -> Array:
        return grouped_matmul(rows, weights, group_sizes, group_offset=group_offset, implementation=implementation)

    hidden = product(rows, gate_up)
    width = hidden.shape[1] // 2
    return product(gate(hidden[:, :width], hidden[:, width:]), down)


def _check(operation: str, rows: Array, gate_up: Weights, down: Weights, num_experts: int) -> None:
    up, back, width = tuple(gate_up.shape), tuple(down.shape), rows.shape[1]
    if len(up) != 3 or len(back) != 3 or up[1] % 2 or back != (up[0], width, up[1] // 2) or up[2] != width:
        raise ValueError(
            f"{operation}: gate_up has shape {up} and down {back}; rows of width {width} need [E, 2·F, {width}] and "
            f"[E, {width}, F]."
        )
    if not 1 <= num_experts <= up[0]:
        raise ValueError(f"{operation}: there are {num_experts} experts; the stacks hold {up[0]}, and one is needed.")
