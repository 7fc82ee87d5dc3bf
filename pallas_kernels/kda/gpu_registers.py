"""How a warpgroup's registers hold pieces of KDA's arrays, and the functions that Mosaic has no instruction for."""

from inspect import Parameter, signature
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

WIDTH = 128
VECTOR = 4  # float32 numbers that a thread moves at once
THREADS = 128
CHANNELS = plgpu.Layout.WG_STRIDED((WIDTH,), 1)
"""A channel a thread."""


class Layouts(NamedTuple):
    """Registers of a block of `rows` x `columns` entries, four of them in every thread.

    Attributes:
        rows: of the block.
        block: its entries: a thread holds four neighbouring columns, a warp whole rows.
        row: a vector over its rows.
        column: a vector over its columns.
    """

    rows: int
    block: Any
    row: Any
    column: Any


def layouts(columns: int) -> Layouts:
    """The layouts of blocks of that many columns, 16 to 128."""
    rows = VECTOR * THREADS // columns
    if columns == WIDTH:
        block = plgpu.Layout.TILED(plgpu.Tiling(((rows, columns), (VECTOR,))), (-3,), (-2,), -1)
    else:
        block = plgpu.Layout.TILED(
            plgpu.Tiling(((rows, columns), (rows // 4, columns), (VECTOR,))), (-5,), (-3, -2), -1
        )
    return Layouts(rows, block, without(block, 1), without(block, 0))


def without(layout: Any, axis: int) -> Any:
    """The layout of what is left of an array when `axis` is summed over."""
    left = layout.to_mgpu().reduce((axis,))
    return plgpu.Layout.TILED(left.tiling, left.warp_dims, left.lane_dims, left.vector_dim)


class Registers:
    """Loads, casts and broadcasts to a layout, of which an interpreter knows nothing."""

    def __init__(self, interpret: Any):
        self.interpret = interpret

    def load(self, ref: Any, layout: Any) -> Any:
        """The array that `ref` holds."""
        return ref[...] if self.interpret else plgpu.load(ref, layout=layout, optimized=False, **_INDEX)

    def cast(self, x: Any, layout: Any) -> Any:
        """`x` in the layout."""
        return x if self.interpret else plgpu.layout_cast(x, layout)

    def spread(self, x: Any, shape: tuple[int, ...], dims: tuple[int, ...], layout: Any) -> Any:
        """`x` broadcast to `shape`, where its axes are `dims`."""
        return self.cast(lax.broadcast_in_dim(x, shape, dims), layout)


# jax 0.10 wants an index beside the reference, 0.11 warns of one, 0.12 has none.
_INDEX: dict[str, Any] = {}
if "idx" in (_parameters := signature(plgpu.load).parameters) and _parameters["idx"].default is Parameter.empty:
    _INDEX["idx"] = ()


def store(ref: Any, value: Any) -> None:
    """ref[...] = value where newer versions ask whether bank conflicts may be."""
    newer = getattr(plgpu, "store", None)
    if newer is None:
        ref[...] = value
    else:
        newer(ref, value, optimized=False)


def softplus(x: Any) -> Any:
    """log(1 + exp x) from the functions that the kernel has, to the last digits also where the result is small."""
    small = jnp.exp(-jnp.abs(x))
    whole = 1.0 + small
    rounded = whole - 1.0
    lost = rounded == 0.0
    log1p = jnp.where(lost, small, jnp.log(whole) * (small / jnp.where(lost, 1.0, rounded)))
    return jnp.maximum(x, 0.0) + log1p


def sigmoid(x: Any) -> Any:
    """1 / (1 + exp -x)."""
    return 1.0 / (1.0 + jnp.exp(-x))
