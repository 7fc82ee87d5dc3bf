"""Root-mean-square normalisation with a weight per channel."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.precision import at_least_float32


def rms_norm(x: Float[Array, "*rows D"], weight: Float[Array, "*one D"], eps: float) -> Float[Array, "*rows D"]:
    """Weight · cast(x · rsqrt(mean(x²) + eps)).

    The statistics are float32; the normalised value is cast to the dtype of `x` before the weight is applied, as the
    vendor's modules do. The order matters in bfloat16.
    """
    wide = x.astype(at_least_float32(x))
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return weight.astype(x.dtype) * normed.astype(x.dtype)
