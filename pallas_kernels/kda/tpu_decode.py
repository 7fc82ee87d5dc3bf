"""One token of KDA for many sequences on a TPU, with their states in a pool that is read once and written in place.

The grid is (blocks of heads, rows); a step moves one slot's states of a block of heads from the pool to VMEM and back.
Their arithmetic is a few operations an entry, and all of it runs on the vector unit in float32. What S^T q becomes by the
write is known beforehand, q·k times u: so the state is read once.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kda.tpu_prefill import SUBLANES
from pallas_kernels.manual_axes import align

LEAVE, ADVANCE, COPY = 0, 1, 2  # what to do with a row's state
VMEM = 2**23  # bytes for states: a block comes and a block goes while another one is worked on


def fits(heads: int, width: int, values: int) -> bool:
    """Whether VMEM holds the states of a block of heads, four times."""
    return 16 * _block(heads) * width * values <= VMEM


def decode(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    pool: jax.Array,
    slots: jax.Array,
    *,
    scale: float,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Advances the states of `slots` by one token each, in place where the caller donates the pool.

    Args:
        q: [B, H, K], as `pallas_kernels.kda.kda` takes it.
        k: [B, H, K].
        v: [B, H, V].
        g: [B, H, K].
        beta: [B, H].
        pool: [N, H, K, V], float32.
        slots: [B] integers, no slot twice; -1 for a row of padding, which may hold anything and touches no slot.
        scale: of q.
        interpret: Pallas's.

    Returns:
        (o [B, H, V] in the dtype of v, 0 at padding; the pool).
    """
    slots = slots.astype(jnp.int32)
    real = slots >= 0
    # A row of padding names the slot of the last real row before it: the same block again, which isn't moved. Ahead of
    # the first real row it names that row's, and if there is none slot 0, which is then written as it was read.
    last = jax.lax.cummax(jnp.where(real, jnp.arange(slots.size), -1))
    nearest = jnp.where(last >= 0, last, jnp.argmax(real))
    what = jnp.where(real, ADVANCE, jnp.where(last >= 0, LEAVE, COPY))
    return _call(q, k, v, g, beta, pool, jnp.maximum(slots[nearest], 0), what, scale, interpret, in_place=True)


def one_token(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    valid: jax.Array | None,
    *,
    scale: float,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """As `decode`, with the state [B, H, K, V] of every row, which is left as it is where a row isn't valid."""
    rows = jnp.arange(q.shape[0], dtype=jnp.int32)
    what = jnp.full_like(rows, ADVANCE) if valid is None else jnp.where(valid, ADVANCE, COPY)
    return _call(q, k, v, g, beta, state, rows, what, scale, interpret, in_place=False)


@partial(jax.jit, static_argnames=("scale", "interpret", "in_place"))
def _call(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    pool: jax.Array,
    slots: jax.Array,
    what: jax.Array,
    scale: float,
    interpret: Any,
    in_place: bool,
) -> tuple[jax.Array, jax.Array]:
    batch, heads, width = q.shape
    values = v.shape[-1]
    block = _block(heads)

    def tokens(size: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, block, size), lambda block, row, *_: (row, block, 0))

    states = pl.BlockSpec((1, block, width, values), lambda block, row, slots, _: (slots[row], block, 0, 0))
    operands = align(slots, what.astype(jnp.int32), q, k, v, g, beta[..., None], pool)
    varying = jax.typeof(pool := operands[-1]).manual_axis_type
    result = [
        jax.ShapeDtypeStruct(v.shape, v.dtype, manual_axis_type=varying),
        jax.ShapeDtypeStruct(pool.shape, pool.dtype, manual_axis_type=varying),
    ]
    moved = 2 * batch * heads * width * values * pool.dtype.itemsize
    o, pool = pl.pallas_call(
        partial(_kernel, scale=scale),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(heads // block, batch),
            in_specs=[tokens(width), tokens(width), tokens(values), tokens(width), tokens(1), states],
            out_specs=[tokens(values), states],
        ),
        out_shape=result,
        input_output_aliases={len(operands) - 1: 1} if in_place else {},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=8 * batch * heads * width * values,
            transcendentals=q.size,
            bytes_accessed=moved + sum(x.size * x.dtype.itemsize for x in (*operands[:-1], result[0])),
        ),
        name="kda_decode",
        interpret=interpret,
    )(*operands)
    return o, pool


def _block(heads: int) -> int:
    """Heads of a block: a part of them has to fill the tiles of [B, H, K]."""
    return next((n for n in (2 * SUBLANES, SUBLANES) if heads % n == 0), heads)


def _kernel(
    _: Any, what: Any, q: Any, k: Any, v: Any, g: Any, beta: Any, before: Any, o: Any, after: Any, *, scale: float
) -> None:
    order = what[pl.program_id(1)]

    @pl.when(order == ADVANCE)
    def advance() -> None:
        queries, keys, new = (x[0].astype(jnp.float32) for x in (q, k, v))
        decay = jnp.exp(g[0])
        block = queries.shape[0]
        # Channels of a key lie along lanes, and have to lie along the rows of a state: the most costly part.
        columns = jnp.transpose(jnp.concatenate([queries, keys, decay], axis=0))
        overlap = jnp.sum(queries * keys, axis=-1, keepdims=True)
        outputs = []
        for head in range(block):
            query, key, keep = (columns[:, i * block + head : i * block + head + 1] for i in range(3))
            one = slice(head, head + 1)
            decayed = keep * before[0, head]
            u = beta[0, one] * (new[one] - jnp.sum(key * decayed, axis=0, keepdims=True))
            outputs.append(scale * (jnp.sum(query * decayed, axis=0, keepdims=True) + overlap[one] * u))
            after[0, head] = decayed + key * u
        o[0] = jnp.concatenate(outputs, axis=0).astype(o.dtype)

    @pl.when(order != ADVANCE)
    def clear() -> None:
        o[...] = jnp.zeros(o.shape, o.dtype)

    @pl.when(order == COPY)
    def copy() -> None:
        after[...] = before[...]
