"""Pallas for TPUs: scores of a block of queries stay in VMEM, where they are selected from.

The grid is (rows, blocks of queries, tiles of keys). A tile is scored as it arrives; after the last one that the block
sees, its queries are selected for, eight at a time. Nothing but positions leaves the chip.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.lightning_indexer.pages import PagedKeys
from pallas_kernels.lightning_indexer.tpu_kernel import BYTES, TOGETHER, Shape, run
from pallas_kernels.lightning_indexer.tpu_pages import unfit_pages
from pallas_kernels.lightning_indexer.tpu_select import LANES, SUBLANES, TILE, WORD
from pallas_kernels.manual_axes import align, axes_left_to_xla
from pallas_kernels.mxfp8 import BLOCK, Mxfp8
from pallas_kernels.target import platform

Queries = Float[Array, "B T H K"] | Mxfp8
Keys = Float[Array, "B S K"] | Mxfp8 | PagedKeys

MOST, MOST_KEYS, WIDEST, MOST_HEADS = 2048, 2**20, 256, 64
_QUERIES = (32, 16, 8)
"""Queries of a block: with more of them a key that is read does more, and fewer keys fit."""

_SCORES = 16 * 2**20
"""Bytes of VMEM for scores, where more than eight queries are to share them."""

_ELSE = 12 * 2**20
"""Bytes of VMEM beside scores and what comes and goes."""


def obstacle(q: Queries, k: Keys, w: Float[Array, "B T H"], top_k: int, named: bool) -> str | None:
    """Why the kernel can't run for this call, or None. Off a TPU it is taken for programs traced for one, or by name."""
    if isinstance(k, PagedKeys) and k.joined:
        return "pages are bytes; the TPU kernel takes MXFP8 pages as Mxfp8, whose scales lie apart."
    keys = k.pages if isinstance(k, PagedKeys) else k
    for name, x in {"q": q, "k": keys}.items():
        if not isinstance(x, Mxfp8) and x.dtype not in (jnp.float32, jnp.bfloat16):
            return f"{name} has dtype {x.dtype}; the TPU kernel takes float32, bfloat16 and MXFP8."
    if w.dtype != jnp.float32:
        return f"w has dtype {w.dtype}; the TPU kernel sums in float32."
    if q.shape[2] > MOST_HEADS or q.shape[3] > WIDEST:
        return (
            f"there are {q.shape[2]} heads of {q.shape[3]}; the TPU kernel takes up to {MOST_HEADS} of up to {WIDEST}."
        )
    if top_k > MOST:
        return f"top_k={top_k}; the TPU kernel selects at most {MOST}."
    if k.shape[1] > MOST_KEYS:
        return f"there are {k.shape[1]} keys a row; VMEM holds the scores of {MOST_KEYS} for eight queries."
    if isinstance(k, PagedKeys) and (unfit := unfit_pages(k.page, k.width, k.mxfp8)) is not None:
        return unfit
    if (left := axes_left_to_xla()) is not None:
        return left
    if platform() != "tpu" and not (named and isinstance(w, Tracer)):
        return f"the TPU kernel needs a TPU, and the platform is {platform()!r}."
    return None


@partial(jax.jit, static_argnames=("top_k", "interpret"))
def lightning_indexer(
    q: Queries,
    k: Keys,
    w: Float[Array, "B T H"],
    *,
    top_k: int,
    q_positions: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"] | None = None,
    key_segment_ids: Int[Array, "B S"] | None = None,
    interpret: Any = False,
) -> Int[Array, "B T C"]:
    """See `pallas_kernels.lightning_indexer.lightning_indexer`; `interpret` is Pallas's, to run it elsewhere."""
    q, k, w = jax.lax.stop_gradient((q, k, w))
    batch, num_queries, heads, width = q.shape
    num_keys = k.shape[1]
    tiles = -(-num_keys // TILE)
    together = next((rows for rows in _QUERIES if 4 * rows * tiles * TILE <= _SCORES), _QUERIES[-1])
    together = min(num_queries, together)
    paged = isinstance(k, PagedKeys)
    stored: Any = k.pages if isinstance(k, PagedKeys) else k
    segmented = segment_ids is not None and key_segment_ids is not None
    shape = Shape(
        rows=together,
        blocks=-(-num_queries // together),
        heads=heads,
        width=width,
        keys=min(TILE, -(-num_keys // TOGETHER) * TOGETHER),
        top_k=top_k,
        low=(isinstance(q, Mxfp8), isinstance(stored, Mxfp8)),
        segmented=segmented,
        paged=paged,
    )
    positions = jnp.minimum(q_positions.astype(jnp.int32), num_keys - 1)
    # What a query has besides its vectors, in one array with queries along lanes: few lanes would take as much memory as
    # 128. Queries that the last block lacks see nothing.
    numbers = [positions[:, None], jnp.swapaxes(jax.lax.bitcast_convert_type(w, jnp.int32), 1, 2)]
    if segmented:
        assert segment_ids is not None
        numbers.append(segment_ids.astype(jnp.int32)[:, None])
    if isinstance(q, Mxfp8):
        numbers.append(jnp.swapaxes(_scale_words(q.scale).reshape(batch, num_queries, -1), 1, 2))
    joined = jnp.concatenate(numbers, axis=1)
    joined = jnp.pad(joined, ((0, 0), (0, 0), (0, -num_queries % LANES)), constant_values=-1)
    padded = jnp.pad(positions, ((0, 0), (0, shape.blocks * shape.rows - num_queries)), constant_values=-1)
    ends = 1 + jnp.max(padded.reshape(batch * shape.blocks, shape.rows), axis=1)

    def per_query(rows: int, *sizes: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, rows, *sizes), lambda row, block, tile, ends: (row, block, *(0 for _ in sizes)))

    def tile_of(row: Any, block: Any, tile: Any, ends: Any, scored: bool) -> Any:
        """The tile itself, or the last one that is needed, which is there already."""
        end = ends[row * shape.blocks + block]
        last = jnp.maximum(end - 1, 0) >> (TILE.bit_length() - 1)
        return jnp.minimum(tile, jnp.where(end > top_k, last, 0) if scored else last)

    def per_key(sublanes: int, scored: bool) -> pl.BlockSpec:
        return pl.BlockSpec(
            (1, sublanes, shape.keys), lambda row, block, tile, ends: (row, 0, tile_of(row, block, tile, ends, scored))
        )

    keys = pl.BlockSpec(
        (1, shape.keys, width), lambda row, block, tile, ends: (row, tile_of(row, block, tile, ends, True), 0)
    )
    lanes = pl.BlockSpec(
        (1, joined.shape[1], LANES),
        lambda row, block, tile, ends: (row, 0, block * shape.rows >> (LANES.bit_length() - 1)),
    )
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    inputs = [joined, _elements(q), _elements(stored)]
    specs = [lanes, per_query(shape.rows, heads, width), anywhere if paged else keys]
    if isinstance(stored, Mxfp8):
        inputs.append(jnp.swapaxes(jnp.asarray(stored.scale), 1, 2))
        specs.append(anywhere if paged else per_key(inputs[-1].shape[1], True))
    if segmented:
        assert key_segment_ids is not None
        inputs.append(key_segment_ids.astype(jnp.int32)[:, None])
        specs.append(per_key(1, False))
    scratch = []
    if isinstance(k, PagedKeys):
        inputs.append(k.page_table[:, None])
        of_row = pl.BlockSpec(
            (1, 1, k.page_table.shape[1]), lambda row, block, tile, ends: (row, 0, 0), memory_space=pltpu.SMEM
        )
        specs.append(of_row)
        scratch += [
            pltpu.VMEM((2, shape.keys, width), _elements(stored).dtype),
            pltpu.SemaphoreType.DMA((2, 2)),
        ]
        if isinstance(stored, Mxfp8):
            scratch.append(pltpu.VMEM((2, shape.keys // k.page, *inputs[3].shape[1:]), jnp.uint8))
    operands = align(ends, *inputs)
    exact = any(not isinstance(x, Mxfp8) and x.dtype == jnp.float32 for x in (q, stored))
    dtype = jnp.dtype(jnp.float32 if exact else jnp.bfloat16)
    chosen = jax.ShapeDtypeStruct(
        (batch, num_queries, top_k), jnp.int32, manual_axis_type=jax.typeof(operands[0]).manual_axis_type
    )
    key_bytes = width + width // BLOCK if shape.low[1] else width * _elements(stored).dtype.itemsize
    scores = 4 * shape.groups * SUBLANES * tiles * TILE
    return pl.pallas_call(
        partial(run, shape=shape),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, shape.blocks, tiles),
            in_specs=specs,
            out_specs=per_query(shape.rows, top_k),
            scratch_shapes=[
                pltpu.VMEM((LANES, joined.shape[1]), jnp.int32),
                pltpu.VMEM((shape.groups, heads * SUBLANES, width), dtype),
                pltpu.VMEM((shape.groups, heads, SUBLANES, LANES), jnp.float32),
                pltpu.VMEM((shape.groups, 2, SUBLANES, LANES), jnp.int32),
                pltpu.VMEM((shape.groups, tiles, WORD, SUBLANES, LANES), jnp.int32),
                pltpu.VMEM((tiles, SUBLANES, LANES), jnp.int32),
                pltpu.VMEM((-(-top_k // LANES), SUBLANES, LANES), jnp.int32),
                *scratch,
            ],
        ),
        out_shape=chosen,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=scores + 16 * shape.keys * max(width, LANES) + _ELSE,
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * batch * num_queries * num_keys * heads * (width + 2),
            transcendentals=0,
            bytes_accessed=shape.blocks * batch * num_keys * key_bytes + 4 * chosen.size,
        ),
        name="lightning_indexer",
        interpret=interpret,
    )(*operands)


def _elements(x: jax.Array | Mxfp8) -> jax.Array:
    return x.elements if isinstance(x, Mxfp8) else x


def _scale_words(scale: jax.Array) -> jax.Array:
    """Scales [..., G] as [..., ceil(G / 4)] integers of four of them each, the first one lowest."""
    *outer, groups = scale.shape
    scale = jnp.pad(scale, (*(((0, 0),) * len(outer)), (0, -groups % BYTES))).astype(jnp.int32)
    parts = scale.reshape(*outer, -1, BYTES)
    return sum((parts[..., i] << (8 * i) for i in range(1, BYTES)), start=parts[..., 0])
