"""KDA over whole sequences on a TPU: one kernel that keeps a head's state in VMEM from its first chunk to its last.

The grid is (rows, blocks of heads, visits). A visit is one chunk of C tokens seen for one sequence: a chunk that holds
tokens of three packed sequences is visited three times, each time with the tokens of the other two masked, and its
output stays in VMEM meanwhile. A sequence's first visit loads its state, its last one stores it. Which visits there are
is worked out beforehand and handed over as scalars. States on the way are those of sequences that go on from the one
before them, without loading anything.

Segments of a sequence, where they are asked for, are sequences of their own: once from zeros and once, without values,
from the identity, for what each does to a state, then from the states that really enter them. One core runs one after the
other all the same, so that they only cost time here; nothing chooses them by itself.

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
from pallas_kernels.precision import einsum

CHUNKS = (16, 32, 64, 128)
SUBLANES = 8
WORD = 32  # bits of a scalar that marks tokens
STARTS, ENDS, OPENS = 1, 2, 4  # of a visit: its sequence's first, its sequence's last, its chunk's first


Turns = Generator[None, None, Any]


class Visits(NamedTuple):
    """What the kernel does, visit by visit; every array is int32 [B * visits], but for `marks`."""

    chunk: jax.Array
    piece: jax.Array  # whose state is stored
    source: jax.Array  # whose state is loaded
    tokens: jax.Array  # the sequence's first token in the chunk + (its last + 1) << 8 + flags << 16
    marks: jax.Array  # bits of the tokens that forget the state, by row, chunk and WORD; [1] where there are none


class Pieces(NamedTuple):
    """The pieces [0, ends_0), [ends_0, ends_1), ... of every row; all arrays are [B, P]."""

    ends: jax.Array
    source: jax.Array  # which of the row's states the piece begins from,
    loads: jax.Array  # unless it goes on from the piece before it


class Call(NamedTuple):
    """What a call asks for."""

    chunk: int
    state: jax.Array  # [B, N, H, K, V], that sequences begin from
    ends: jax.Array  # [B, N] of the sequences
    resets: jax.Array | None  # ids [B, T] of sequences that share a state, which is forgotten where they change


class Shape(NamedTuple):
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
    keeps: bool = False  # the state that enters every visit is a result as well


@partial(jax.jit, static_argnames=("num_segments", "scale", "gate_lower_bound", "chunk_size", "segments", "interpret"))
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
    state_positions: jax.Array | None = None,
    segments: int = 1,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """See `pallas_kernels.kda.kda`; returns (o, final_state, states).

    Forward only. q, k and v are float32 or bfloat16, everything else is float32. `interpret` is Pallas's.
    """
    batch, width = q.shape[0], q.shape[-1]
    chunk, state, ends, resets = prepare(q, v, initial_state, lengths, segment_ids, num_segments, chunk_size)

    def run(v: jax.Array, state: jax.Array, pieces: Pieces) -> tuple[jax.Array, jax.Array]:
        options = {"chunk": chunk, "scale": scale, "gate_lower_bound": gate_lower_bound, "interpret": interpret}
        o, left = over_pieces(q, k, v, g, beta, state, pieces, resets, **options)
        return o, left

    stops = ends[:, -1:]
    if segments > 1:
        ends = _cut(ends, segments, chunk)
        pieces = whole(ends)
        identity = jnp.broadcast_to(jnp.eye(width), (*state.shape[:-1], width))
        many = tuple(jnp.repeat(x, segments, axis=1) for x in (jnp.zeros_like(state), identity))
        (_, offset), (_, transition) = run(v, many[0], pieces), run(jnp.zeros_like(k), many[1], pieces)
        state = _enter(state, transition, offset, segments)
    if state_positions is None:
        o, left = run(v, state, whole(ends))
        left = left[:, segments - 1 :: segments]
        return o, left if num_segments else left[:, 0], None
    wanted = jnp.clip(state_positions.astype(jnp.int32), 0, stops)
    pieces = _stop_at(ends, wanted)
    o, left = run(v, state, pieces)
    # Where ends are equal, the first of their pieces holds the tokens and the others none.
    index = jax.vmap(jnp.searchsorted)(pieces.ends, wanted)
    return o, left[:, -1], left[jnp.arange(batch)[:, None], index]


def prepare(
    q: jax.Array,
    v: jax.Array,
    initial_state: jax.Array | None,
    lengths: jax.Array | None,
    segment_ids: jax.Array | None,
    num_segments: int | None,
    chunk_size: int | None,
) -> Call:
    """Brings the arguments of a call into one form."""
    batch, length, heads, width = q.shape
    state = jnp.zeros((batch, num_segments or 1, heads, width, v.shape[-1]), jnp.float32)
    if initial_state is not None:
        state = initial_state.reshape(state.shape)
    chunk = chunk_size or next(size for size in CHUNKS if size >= min(length, CHUNK))
    if segment_ids is None:
        ends = jnp.full((batch, 1), length) if lengths is None else jnp.clip(lengths, 0, length)[:, None]
    elif num_segments is None:
        ends = jnp.sum(segment_ids >= 0, axis=1, keepdims=True)
    else:
        ids = jnp.where(segment_ids < 0, num_segments, segment_ids)
        ends = jax.vmap(lambda row: jnp.searchsorted(row, jnp.arange(num_segments), side="right"))(ids)
    resets = segment_ids if segment_ids is not None and num_segments is None else None
    return Call(chunk, state, ends.astype(jnp.int32), resets)


def whole(ends: jax.Array) -> Pieces:
    """Every piece begins from a state of its own."""
    source = jnp.broadcast_to(jnp.arange(ends.shape[1], dtype=jnp.int32), ends.shape)
    return Pieces(ends, source, jnp.ones(ends.shape, bool))


def _cut(ends: jax.Array, segments: int, chunk: int) -> jax.Array:
    """Ends [B, N * segments] of the segments of sequences that end at [B, N]: as many whole chunks each, but for one."""
    begins = jnp.pad(ends[:, :-1], [(0, 0), (1, 0)])
    count = -(-(ends - begins) // chunk)
    bounds = count[..., None] * jnp.arange(1, segments + 1) // segments * chunk
    return jnp.minimum(begins[..., None] + bounds, ends[..., None]).reshape(ends.shape[0], -1)


def _stop_at(ends: jax.Array, wanted: jax.Array) -> Pieces:
    """Cuts the segments of rows that hold one sequence at more places; the pieces of one go on from each other."""
    every = jnp.sort(jnp.concatenate([ends, wanted], axis=1), axis=1)
    begins = jnp.pad(every[:, :-1], [(0, 0), (1, 0)])
    passed = jax.vmap(lambda row, begin: jnp.searchsorted(row, begin, side="right"))(ends, begins)
    source = jnp.minimum(passed, ends.shape[1] - 1).astype(jnp.int32)
    source = source.at[:, 0].set(0)
    return Pieces(every, source, jnp.diff(source, axis=1, prepend=-1) != 0)


def _enter(state: jax.Array, transition: jax.Array, offset: jax.Array, segments: int) -> jax.Array:
    """The states [B, N * segments, H, K, V] that enter all segments: S' = M S + B."""

    def split(x: jax.Array) -> jax.Array:
        return x.reshape(x.shape[0], -1, segments, *x.shape[2:])

    transition, offset = split(transition), split(offset)
    entering = [state]
    for segment in range(segments - 1):
        entering.append(einsum("bnhij,bnhjv->bnhiv", transition[:, :, segment], entering[-1]) + offset[:, :, segment])
    return jnp.stack(entering, axis=2).reshape(state.shape[0], -1, *state.shape[2:])


def over_pieces(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    initial_state: jax.Array,
    pieces: Pieces,
    resets: jax.Array | None,
    *,
    chunk: int,
    scale: float,
    gate_lower_bound: float | None,
    interpret: Any,
    keeps: bool = False,
) -> tuple[jax.Array, ...]:
    """Returns (o, the states [B, P, H, K, V] after the pieces). The state is forgotten where the ids `resets` change.

    With `keeps` also the states [B, visits, H, K, V] that enter all visits.
    """
    batch, length, heads, width = q.shape
    values = v.shape[-1]
    chunks = -(-length // chunk)
    visits = visits_of(length, chunk, pieces, resets)
    shape = shape_of(q, k, v, visits, chunk, scale, gate_lower_bound, resets is not None)._replace(keeps=keeps)

    def spec(sizes: tuple[int, ...], place: Any) -> pl.BlockSpec:
        def index(row: Any, block: Any, visit: Any, chunks: Any, pieces: Any, sources: Any, *_: Any) -> Any:
            nth = row * shape.visits + visit
            return place(row, block, chunks[nth], pieces[nth], sources[nth])

        return pl.BlockSpec(sizes, index)

    def tokens(size: int) -> pl.BlockSpec:
        if shape.by_token:
            return spec((1, chunk, shape.block, size), lambda row, block, chunk, *_: (row, chunk, block, 0))
        return spec((1, shape.block, chunk, size), lambda row, block, chunk, *_: (row, block, chunk, 0))

    def turn(x: jax.Array) -> jax.Array:
        return x if shape.by_token else jnp.swapaxes(x, 1, 2)

    one = (1, 1, shape.block, width, values)
    states_in = spec(one, lambda row, block, _, piece, source: (row, source, block, 0, 0))
    states_out = spec(one, lambda row, block, _, piece, source: (row, piece, block, 0, 0))
    betas = spec((1, chunk, heads), lambda row, block, chunk, *_: (row, chunk, 0))
    operands = jax.tree.leaves(align(*visits, *map(turn, (q, k, v, g)), beta, initial_state))
    varying = jax.typeof(operands[-1]).manual_axis_type
    result = [
        jax.ShapeDtypeStruct(turn(v).shape, v.dtype, manual_axis_type=varying),
        jax.ShapeDtypeStruct(
            (batch, pieces.ends.shape[1], heads, width, values), jnp.float32, manual_axis_type=varying
        ),
    ]
    out_specs = [tokens(values), states_out]
    if keeps:
        out_specs.append(pl.BlockSpec(one, lambda row, block, visit, *_: (row, visit, block, 0, 0)))
        kept = (batch, shape.visits, heads, width, values)
        result.append(jax.ShapeDtypeStruct(kept, jnp.float32, manual_axis_type=varying))
    per_token = 6 * width * values + 4 * chunk * (width + values)
    o, *states = pl.pallas_call(
        partial(_kernel, shape=shape),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(visits),
            grid=(batch, heads // shape.block, shape.visits),
            in_specs=[tokens(width), tokens(width), tokens(values), tokens(width), betas, states_in],
            out_specs=out_specs,
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
    return turn(o), *states


def shape_of(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    visits: Visits,
    chunk: int,
    scale: float,
    gate_lower_bound: float | None,
    resets: bool,
) -> Shape:
    """What a kernel is compiled for."""
    batch, _, heads, _ = q.shape
    by_token = heads % SUBLANES == 0
    return Shape(
        chunk=chunk,
        block=SUBLANES if by_token else max(n for n in range(1, SUBLANES + 1) if heads % n == 0),
        heads=heads,
        visits=visits.chunk.size // batch,
        scale=scale,
        bounded=gate_lower_bound is not None and gate_lower_bound >= LOWEST_SINGLE_REFERENCE and not resets,
        passes=3 if jnp.result_type(q, k, v) == jnp.bfloat16 else 6,
        resets=resets,
        by_token=by_token,
    )


def visits_of(length: int, chunk: int, pieces: Pieces, resets: jax.Array | None) -> Visits:
    """Every chunk is visited once for every piece with tokens in it, and for every one that has none and is there.

    Chunks of padding are visited last, for no piece: their output is 0.
    """
    ends = pieces.ends
    batch, sequences = ends.shape
    chunks = -(-length // chunk)
    marks = jnp.zeros(1, jnp.int32)
    if resets is not None:
        begins = (resets >= 0) & (jnp.diff(resets, axis=1, prepend=-1) != 0)
        bits = jnp.pad(begins, [(0, 0), (0, chunks * chunk - length)]).reshape(batch * chunks, chunk)
        bits = jnp.pad(bits, [(0, 0), (0, -chunk % WORD)]).reshape(-1, WORD).astype(jnp.uint32)
        marks = jnp.sum(bits << jnp.arange(WORD, dtype=jnp.uint32), axis=1, dtype=jnp.uint32)
        marks = jax.lax.bitcast_convert_type(marks, jnp.int32)
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
    # What pads a row stays with its last piece.
    source, loads = (jnp.concatenate([x, x[:, -1:]], axis=1) for x in (pieces.source, pieces.loads))
    starts, stops_here = real & (nth == 0) & of_owner(loads), real & (nth == of_owner(counts) - 1)
    opens = exists & (jnp.diff(where, axis=1, prepend=-1) != 0)
    flags = starts * STARTS + stops_here * ENDS + opens * OPENS
    begin, end = (jnp.where(real, jnp.clip(of_owner(x) - where * chunk, 0, chunk), 0) for x in (begins, ends))
    tokens = begin + (end << 8) + (flags << 16)
    scalars = (where, jnp.minimum(owner, sequences - 1), of_owner(source), tokens)
    where, owner, source, tokens = (x.astype(jnp.int32).reshape(-1) for x in scalars)
    return Visits(where, owner, source, tokens, marks)


def one_head(
    q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array, state: jax.Array, shape: Shape
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
        total = _one_row(u, size - 1)
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
    return o, _decayed(_one_row(into, shape.chunk - 1), state) + written


def _within_runs(q: jax.Array, k: jax.Array, g: jax.Array, upto: jax.Array, shape: Shape) -> Turns:
    """A (unscaled) and L (without β) between tokens of the same run of 16, 0 elsewhere."""
    row, col = _iotas(shape.chunk)
    # A token meets itself without decay.
    attention = jnp.where(row == col, jnp.sum(q * k, axis=1, keepdims=True), 0)
    if shape.bounded:
        by_run = g.reshape(-1, RUN, g.shape[-1])
        span = upto - jnp.broadcast_to(_one_row(by_run, 0), by_run.shape).reshape(g.shape)
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
    given, lower = lower, jax.lax.stop_gradient(lower)
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
    return _as_inverse_of(given, inverse, passes)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _as_inverse_of(lower: jax.Array, inverse: jax.Array, passes: int) -> jax.Array:
    """P = (I + L)^-1, which is known; its gradient -P^T dP P^T takes two products, and not those of a substitution."""
    del lower, passes
    return inverse


def _inverse_of_back(passes: int, inverse: jax.Array, d: jax.Array) -> tuple[jax.Array, jax.Array]:
    row, col = _iotas(d.shape[0])
    d_lower = _dot(_dot(inverse, d, (0, 0), passes), inverse, (1, 1), passes)
    return jnp.where(col < row, -d_lower, 0), jnp.zeros_like(d)


_as_inverse_of.defvjp(lambda lower, inverse, passes: (inverse, inverse), _inverse_of_back)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _one_row(x: jax.Array, index: int) -> jax.Array:
    """Row `index` of every [N, K] of an array [..., N, K], as [..., 1, K]."""
    return x[..., index : index + 1, :]


def _one_row_back(index: int, sizes: tuple[int, ...], d: jax.Array) -> tuple[jax.Array]:
    # A selection, since nothing narrower than a register can be put in between rows.
    place = jax.lax.broadcasted_iota(jnp.int32, sizes, len(sizes) - 2)
    return (jnp.where(place == index, jnp.broadcast_to(d, sizes), 0),)


_one_row.defvjp(lambda x, index: (_one_row(x, index), x.shape), _one_row_back)


@jax.custom_vjp
def _decayed(decay: jax.Array, state: jax.Array) -> jax.Array:
    """diag(decay) S of decay [1, K]."""
    return jnp.transpose(decay) * state


def _decayed_back(saved: tuple[jax.Array, jax.Array], d: jax.Array) -> tuple[jax.Array, jax.Array]:
    decay, state = saved
    # Sums of rows that come out along lanes are a product.
    ones = jnp.ones((SUBLANES, state.shape[1]), jnp.float32)
    return _dot(ones, state * d, (1, 1), 6)[:1], jnp.transpose(decay) * d


_decayed.defvjp(lambda decay, state: (_decayed(decay, state), (decay, state)), _decayed_back)


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
    """sum_j mask_ij g_j for every mask."""
    total = _sums(jnp.concatenate([jnp.where(mask, 1.0, 0.0) for mask in masks], axis=0).astype(jnp.bfloat16), g)
    return [total[i * g.shape[0] : (i + 1) * g.shape[0]] for i in range(len(masks))]


@jax.custom_vjp
def _sums(which: jax.Array, g: jax.Array) -> jax.Array:
    """Sums of the rows of g: ones are exact in bfloat16, and three parts of g in it are all of g."""
    return _product(jnp.concatenate([which] * 3, axis=1), _in_three(g), (1, 0))


def _sums_back(which: jax.Array, d: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.zeros_like(which), _product(jnp.concatenate([which] * 3, axis=0), _in_three(d), (0, 0))


_sums.defvjp(lambda which, g: (_sums(which, g), which), _sums_back)


def _in_three(x: jax.Array) -> jax.Array:
    """Bfloat16 numbers that add up to those of x, the smallest ones first."""
    parts, rest = [], x
    for _ in range(3):
        parts.append(rest.astype(jnp.bfloat16))
        rest = rest - parts[-1].astype(jnp.float32)
    return jnp.concatenate(parts[::-1], axis=0)


def _matmul(a: jax.Array, b: jax.Array, passes: int) -> jax.Array:
    return _dot(a, b, (1, 0), passes)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
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


def _dot_back(
    over: tuple[int, int], passes: int, saved: tuple[jax.Array, jax.Array], d: jax.Array
) -> tuple[jax.Array, jax.Array]:
    a, b = saved
    d_a = _dot(d, b, (1, 1 - over[1]), passes) if over[0] else _dot(b, d, (1 - over[1], 1), passes)
    d_b = _dot(d, a, (0, 1 - over[0]), passes) if over[1] else _dot(a, d, (1 - over[0], 0), passes)
    return d_a, d_b


_dot.defvjp(lambda a, b, over, passes: (_dot(a, b, over, passes), (a, b)), _dot_back)


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


def marked(marks: Any, chunk: Any, shape: Shape) -> jax.Array:
    """Which tokens [C, 1] of a chunk forget the state before them."""
    place = jax.lax.broadcasted_iota(jnp.int32, (shape.chunk, 1), 0)
    words = -(-shape.chunk // WORD)
    nth = (pl.program_id(0) * shape.visits + chunk) * words
    bits = jnp.zeros_like(place)
    for i in range(words):
        bits = jnp.where(_of(place, WORD) == i, marks[nth + i], bits)
    return (jax.lax.shift_right_logical(bits, place & (WORD - 1)) & 1) != 0


def _kernel(*refs: Any, shape: Shape) -> None:
    chunks, _, _, visited, marks, q, k, v, g, beta, first, o, last, *kept, state = refs
    visit = pl.program_id(0) * shape.visits + pl.program_id(2)
    word = visited[visit]
    begin, end, flags = word & 255, (word >> 8) & 255, word >> 16

    @pl.when(flags & STARTS != 0)
    def load() -> None:
        state[...] = first[0, 0]

    if shape.keeps:
        kept[0][0, 0] = state[...]

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
        forgets = marked(marks, chunks[visit], shape) if shape.resets else None
        heads = []
        for head in range(shape.block):
            # Padding may hold NaN, and so may memory behind the last token.
            query, key, value, decay = (jnp.where(valid, x[head], 0) for x in by_head)
            if forgets is not None:
                decay = jnp.where(forgets, FORGET, decay)
            heads.append(one_head(query, key, value, decay, betas[:, head : head + 1], state[head], shape))
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
