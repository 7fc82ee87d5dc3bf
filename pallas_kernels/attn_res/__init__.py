"""Attention Residuals, block form: a token's input is a learned mixture of the sums that earlier blocks left behind."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.attn_res import gpu, reference, tpu, xla
from pallas_kernels.dispatch import Implementation, always, choose
from pallas_kernels.manual_axes import align
from pallas_kernels.rms_norm import rms_norm


def attn_res(
    partial: Float[Array, "B T D"],
    bank: Float[Array, "R B T D"],
    num_rows: int | Int[Array, ""],
    query: Float[Array, "D"],
    norm_weight: Float[Array, "D"],
    *,
    eps: float = 1e-5,
    out_norm_weight: Float[Array, "D"] | None = None,
    out_eps: float = 1e-5,
    implementation: Implementation | None = None,
) -> Float[Array, "B T D"]:
    """Mixes the current partial sum with the banked ones, token by token.

    v_r = bank[r] for r < num_rows, and last v = partial. For every token
    s_r = Σ_d v_rd · (mean_d v_rd² + eps)^(−1/2) · norm_weight_d · query_d, π = softmax_r(s), result = Σ_r π_r v_r.
    The rows are mixed as they are, not normalised. There is no 1/√D. Computed in float32 or better, returned in the
    dtype of `partial`. With num_rows = 0 the result is `partial` exactly.

    With `out_norm_weight` the result is then normalised, as the sublayer that reads it does first: result, rounded to its
    dtype, times (mean result² + out_eps)^(−1/2), rounded again, times the weight. The kernels do so in the same pass.

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
        out_norm_weight: weight of the norm that follows. None: there is none.
        out_eps: of the norm that follows.
        implementation: None takes the best that can run. "gpu" takes bfloat16 rows whose width is a multiple of 1024, at
            most 8192, on Hopper, and is picked from 256 tokens; "tpu" takes float32 or bfloat16 rows whose width is a
            multiple of 128. The gradient is that of "xla".

    Raises:
        ValueError: sizes that don't fit each other.
        UnsupportedImplementationError: the implementation named can't run.
    """
    if bank.ndim != 4 or bank.shape[1:] != partial.shape:
        raise ValueError(
            f"attn_res: bank has shape {bank.shape}; partial of shape {partial.shape} needs (rows, *{partial.shape})."
        )
    for name, vector in (("query", query), ("norm_weight", norm_weight), ("out_norm_weight", out_norm_weight)):
        if vector is not None and vector.shape != partial.shape[-1:]:
            raise ValueError(f"attn_res: {name} has shape {vector.shape}; width {partial.shape[-1]} is needed.")
    if isinstance(num_rows, int) and not 0 <= num_rows <= bank.shape[0]:
        raise ValueError(f"attn_res: num_rows is {num_rows}; the bank has room for 0 to {bank.shape[0]} rows.")
    choice = choose(
        "attn_res",
        implementation,
        {
            "tpu": lambda: tpu.obstacle(partial, bank, named=implementation == "tpu"),
            "gpu": lambda: gpu.obstacle(partial, bank, named=implementation == "gpu"),
            "xla": always,
            "reference": always,
        },
    )
    arguments = align(partial, bank, jnp.asarray(num_rows, jnp.int32), query, norm_weight)
    if choice.name in ("gpu", "tpu"):
        kernel = gpu if choice.name == "gpu" else tpu
        if out_norm_weight is None:
            return kernel.attn_res(*arguments, eps)
        return normed(kernel.mix, out_eps, eps, *align(*arguments, out_norm_weight))
    run = reference.attn_res if choice.name == "reference" else xla.attn_res
    result = run(*arguments, eps)
    return result if out_norm_weight is None else rms_norm(result, out_norm_weight, out_eps)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def normed(mix: Callable[..., Array], out_eps: float, eps: float, *arguments: Array) -> Float[Array, "B T D"]:
    """A kernel's mixture and the norm that follows; the gradient mixes again, so that nothing more is kept."""
    *inputs, out_weight = arguments
    return mix(*inputs, eps, out_weight, out_eps)


def _forward(mix: Callable[..., Array], out_eps: float, eps: float, *arguments: Array) -> tuple[Array, Any]:
    return normed(mix, out_eps, eps, *arguments), arguments


def _backward(mix: Callable[..., Array], out_eps: float, eps: float, arguments: Any, d_result: Array) -> Any:
    *inputs, out_weight = arguments
    mixture = mix(*inputs, eps)
    _, pull = jax.vjp(lambda mixture, weight: rms_norm(mixture, weight, out_eps), mixture, out_weight)
    d_mixture, d_weight = pull(d_result)
    return *xla.backward(eps, tuple(inputs), d_mixture), d_weight


normed.defvjp(_forward, _backward)
