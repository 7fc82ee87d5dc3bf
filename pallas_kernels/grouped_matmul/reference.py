"""The definition: every row against every expert, one of which counts."""

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.mxfp4 import Mxfp4
from pallas_kernels.precision import at_least_float32, einsum


def grouped_matmul(
    rows: Float[Array, "M D"],
    weights: Float[Array, "E F D"] | Mxfp4,
    group_sizes: Int[Array, "G"],
    group_offset: Int[Array, ""],
    out_dtype: DTypeLike,
) -> Float[Array, "M F"]:
    """See `pallas_kernels.grouped_matmul.grouped_matmul`; costs G times the work."""
    accumulator = at_least_float32(rows)
    weights = weights.dequantize(rows.dtype) if isinstance(weights, Mxfp4) else weights
    ends = jnp.cumsum(group_sizes)
    row = jnp.arange(rows.shape[0])
    result = jnp.zeros((rows.shape[0], weights.shape[1]), accumulator)
    for group in range(group_sizes.shape[0]):
        mine = ((row >= ends[group] - group_sizes[group]) & (row < ends[group]))[:, None]
        weight = jnp.take(weights, group_offset + group, axis=0, mode="clip")
        product = einsum("md,fd->mf", jnp.where(mine, rows, 0).astype(accumulator), weight.astype(accumulator))
        result = result + jnp.where(mine, product, 0)
    return result.astype(out_dtype)
