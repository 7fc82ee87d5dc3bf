"""The product of an expert's gate and up branches: SwiGLU and SiTU-GLU."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.precision import at_least_float32

_LOG2_E = 1.4426950408889634
_SERIES = (-1 / 3, 2 / 15, -17 / 315, 62 / 2835)  # tanh z = z (1 + c1 z^2 + c2 z^4 + ...)


@dataclass(frozen=True)
class Gate:
    """silu(g) · u, or [b1 · tanh(g / b1) · σ(g)] · [b2 · tanh(u / b2)]; σ sees the uncapped g.

    Attributes:
        situ_beta: b1; None is silu(g) · u.
        situ_linear_beta: b2; None leaves u as it is.
    """

    situ_beta: float | None = None
    situ_linear_beta: float | None = None

    def __call__(self, gate: Float[Array, "*rows F"], up: Float[Array, "*rows F"]) -> Float[Array, "*rows F"]:
        """Elementwise, in float32 or better; the result has the dtype of `gate`."""
        dtype = at_least_float32(gate)
        g, u = gate.astype(dtype), up.astype(dtype)
        if self.situ_beta is None:
            return (jax.nn.silu(g) * u).astype(gate.dtype)
        capped = self.situ_beta * jnp.tanh(g / self.situ_beta) * jax.nn.sigmoid(g)
        if self.situ_linear_beta is not None:
            u = self.situ_linear_beta * jnp.tanh(u / self.situ_linear_beta)
        return (capped * u).astype(gate.dtype)

    def quickly(self, g: Any, u: Any) -> Any:
        """The same of float32 numbers in a kernel, to a few units of 2^-21, by two functions that GPUs have units for."""
        if self.situ_beta is None:
            return g * _one_over_one_plus(lax.exp2(g * -_LOG2_E)) * u
        capped = self.situ_beta * _tanh(g * (1 / self.situ_beta)) * _one_over_one_plus(lax.exp2(g * -_LOG2_E))
        if self.situ_linear_beta is not None:
            u = self.situ_linear_beta * _tanh(u * (1 / self.situ_linear_beta))
        return capped * u


SWIGLU = Gate()


def _one_over_one_plus(positive: Any) -> Any:
    root = lax.rsqrt(positive + 1.0)
    return root * root


def _tanh(z: Any) -> Any:
    far = 1.0 - 2.0 * _one_over_one_plus(lax.exp2(z * (2 * _LOG2_E)))
    square = z * z
    series = square * _SERIES[-1] + _SERIES[-2]
    for factor in reversed(_SERIES[:-2]):
        series = series * square + factor
    near = z + z * square * series
    return jnp.where(square < 0.0625, near, far)
