"""A window of KDA tokens on slots of a pool on a TPU without writing states, and folding what was accepted of it.

The grid is (blocks of heads, rows); a step brings one slot's states of a block of heads to VMEM, and its records. The
product of the window's rows with a state and the fold of records run on the matrix unit with all digits of float32, the
rest, pairs of tokens and the triangular system, on the vector unit.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kda.tpu_prefill import SUBLANES
from pallas_kernels.manual_axes import align

Records = tuple[jax.Array, jax.Array, jax.Array]
_EXACT = jax.lax.Precision.HIGHEST
_LEAVE, _COPY = -1, -2


@partial(jax.jit, static_argnames=("scale", "interpret"))
def verify(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    pool: jax.Array,
    recorded: Records,
    slots: jax.Array,
    committed: jax.Array,
    *,
    scale: float,
    interpret: Any = False,
) -> tuple[jax.Array, Records]:
    """As `kda_verify`: (o [B, n, H, V], recorded), in place where the caller donates the records."""
    batch, tokens, heads, width = q.shape
    values, capacity = v.shape[-1], recorded[0].shape[2]
    block = _block(heads)

    def window(size: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, tokens, block, size), lambda block, row, *_: (row, 0, block, 0))

    def past(size: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, block, capacity, size), lambda block, row, slots, *_: (slots[row], block, 0, 0))

    states = pl.BlockSpec((1, block, width, values), lambda block, row, slots, *_: (slots[row], block, 0, 0))
    operands = align(*_orders(slots, committed), q, k, v, g, beta[..., None], pool, *recorded)
    varying = jax.typeof(operands[-1]).manual_axis_type
    kinds = (v, *recorded)
    o, *after = pl.pallas_call(
        partial(_verify, scale=scale),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(heads // block, batch),
            in_specs=[
                *(window(size) for size in (width, width, values, width, 1)),
                states,
                *(past(size) for size in (width, values, width)),
            ],
            out_specs=[window(values), *(past(size) for size in (width, values, width))],
            scratch_shapes=[pltpu.VMEM((capacity + tokens, values), jnp.float32)],
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=varying) for x in kinds],
        input_output_aliases={len(operands) - 3 + which: 1 + which for which in range(3)},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=4 * batch * tokens * heads * width * values,
            transcendentals=batch * tokens * heads * width * (capacity + tokens),
            bytes_accessed=batch * heads * width * values * 4 + sum(x.size * x.dtype.itemsize for x in operands[2:7]),
        ),
        name="kda_verify",
        interpret=interpret,
    )(*operands)
    return o, (after[0], after[1], after[2])


@partial(jax.jit, static_argnames=("interpret",))
def commit(
    pool: jax.Array, recorded: Records, slots: jax.Array, counts: jax.Array, *, interpret: Any = False
) -> jax.Array:
    """As `kda_commit`; in place where the caller donates the pool."""
    heads, width, values = pool.shape[1:]
    batch, capacity = slots.shape[0], recorded[0].shape[2]
    block = _block(heads)

    def past(size: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, block, capacity, size), lambda block, row, slots, *_: (slots[row], block, 0, 0))

    states = pl.BlockSpec((1, block, width, values), lambda block, row, slots, *_: (slots[row], block, 0, 0))
    operands = align(*_orders(slots, counts), *recorded, pool)
    moved = 2 * batch * heads * width * values * 4
    return pl.pallas_call(
        _commit,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(heads // block, batch),
            in_specs=[past(width), past(values), past(width), states],
            out_specs=states,
        ),
        out_shape=jax.ShapeDtypeStruct(
            pool.shape, pool.dtype, manual_axis_type=jax.typeof(operands[-1]).manual_axis_type
        ),
        input_output_aliases={len(operands) - 1: 0},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=2 * batch * capacity * heads * width * values, transcendentals=0, bytes_accessed=moved
        ),
        name="kda_commit",
        interpret=interpret,
    )(*operands)


def _orders(slots: jax.Array, counts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(the slot of each row's blocks, its count or, at padding, `_LEAVE` or `_COPY`).

    A row of padding names the slot of the last real row before it: the same blocks again, which aren't moved. Ahead of the
    first real row it names that row's, and if there is none slot 0: these are written as they were read.
    """
    real = slots >= 0
    last = jax.lax.cummax(jnp.where(real, jnp.arange(slots.size), -1))
    known = jnp.maximum(slots[jnp.where(last >= 0, last, jnp.argmax(real))], 0)
    orders = jnp.where(real, counts, jnp.where(last >= 0, _LEAVE, _COPY))
    return known.astype(jnp.int32), orders.astype(jnp.int32)


def _block(heads: int) -> int:
    """Heads of a block: a part of them has to fill the tiles of [B, H, K]."""
    return SUBLANES if heads % SUBLANES == 0 else heads


def _verify(
    _: Any,
    counts: Any,
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    state: Any,
    past_k: Any,
    past_u: Any,
    past_g: Any,
    o: Any,
    after_k: Any,
    after_u: Any,
    after_g: Any,
    written: Any,
    *,
    scale: float,
) -> None:
    count = counts[pl.program_id(1)]
    tokens, block, capacity = q.shape[1], q.shape[2], past_k.shape[2]

    @pl.when(count < 0)
    def clear() -> None:
        o[...] = jnp.zeros(o.shape, o.dtype)

    @pl.when(count == _COPY)
    def copy() -> None:
        for before, after in ((past_k, after_k), (past_u, after_u), (past_g, after_g)):
            after[...] = before[...]

    @pl.when(count >= 0)
    def compute() -> None:
        place = jax.lax.broadcasted_iota(jnp.int32, (capacity + tokens, 1), 0)
        old = place[:capacity] < count
        sums = jax.lax.broadcasted_iota(jnp.int32, (capacity + tokens,) * 2, 0)
        sums = (sums >= jax.lax.broadcasted_iota(jnp.int32, sums.shape, 1)).astype(jnp.float32)
        for head in range(block):
            # Records that don't count may hold anything.
            past = [jnp.where(old, x[0, head].astype(jnp.float32), 0.0) for x in (past_k, past_u, past_g)]
            queries, keys, new, decays = (x[0, :, head].astype(jnp.float32) for x in (q, k, v, g))
            strength = beta[0, :, head]
            total = _dot(sums, jnp.concatenate([past[2], decays]))
            own, all_keys = total[capacity:], jnp.concatenate([past[0], keys])
            grown = jnp.exp(own)
            read = _dot(jnp.concatenate([keys * grown, queries * grown]), state[0, head])
            written[:capacity] = past[1]
            written[capacity:] = jnp.zeros((tokens, written.shape[1]), jnp.float32)
            for token in range(tokens):
                one = slice(token, token + 1)
                counted = (place < count) | ((place >= capacity) & (place <= capacity + token))
                decayed = all_keys * jnp.exp(jnp.where(counted, own[one] - total, -jnp.inf))
                mix = jnp.sum(keys[one] * decayed, axis=-1, keepdims=True)
                expected = read[one] + jnp.sum(mix * written[...], axis=0, keepdims=True)
                written[capacity + token : capacity + token + 1] = strength[one] * (new[one] - expected)
                mix = jnp.sum(queries[one] * decayed, axis=-1, keepdims=True)
                result = read[tokens + token : tokens + token + 1] + jnp.sum(mix * written[...], axis=0, keepdims=True)
                o[0, one, head] = (scale * result).astype(o.dtype)
            pairs = (
                (past_k, k[0, :, head], after_k),
                (past_u, written[capacity:], after_u),
                (past_g, g[0, :, head], after_g),
            )
            for before, fresh, after in pairs:
                entries = before[0, head]
                for token in range(tokens):
                    entries = jnp.where(place[:capacity] == count + token, fresh[token : token + 1], entries)
                after[0, head] = entries


def _commit(_: Any, counts: Any, past_k: Any, past_u: Any, past_g: Any, before: Any, after: Any) -> None:
    count = counts[pl.program_id(1)]
    block, capacity = past_k.shape[1:3]

    @pl.when(count == _COPY)
    def copy() -> None:
        after[...] = before[...]

    @pl.when(count >= 0)
    def fold() -> None:
        place = jax.lax.broadcasted_iota(jnp.int32, (capacity, 1), 0)
        # What comes after each record, and the record itself for the state.
        later = jax.lax.broadcasted_iota(jnp.int32, (capacity + 1, capacity), 0)
        later = (later < jax.lax.broadcasted_iota(jnp.int32, later.shape, 1) + 1).astype(jnp.float32)
        folded = []
        for head in range(block):
            keys, u, decays = (
                jnp.where(place < count, x[0, head].astype(jnp.float32), 0.0) for x in (past_k, past_u, past_g)
            )
            left = jnp.exp(_dot(later, decays))  # row 0: of the state, row j + 1: of record j
            folded.append((left[:1], keys * left[1:], u))
        columns = jnp.transpose(jnp.concatenate([left for left, _, _ in folded]))
        for head, (_, keys, u) in enumerate(folded):
            fresh = jax.lax.dot_general(
                keys, u, (((0,), (0,)), ((), ())), precision=_EXACT, preferred_element_type=jnp.float32
            )
            after[0, head] = columns[:, head : head + 1] * before[0, head] + fresh


def _dot(left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.dot(left, right, precision=_EXACT, preferred_element_type=jnp.float32)
