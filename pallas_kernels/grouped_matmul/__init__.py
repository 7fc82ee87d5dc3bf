"""Rows sorted by group, each group times its own expert's weights: y[m] = W[group_offset + group(m)] · x[m]."""

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import Implementation, always, choose
from pallas_kernels.grouped_matmul import gpu, reference, tpu, xla
from pallas_kernels.manual_axes import align
from pallas_kernels.mxfp4 import Mxfp4


def grouped_matmul(
    rows: Float[Array, "M D"],
    weights: Float[Array, "E F D"] | Mxfp4,
    group_sizes: Int[Array, "G"],
    *,
    group_offset: int | Int[Array, ""] = 0,
    out_dtype: DTypeLike | None = None,
    tile_size: int | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "M F"]:
    """Multiplies each group of rows by one expert's weights.

    Rows 0..n₀−1 are group 0, the next n₁ are group 1, and so on, n = group_sizes. Row m of group g becomes
    Σ_d rows[m, d] · weights[group_offset + g, :, d]. Rows past Σ n are padding: they come back exactly 0 and get a zero
    gradient, whatever they hold (NaN too).

    Products are accumulated in float32 or better. bfloat16 and MXFP4 weights are brought to the rows' dtype one expert
    at a time; float32 weights are never rounded. `rows` and array weights are differentiable in reverse mode, once;
    MXFP4 weights are constants. A gradient of `weights` has the shape of all of `weights`: to train, pass one layer's
    experts rather than an offset into all layers'.

    Everything is local to a device: under sharding call it inside `shard_map`, on the device's own rows and experts.

    Args:
        rows: sorted by group.
        weights: experts in the orientation of the checkpoints, [out, in]. May hold more experts than there are groups,
            such as the experts of all layers.
        group_sizes: rows of each group, Σ n <= M; zeros are fine.
        group_offset: expert of group 0. May be traced: one expert at a time is sliced out of `weights`, so passing
            all layers' experts with layer · groups here copies nothing. group_offset + G must not exceed E.
        out_dtype: dtype of the result; None is that of the rows.
        tile_size: rows multiplied at once by `xla`; None picks 8..256 from the mean group.
        implementation: None takes the best that can run. "tpu" takes rows, results and array weights in float32 or
            bfloat16, in multiples of 128 columns (rows for MXFP4: 256). The gradient is that of "xla".

    Raises:
        ValueError: sizes that don't fit each other.
        UnsupportedImplementationError: the implementation named can't run.
    """
    num_rows, width = rows.shape
    if isinstance(weights, Mxfp4):
        weights.check("grouped_matmul: weights")
    if len(weights.shape) != 3 or weights.shape[2] != width:
        raise ValueError(
            f"grouped_matmul: weights have shape {tuple(weights.shape)}; rows of width {width} need "
            f"[experts, out, {width}]."
        )
    num_experts, num_groups = weights.shape[0], group_sizes.shape[0]
    first = group_offset if isinstance(group_offset, int) else 0
    if not 1 <= num_groups <= num_experts - first or first < 0:
        raise ValueError(
            f"grouped_matmul: group_sizes has {num_groups} groups and group_offset is {group_offset}; weights hold "
            f"{num_experts} experts, and at least one group is needed."
        )
    if tile_size is not None and tile_size < 1:
        raise ValueError(f"grouped_matmul: tile_size is {tile_size}; it must be a positive number of rows.")
    out_dtype = rows.dtype if out_dtype is None else jnp.dtype(out_dtype)

    choice = choose(
        "grouped_matmul",
        implementation,
        {
            "tpu": lambda: tpu.obstacle(rows, weights, num_groups, out_dtype, named=implementation == "tpu"),
            "gpu": lambda: gpu.obstacle(rows, weights, out_dtype),
            "xla": always,
            "reference": always,
        },
    )
    offset = jnp.asarray(group_offset, jnp.int32)
    rows, weights, group_sizes, offset = align(rows, weights, group_sizes, offset)
    if num_rows == 0:
        return jnp.zeros((0, weights.shape[1]), out_dtype)
    if choice.name == "reference":
        return reference.grouped_matmul(rows, weights, group_sizes, offset, out_dtype)
    tile = min(tile_size or xla.tile_size(num_rows, num_groups), num_rows)
    if choice.name == "gpu":
        return gpu.grouped_matmul(rows, weights, group_sizes, offset, out_dtype, tile)
    if choice.name == "tpu":
        return tpu.grouped_matmul(rows, weights, group_sizes, offset, out_dtype, tile)
    return xla.grouped_matmul(rows, weights, group_sizes, offset, out_dtype, tile)
