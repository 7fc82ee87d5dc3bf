"""KDA over whole sequences on a TPU: one kernel that keeps a head's state in VMEM from its first chunk to its last.

The grid is (rows, blocks of heads, visits). A visit is one chunk of C tokens seen for one sequence: a chunk that holds
tokens of three packed sequences is visited three times, each time with the tokens of the other two masked, and its
output stays in VMEM meanwhile. A sequence's first visit loads its state, its last one stores it. Which visits there are
is worked out beforehand and handed over as scalars.

Per visit and head, in the letters of `xla` and with P = (I + L)^-1:

    X = P (β (V - (K * exp G) S))     O = scale ((Q * exp G) S + A X)     S' = diag(exp G_C) S + (K * exp(G_C - G))^T X

The state is subtracted before P is applied, so that P multiplies V columns and not K + V. Exponents follow the rules of
`xla`: sums of g over the tokens between two of them, so that every factor is at most 1; with a bounded gate one
reference, the first row, for a run of 16. P comes from block substitution, on whole C x C tiles: products of 16 x 16
ones would leave the matrix unit just as idle.

Arrays are read where they are. A number of heads that is a multiple of 8 fills the tiles of [B, T, H, K], and blocks
hold 8 heads, which the kernel brings together in VMEM. For another number XLA stores these arrays heads first, and so
the kernel reads them.

With bfloat16 inputs, products take three passes of the matrix unit (16 bits of each operand), with float32 inputs six.
One pass isn't enough: where keys resemble each other, A X cancels most of (Q * exp G) S, and P amplifies what it is made
of.
"""

from collections.abc import Generator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kda.xla import BALANCE, CHUNK, FORGET, LOWEST_SINGLE_REFERENCE, RUN
from pallas_kernels.manual_axes import align

CHUNKS = (16, 32, 64, 128)
SUBLANES = 8
WORD = 32  # bits of a scalar that marks tokens
STARTS, ENDS, OPENS = 1, 2, 4  # of a visit: its sequence's first, its sequence's last, its chunk's first


Turns = Generator[None, None, Any]


class _Visits(NamedTuple):
    """What the kernel does, visit by visit; every array is int32 [B * visits], but for `marks`."""

    chunk: jax.Array
    sequence: jax.Array
    tokens: jax.Array  # the sequence's first token in the chunk + (its last + 1) << 8 + flags << 16
    marks: jax.Array  # bits of the tokens that forget the state, by row, chunk and WORD; [1] where there are none


class _Shape(NamedTuple):
    """What the kernel is compiled for."""

    chunk: int
    block: int  # heads of a block
    heads: int
    visits: int
    scale: float
    bounded: bool  # every g is at least LOWEST_SINGLE_REFERENCE
    passes: int  # of the matrix unit, per product
    resets: bool  # there are marks
    by_token: bool  # arrays are [B, T, H, K], otherwise [B, H, T, K]


@partial(jax.jit, static_argnames=("num_segments", "scale", "gate_lower_bound", "chunk_size", "interpret"))
def kda(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    *,
    initial_state: jax.Array | None,
    lengths: jax.Array | None,
    segment_ids: jax.Array | None,
    num_segments: int | None,
    scale: float,
    gate_lower_bound: float | None,
    chunk_size: int | None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.kda.kda`; returns (o, final_state).

    Forward only. q, k and v are float32 or bfloat16, everything else is float32. `interpret` is Pallas's.
    """
    batch, length, heads, width = q.shape
    values = v.shape[-1]
    sequences = num_segments or 1
    if initial_state is None:
        initial_state = jnp.zeros((batch, sequences, heads, width, values), jnp.float32)
    chunk = chunk_size or next(size for size in CHUNKS if size >= min(length, CHUNK))
    chunks = -(-length // chunk)
    visits = _visits(batch, length, chunk, lengths, segment_ids, num_segments)
    by_token = heads % SUBLANES == 0
    resets = segment_ids is not None and num_segments is None
    bounded = gate_lower_bound is not None and gate_lower_bound >= LOWEST_SINGLE_REFERENCE and not resets
    shape = _Shape(
        chunk=chunk,
        block=SUBLANES if by_token else max(n for n in range(1, SUBLANES + 1) if heads % n == 0),
        heads=heads,
        visits=visits.chunk.size // batch,
        scale=scale,
        bounded=bounded,
        passes=3 if jnp.result_type(q, k, v) == jnp.bfloat16 else 6,
        resets=resets,
        by_token=by_token,
    )

    def spec(sizes: tuple[int, ...], place: Any) -> pl.BlockSpec:
        def index(row: Any, block: Any, visit: Any, chunks: Any, sequences: Any, *_: Any) -> Any:
            nth = row * shape.visits + visit
            return place(row, block, chunks[nth], sequences[nth])

        return pl.BlockSpec(sizes, index)

    def tokens(size: int) -> pl.BlockSpec:
        if by_token:
            return spec((1, chunk, shape.block, size), lambda row, block, chunk, _: (row, chunk, block, 0))
        return spec((1, shape.block, chunk, size), lambda row, block, chunk, _: (row, block, chunk, 0))

    def turn(x: jax.Array) -> jax.Array:
        return x if by_token else jnp.swapaxes(x, 1, 2)

    states = spec((1, 1, shape.block, width, values), lambda row, block, _, sequence: (row, sequence, block, 0, 0))
    betas = spec((1, chunk, heads), lambda row, block, chunk, _: (row, chunk, 0))
    initial_state = initial_state.reshape(batch, sequences, heads, width, values)
    operands = jax.tree.leaves(align(*visits, *map(turn, (q, k, v, g)), beta, initial_state))
    varying = jax.typeof(operands[-1]).manual_axis_type
    result = [
        jax.ShapeDtypeStruct(turn(v).shape, v.dtype, manual_axis_type=varying),
        jax.ShapeDtypeStruct(initial_state.shape, jnp.float32, manual_axis_type=varying),
    ]
    per_token = 6 * width * values + 4 * chunk * (width + values)
    o, final_state = pl.pallas_call(
        partial(_kernel, shape=shape),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(visits),
            grid=(batch, heads // shape.block, shape.visits),
            in_specs=[tokens(width), tokens(width), tokens(values), tokens(width), betas, states],
            out_specs=[tokens(values), states],
            scratch_shapes=[pltpu.VMEM((shape.block, width, values), jnp.float32)],
        ),
        out_shape=result,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=batch * chunks * chunk * heads * per_token,
            transcendentals=6 * q.size,
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in (*operands, *result)),
        ),
        name="kda_prefill",
        interpret=interpret,
    )(*operands)
    return turn(o), final_state if num_segments else final_state[:, 0]


def _visits(
    batch: int,
    length: int,
    chunk: int,
    lengths: jax.Array | None,
    segment_ids: jax.Array | None,
    num_segments: int | None,
) -> _Visits:
    """Every chunk is visited once for every sequence with tokens in it, and for every one that has none and is there.

    Chunks of padding are visited last, for no sequence: their output is 0.
    """
    chunks = -(-length // chunk)
    marks = jnp.zeros(1, jnp.int32)
    if segment_ids is None:
        ends = jnp.full((batch, 1), length) if lengths is None else jnp.clip(lengths, 0, length)[:, None]
    elif num_segments is None:
        valid = segment_ids >= 0
        ends = jnp.sum(valid, axis=1, keepdims=True)
        begins = valid & (jnp.diff(segment_ids, axis=1, prepend=-1) != 0)
        bits = jnp.pad(begins, [(0, 0), (0, chunks * chunk - length)]).reshape(batch * chunks, chunk)
        bits = jnp.pad(bits, [(0, 0), (0, -chunk % WORD)]).reshape(-1, WORD).astype(jnp.uint32)
        marks = jnp.sum(bits << jnp.arange(WORD, dtype=jnp.uint32), axis=1, dtype=jnp.uint32)
        marks = jax.lax.bitcast_convert_type(marks, jnp.int32)
    else:
        ids = jnp.where(segment_ids < 0, num_segments, segment_ids)
        ends = jax.vmap(lambda row: jnp.searchsorted(row, jnp.arange(num_segments), side="right"))(ids)
    ends = ends.astype(jnp.int32)
    sequences = ends.shape[1]
    begins = jnp.pad(ends[:, :-1], [(0, 0), (1, 0)])

    first = jnp.minimum(begins // chunk, chunks - 1)
    last = jnp.where(begins < ends, (ends - 1) // chunk, first)
    # The padding is one more sequence, without tokens.
    first = jnp.concatenate([first, last[:, -1:] + 1], axis=1)
    counts = jnp.concatenate([last, jnp.full((batch, 1), chunks - 1)], axis=1) - first + 1
    begins, ends = (jnp.pad(x, [(0, 0), (0, 1)]) for x in (begins, ends))
    stops = jnp.cumsum(counts, axis=1)

    # Neighbours share one chunk at most.
    visit = jnp.arange(chunks + sequences - 1)
    owner = jax.vmap(lambda row: jnp.searchsorted(row, visit, side="right"))(stops)
    exists, owner = owner <= sequences, jnp.minimum(owner, sequences)

    def of_owner(x: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x, owner, axis=1)

    nth = visit - of_owner(stops - counts)
    where = jnp.clip(of_owner(first) + nth, 0, chunks - 1)
    real = exists & (owner < sequences)
    starts, stops_here = real & (nth == 0), real & (nth == of_owner(counts) - 1)
    opens = exists & (jnp.diff(where, axis=1, prepend=-1) != 0)
    flags = starts * STARTS + stops_here * ENDS + opens * OPENS
    begin, end = (jnp.where(real, jnp.clip(of_owner(x) - where * chunk, 0, chunk), 0) for x in (begins, ends))
    tokens = begin + (end << 8) + (flags << 16)
    scalars = (where, jnp.minimum(owner, sequences - 1), tokens)
    where, owner, tokens = (x.astype(jnp.int32).reshape(-1) for x in scalars)
    return _Visits(where, owner, tokens, marks)


def _head(
    q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array, state: jax.Array, shape: _Shape
) -> Turns:
    """One head of one visit; beta is [C, 1], everything float32. Returns (o [C, V], the state after it)."""
    row, col = _iotas(shape.chunk)
    run = _same(row, col, RUN)
    upto, after = _sum_over(g, [run & (col <= row), run & (col > row)])
    yield
    attention, lower = yield from _within_runs(q, k, g, upto, shape)
    size = RUN
    while size < shape.chunk:
        u, a = _by_size(upto, size), _by_size(after, size)
        decay = jnp.exp(jnp.stack([a[:, 0], u[:, 1]], axis=1)).reshape(g.shape)
        a_part, l_part = _both(q * decay, k * decay, k * decay, shape.passes)
        pairs = _pairs(row, col, size)
        yield
        attention, lower = jnp.where(pairs, a_part, attention), jnp.where(pairs, l_part, lower)
        # The sums of the later half begin earlier, those of the earlier half end later.
        total = u[:, :, size - 1 :]
        upto = jnp.stack([u[:, 0], u[:, 1] + total[:, 0]], axis=1).reshape(g.shape)
        after = jnp.stack([a[:, 0] + total[:, 1], a[:, 1]], axis=1).reshape(g.shape)
        size *= 2

    into = jnp.exp(upto)
    read = _matmul(jnp.concatenate([q * into, k * into], axis=0), state, shape.passes)
    yield
    inverse = yield from _unit_lower_inverse(beta * lower, shape.passes)
    corrected = _matmul(inverse, beta * (v - read[shape.chunk :]), shape.passes)
    yield
    o = shape.scale * (read[: shape.chunk] + _matmul(attention, corrected, shape.passes))
    written = _dot(k * jnp.exp(after), corrected, (0, 0), shape.passes)
    decay = jnp.transpose(into[shape.chunk - 1 :])
    return o, decay * state + written


def _within_runs(q: jax.Array, k: jax.Array, g: jax.Array, upto: jax.Array, shape: _Shape) -> Turns:
    """A (unscaled) and L (without β) between tokens of the same run of 16, 0 elsewhere."""
    row, col = _iotas(shape.chunk)
    # A token meets itself without decay.
    attention = jnp.where(row == col, jnp.sum(q * k, axis=1, keepdims=True), 0)
    if shape.bounded:
        by_run = g.reshape(-1, RUN, g.shape[-1])
        span = upto - jnp.broadcast_to(by_run[:, :1], by_run.shape).reshape(g.shape)
        rows, cols = jnp.exp(span) * BALANCE, k * (jnp.exp(-span) / BALANCE)
        a_part, l_part = _both(q * rows, k * rows, cols, shape.passes)
        pairs = _same(row, col, RUN) & (col < row)
        yield
        return jnp.where(pairs, a_part, attention), jnp.where(pairs, l_part, 0)
    lower = jnp.zeros((shape.chunk, shape.chunk), jnp.float32)
    masks = []
    sizes = (1, 2, 4, 8)
    for size in sizes:
        # A token of the earlier half decays over what follows it there, one of the later half up to itself.
        middle = _of(row, 2 * size) * (2 * size) + size
        masks.append(((row < col) & (col < middle)) | ((middle <= col) & (col <= row)))
    for size, total in zip(sizes, _sum_over(g, masks), strict=True):
        decay = jnp.exp(total)
        a_part, l_part = _both(q * decay, k * decay, k * decay, shape.passes)
        pairs = _pairs(row, col, size)
        yield
        attention, lower = jnp.where(pairs, a_part, attention), jnp.where(pairs, l_part, lower)
    return attention, lower


def _both(q: jax.Array, k: jax.Array, cols: jax.Array, passes: int) -> tuple[jax.Array, jax.Array]:
    """Products of every row of q, and of every row of k, with every row of cols."""
    product = _dot(jnp.concatenate([q, k], axis=0), cols, (1, 1), passes)
    return product[: q.shape[0]], product[q.shape[0] :]


def _unit_lower_inverse(lower: jax.Array, passes: int) -> Turns:
    """(I + lower)^-1 by block substitution, as in `xla`, all blocks of a size in one product."""
    row, col = _iotas(lower.shape[0])
    inverse = jnp.where(row == col, 1.0, 0.0) - jnp.where(_pairs(row, col, 1), lower, 0)
    size = 2
    while size < lower.shape[0]:
        corner = jnp.where(_pairs(row, col, size), lower, 0)
        # Only rows of the later blocks are there; from the height of a register on the others can be left out.
        below = _matmul(_later_rows(corner, size), inverse, passes)
        yield
        update = _matmul(_later_rows(inverse, size), _between_zeros(below, size), passes)
        inverse -= _between_zeros(update, size)
        yield
        size *= 2
    return inverse


def _later_rows(x: jax.Array, size: int) -> jax.Array:
    """Every other block of `size` rows."""
    return x if size < SUBLANES else _by_size(x, size)[:, 1].reshape(-1, x.shape[1])


def _between_zeros(x: jax.Array, size: int) -> jax.Array:
    """The same rows with zeros for the ones that `_later_rows` left out."""
    if size < SUBLANES:
        return x
    blocks = x.reshape(-1, size, x.shape[1])
    return jnp.stack([jnp.zeros_like(blocks), blocks], axis=1).reshape(-1, x.shape[1])


def _iotas(n: int) -> tuple[jax.Array, jax.Array]:
    return jax.lax.broadcasted_iota(jnp.int32, (n, n), 0), jax.lax.broadcasted_iota(jnp.int32, (n, n), 1)


def _same(row: jax.Array, col: jax.Array, size: int) -> jax.Array:
    return _of(row, size) == _of(col, size)


def _pairs(row: jax.Array, col: jax.Array, size: int) -> jax.Array:
    """Where the column is in the first half, and the row in the second half, of the same 2 · size tokens."""
    return _same(row, col, 2 * size) & (_of(row, size) > _of(col, size))


def _of(token: jax.Array, size: int) -> jax.Array:
    """Which run of `size` tokens it belongs to; a shift, because size is a power of 2 and division is slow."""
    return token >> (size.bit_length() - 1)


def _by_size(x: jax.Array, size: int) -> jax.Array:
    return x.reshape(-1, 2, size, x.shape[-1])


def _sum_over(g: jax.Array, masks: Sequence[jax.Array]) -> list[jax.Array]:
    """sum_j mask_ij g_j for every mask: ones are exact in bfloat16, and three parts of g in it are all of g."""
    which = jnp.concatenate([jnp.where(mask, 1.0, 0.0) for mask in masks], axis=0).astype(jnp.bfloat16)
    parts, rest = [], g
    for _ in range(3):
        parts.append(rest.astype(jnp.bfloat16))
        rest = rest - parts[-1].astype(jnp.float32)
    total = _product(jnp.concatenate([which] * 3, axis=1), jnp.concatenate(parts[::-1], axis=0), (1, 0))
    return [total[i * g.shape[0] : (i + 1) * g.shape[0]] for i in range(len(masks))]


def _matmul(a: jax.Array, b: jax.Array, passes: int) -> jax.Array:
    return _dot(a, b, (1, 0), passes)


def _dot(a: jax.Array, b: jax.Array, over: tuple[int, int], passes: int) -> jax.Array:
    """A product of 8 bits of the operands in one pass of the matrix unit, of 16 in three, of 24 in six."""
    if passes == 6:
        return _product(a, b, over, jax.lax.Precision.HIGHEST)
    # Three products in one, by length: the matrix unit adds them up itself, and is deeper than a chunk is long.
    high_a, high_b = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)
    low_a = (a - high_a.astype(jnp.float32)).astype(jnp.bfloat16)
    low_b = (b - high_b.astype(jnp.float32)).astype(jnp.bfloat16)
    if over[0] == 1 and a.shape[1] % 128:
        rows = _product(jnp.concatenate([high_a, low_a], axis=0), high_b, over)
        return rows[: a.shape[0]] + (rows[a.shape[0] :] + _product(high_a, low_b, over))
    long_a = jnp.concatenate([high_a, high_a, low_a], axis=over[0])
    return _product(long_a, jnp.concatenate([high_b, low_b, high_b], axis=over[1]), over)


def _product(
    a: jax.Array, b: jax.Array, over: tuple[int, int], precision: jax.lax.Precision | None = None
) -> jax.Array:
    numbers = (((over[0],), (over[1],)), ((), ()))
    return jax.lax.dot_general(a, b, numbers, precision=precision, preferred_element_type=jnp.float32)


def _take_turns(heads: Sequence[Turns]) -> list[Any]:
    """The results of generators that run side by side, each up to its next `yield` in turn.

    The compiler keeps much of a program's order, and a product takes a hundred cycles and more: so that other heads'
    arithmetic fills them, it has to be written in between.
    """
    results: dict[int, Any] = {}
    while len(results) < len(heads):
        for i, head in enumerate(heads):
            if i not in results:
                try:
                    next(head)
                except StopIteration as stop:
                    results[i] = stop.value
    return [results[i] for i in range(len(heads))]


def _kernel(*refs: Any, shape: _Shape) -> None:
    chunks, _, visited, marks, q, k, v, g, beta, first, o, last, state = refs
    visit = pl.program_id(0) * shape.visits + pl.program_id(2)
    word = visited[visit]
    begin, end, flags = word & 255, (word >> 8) & 255, word >> 16

    @pl.when(flags & STARTS != 0)
    def load() -> None:
        state[...] = first[0, 0]

    @pl.when((flags & OPENS != 0) & (begin == end))
    def clear() -> None:
        o[...] = jnp.zeros(o.shape, o.dtype)

    @pl.when(begin < end)
    def advance() -> None:
        place = jax.lax.broadcasted_iota(jnp.int32, (shape.chunk, 1), 0)
        valid = (place >= begin) & (place < end)
        betas = jnp.where(valid, beta[0], 0)
        if shape.block < shape.heads:
            # Lanes can't be sliced at a place that isn't known beforehand.
            number = jax.lax.broadcasted_iota(jnp.int32, (shape.heads, shape.block), 0)
            mine = number == jax.lax.broadcasted_iota(jnp.int32, number.shape, 1) + pl.program_id(1) * shape.block
            betas = _matmul(betas, jnp.where(mine, 1.0, 0.0), 6)
        by_head = [x[0].astype(jnp.float32) for x in (q, k, v, g)]
        if shape.by_token:
            by_head = [jnp.swapaxes(x, 0, 1) for x in by_head]
        forgets = None
        if shape.resets:
            words = -(-shape.chunk // WORD)
            nth = (pl.program_id(0) * shape.visits + chunks[visit]) * words
            bits = jnp.zeros_like(place)
            for i in range(words):
                bits = jnp.where(_of(place, WORD) == i, marks[nth + i], bits)
            forgets = (jax.lax.shift_right_logical(bits, place & (WORD - 1)) & 1) != 0
        heads = []
        for head in range(shape.block):
            # Padding may hold NaN, and so may memory behind the last token.
            query, key, value, decay = (jnp.where(valid, x[head], 0) for x in by_head)
            if forgets is not None:
                decay = jnp.where(forgets, FORGET, decay)
            heads.append(_head(query, key, value, decay, betas[:, head : head + 1], state[head], shape))
        outputs = []
        for head, (out, after) in enumerate(_take_turns(heads)):
            state[head] = after
            outputs.append(out)
        out = jnp.stack(outputs)
        if shape.by_token:
            out = jnp.swapaxes(out, 0, 1)
        place = jax.lax.broadcasted_iota(jnp.int32, out.shape, 0 if shape.by_token else 1)
        before = jnp.where(flags & OPENS != 0, 0.0, o[0].astype(jnp.float32))
        o[0] = jnp.where((place >= begin) & (place < end), out, before).astype(o.dtype)

    @pl.when(flags & ENDS != 0)
    def store() -> None:
        last[0, 0] = state[...]
