"""The gradient of KDA on a TPU, which keeps that of a head's state in VMEM from its last chunk to its first.

The prefill kernel runs again for the states between chunks; then this kernel goes through its visits backwards.

A visit (see `tpu_prefill`) is differentiated as it is written: the kernel traces `jax.vjp` of one head's chunk, in which
products, sums over tokens and the inverse say what their gradients are. So it computes a chunk again and nothing else has
to be kept of it; what comes on top of arguments and results is one state a visit, float32.

Heads of a block take turns in a loop: side by side, as in the forward kernel, they would make a program that takes minutes
to compile.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kda import tpu_prefill as forward
from pallas_kernels.kda.tpu_prefill import ENDS, OPENS, STARTS, Shape, Turns, Visits
from pallas_kernels.kda.xla import FORGET
from pallas_kernels.manual_axes import align

_VMEM = 40 * 2**20


class Gradients(NamedTuple):
    """Of the arguments of the same names, in their dtypes."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    g: jax.Array
    beta: jax.Array
    initial_state: jax.Array


@partial(jax.jit, static_argnames=("num_segments", "scale", "gate_lower_bound", "chunk_size", "interpret"))
def gradients(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    d_o: jax.Array,
    d_state: jax.Array,
    *,
    initial_state: jax.Array | None,
    lengths: jax.Array | None,
    segment_ids: jax.Array | None,
    num_segments: int | None,
    scale: float,
    gate_lower_bound: float | None,
    chunk_size: int | None,
    interpret: Any = False,
) -> Gradients:
    """Of `tpu_prefill.kda` with one segment and no `state_positions`, for the gradients of its first two results."""
    batch, length, heads, width = q.shape
    values = v.shape[-1]
    call = forward.prepare(q, v, initial_state, lengths, segment_ids, num_segments, chunk_size)
    chunk, pieces = call.chunk, forward.whole(call.ends)
    _, _, kept = forward.over_pieces(
        q,
        k,
        v,
        g,
        beta,
        call.state,
        pieces,
        call.resets,
        chunk=chunk,
        scale=scale,
        gate_lower_bound=gate_lower_bound,
        interpret=interpret,
        keeps=True,
    )
    visits = _backwards(forward.visits_of(length, chunk, pieces, call.resets), batch)
    shape = forward.shape_of(q, k, v, visits, chunk, scale, gate_lower_bound, call.resets is not None)

    def spec(sizes: tuple[int, ...], place: Any) -> pl.BlockSpec:
        def index(row: Any, block: Any, visit: Any, chunks: Any, pieces: Any, *_: Any) -> Any:
            nth = row * shape.visits + visit
            return place(row, block, visit, chunks[nth], pieces[nth])

        return pl.BlockSpec(sizes, index)

    def tokens(size: int) -> pl.BlockSpec:
        if shape.by_token:
            return spec((1, chunk, shape.block, size), lambda row, block, _, chunk, piece: (row, chunk, block, 0))
        return spec((1, shape.block, chunk, size), lambda row, block, _, chunk, piece: (row, block, chunk, 0))

    def turn(x: jax.Array) -> jax.Array:
        return x if shape.by_token else jnp.swapaxes(x, 1, 2)

    one = (1, 1, shape.block, width, values)
    of_piece = spec(one, lambda row, block, _, chunk, piece: (row, piece, block, 0, 0))
    of_visit = spec(one, lambda row, block, visit, *_: (row, shape.visits - 1 - visit, block, 0, 0))
    betas = spec((1, 1, chunk, shape.block), lambda row, block, _, chunk, piece: (row, block, chunk, 0))
    blocks = heads // shape.block
    by_block = beta.astype(jnp.float32).reshape(batch, length, blocks, shape.block)
    inputs = (*map(turn, (q, k, v, g, d_o.astype(v.dtype))), jnp.swapaxes(by_block, 1, 2), kept)
    operands = jax.tree.leaves(align(*visits, *inputs, d_state.reshape(call.state.shape).astype(jnp.float32)))
    varying = jax.typeof(operands[-1]).manual_axis_type

    def like(x: jax.Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=varying)

    found = [*(like(x) for x in operands[5:9]), like(operands[10]), like(operands[-1])]
    by_head = pltpu.VMEM((shape.block, chunk, width), jnp.float32)
    by_value = pltpu.VMEM((shape.block, chunk, values), jnp.float32)
    dq, dk, dv, dg, d_beta, d_first = pl.pallas_call(
        partial(_kernel, shape=shape),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(visits),
            grid=(batch, blocks, shape.visits),
            in_specs=[*map(tokens, (width, width, values, width, values)), betas, of_visit, of_piece],
            out_specs=[*map(tokens, (width, width, values, width)), betas, of_piece],
            scratch_shapes=[
                pltpu.VMEM((shape.block, width, values), jnp.float32),
                *(by_head, by_head, by_value, by_head, by_value),
                *(by_head, by_head, by_value, by_head),
            ],
        ),
        out_shape=found,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=_VMEM
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * batch * length * heads * (6 * width * values + 4 * chunk * (width + values)),
            transcendentals=6 * q.size,
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in (*operands, *found)),
        ),
        name="kda_backward",
        interpret=interpret,
    )(*operands)
    d_beta = jnp.swapaxes(d_beta, 1, 2).reshape(beta.shape).astype(beta.dtype)
    return Gradients(turn(dq), turn(dk), turn(dv), turn(dg), d_beta, d_first)


def _backwards(visits: Visits, batch: int) -> Visits:
    """The same visits from the last to the first, of which others are a chunk's first ones."""

    def turned(x: jax.Array) -> jax.Array:
        return x.reshape(batch, -1)[:, ::-1].reshape(-1)

    chunk = turned(visits.chunk)
    opens = jnp.diff(chunk.reshape(batch, -1), axis=1, prepend=-1).reshape(-1) != 0
    tokens = (turned(visits.tokens) & ~(OPENS << 16)) | (opens.astype(jnp.int32) * (OPENS << 16))
    return Visits(chunk, turned(visits.piece), turned(visits.source), tokens, visits.marks)


def _drained(turns: Turns) -> Any:
    """What a generator returns."""
    while True:
        try:
            next(turns)
        except StopIteration as stop:
            return stop.value


def _kernel(*refs: Any, shape: Shape) -> None:
    chunks, _, _, visited, marks = refs[:5]
    given, (betas, entered, last) = refs[5:10], refs[10:13]
    (dq, dk, dv, dg), (d_betas, first) = refs[13:17], refs[17:19]
    carry, inputs, outputs = refs[19], refs[20:25], refs[25:29]
    nth = pl.program_id(0) * shape.visits + pl.program_id(2)
    word = visited[nth]
    begin, end, flags = word & 255, (word >> 8) & 255, word >> 16
    opens = flags & OPENS != 0

    @pl.when(flags & ENDS != 0)
    def load() -> None:
        carry[...] = last[0, 0]

    @pl.when(opens & (begin == end))
    def clear() -> None:
        for x in (dq, dk, dv, dg, d_betas):
            x[...] = jnp.zeros(x.shape, x.dtype)

    @pl.when(begin < end)
    def go_back() -> None:
        place = jax.lax.broadcasted_iota(jnp.int32, (shape.chunk, 1), 0)
        valid = (place >= begin) & (place < end)
        for source, target in zip(given, inputs, strict=True):
            by_head = source[0].astype(jnp.float32)
            target[...] = jnp.swapaxes(by_head, 0, 1) if shape.by_token else by_head
        every_beta = jnp.where(valid, betas[0, 0], 0)
        number = jax.lax.broadcasted_iota(jnp.int32, (shape.chunk, shape.block), 1)
        forgets = forward.marked(marks, chunks[nth], shape) if shape.resets else None

        def one(head: Any, d_beta: jax.Array) -> jax.Array:
            # Padding may hold NaN, and so may memory behind the last token.
            q, k, v, g, d_out = (jnp.where(valid, x[head], 0) for x in inputs)
            if forgets is not None:
                g = jnp.where(forgets, FORGET, g)
            beta = jnp.sum(jnp.where(number == head, every_beta, 0), axis=1, keepdims=True)

            def run(
                q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array, state: jax.Array
            ) -> tuple[jax.Array, jax.Array]:
                return _drained(forward.one_head(q, k, v, g, beta, state, shape))

            _, pull = jax.vjp(run, q, k, v, g, beta, entered[0, 0, head])
            *d_tokens, d_beta_here, d_state = pull((d_out, carry[head]))
            carry[head] = d_state
            for target, d in zip(outputs, d_tokens, strict=True):
                target[head] = d
            if forgets is not None:
                outputs[3][head] = jnp.where(forgets, 0, d_tokens[3])
            return jnp.where(number == head, d_beta_here, d_beta)

        found = jax.lax.fori_loop(0, shape.block, one, jnp.zeros((shape.chunk, shape.block), jnp.float32))
        for source, target in zip(outputs, (dq, dk, dv, dg), strict=True):
            out = jnp.swapaxes(source[...], 0, 1) if shape.by_token else source[...]
            token = jax.lax.broadcasted_iota(jnp.int32, out.shape, 0 if shape.by_token else 1)
            before = jnp.where(opens, 0.0, target[0].astype(jnp.float32))
            target[0] = jnp.where((token >= begin) & (token < end), out, before).astype(target.dtype)
        d_betas[0, 0] = jnp.where(valid, found, jnp.where(opens, 0.0, d_betas[0, 0]))

    @pl.when(flags & STARTS != 0)
    def store() -> None:
        first[0, 0] = carry[...]
