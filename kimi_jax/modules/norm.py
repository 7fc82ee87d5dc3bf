"""Normalisations of the text models."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from kimi_jax.params import param
from pallas_kernels.precision import at_least_float32
from pallas_kernels.rms_norm import rms_norm


class RMSNorm(nnx.Module):
    """RMSNorm with a weight per channel."""

    def __init__(self, width: int, eps: float, name: str, axis: str | None = None):
        self.eps = eps
        self.weight = param((width,), (axis,), name, init="ones")

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        """Normalises the last axis."""
        return rms_norm(x, self.weight[...], self.eps)


class LayerNorm(nnx.Module):
    """LayerNorm with mean, weight and bias, in float32, cast to the input's dtype at the end."""

    def __init__(self, width: int, eps: float, name: str):
        self.eps = eps
        self.weight = param((width,), (None,), f"{name}.weight", init="ones")
        self.bias = param((width,), (None,), f"{name}.bias", init="zeros")

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        """Normalises the last axis."""
        wide = x.astype(at_least_float32(x))
        centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
        normed = centred * jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + self.eps)
        result = normed * self.weight[...].astype(wide.dtype) + self.bias[...].astype(wide.dtype)
        return result.astype(x.dtype)
