"""KDA over whole sequences on Hopper, in two stages.

The first one treats every chunk of 64 tokens on its own and fills the chip whatever the number of heads; it leaves four
bfloat16 matrices a chunk in device memory. The second one goes through a sequence's chunks one after the other, with four
products a chunk that stay in registers. Chunks begin where sequences begin, so none holds tokens of two.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.kda.gpu_prefill_chunk import Form, prepare
from pallas_kernels.kda.gpu_prefill_pass import advance
from pallas_kernels.kda.gpu_prefill_segments import combine, summarise
from pallas_kernels.kda.gpu_prefill_warp import CHUNK, WIDTH
from pallas_kernels.kda.xla import LOWEST_SINGLE_REFERENCE

ALIGNED = 8  # tokens; copies move whole groups of them


class Plan(NamedTuple):
    """Which tokens a chunk has, and which chunks a sequence has.

    A chunk is 64 tokens from a multiple of 8 on, where copies can begin, of which a range is the sequence's.

    Attributes:
        tokens: int32 [5, N], each chunk's row, its first token, where in it the range begins, where the tokens that count
            end (0: none), and where the rows of the output end that it writes, which are zeros for padding.
        parts: int32 [2, S], each sequence's first chunk and number of chunks. What pads a row follows its last sequence.
        own: int32 [S], the number of chunks without those that pad.
        stops: int32 [N], where among the states after pieces that of each chunk goes, or -1.
    """

    tokens: jax.Array
    parts: jax.Array
    own: jax.Array
    stops: jax.Array | None = None


class _Pieces(NamedTuple):
    """Chunks of the pieces [0, ends_0), [ends_0, ends_1), ... of every row and of what pads it.

    Attributes:
        tokens: of `Plan`.
        owner: int32 [B, chunks], the piece of a chunk; the number of pieces where it pads or doesn't exist.
        last: bool [B, chunks], the chunk ends its piece.
        places: int32 [B, pieces + 1], the first chunk of every piece, and of what pads.
        counts: int32 [B, pieces + 1], how many chunks it has.
    """

    tokens: jax.Array
    owner: jax.Array
    last: jax.Array
    places: jax.Array
    counts: jax.Array


def _plan_rows(batch: int, length: int, lengths: jax.Array | None) -> Plan:
    chunks = -(-length // CHUNK)
    row, nth = np.divmod(np.arange(batch * chunks, dtype=np.int32), chunks)
    first = nth * CHUNK
    begins = np.arange(batch, dtype=np.int32) * chunks
    parts = jnp.asarray(np.stack([begins, np.full_like(begins, chunks)]))
    fixed = (row, first, np.zeros_like(row)), np.full_like(row, CHUNK)
    if lengths is None:  # what is known beforehand costs nothing on the device
        tokens = jnp.asarray(np.stack([*fixed[0], (length - first).clip(0, CHUNK), fixed[1]]))
        return Plan(tokens, parts, parts[1])
    ends = jnp.clip(lengths, 0, length).astype(jnp.int32)
    tokens = jnp.stack([*fixed[0], (ends[row] - first).clip(0, CHUNK), fixed[1]])
    return Plan(tokens, parts, -(-ends // CHUNK))


def _plan_pieces(length: int, ends: jax.Array) -> _Pieces:
    batch, pieces = ends.shape
    ends = jnp.pad(ends.astype(jnp.int32), [(0, 0), (0, 1)], constant_values=length)  # the padding is one more piece
    begins = jnp.pad(ends[:, :-1], [(0, 0), (1, 0)])
    starts = begins // ALIGNED * ALIGNED
    chunks = (length + ends.shape[1] * (CHUNK + ALIGNED - 2)) // CHUNK  # of a row, at least as many as it has
    counts = jnp.where(begins < ends, -(-(ends - starts) // CHUNK), 0)
    stops = jnp.cumsum(counts, axis=1)
    owner = jax.vmap(lambda row: jnp.searchsorted(row, jnp.arange(chunks), side="right"))(stops)
    exists, real = owner <= pieces, owner < pieces
    owner = jnp.minimum(owner, pieces)

    def of_owner(x: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x, owner, axis=1)

    nth = jnp.arange(chunks) - of_owner(stops - counts)
    first = jnp.where(exists, of_owner(starts) + nth * CHUNK, 0)
    begin, end = (jnp.where(exists, jnp.clip(of_owner(x) - first, 0, CHUNK), 0) for x in (begins, ends))
    row = jnp.broadcast_to(jnp.arange(batch)[:, None], first.shape)
    tokens = (row, first, begin, jnp.where(real, end, 0), end)
    return _Pieces(
        jnp.stack([x.astype(jnp.int32).reshape(-1) for x in tokens]),
        owner,
        real & (nth == of_owner(counts) - 1),
        stops - counts + jnp.arange(batch)[:, None] * chunks,
        counts,
    )


def plan(
    batch: int,
    length: int,
    lengths: jax.Array | None,
    segment_ids: jax.Array | None,
    num_segments: int | None,
) -> Plan:
    """Cuts rows or packed sequences into chunks."""
    if segment_ids is None or num_segments is None:
        return _plan_rows(batch, length, lengths)
    ids = jnp.where(segment_ids < 0, num_segments, segment_ids)
    ends = jax.vmap(lambda row: jnp.searchsorted(row, jnp.arange(num_segments), side="right"))(ids)
    pieces = _plan_pieces(length, ends)
    own = pieces.counts[:, :num_segments]
    counts = own.at[:, num_segments - 1].add(pieces.counts[:, num_segments])
    parts = (pieces.places[:, :num_segments], counts)
    return Plan(
        pieces.tokens,
        jnp.stack([x.astype(jnp.int32).reshape(-1) for x in parts]),
        own.astype(jnp.int32).reshape(-1),
    )


def plan_stops(batch: int, length: int, lengths: jax.Array | None, positions: jax.Array) -> tuple[Plan, jax.Array]:
    """Cuts rows so that chunks end at `positions` [B, M].

    Returns (the plan, whose pieces leave B * (M + 1) states, and int32 [B, M] of which each position's is, -1: the first
    one, that no chunk leaves).
    """
    stop = jnp.full((batch, 1), length) if lengths is None else jnp.clip(lengths, 0, length)[:, None]
    wanted = jnp.clip(positions, 0, stop)
    ends = jnp.sort(jnp.concatenate([wanted, stop], axis=1), axis=1)
    pieces, many = _plan_pieces(length, ends), ends.shape[1]
    rows = jnp.arange(batch)[:, None] * many
    stops = jnp.where(pieces.last, rows + pieces.owner, -1).astype(jnp.int32).reshape(-1)
    parts = jnp.stack([pieces.places[:, 0], jnp.sum(pieces.counts, axis=1)]).astype(jnp.int32)
    own = jnp.sum(pieces.counts[:, :many], axis=1).astype(jnp.int32)
    # Where ends are equal, the first of their pieces holds the tokens and the others none.
    index = jnp.where(wanted == 0, -1, rows + jax.vmap(jnp.searchsorted)(ends, wanted))
    return Plan(pieces.tokens, parts, own, stops), index


def cut(work: Plan, segments: int) -> jax.Array:
    """The `parts` of all sequences' segments, which are equal but for a chunk; a sequence's last one has what pads too."""
    begin, count = work.parts
    bounds = work.own[:, None] * jnp.arange(segments, dtype=jnp.int32) // segments
    bounds = jnp.concatenate([bounds, count[:, None]], axis=1)
    return jnp.stack([(begin[:, None] + bounds[:, :-1]).reshape(-1), jnp.diff(bounds, axis=1).reshape(-1)])


@partial(
    jax.jit,
    static_argnames=("num_segments", "scale", "gate_lower_bound", "segments", "groups", "stages", "interpret"),
)
def kda(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    A_log: jax.Array | None,
    dt_bias: jax.Array | None,
    *,
    initial_state: jax.Array | None,
    lengths: jax.Array | None,
    segment_ids: jax.Array | None,
    num_segments: int | None,
    scale: float,
    gate_lower_bound: float | None,
    state_positions: jax.Array | None = None,
    segments: int = 1,
    groups: int | None = None,
    stages: int | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """See `pallas_kernels.kda.kda` and, with A_log, `pallas_kernels.kda.kda_from_raw`; returns (o, final_state, states)."""
    batch, length, heads, width = q.shape
    sequences = num_segments or 1
    index = None
    if state_positions is None:
        work = plan(batch, length, lengths, segment_ids, num_segments)
    else:
        work, index = plan_stops(batch, length, lengths, state_positions)
    parts = work.parts if segments == 1 else cut(work, segments)
    processors = getattr(jax.devices()[0], "core_count", 132) if interpret is None else 1
    if groups is None:  # a multiprocessor for half a head, if there are as many
        groups = 1 if 2 * parts.shape[1] * heads <= processors else 2
    stages = stages or (3 if groups == 1 else 2)
    bounded = gate_lower_bound is not None and gate_lower_bound >= LOWEST_SINGLE_REFERENCE
    known = lengths is None and state_positions is None and (segment_ids is None or num_segments is None)
    if initial_state is None:
        initial_state = jnp.zeros((batch * sequences, heads, width, WIDTH), jnp.float32)
    state = initial_state.reshape(batch * sequences, heads, width, WIDTH)
    raw = A_log is not None
    if A_log is not None and dt_bias is not None:
        rates, bias = A_log.astype(jnp.float32), dt_bias.astype(jnp.float32)
    else:
        rates, bias = jnp.zeros(heads, jnp.float32), jnp.zeros((heads, width), jnp.float32)
    # The copy engine gives zeros past the end, where the interpreter refuses to read.
    if padding := -length % ALIGNED if interpret is None else CHUNK:
        q, k, v, g, beta = (jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2)) for x in (q, k, v, g, beta))
    form = Form(scale, raw, gate_lower_bound, bounded)
    chunks = prepare(q, k, g, beta, rates, bias, work.tokens, length if known else None, form, interpret)
    first = state
    if segments > 1:
        summary = summarise(chunks, v, work.tokens, parts, segments, interpret=interpret)
        state = combine(first, *summary, segments, interpret)
    o, state, states = advance(
        chunks,
        v,
        work.tokens,
        parts,
        state,
        groups=groups,
        stages=stages,
        segments=segments,
        stops=work.stops,
        kept=0 if index is None else batch * (index.shape[1] + 1),
        interpret=interpret,
    )
    if index is not None and states is not None:
        states = jnp.where(index[..., None, None, None] < 0, first[:, None], states[jnp.maximum(index, 0)])
    shape = (batch, num_segments) if num_segments else (batch,)
    return o[:, :length], state.reshape(*shape, heads, width, WIDTH), states
