"""Attention Residuals, block form: a token's input is a learned mixture of the sums that earlier blocks left behind."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.attn_res import reference, xla
from pallas_kernels.dispatch import Implementation, always, choose
from pallas_kernels.manual_axes import align


def attn_res(
    partial: Float[Array, "B T D"],
    bank: Float[Array, "R B T D"],
    num_rows: int | Int[Array, ""],
    query: Float[Array, "D"],
    norm_weight: Float[Array, "D"],
    *,
    eps: float = 1e-5,
    implementation: Implementation | None = None,
) -> Float[Array, "B T D"]:
    """Mixes the current partial sum with the banked ones, token by token.

    v_r = bank[r] for r < num_rows, and last v = partial. For every token
    s_r = Σ_d v_rd · (mean_d v_rd² + eps)^(−1/2) · norm_weight_d · query_d, π = softmax_r(s), result = Σ_r π_r v_r.
    The rows are mixed as they are, not normalised. There is no 1/√D. Computed in float32 or better, returned in the
    dtype of `partial`. With num_rows = 0 the result is `partial` exactly.

    Rows from num_rows on are storage: whatever they hold, NaN too, reaches neither the result nor a gradient, and their
    own gradient is 0. Differentiable in reverse mode, once.

    Source: Attention Residuals (Kimi team, 2025), block form, as the public Kimi K3 code computes it.

    Args:
        partial: the sum of the current block so far.
        bank: room for R finished sums.
        num_rows: how many of them there are, 0 <= num_rows <= R. May be traced.
        query: the learned pseudo-query.
        norm_weight: weight of the RMS norm on the keys.
        eps: of that norm.
        implementation: None takes the best that can run.

    Raises:
        ValueError: sizes that don't fit each other.
        UnsupportedImplementationError: the implementation named can't run.
    """
    if bank.ndim != 4 or bank.shape[1:] != partial.shape:
        raise ValueError(
            f"attn_res: bank has shape {bank.shape}; partial of shape {partial.shape} needs (rows, *{partial.shape})."
        )
    for name, vector in (("query", query), ("norm_weight", norm_weight)):
        if vector.shape != partial.shape[-1:]:
            raise ValueError(f"attn_res: {name} has shape {vector.shape}; width {partial.shape[-1]} is needed.")
    if isinstance(num_rows, int) and not 0 <= num_rows <= bank.shape[0]:
        raise ValueError(f"attn_res: num_rows is {num_rows}; the bank has room for 0 to {bank.shape[0]} rows.")
    choice = choose(
        "attn_res",
        implementation,
        {
            "tpu": lambda: "attn_res has no TPU kernel yet.",
            "gpu": lambda: "attn_res has no GPU kernel yet.",
            "xla": always,
            "reference": always,
        },
    )
    run = reference.attn_res if choice.name == "reference" else xla.attn_res
    return run(*align(partial, bank, jnp.asarray(num_rows, jnp.int32), query, norm_weight), eps)
