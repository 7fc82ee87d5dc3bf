"""Plain JAX: a loop over tiles of rows, each with the one expert it needs.

No copy of the rows is padded to whole tiles: a tile starts wherever its group does, and rows of it that belong to a
neighbour are masked. The largest temporaries are one expert's weights and one tile, next to the result.

The trip count is the number of tiles in use, known only at run time. On CPU and TPU such a loop costs nothing extra.
On GPU the host reads the loop's condition before every trip. A fixed count would avoid that and pay instead for up to G
tiles that nobody uses, each of them the bytes of an expert: on an H200 that took a quarter off at experts of 5 MB and
added a tenth at experts of 22 MB, so one form serves all experts but small ones: see `at_once`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.grouped_matmul import at_once
from pallas_kernels.grouped_matmul.tiles import cut
from pallas_kernels.manual_axes import align
from pallas_kernels.mxfp4 import Mxfp4
from pallas_kernels.precision import at_least_float32, einsum

Weights = Float[Array, "E F D"] | Mxfp4
Carry = TypeVar("Carry")

SMALLEST_TILE, LARGEST_TILE = 8, 256


def tile_size(num_rows: int, num_groups: int) -> int:
    """Rows a tile: the power of two from 8 to 256 next above the mean group, so that most groups need one or two."""
    mean = -(-num_rows // num_groups)
    return min(max(1 << (mean - 1).bit_length(), SMALLEST_TILE), LARGEST_TILE)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def grouped_matmul(
    rows: Float[Array, "M D"],
    weights: Weights,
    group_sizes: Int[Array, "G"],
    group_offset: Int[Array, ""],
    out_dtype: DTypeLike,
    tile: int,
) -> Float[Array, "M F"]:
    """See `pallas_kernels.grouped_matmul.grouped_matmul`; `tile` <= M rows at a time."""
    return _product("md,fd->mf", rows, weights, group_sizes, group_offset, weights.shape[1], out_dtype, tile)


def _forward(
    rows: Array, weights: Weights, group_sizes: Array, group_offset: Array, out_dtype: DTypeLike, tile: int
) -> tuple[Array, tuple[Array, Weights, Array, Array]]:
    result = _product("md,fd->mf", rows, weights, group_sizes, group_offset, weights.shape[1], out_dtype, tile)
    return result, (rows, weights, group_sizes, group_offset)


def _backward(
    out_dtype: DTypeLike, tile: int, residuals: tuple[Array, Weights, Array, Array], d_result: Array
) -> tuple[Array, Array | None, None, None]:
    rows, weights, group_sizes, group_offset = residuals
    d_rows = _product("mf,fd->md", d_result, weights, group_sizes, group_offset, rows.shape[1], rows.dtype, tile)
    if isinstance(weights, Mxfp4):
        return d_rows, None, None, None
    return d_rows, _weight_gradient(rows, d_result, weights, group_sizes, group_offset, tile), None, None


grouped_matmul.defvjp(_forward, _backward)


# Compiled here too, so that calls outside of any jit build their loop once and not every time.
@partial(jax.jit, static_argnums=(0, 5, 6, 7))
def _product(
    spec: str,
    rows: Float[Array, "M X"],
    weights: Weights,
    group_sizes: Int[Array, "G"],
    group_offset: Int[Array, ""],
    width: int,
    out_dtype: DTypeLike,
    tile: int,
) -> Float[Array, "M Y"]:
    """einsum(spec, rows, weights of the row's group), of `width` columns."""

    def run(buffer: "_Buffer", rows: Array, weights: Weights, group_sizes: Array, group_offset: Array) -> Array:
        def step(result: Array, at: "_Tile", operands: tuple[Array, Weights]) -> Array:
            rows, weights = operands
            weight = jax.tree.map(lambda leaf: _index(leaf, group_offset + at.group), weights)
            if isinstance(weight, Mxfp4):
                product = buffer.pack(_packed_product(spec, at.read(rows), weight, out_dtype))
            else:
                product = buffer.pack(einsum(spec, at.read(rows), weight, out=out_dtype))
            old = jax.lax.dynamic_slice_in_dim(result, at.start, tile)
            return jax.lax.dynamic_update_slice_in_dim(result, jnp.where(at.mine, product, old), at.start, axis=0)

        empty = buffer.zeros((rows.shape[0], width))
        return buffer.unpack(_for_each_tile(step, empty, (rows, weights), group_sizes, rows.shape[0], tile))

    def together(rows: Array, weights: Array, group_sizes: Array, group_offset: Array) -> Array:
        return at_once.product(spec, rows, weights, group_sizes, group_offset, out_dtype, tile)

    small = at_once.suits(weights, rows.shape[0], group_sizes.shape[0], tile)
    return _by_platform(run, together if small else None, out_dtype, rows, weights, group_sizes, group_offset)


@partial(jax.jit, static_argnums=5)
def _weight_gradient(
    rows: Float[Array, "M D"],
    d_result: Float[Array, "M F"],
    weights: Float[Array, "E F D"],
    group_sizes: Int[Array, "G"],
    group_offset: Int[Array, ""],
    tile: int,
) -> Float[Array, "E F D"]:
    """For each expert the sum over its rows of d_result ⊗ row; one expert's sum at a time is held in float32."""

    def run(buffer: "_Buffer", rows: Array, d_result: Array, group_sizes: Array, group_offset: Array) -> Array:
        def step(carry: tuple[Array, Array], at: "_Tile", operands: tuple[Array, Array]) -> tuple[Array, Array]:
            total, gradient = carry
            rows, d_result = operands
            outer = einsum("mf,md->fd", at.read(d_result), at.read(rows)).astype(total.dtype)
            total = jnp.where(at.is_first, outer, total + outer)
            done = buffer.pack(total.astype(weights.dtype))[None]
            return total, jax.lax.dynamic_update_slice_in_dim(gradient, done, group_offset + at.group, axis=0)

        total = jnp.zeros(weights.shape[1:], at_least_float32(rows, d_result))
        carry = (total, buffer.zeros(weights.shape))
        _, gradient = _for_each_tile(step, carry, (rows, d_result), group_sizes, rows.shape[0], tile)
        return buffer.unpack(gradient)

    def together(rows: Array, d_result: Array, group_sizes: Array, group_offset: Array) -> Array:
        return at_once.weight_gradient(rows, d_result, weights, group_sizes, group_offset, tile)

    small = at_once.suits(weights, rows.shape[0], group_sizes.shape[0], tile)
    return _by_platform(run, together if small else None, weights.dtype, rows, d_result, group_sizes, group_offset)


def _index(stack: Array, index: Int[Array, ""]) -> Array:
    return jax.lax.dynamic_index_in_dim(stack, index, keepdims=False)


def _packed_product(spec: str, rows: Float[Array, "C X"], weight: Mxfp4, out_dtype: DTypeLike) -> Float[Array, "C Y"]:
    """einsum(spec, rows, weight), of one expert.

    Unpacked in order, weights go through axes of 2 and 32 elements, which a TPU pads to 128 lanes in its main memory:
    40 times the bytes of the packed expert were read and written for each tile, and the stacks of scales of all layers
    were copied to another layout for each layer.
    """

    def whole(rows: Array, weight: Mxfp4) -> Array:
        return einsum(spec, rows, weight.dequantize(rows.dtype), out=out_dtype)

    def halves(rows: Array, weight: Mxfp4) -> Array:
        return product_by_halves(spec, rows, weight, out_dtype)

    return jax.lax.platform_dependent(rows, weight, tpu=halves, default=whole)


def product_by_halves(spec: str, rows: Float[Array, "C X"], weight: Mxfp4, out_dtype: DTypeLike) -> Float[Array, "C Y"]:
    """einsum(spec, rows, weight) with even and odd inputs multiplied apart, so that no weight changes its place.

    Args:
        spec: "md,fd->mf", or "mf,fd->md", the product with the transposed weight.
        rows: of one expert.
        weight: [F, D].
        out_dtype: of the result.
    """
    even, odd = weight.even_odd(rows.dtype)
    if spec == "md,fd->mf":
        return (einsum(spec, rows[:, 0::2], even) + einsum(spec, rows[:, 1::2], odd)).astype(out_dtype)
    both = [einsum(spec, rows, half, out=out_dtype) for half in (even, odd)]
    return jnp.stack(both, axis=-1).reshape(rows.shape[0], -1)


@dataclass(frozen=True)
class _Buffer:
    """An array that the loop fills slice by slice: as it is, or, for bfloat16, as its bits.

    XLA:CPU of jaxlib 0.10 updates a slice of a bfloat16 array by converting all of it to float32 and back, at every
    trip; it leaves integers alone. Elsewhere bits would cost a copy at the end.
    """

    dtype: DTypeLike
    as_bits: bool

    def zeros(self, shape: tuple[int, ...]) -> Array:
        return self.pack(jnp.zeros(shape, self.dtype))

    def pack(self, array: Array) -> Array:
        return jax.lax.bitcast_convert_type(array, jnp.uint16) if self.as_bits else array

    def unpack(self, array: Array) -> Array:
        return jax.lax.bitcast_convert_type(array, self.dtype) if self.as_bits else array


def _by_platform(
    run: Callable[..., Array], together: Callable[..., Array] | None, dtype: DTypeLike, *operands: Any
) -> Array:
    """run(buffer, *operands) with the kind of buffer that suits the platform compiled for, or `together` on a GPU."""
    forms: dict[str, Callable[..., Array]] = {"default": partial(run, _Buffer(dtype, as_bits=False))}
    if dtype == jnp.bfloat16:
        forms["cpu"] = partial(run, _Buffer(dtype, as_bits=True))
    if together is not None:
        forms["cuda"] = together
    if len(forms) == 1:
        return forms["default"](*operands)
    return jax.lax.platform_dependent(*operands, default=forms.pop("default"), **forms)


class _Tile(NamedTuple):
    """One trip of the loop."""

    group: Int[Array, ""]
    is_first: Bool[Array, ""]  # of its group
    start: Int[Array, ""]  # the first row read
    mine: Bool[Array, "C 1"]  # which of the rows read belong to the tile; the others are a neighbour's, or padding

    def read(self, rows: Float[Array, "M X"]) -> Float[Array, "C X"]:
        """The tile's rows; zeros where they aren't its own, so that nothing a neighbour holds, NaN too, gets in."""
        return jnp.where(self.mine, jax.lax.dynamic_slice_in_dim(rows, self.start, self.mine.shape[0]), 0)


def _for_each_tile(
    step: Callable[[Carry, _Tile, Any], Carry],
    carry: Carry,
    operands: Any,
    group_sizes: Int[Array, "G"],
    num_rows: int,
    tile: int,
) -> Carry:
    """Folds `step(carry, tile, operands)` over the tiles of all groups, in the order of their rows."""
    tiles = cut(group_sizes, num_rows, tile)

    def trip(index: Array, carry: Carry) -> Carry:
        # Tying the operands to the trip keeps XLA from hoisting work on whole operands out of the loop. XLA:CPU of
        # jaxlib 0.10 slices bfloat16 by way of float32: without this it holds a float32 copy of all experts.
        tied, index = jax.lax.optimization_barrier((operands, index))
        # A tile that would run past the rows reads from further back; `mine` drops what it shouldn't touch.
        start = jnp.minimum(tiles.first[index], num_rows - tile)
        row = start + jnp.arange(tile, dtype=jnp.int32)
        mine = (row >= tiles.first[index]) & (row < tiles.last[index])
        return step(carry, _Tile(tiles.group[index], tiles.number[index] == 0, start, mine[:, None]), tied)

    carry, _ = align(carry, operands)
    with jax.named_scope(f"tiles_of_{tile}_rows"):
        return jax.lax.fori_loop(0, tiles.used, trip, carry)
