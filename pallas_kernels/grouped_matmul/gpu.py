"""Pallas Mosaic GPU for Hopper: bfloat16 rows times bfloat16 or MXFP4 experts, summed in float32."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.gate import Gate
from pallas_kernels.grouped_matmul import xla
from pallas_kernels.grouped_matmul.gpu_tiles import BLOCK, CHUNK, COLUMNS, PART, WIDEST, Tuning, cut
from pallas_kernels.manual_axes import axes_left_to_xla
from pallas_kernels.mxfp4 import Mxfp4
from pallas_kernels.target import platform

Weights = Float[Array, "E F D"] | Mxfp4
AnyWeights = Float[Array, "E _ _"] | Mxfp4

SHARED_BYTES = 225 * 1024
"""Shared memory that a block of threads may fill: Hopper's 227 KiB but for barriers and alignment."""

_SCALES_COPIED, _LONGEST_COPY = 16, 256  # The copy engine moves multiples of 16 bytes, at most 256 elements a row.
_FEW = 16
"""Rows to an expert up to which copies of weights are all that takes time."""
_NARROW, _MIDDLE = (8, 16, 32), (8, 16, 32, 64, 96)
_WIDE = (8, 32, 64, 96, 128, 144, 160, 192, 224, 256)
_WIDER = (8, 64, 128, 144, 160, 208, 240, 256, 272, 288)
"""What leaves room for a fourth slot, which is worth more than the few groups beyond it that are cut in two."""
_MOST_REACHED = 320
_TAIL = 3
"""Standard deviations of evenly drawn groups' sizes that a tile holds beyond their mean."""
_TALL = (8, 32, 64, 96, 112, 120, 128, 136, 144, 152)
_MOST_STAGES = 8


def obstacle(rows: Float[Array, "M D"], weights: Weights, out_dtype: DTypeLike) -> str | None:
    """Why the kernel can't run for this call, or None."""
    if platform() != "gpu":
        return f"it runs on NVIDIA Hopper GPUs, and the platform is {platform()!r}."
    capability = getattr(jax.devices()[0], "compute_capability", "unknown")
    if capability != "9.0":
        return f"it is compiled for compute capability 9.0 (Hopper), and this device has {capability}."
    return axes_left_to_xla() or unfit(rows, weights, out_dtype)


def unfit(rows: Float[Array, "M D"] | jax.ShapeDtypeStruct, weights: Weights, out_dtype: DTypeLike) -> str | None:
    """Why no Hopper GPU could run this call, or None."""
    out_width, width = weights.shape[1:]
    if rows.dtype != jnp.bfloat16 or jnp.dtype(out_dtype) != jnp.bfloat16:
        return (
            f"rows are {rows.dtype} and results {jnp.dtype(out_dtype)}; its matrix instructions take bfloat16 and it "
            "writes bfloat16."
        )
    columns = 2 * COLUMNS
    if out_width % columns:
        return f"results have {out_width} columns; it takes multiples of {columns}."
    if isinstance(weights, Mxfp4):
        whole = 32 * _SCALES_COPIED
        if width % whole or width > 32 * _LONGEST_COPY:
            return f"MXFP4 rows are {width} wide; it takes multiples of {whole} up to {32 * _LONGEST_COPY}."
        return None
    if weights.dtype != jnp.bfloat16:
        return f"weights are {weights.dtype}; it takes bfloat16 and MXFP4."
    return f"rows are {width} wide; it takes multiples of 64." if width % 64 else None


def tuned(
    num_rows: int,
    num_groups: int,
    width: int,
    out_width: int,
    packed: bool,
    blocks: int = 132,
    gated: bool = False,
) -> Tuning:
    """How to cut a product: tiles about as wide as the mean group, and as many slots as fit.

    A slot that is multiplied isn't on its way, so three slots keep two copies running and four three, which is what hides
    them behind a wide tile's product while the whole device reads. With a few rows to an expert there is next to nothing to
    hide it behind, so many small slots keep enough bytes on their way; and unpacking, which then takes longer than
    anything else, is spread over three warpgroups. `out_width` counts the weights' outputs.
    """
    mean = num_rows / num_groups
    few = mean <= _FEW
    narrow = _NARROW[:2] if mean <= 4 else _NARROW
    tall = 2 if gated else 1
    wide = _TALL if gated else _WIDE[:7] if packed else _reaching(mean)
    widths: tuple[int, ...] = narrow if few else _MIDDLE if mean <= 64 else wide
    whole = -(-num_rows // BLOCK) * BLOCK
    widths = tuple(size for size in widths if size <= whole)
    step = CHUNK if packed or (few and not gated and width % CHUNK == 0) else 64
    warpgroups = 3 if packed and few and out_width % (3 * tall * COLUMNS) == 0 else 2
    columns = warpgroups * COLUMNS
    a_row = 2 * 2 * columns  # of results, in both buffers
    scales = 2 * tall * columns * width // 32 if packed else 0
    fixed = min(PART, widths[-1]) * a_row + scales
    an_input = tall * (columns // 2 if packed else 2 * columns) + 2 * widths[-1]  # of all weights and rows of a slot
    # Memory gives pieces of 128 bytes, 256 inputs of packed weights, a quarter faster than pieces of 64.
    if packed and few and SHARED_BYTES - fixed >= 3 * 2 * CHUNK * an_input:
        step = 2 * CHUNK
    stages = min(_MOST_STAGES, (SHARED_BYTES - fixed) // (step * an_input))
    # What is left lets results leave in fewer turns.
    room = (SHARED_BYTES - scales - stages * step * an_input) // a_row
    share = widths[-1] if widths[-1] <= WIDEST else widths[-1] // 2
    turns = -(-share // room)
    part = -(-share // (turns * BLOCK)) * BLOCK
    return Tuning(widths, stages, step, warpgroups, blocks=blocks, tall=tall, part=part)


def _reaching(mean: float) -> tuple[int, ...]:
    """Widths up to one that holds nearly all groups whole, if there is one; narrower ones leave room for slots."""
    reach = mean + _TAIL * mean**0.5 + BLOCK
    widths = _WIDER if _WIDE[-1] < reach <= _MOST_REACHED else _WIDE
    return widths[: sum(width < reach for width in widths) + 1]


def by_kernel(
    rows: Float[Array, "M D"],
    weights: AnyWeights,
    group_sizes: Int[Array, " G"],
    group_offset: Int[Array, ""],
    gate: Gate | None = None,
    transposed: bool = False,
    ordered: bool = False,
) -> Float[Array, "M F"]:
    """The product, cut as `tuned` says; results have the rows' dtype. `transposed` array weights are [E, D, F].

    `ordered` rows have been through `order` already.
    """
    blocks = getattr(jax.devices()[0], "core_count", 132)
    width, out_width = rows.shape[1], weights.shape[2 if transposed else 1]
    packed = isinstance(weights, Mxfp4)
    tuning = tuned(rows.shape[0], group_sizes.shape[0], width, out_width, packed, blocks, gate is not None)
    return product(rows, weights, group_sizes, group_offset, rows.dtype, tuning, None, gate, transposed, ordered)


def order(rows: Float[Array, "M D"]) -> Float[Array, "M D"]:
    """Columns in the order in which products with MXFP4 weights take them."""
    from pallas_kernels.grouped_matmul.gpu_unpack import order_inputs

    return order_inputs(rows)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def grouped_matmul(
    rows: Float[Array, "M D"],
    weights: Weights,
    group_sizes: Int[Array, "G"],
    group_offset: Int[Array, ""],
    out_dtype: DTypeLike,
    tile: int,
) -> Float[Array, "M F"]:
    """See `pallas_kernels.grouped_matmul.grouped_matmul`; `tile` is for gradients that `xla` computes."""
    del out_dtype, tile
    return by_kernel(rows, weights, group_sizes, group_offset)


def _forward(
    rows: Array, weights: Weights, group_sizes: Array, group_offset: Array, out_dtype: DTypeLike, tile: int
) -> tuple[Any, tuple[Array, Weights, Array, Array]]:
    result = grouped_matmul(rows, weights, group_sizes, group_offset, out_dtype, tile)
    return result, (rows, weights, group_sizes, group_offset)


def _backward(
    out_dtype: DTypeLike, tile: int, residuals: tuple[Array, Weights, Array, Array], d_result: Array
) -> tuple[Array, Array | None, None, None]:
    del out_dtype
    return *gradients(*residuals, d_result, tile), None, None


grouped_matmul.defvjp(_forward, _backward)


def gradients(
    rows: Float[Array, "M D"],
    weights: Weights,
    group_sizes: Int[Array, " G"],
    group_offset: Int[Array, ""],
    d_result: Float[Array, "M F"],
    tile: int | None = None,
) -> tuple[Float[Array, "M D"], Float[Array, "E F D"] | None]:
    """Of a product: by its rows, and by array weights; MXFP4 ones are constants, multiplied by `xla` in `tile` rows."""
    if tile is None:
        tile = min(xla.tile_size(rows.shape[0], group_sizes.shape[0]), rows.shape[0])
    if isinstance(weights, Mxfp4):
        _, pull = jax.vjp(
            lambda rows: xla.grouped_matmul(rows, weights, group_sizes, group_offset, rows.dtype, tile), rows
        )
        return *pull(d_result), None
    if unfit_for_gradients(weights):
        _, pull = jax.vjp(
            lambda rows, weights: xla.grouped_matmul(rows, weights, group_sizes, group_offset, rows.dtype, tile),
            rows,
            weights,
        )
        return pull(d_result)
    d_rows = by_kernel(d_result, weights, group_sizes, group_offset, transposed=True)
    return d_rows, weight_gradient(rows, d_result, weights, group_sizes, group_offset)


def unfit_for_gradients(weights: Float[Array, "E F D"]) -> str | None:
    """Why the kernels can't run for the gradients of a product whose forward pass they can run, or None."""
    width = weights.shape[2]
    return f"rows are {width} wide; it takes multiples of 128 there." if width % 128 else None


@partial(jax.jit, static_argnums=5)
def weight_gradient(
    rows: Float[Array, "M D"],
    d_result: Float[Array, "M F"],
    weights: Float[Array, "E F D"],
    group_sizes: Int[Array, " G"],
    group_offset: Int[Array, ""],
    interpret: Any = None,
) -> Float[Array, "E F D"]:
    """For each expert the sum over its rows of d_result ⊗ row, in float32, rounded once."""
    from pallas_kernels.grouped_matmul.gpu_outer import outer

    # A factor of zero doesn't drop what isn't a number.
    used = jnp.arange(rows.shape[0], dtype=jnp.int32) < jnp.sum(group_sizes, dtype=jnp.int32)
    blocks = 1 if interpret is not None else getattr(jax.devices()[0], "core_count", 132)
    gradient = outer(group_sizes, d_result, jnp.where(used[:, None], rows, 0), blocks, interpret)
    if weights.shape[0] == group_sizes.shape[0]:
        return gradient
    return jax.lax.dynamic_update_slice_in_dim(jnp.zeros(weights.shape, weights.dtype), gradient, group_offset, axis=0)


@partial(jax.jit, static_argnums=(4, 5, 6, 7, 8, 9))
def product(
    rows: Float[Array, "M D"],
    weights: AnyWeights,
    group_sizes: Int[Array, "G"],
    group_offset: Int[Array, ""],
    out_dtype: DTypeLike,
    tuning: Tuning,
    interpret: Any = None,
    gate: Gate | None = None,
    transposed: bool = False,
    ordered: bool = False,
) -> Float[Array, "M F"]:
    """The product cut as `tuning` says, through `gate` if there is one; `transposed` array weights are [E, D, F].

    `ordered` rows have been through `order` already.
    `interpret` is what Pallas takes to run it without a GPU.
    """
    # Imported late: Mosaic takes a second, which nobody should wait for who has no such GPU.
    from pallas_kernels.grouped_matmul import gpu_cut
    from pallas_kernels.grouped_matmul.gpu_kernel import multiply

    num_rows = rows.shape[0]
    whole = -(-num_rows // BLOCK) * BLOCK
    if isinstance(weights, Mxfp4) and not ordered:
        rows = order(rows)
    # The copy engine gives zeros past the end; the interpreter refuses to read there.
    padding = whole - num_rows + (tuning.widths[-1] if interpret is not None else 0)
    if padding:
        rows = jnp.pad(rows, ((0, padding), (0, 0)))
    by_kernel = interpret is None and group_sizes.shape[0] <= gpu_cut.MOST_GROUPS and whole <= gpu_cut.MOST_ROWS
    work = (gpu_cut.cut if by_kernel else cut)(group_sizes, group_offset, whole, tuning.widths)
    result = multiply(work, rows, weights, whole, out_dtype, tuning, interpret, gate, transposed)
    return result if whole == num_rows else result[:num_rows]
