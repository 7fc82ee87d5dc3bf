"""Pallas for TPUs: rows of the cache are copied from main memory one by one, while those before them are attended.

The grid is (blocks of queries). A query's keys pass by in tiles with the softmax's running maximum; the rows of the next
tile, or of the next query's first one, are on their way meanwhile. A tile in which no key is named is neither copied nor
multiplied.

The smallest piece that a TPU can copy is one row of 32-bit words. Words of a narrower cache hold numbers of neighbouring
rows, two of bfloat16 or four of FP8: all of them are copied, and the kernel keeps one.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.fp8_latent import TILE, Fp8Latent
from pallas_kernels.manual_axes import align, axes_left_to_xla
from pallas_kernels.sparse_mla import xla
from pallas_kernels.target import platform

Latent = Float[Array, "B S LR"] | Fp8Latent

LANES, SUBLANES = 128, 8
QUERIES = 8  # of a block: whole tiles of indices and log-sum-exps
KEYS = 512  # of a tile at most
ROWS = 32  # of the cache, that whole tiles of words have, whatever its numbers
_VMEM = 40 * 2**20


def obstacle(
    q_shape: tuple[int, ...], dtype: DTypeLike, latent: Latent, latent_width: int, *, named: bool
) -> str | None:
    """Why the kernel can't run for queries [B, T, H, L + R] of this dtype, or None.

    Off a TPU it is taken for programs traced for one, or by name.
    """
    problem = unfit(q_shape, dtype, latent, latent_width) or axes_left_to_xla()
    stored = latent.packed if isinstance(latent, Fp8Latent) else latent
    if problem is None and platform() != "tpu" and not (named and isinstance(stored, Tracer)):
        return f"the TPU kernel needs a TPU, and the platform is {platform()!r}."
    return problem


def unfit(q_shape: tuple[int, ...], dtype: DTypeLike, latent: Latent, latent_width: int) -> str | None:
    """Why no TPU could run this call, or None."""
    found = {"queries have": jnp.dtype(dtype)}
    if not isinstance(latent, Fp8Latent):
        found["latents have"] = latent.dtype
    for what, kind in found.items():
        if kind not in (jnp.float32, jnp.bfloat16):
            return f"{what} dtype {kind}; the TPU kernel takes float32 and bfloat16, and FP8 latents."
    if latent_width % LANES:
        return f"values have {latent_width} channels; the TPU kernel takes multiples of {LANES}."
    if isinstance(latent, Fp8Latent) and latent.latent_width != latent_width:
        return (
            f"values have {latent_width} channels, FP8 latents {latent.latent_width}; the TPU kernel takes equal ones."
        )
    if latent.shape[1] % ROWS:
        return f"the cache has {latent.shape[1]} rows; the TPU kernel takes multiples of {ROWS}."
    _, _, heads, width = q_shape
    size, words = jnp.dtype(dtype).itemsize, latent.packed.shape[-1] if isinstance(latent, Fp8Latent) else width
    lanes = -(-words // LANES) * LANES
    block = 2 * QUERIES * heads * (width + latent_width) * size
    tile = KEYS * lanes * (2 * 4 + 3 * 4) + heads * (2 * latent_width + 4 * KEYS) * 4
    if block + tile > _VMEM:
        return f"{heads} heads of {width} channels don't fit in VMEM."
    return None


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5, 6))
def sparse_mla(
    q: Float[Array, "B T H LR"],
    latent: Latent,
    indices: Int[Array, "B T C"],
    latent_width: int,
    scale: float,
    budget_bytes: int,
    interpret: Any = False,
) -> tuple[Float[Array, "B T H L"], Float[Array, "B T H"]]:
    """See `pallas_kernels.sparse_mla.sparse_mla`; `budget_bytes` is for the gradients, which `xla` computes."""
    del budget_bytes
    return attend(q, latent, indices, latent_width, scale, interpret)


def _forward(
    q: Array, latent: Latent, indices: Array, latent_width: int, scale: float, budget_bytes: int, interpret: Any
) -> tuple[tuple[Array, Array], tuple[Array, Latent, Array]]:
    return sparse_mla(q, latent, indices, latent_width, scale, budget_bytes, interpret), (q, latent, indices)


def _backward(
    latent_width: int,
    scale: float,
    budget_bytes: int,
    interpret: Any,
    saved: tuple[Array, Latent, Array],
    grads: tuple[Array, Array],
) -> tuple[Array, Array | None, None]:
    del interpret
    q, latent, indices = saved
    run = partial(xla.sparse_mla, latent_width=latent_width, scale=scale, budget_bytes=budget_bytes)
    if isinstance(latent, Fp8Latent):
        _, pull = jax.vjp(lambda q: run(q, latent, indices), q)
        return *pull(grads), None, None
    _, pull = jax.vjp(lambda q, latent: run(q, latent, indices), q, latent)
    return *pull(grads), None


sparse_mla.defvjp(_forward, _backward)


@partial(jax.jit, static_argnums=(3, 4, 5, 6))
def attend(
    q: Float[Array, "B T H LR"],
    latent: Latent,
    indices: Int[Array, "B T C"],
    latent_width: int,
    scale: float,
    interpret: Any = False,
    most_keys: int = KEYS,
) -> tuple[Float[Array, "B T H L"], Float[Array, "B T H"]]:
    """The kernel, with at most so many keys in a tile; `interpret` is Pallas's."""
    (batch, tokens, heads, width), keys = q.shape, indices.shape[2]
    packed = isinstance(latent, Fp8Latent)
    stored = latent.packed if isinstance(latent, Fp8Latent) else latent
    num_rows, words = stored.shape[1:]
    queries = batch * tokens
    if not queries or not keys:
        return jnp.zeros_like(q[..., :latent_width]), jnp.full_like(q[..., 0], -jnp.inf, jnp.float32)
    tile = min(most_keys, -(-keys // LANES) * LANES)
    indices = indices.reshape(queries, keys)
    if keys % tile:
        indices = jnp.pad(indices, ((0, 0), (0, -keys % tile)), constant_values=-1)
    together = 4 // stored.dtype.itemsize
    block = min(QUERIES, queries)
    blocks = -(-queries // block)
    # Where to copy from, in one line: a program that issues copies has two scalar units, and each operation counts.
    places = jnp.pad(jnp.clip(indices, 0, num_rows - 1) // together, ((0, blocks * block - queries), (0, 0)))
    places = places.reshape(blocks, 1, -1)
    if interpret:  # the interpreter knows no references to the words of an array
        stored = _words(stored, together)
    operands = align(places, indices, q.reshape(queries, heads, width), stored)
    varying = jax.typeof(operands[-1]).manual_axis_type

    def each(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((block, *shape), lambda block: (block, *(0 for _ in shape)))

    pairs = queries * keys * heads
    o, lse = pl.pallas_call(
        partial(
            _kernel,
            tokens=tokens,
            queries=queries,
            num_rows=num_rows,
            together=together,
            latent_width=latent_width,
            packed=packed,
            scale=scale,
        ),
        grid=(blocks,),
        in_specs=[
            pl.BlockSpec((None, 1, places.shape[2]), lambda block: (block, 0, 0), memory_space=pltpu.SMEM),
            each(indices.shape[1]),
            each(heads, width),
            pl.BlockSpec(memory_space=pl.ANY),
        ],
        out_specs=[each(heads, latent_width), each(heads)],
        out_shape=[
            jax.ShapeDtypeStruct((queries, heads, latent_width), q.dtype, manual_axis_type=varying),
            jax.ShapeDtypeStruct((queries, heads), jnp.float32, manual_axis_type=varying),
        ],
        scratch_shapes=[
            pltpu.VMEM((2, tile // SUBLANES, SUBLANES, words), jnp.uint32),
            pltpu.SemaphoreType.DMA((2,)),
            pltpu.VMEM((heads, latent_width), jnp.float32),
            pltpu.VMEM((heads, LANES), jnp.float32),
            pltpu.VMEM((heads, LANES), jnp.float32),
        ],
        # Positions are clipped: there is nothing to check at every copy.
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), vmem_limit_bytes=_VMEM, disable_bounds_checks=True
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * pairs * (width + latent_width),
            transcendentals=pairs,
            bytes_accessed=4 * queries * keys * words + sum(x.size * x.dtype.itemsize for x in operands[:3]),
        ),
        name="sparse_mla",
        interpret=interpret,
    )(*operands)
    return o.reshape(batch, tokens, heads, latent_width), lse.reshape(batch, tokens, heads)


def _words(stored: Array, together: int) -> Array:
    """[B, S / together, W] 32-bit words, as a TPU keeps [B, S, W] numbers: those of neighbouring rows in one word."""
    batch, num_rows, width = stored.shape
    rows = stored.reshape(batch, num_rows // together, together, width)
    if together == 1:
        return jax.lax.bitcast_convert_type(stored, jnp.uint32)
    return jax.lax.bitcast_convert_type(jnp.swapaxes(rows, 2, 3), jnp.uint32)


def _kernel(
    places: Any,
    indices: Any,
    q: Any,
    cache: Any,
    o: Any,
    lse: Any,
    rows: Any,
    arrived: Any,
    mixture: Any,
    highest: Any,
    mass: Any,
    *,
    tokens: int,
    queries: int,
    num_rows: int,
    together: int,
    latent_width: int,
    packed: bool,
    scale: float,
) -> None:
    block, tile = q.shape[0], rows.shape[1] * SUBLANES
    tiles = indices.shape[1] // tile
    steps, first = block * tiles, pl.program_id(0) * block
    words = cache if cache.dtype == jnp.uint32 else cache.bitcast(jnp.uint32)

    def place(step: Any) -> tuple[Any, Any]:
        query = jax.lax.div(step, tiles)
        return query, pl.multiple_of((step - query * tiles) * tile, LANES)

    def chosen(step: Any) -> Array:
        query, start = place(step)
        return indices[pl.ds(query, 1), pl.ds(start, tile)]

    def inside(rows: Array) -> Array:
        return (rows >= 0) & (rows < num_rows)

    def wanted(step: Any) -> Any:
        named = jnp.max(inside(chosen(step)).astype(jnp.float32)) > 0
        return named & (first + place(step)[0] < queries)

    def for_each_copy(step: Any, act: Callable[[Any], None]) -> None:
        sequence = words.at[jax.lax.div(first + place(step)[0], tokens)]
        here, signal = rows.at[step & 1], arrived.at[step & 1]

        @pl.loop(0, tile // SUBLANES)
        def _(eight: Any) -> None:
            for key in range(SUBLANES):
                word = places[0, step * tile + eight * SUBLANES + key]
                act(pltpu.make_async_copy(sequence.at[pl.ds(word, 1), :], here.at[eight, pl.ds(key, 1), :], signal))

    def fetch(step: Any) -> Any:
        # There is none after the last one; its indices are read again, and nothing is copied.
        found = wanted(jnp.minimum(step, steps - 1)) & (step < steps)

        @pl.when(found)
        def _() -> None:
            for_each_copy(step, lambda copy: copy.start())

        return found

    def attend(step: Any, here: Any) -> Any:
        query, start = place(step)
        following = fetch(step + 1)

        @pl.when(start == 0)
        def _() -> None:
            mixture[...] = jnp.zeros(mixture.shape, mixture.dtype)
            highest[...] = jnp.full(highest.shape, -jnp.inf, highest.dtype)
            mass[...] = jnp.zeros(mass.shape, mass.dtype)

        @pl.when(here)
        def _() -> None:
            for_each_copy(step, lambda copy: copy.wait())
            lying = chosen(step)
            standing = jnp.transpose(jnp.broadcast_to(lying, (QUERIES, tile)))[:, :1]
            mine = rows[step & 1].reshape(tile, rows.shape[3])
            shift = (standing & (together - 1)) * (32 // together)
            whole = _latents if packed else _numbers
            parts = whole(mine, shift, inside(standing), latent_width, together)
            parts = [part.astype(q.dtype) for part in parts]
            begin, scores = 0, jnp.zeros((q.shape[1], tile), jnp.float32)
            for part in parts:
                scores += _dot(q[query, :, begin : begin + part.shape[1]], part, 1)
                begin += part.shape[1]
            scores = jnp.where(inside(lying), scores * scale, -jnp.inf)
            before = highest[:, :1]
            above = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
            anchor = jnp.where(above == -jnp.inf, 0, above)  # scores may be -inf themselves
            kept, new = jnp.exp(before - anchor), jnp.exp(scores - anchor)
            mass[...] = jnp.broadcast_to(mass[:, :1] * kept + jnp.sum(new, axis=1, keepdims=True), mass.shape)
            highest[...] = jnp.broadcast_to(above, highest.shape)
            mixture[...] = mixture[...] * kept + _dot(new.astype(q.dtype), parts[0][:, :latent_width], 0)

        @pl.when(start == (tiles - 1) * tile)
        def _() -> None:
            total = mass[:, :1]
            some = jnp.where(total == 0, 1, total)
            o[query] = (mixture[...] / some).astype(o.dtype)
            sums = jnp.where(total == 0, -jnp.inf, highest[:, :1] + jnp.log(some))
            # A column turned into a row: all but its diagonal is left out.
            heads = sums.shape[0]
            row, column = (jax.lax.broadcasted_iota(jnp.int32, (heads, heads), axis) for axis in (0, 1))
            lse[pl.ds(query, 1), :] = jnp.sum(jnp.where(row == column, sums, 0), axis=0, keepdims=True)

        return following

    jax.lax.fori_loop(0, steps, attend, fetch(jnp.int32(0)))


def _numbers(words: Array, shift: Array, valid: Array, latent_width: int, together: int) -> list[Array]:
    """The rows, in float32; zeros where no row is named, because memory may hold NaN there."""
    del latent_width
    bits = words
    if together == 2:
        bits = jax.lax.shift_right_logical(bits, jnp.broadcast_to(shift, bits.shape).astype(jnp.uint32)) << 16
    return [jnp.where(valid, jax.lax.bitcast_convert_type(bits, jnp.float32), 0)]


def _latents(words: Array, shift: Array, valid: Array, latent_width: int, together: int) -> list[Array]:
    """As `_numbers`, of FP8 latents: [latent, slot]. Bytes of wider numbers are put together by exact products."""
    tiles = latent_width // TILE

    def take(start: int, size: int) -> Array:
        part = jax.lax.bitcast_convert_type(words[:, start : start + size], jnp.int32)
        return jax.lax.shift_right_logical(part, jnp.broadcast_to(shift, part.shape)) & 0xFF

    rest = words.shape[1] - latent_width
    tail = take(latent_width, rest).astype(jnp.float32).astype(jnp.bfloat16)

    def halves(width: int, low: Any) -> Array:
        """The byte that `low` of a column names plus 256 times the one after it."""
        byte, column = (jax.lax.broadcasted_iota(jnp.int32, (rest, width), axis) for axis in (0, 1))
        at = low(column)
        weight = jnp.where(byte == at, 1.0, jnp.where(byte == at + 1, 256.0, 0.0)).astype(jnp.bfloat16)
        return _dot(tail, weight, 0).astype(jnp.int32)

    low = halves(latent_width, lambda column: 4 * jax.lax.div(column, TILE))
    high = halves(latent_width, lambda column: 4 * jax.lax.div(column, TILE) + 2)
    scale = jax.lax.bitcast_convert_type(high << 16 | low, jnp.float32)
    slot = jax.lax.bitcast_convert_type(halves((rest - 4 * tiles) // 2, lambda i: 4 * tiles + 2 * i) << 16, jnp.float32)
    # A table of all magnitudes lies along the lanes; a lookup is one permutation of them.
    table = _e4m3(jax.lax.broadcasted_iota(jnp.int32, (words.shape[0], TILE), 1))
    latent = []
    for tile in range(tiles):
        code = take(tile * TILE, TILE)
        value = jnp.take_along_axis(table, code & 0x7F, axis=1)
        value = jnp.where(code >= 0x80, -value, value)
        latent.append(value * scale[:, tile * TILE : (tile + 1) * TILE])
    return [jnp.where(valid, part, 0) for part in (jnp.concatenate(latent, axis=1), slot)]


def _e4m3(code: Array) -> Array:
    """Of codes 0..127. Subnormal ones are what remains of 2^-6 (1 + m / 8) without its 1: no bits of float32 are."""
    bits = jnp.maximum(code, code & 7 | 8) << 20
    value = jax.lax.bitcast_convert_type(bits + (120 << 23), jnp.float32)
    value = jnp.where(code < 8, value - 2.0**-6, value)
    return jnp.where(code == 0x7F, jnp.nan, value)


def _dot(left: Array, right: Array, axis: int) -> Array:
    """Sums of products over the last axis of `left` and an axis of `right`, in float32 and from all digits."""
    precision = jax.lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
    contracted = (((1,), (axis,)), ((), ()))
    return jax.lax.dot_general(left, right, contracted, precision=precision, preferred_element_type=jnp.float32)
