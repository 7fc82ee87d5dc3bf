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
    """

    tokens: jax.Array
    parts: jax.Array


def _plan_rows(batch: int, length: int, lengths: jax.Array | None) -> Plan:
    chunks = -(-length // CHUNK)
    row, nth = np.divmod(np.arange(batch * chunks, dtype=np.int32), chunks)
    first = nth * CHUNK
    begins = np.arange(batch, dtype=np.int32) * chunks
    parts = jnp.asarray(np.stack([begins, np.full_like(begins, chunks)]))
    fixed = (row, first, np.zeros_like(row)), np.full_like(row, CHUNK)
    if lengths is None:  # what is known beforehand costs nothing on the device
        return Plan(jnp.asarray(np.stack([*fixed[0], (length - first).clip(0, CHUNK), fixed[1]])), parts)
    ends = jnp.clip(lengths, 0, length).astype(jnp.int32)
    return Plan(jnp.stack([*fixed[0], (ends[row] - first).clip(0, CHUNK), fixed[1]]), parts)


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
    ends = jnp.pad(ends.astype(jnp.int32), [(0, 0), (0, 1)], constant_values=length)  # the padding is one more piece
    begins = jnp.pad(ends[:, :-1], [(0, 0), (1, 0)])
    starts = begins // ALIGNED * ALIGNED
    chunks = (length + ends.shape[1] * (CHUNK + ALIGNED - 2)) // CHUNK  # of a row, at least as many as it has
    counts = jnp.where(begins < ends, -(-(ends - starts) // CHUNK), 0)
    stops = jnp.cumsum(counts, axis=1)
    owner = jax.vmap(lambda row: jnp.searchsorted(row, jnp.arange(chunks), side="right"))(stops)
    exists, real = owner <= num_segments, owner < num_segments
    owner = jnp.minimum(owner, num_segments)

    def of_owner(x: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x, owner, axis=1)

    first = jnp.where(exists, of_owner(starts) + (jnp.arange(chunks) - of_owner(stops - counts)) * CHUNK, 0)
    begin, end = (jnp.where(exists, jnp.clip(of_owner(x) - first, 0, CHUNK), 0) for x in (begins, ends))
    row = jnp.broadcast_to(jnp.arange(batch)[:, None], first.shape)
    tokens = (row, first, begin, jnp.where(real, end, 0), end)
    places = stops - counts + jnp.arange(batch)[:, None] * chunks
    counts = counts.at[:, num_segments - 1].add(counts[:, num_segments])
    parts = (places[:, :num_segments], counts[:, :num_segments])
    return Plan(*(jnp.stack([x.astype(jnp.int32).reshape(-1) for x in lines]) for lines in (tokens, parts)))


@partial(
    jax.jit,
    static_argnames=("num_segments", "scale", "gate_lower_bound", "groups", "stages", "interpret"),
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
    groups: int | None = None,
    stages: int | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.kda.kda` and, with raw, `pallas_kernels.kda.kda_from_raw`; returns (o, final_state)."""
    batch, length, heads, width = q.shape
    sequences = num_segments or 1
    work = plan(batch, length, lengths, segment_ids, num_segments)
    processors = getattr(jax.devices()[0], "core_count", 132) if interpret is None else 1
    if groups is None:  # a multiprocessor for half a head, if there are as many
        groups = 1 if 2 * work.parts.shape[1] * heads <= processors else 2
    stages = stages or (3 if groups == 1 else 2)
    bounded = gate_lower_bound is not None and gate_lower_bound >= LOWEST_SINGLE_REFERENCE
    known = lengths is None and (segment_ids is None or num_segments is None)
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
    o, state = advance(chunks, v, work.tokens, work.parts, state, groups=groups, stages=stages, interpret=interpret)
    shape = (batch, num_segments) if num_segments else (batch,)
    return o[:, :length], state.reshape(*shape, heads, width, WIDTH)
