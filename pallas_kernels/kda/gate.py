"""The decay gate and the key norm of KDA, one routine for every way of running a model."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.precision import at_least_float32

L2_EPS = 1e-6


def gate(
    raw: Float[Array, "B T H K"],
    A_log: Float[Array, "H"],
    dt_bias: Float[Array, "H K"],
    lower_bound: float | None,
) -> Float[Array, "B T H K"]:
    """Log decay g <= 0 per token, head and key channel, in float32 or better.

    With z = raw + dt_bias and a = exp(A_log), one value per head:
    g = lower_bound · σ(a z) if there is a bound (then lower_bound < g < 0), otherwise g = -a · softplus(z).
    The first isn't a clamp of the second.

    Prefill, decode and verification have to call this routine: the same formula in another order of operations drifts
    away in the state.

    Source: Kimi Linear report (arXiv 2510.26692); the bounded form as in the public Kimi K3 code.

    Args:
        raw: output of the decay projection.
        A_log: logarithm of the rate.
        dt_bias: added to `raw`.
        lower_bound: negative, -5 in Kimi K3; None for the unbounded form of Kimi-Linear.

    Raises:
        ValueError: sizes that don't fit each other, or a bound that isn't negative.
    """
    heads, width = raw.shape[-2:]
    if A_log.shape != (heads,) or dt_bias.shape != (heads, width):
        raise ValueError(
            f"gate: A_log has shape {A_log.shape} and dt_bias {dt_bias.shape}; "
            f"raw of shape {raw.shape} needs ({heads},) and ({heads}, {width})."
        )
    if lower_bound is not None and not lower_bound < 0:
        raise ValueError(f"gate: lower_bound is {lower_bound}; it must be negative, or None for the unbounded form.")
    dtype = at_least_float32(raw, A_log, dt_bias)
    z = raw.astype(dtype) + dt_bias.astype(dtype)
    rate = jnp.exp(A_log.astype(dtype))[:, None]
    return log_decay(z, rate, lower_bound)


def log_decay(
    z: Any,
    rate: Any,
    lower_bound: float | None,
    softplus: Callable[[Any], Any] = jax.nn.softplus,
    sigmoid: Callable[[Any], Any] = jax.nn.sigmoid,
) -> Any:
    """The formula of `gate`, for arrays that fit each other; a kernel brings the functions that it has."""
    if lower_bound is None:
        return -rate * softplus(z)
    return lower_bound * sigmoid(rate * z)


def l2_normalize(x: Float[Array, "*dims K"], eps: float = L2_EPS) -> Float[Array, "*dims K"]:
    """Returns x / sqrt(Σ x² + eps) over the last axis, in float32 or better; eps is added to the sum, not to a mean."""
    x = x.astype(at_least_float32(x))
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + eps)
