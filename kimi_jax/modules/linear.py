"""Matrix products with the checkpoint's `[out, in]` weights."""

import jax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.precision import einsum


def linear(x: Float[Array, "*rows D"], weight: Float[Array, "O D"], out: DTypeLike | None = None) -> jax.Array:
    """Y = x Wᵀ, accumulated in float32 or better; the result has the dtype of `x` unless `out` names another."""
    return einsum("...d,od->...o", x, weight.astype(x.dtype), out=out or x.dtype)
