"""Pallas for TPUs: a list of visits, each one tile of rows times a block of one expert's weights.

The grid is (blocks of columns, visits). A visit's expert and tile are scalars that pick the blocks, so Pallas copies the
next visit's weights while this one's are multiplied, and copies nothing where the next visit has the same. Experts that no
row belongs to are in no visit. A tile that several groups share is visited by each of them, which writes its own rows only.

MXFP4 weights come packed. The first visit of an expert unpacks a block of them in VMEM, even inputs apart from odd ones;
the columns of the rows are parted likewise, 256 at a time, by a product with a permutation, which is exact.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_matmul import xla
from pallas_kernels.manual_axes import align, axes_left_to_xla
from pallas_kernels.mxfp4 import BLOCK, Mxfp4
from pallas_kernels.target import platform

Weights = Float[Array, "E F D"] | Mxfp4

LANES = 128
SMALLEST_TILE, LARGEST_TILE = 16, 256
MOST_VISITS = 2**15  # four scalars each
_VMEM = 22 * 2**20  # bytes of all blocks, twice where they're copied ahead
_LIMIT = 44 * 2**20  # what the compiler may take: blocks, and intermediate arrays of a visit
_NAN_SCALE = 255
_AT_ONCE = 256  # columns unpacked together
_TWICE = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0)  # twice the magnitudes of the codes 0..7


@dataclass(frozen=True)
class Tuning:
    """How a product is cut.

    Attributes:
        rows: of a tile, a multiple of 16.
        columns: of the result that a block of weights gives, a multiple of 128.
    """

    rows: int
    columns: int


class Visits(NamedTuple):
    """What is done, in this order; tiles ascend, and each has at least one visit.

    Attributes:
        tile: [N] of rows.
        expert: [N] whose weights are there; a visit without products names the one of the visit before it.
        first: [N] first row of the expert.
        last: [N] the row after its last; not after `first` where there's nothing to multiply.
    """

    tile: Int[Array, " N"]
    expert: Int[Array, " N"]
    first: Int[Array, " N"]
    last: Int[Array, " N"]


def obstacle(
    rows: Float[Array, "M D"], weights: Weights, num_groups: int, out_dtype: DTypeLike, *, named: bool
) -> str | None:
    """Why the kernel can't run for this call, or None. Off a TPU it is taken for programs traced for one, or by name."""
    problem = unfit(rows, weights, num_groups, out_dtype) or axes_left_to_xla()
    if problem is None and platform() != "tpu" and not (named and isinstance(rows, Tracer)):
        return f"the TPU kernel needs a TPU, and the platform is {platform()!r}."
    return problem


def unfit(rows: Float[Array, "M D"], weights: Weights, num_groups: int, out_dtype: DTypeLike) -> str | None:
    """Why no TPU could run this call, or None."""
    num_rows, width = rows.shape
    out_width = weights.shape[1]
    packed = isinstance(weights, Mxfp4)
    found = {"rows have": rows.dtype, "results have": jnp.dtype(out_dtype)}
    if not isinstance(weights, Mxfp4):
        found["weights have"] = weights.dtype
    for what, dtype in found.items():
        if dtype not in (jnp.float32, jnp.bfloat16):
            return f"{what} dtype {dtype}; the TPU kernel takes float32 and bfloat16."
    whole = 2 * LANES if packed else LANES
    if width % whole:
        return f"rows are {width} wide; the TPU kernel takes multiples of {whole}{' for MXFP4' if packed else ''}."
    if out_width % LANES:
        return f"results have {out_width} columns; the TPU kernel takes multiples of {LANES}."
    tuning = _tuned(rows, weights, num_groups, out_dtype)
    if tuning is None:
        return f"rows are {width} wide; blocks of so wide weights don't fit in VMEM."
    if (visits := most_visits(num_rows, num_groups, tuning.rows)) > MOST_VISITS:
        return f"{num_rows} rows of {num_groups} groups may take {visits} visits; the TPU kernel has {MOST_VISITS}."
    return None


def most_visits(num_rows: int, num_groups: int, tile: int) -> int:
    """Visits that any groups of these rows could need: one a tile, and one more for each border within a tile."""
    return -(-num_rows // tile) + min(num_groups, num_rows) - 1


def tuned(
    num_rows: int, num_groups: int, width: int, out_width: int, weight_bytes: float, row_bytes: int, out_bytes: int
) -> Tuning | None:
    """Tiles about as tall as the mean group, and the widest blocks of weights that VMEM holds; None: it holds none.

    Args:
        num_rows: M.
        num_groups: G.
        width: D.
        out_width: F.
        weight_bytes: of a weight in memory, 0.53125 if it is MXFP4.
        row_bytes: of a number of the rows.
        out_bytes: of a number of the result.
    """
    mean = -(-num_rows // num_groups)
    tile = min(max(1 << (mean - 1).bit_length(), SMALLEST_TILE), LARGEST_TILE)
    packed = weight_bytes < 1
    # Two of what is copied; unpacked weights; products in float32, a few at a time.
    fixed = tile * width * row_bytes * (3 if packed else 2)
    column = width * (2 * weight_bytes + (row_bytes if packed else 0)) + tile * (2 * out_bytes + 8)
    if not packed and weight_bytes != row_bytes:
        column += 4 * width  # brought to one dtype
    fits = int((_VMEM - fixed) // column) // LANES
    if fits < 1:
        return None
    # Equal blocks: of 24 lanes' worth, 12 and 12 rather than 16 and 8.
    blocks = -(-out_width // (fits * LANES))
    return Tuning(tile, -(-out_width // (blocks * LANES)) * LANES)


def _tuned(rows: Float[Array, "M D"], weights: Weights, num_groups: int, out_dtype: DTypeLike) -> Tuning | None:
    weight_bytes = 0.5 + 1 / BLOCK if isinstance(weights, Mxfp4) else float(weights.dtype.itemsize)
    sizes = weight_bytes, rows.dtype.itemsize, jnp.dtype(out_dtype).itemsize
    return tuned(rows.shape[0], num_groups, rows.shape[1], weights.shape[1], *sizes)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def grouped_matmul(
    rows: Float[Array, "M D"],
    weights: Weights,
    group_sizes: Int[Array, "G"],
    group_offset: Int[Array, ""],
    out_dtype: DTypeLike,
    tile: int,
    interpret: Any = False,
) -> Float[Array, "M F"]:
    """See `pallas_kernels.grouped_matmul.grouped_matmul`; `tile` is for the gradients, which `xla` computes."""
    del tile
    tuning = _tuned(rows, weights, group_sizes.shape[0], out_dtype)
    assert tuning is not None
    return product(rows, weights, group_sizes, group_offset, out_dtype, tuning, interpret)


def _forward(
    rows: Array,
    weights: Weights,
    group_sizes: Array,
    group_offset: Array,
    out_dtype: DTypeLike,
    tile: int,
    interpret: Any,
) -> tuple[Any, tuple[Array, Weights, Array, Array]]:
    arguments = rows, weights, group_sizes, group_offset
    return grouped_matmul(*arguments, out_dtype, tile, interpret), arguments


def _backward(
    out_dtype: DTypeLike, tile: int, interpret: Any, saved: tuple[Array, Weights, Array, Array], d_result: Array
) -> tuple[Array, Array | None, None, None]:
    del interpret
    rows, weights, group_sizes, group_offset = saved
    if isinstance(weights, Mxfp4):
        _, pull = jax.vjp(
            lambda rows: xla.grouped_matmul(rows, weights, group_sizes, group_offset, out_dtype, tile), rows
        )
        return *pull(d_result), None, None, None
    _, pull = jax.vjp(
        lambda rows, weights: xla.grouped_matmul(rows, weights, group_sizes, group_offset, out_dtype, tile),
        rows,
        weights,
    )
    return *pull(d_result), None, None


grouped_matmul.defvjp(_forward, _backward)


def plan(group_sizes: Int[Array, " G"], group_offset: Int[Array, ""], num_rows: int, tile: int) -> Visits:
    """The visits that these groups need; the last one is repeated without products to the length that any could need."""
    sizes = group_sizes.astype(jnp.int32)
    num_groups, num_tiles = sizes.shape[0], -(-num_rows // tile)
    most = most_visits(num_rows, num_groups, tile)
    ends = jnp.cumsum(sizes)
    begins = ends - sizes
    counts = jnp.where(sizes > 0, jax.lax.div(ends - 1, jnp.int32(tile)) - jax.lax.div(begins, jnp.int32(tile)) + 1, 0)
    upto = jnp.cumsum(counts)
    used, total = upto[-1], ends[-1]
    index = jnp.arange(most, dtype=jnp.int32)
    group = jnp.repeat(jnp.arange(num_groups, dtype=jnp.int32), counts, total_repeat_length=most)
    # Tiles without any group's rows come after all others; past them the last tile stays.
    after = jnp.minimum(jax.lax.div(total + (tile - 1), jnp.int32(tile)) + index - used, num_tiles - 1)
    busy = index < used
    tiles = jnp.where(busy, jax.lax.div(begins[group], jnp.int32(tile)) + index - (upto - counts)[group], after)
    expert = group_offset + group[jnp.minimum(index, jnp.maximum(used - 1, 0))]
    return Visits(tiles, expert, jnp.where(busy, begins[group], 0), jnp.where(busy, ends[group], 0))


@partial(jax.jit, static_argnums=(4, 5, 6))
def product(
    rows: Float[Array, "M D"],
    weights: Weights,
    group_sizes: Int[Array, "G"],
    group_offset: Int[Array, ""],
    out_dtype: DTypeLike,
    tuning: Tuning,
    interpret: Any = False,
) -> Float[Array, "M F"]:
    """The product cut as `tuning` says; `interpret` is Pallas's."""
    (num_rows, width), (_, out_width, _) = rows.shape, weights.shape
    tile, columns = tuning.rows, tuning.columns
    packed = isinstance(weights, Mxfp4)
    visits = plan(group_sizes, jnp.asarray(group_offset, jnp.int32), num_rows, tile)
    # XLA keeps scales input blocks first, so that whole lanes are used: turned, they're the array that is there.
    parts = (weights.packed, jnp.swapaxes(weights.scale, 1, 2)) if isinstance(weights, Mxfp4) else (weights,)
    operands = align(*visits, rows, *parts)
    scratch = []
    if packed:
        scratch = [
            pltpu.VMEM((tile, width), rows.dtype),
            pltpu.VMEM((columns, width // BLOCK), jnp.bfloat16),
            # In strips of 128 inputs, whose rows follow each other in memory: others would be stored half a register a time.
            pltpu.VMEM((width // LANES, columns, LANES), rows.dtype),
        ]

    whole = pl.BlockSpec(
        (None, columns, parts[0].shape[2]), lambda column, visit, _, experts, *__: (experts[visit], column, 0)
    )
    turned = pl.BlockSpec(
        (None, width // BLOCK, columns), lambda column, visit, _, experts, *__: (experts[visit], 0, column)
    )
    read = num_rows * width * rows.dtype.itemsize * -(-out_width // columns)
    read += min(group_sizes.size, num_rows) * sum(part.dtype.itemsize * part.size // part.shape[0] for part in parts)
    return pl.pallas_call(
        partial(_kernel, packed=packed),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(visits),
            grid=(-(-out_width // columns), visits.tile.size),
            in_specs=[
                pl.BlockSpec((tile, width), lambda column, visit, tiles, *_: (tiles[visit], 0)),
                *((whole, turned) if packed else (whole,)),
            ],
            out_specs=pl.BlockSpec((tile, columns), lambda column, visit, tiles, *_: (tiles[visit], column)),
            scratch_shapes=scratch,
        ),
        out_shape=jax.ShapeDtypeStruct(
            (num_rows, out_width), out_dtype, manual_axis_type=jax.typeof(operands[-1]).manual_axis_type
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=_LIMIT),
        cost_estimate=pl.CostEstimate(
            flops=2 * num_rows * width * out_width,
            transcendentals=0,
            bytes_accessed=read + num_rows * out_width * jnp.dtype(out_dtype).itemsize,
        ),
        name="grouped_matmul",
        interpret=interpret,
    )(*operands)


def _kernel(tiles: Any, experts: Any, first: Any, last: Any, rows: Any, *refs: Any, packed: bool) -> None:
    visit = pl.program_id(1)
    before = jnp.maximum(visit - 1, 0)
    new_tile = (visit == 0) | (tiles[visit] != tiles[before])
    busy = first[visit] < last[visit]
    if packed:
        codes, scale, out, parted, factors, unpacked = refs

        @pl.when(((visit == 0) | (experts[visit] != experts[before])) & busy)
        def _() -> None:
            _unpack(codes, scale, factors, unpacked)

        @pl.when(new_tile & busy)
        def _() -> None:
            _part(rows, parted)

        rows = parted
    else:
        weights, out = refs

    @pl.when(new_tile)
    def _() -> None:
        out[...] = jnp.zeros(out.shape, out.dtype)

    @pl.when(busy)
    def _() -> None:
        if packed:
            factor = jnp.concatenate([unpacked[strip] for strip in range(unpacked.shape[0])], axis=1)
        else:
            factor = weights[...]
        dtype = jnp.promote_types(rows.dtype, factor.dtype)
        sums = _dot(rows[...].astype(dtype), factor.astype(dtype), 1, 1).astype(out.dtype)
        row = tiles[visit] * out.shape[0] + jax.lax.broadcasted_iota(jnp.int32, out.shape, 0)
        out[...] = jnp.where((row >= first[visit]) & (row < last[visit]), sums, out[...])


def _part(rows: Any, parted: Any) -> None:
    """Of each 256 columns the even ones first."""
    pair = 2 * LANES
    source = jax.lax.broadcasted_iota(jnp.int32, (pair, pair), 0)
    place = jax.lax.broadcasted_iota(jnp.int32, (pair, pair), 1)
    order = source == jnp.where(place < LANES, 2 * place, 2 * place - pair + 1)
    order = order.astype(jnp.float32).astype(rows.dtype)

    @pl.loop(0, rows.shape[1] // pair)
    def _(chunk: Any) -> None:
        here = pl.ds(pl.multiple_of(chunk * pair, pair), pair)
        parted[:, here] = _dot(rows[:, here], order, 1, 0).astype(parted.dtype)


def _unpack(codes: Any, scale: Any, factors: Any, unpacked: Any) -> None:
    """Weights in the order of `_part`. Half the scale makes up for doubled codes: down to byte 2 it is a normal number.

    It reaches its 16 columns by a product with ones and zeros, which is exact.
    """
    columns = codes.shape[0]
    bits = scale[...].astype(jnp.int32)
    half = jax.lax.bitcast_convert_type((jnp.maximum(bits, 1) - 1) << 23, jnp.float32)
    half = jnp.where(bits == _NAN_SCALE, jnp.nan, half)
    factors[...] = jnp.transpose(half).astype(factors.dtype)
    block = jax.lax.broadcasted_iota(jnp.int32, (scale.shape[0], LANES), 0)
    mine = jax.lax.div(jax.lax.broadcasted_iota(jnp.int32, (scale.shape[0], LANES), 1), BLOCK // 2)
    table = _table()

    @pl.loop(0, codes.shape[1] // LANES)
    def _(chunk: Any) -> None:
        lanes = pl.ds(pl.multiple_of(chunk * LANES, LANES), LANES)
        spread = (block == mine + chunk * (2 * LANES // BLOCK)).astype(jnp.float32).astype(jnp.bfloat16)
        for start in range(0, columns, _AT_ONCE):
            here = pl.ds(start, min(_AT_ONCE, columns - start))
            factor = _dot(factors[here], spread, 1, 0)
            both = codes[here, lanes].astype(jnp.int32)
            pair = _look_up(table, both & 0x7F)
            odd = (pair & ~0xFFFF) ^ ((both & 0x80) << 24)
            for place, bits in enumerate((pair << 16, odd)):
                values = jax.lax.bitcast_convert_type(bits, jnp.float32) * factor
                unpacked[2 * chunk + place, here] = values.astype(unpacked.dtype)


def _table() -> Array:
    """Along the lanes, for the lower seven bits of a byte: twice its even number as bfloat16, above it twice the odd one.

    The odd number's sign is the eighth bit.
    """
    byte = jax.lax.broadcasted_iota(jnp.int32, (8, LANES), 1)

    def twice(code: Array) -> Array:
        value = jnp.zeros(code.shape, jnp.float32)
        for magnitude, number in enumerate(_TWICE):
            value = jnp.where(code & 7 == magnitude, number, value)
        return jax.lax.bitcast_convert_type(jnp.where(code >= 8, -value, value), jnp.int32)

    return jax.lax.shift_right_logical(twice(byte & 0xF), 16) | twice(byte >> 4)


def _look_up(table: Array, places: Array) -> Array:
    """table[0, places], places < 128: a permutation of lanes."""
    rows = jnp.broadcast_to(table[:1], places.shape)
    numbers = jax.lax.GatherDimensionNumbers((), (1,), (1,), (0,), (0,))
    inside = jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS
    return jax.lax.gather(rows, places[..., None], numbers, (1, 1), mode=inside)


def _dot(left: Array, right: Array, left_axis: int, right_axis: int) -> Array:
    """Sums of products over one axis of each, in float32 and from all digits."""
    precision = jax.lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
    contracted = (((left_axis,), (right_axis,)), ((), ()))
    return jax.lax.dot_general(left, right, contracted, precision=precision, preferred_element_type=jnp.float32)
