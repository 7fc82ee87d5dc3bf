"""Matrix products with the checkpoint's `[out, in]` weights."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.precision import at_least_float32, einsum
from pallas_kernels.target import platform

FEW_ROWS = 512
"""Rows up to which a product takes as long as its start and its weights, however many they are."""

_PIECE = 128


def linear(x: Float[Array, "*rows D"], weight: Float[Array, "O D"], out: DTypeLike | None = None) -> jax.Array:
    """Y = x Wᵀ, accumulated in float32 or better; the result has the dtype of `x` unless `out` names another."""
    return einsum("...d,od->...o", x, weight.astype(x.dtype), out=out or x.dtype)


def side_by_side(
    x: Float[Array, "*rows D"], weights: Sequence[Float[Array, "_ D"]], outs: Sequence[DTypeLike] | None = None
) -> list[jax.Array]:
    """`linear` of one x with several weights; for few rows on a GPU as one product, which starts once.

    XLA multiplies with weights that lie in several arrays where each has whole blocks of outputs; otherwise it would copy
    them together first, and they're multiplied one by one.

    Args:
        x: rows.
        weights: each [O, D].
        outs: dtype of each result; None: that of `x`.
    """
    dtypes = [x.dtype] * len(weights) if outs is None else list(outs)
    sizes = [weight.shape[0] for weight in weights]
    few = math.prod(x.shape[:-1]) <= FEW_ROWS and platform() == "gpu"
    if not few or len(sizes) == 1 or any(size % _PIECE for size in sizes):
        return [linear(x, weight, out) for weight, out in zip(weights, dtypes, strict=True)]
    both = linear(x, jnp.concatenate([weight.astype(x.dtype) for weight in weights]), at_least_float32(x))
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes) - 1)]
    return [part.astype(out) for part, out in zip(jnp.split(both, ends, axis=-1), dtypes, strict=True)]
