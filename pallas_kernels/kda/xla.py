"""KDA in chunks, in plain JAX: bounded memory, any gate, differentiable.

Inside a chunk of C tokens, with G the inclusive cumulative sum of g and S the state that enters the chunk:

    L_ij = β_i Σ_c k_ic k_jc exp(G_ic - G_jc)  (i > j)      A_ij = scale Σ_c q_ic k_jc exp(G_ic - G_jc)  (i >= j)
    W = (I + L)^-1 diag(β) (K * exp G)                      U = (I + L)^-1 diag(β) V
    X = U - W S                                             O = scale (Q * exp G) S + A X
    S' = diag(exp G_C) S + (K * exp(G_C - G))^T X

Row i of X is the corrected value u_i of the recurrence.

No difference of cumulative sums is formed: behind a strongly decaying token it would have lost its digits, and its
exponential could overflow. Tokens are joined two runs at a time instead, and the decay from token j of the earlier run
to token i of the later one is exp(sum of g after j in j's run) · exp(sum of g up to i in i's run). Both factors are at
most 1, and neither depends on a token after i. With a gate bounded below, runs of 16 need a single reference, their
first row: exp(G_i - G_0) · exp(G_0 - G_j), of which the second stays below exp(15 · 5.5).

Source: Kimi Linear report (arXiv 2510.26692) for the formulas.
"""

from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.manual_axes import align
from pallas_kernels.precision import at_least_float32, einsum
from pallas_kernels.target import platform

ChunkScan = Literal["sequential", "associative"]
Tree = TypeVar("Tree")

CHUNK = 64
RUN = 16
LOWEST_SINGLE_REFERENCE = -5.5  # exp(±15 · 5.5) are still normal float32 numbers,
BALANCE = 2.0**60  # and with this factor so are their products with small keys
GRID = 2.0**12
FORGET = -1000.0  # exp is 0 in float32 and float64; finite, because sums multiply it by 0
PAIRS = 2**30  # bytes of the pairs that the "associative" form combines at once
FEW = 128  # rows times heads up to which a GPU's steps take longer to start than to run


class _Tokens(NamedTuple):
    q: jax.Array
    k: jax.Array
    v: jax.Array
    g: jax.Array
    beta: jax.Array


class _Pieces(NamedTuple):
    """Which piece of its row a chunk belongs to; every array is [chunks, B]."""

    number: jax.Array
    first: jax.Array  # the chunk begins the piece
    last: jax.Array  # the chunk ends the piece


class _Run(NamedTuple):
    """Consecutive tokens, solved among themselves; every array is [..., tokens, *]."""

    q: jax.Array
    k: jax.Array
    beta: jax.Array
    upto: jax.Array  # sum of g from the run's first token to this one, this one included
    after: jax.Array  # sum of g over the run's tokens after this one
    attention: jax.Array  # A
    inverse: jax.Array  # (I + L)^-1


class _Chunk(NamedTuple):
    """What a chunk does to whatever state enters it, in the letters above; every array is [chunks, B, H, *]."""

    q: jax.Array  # scale Q * exp G
    attention: jax.Array  # A
    w: jax.Array
    u: jax.Array
    k: jax.Array  # K * exp(G_C - G)
    decay: jax.Array  # exp G_C


class _Restart(NamedTuple):
    """Chunks that begin a sequence of their own, and the state they begin it from."""

    first: jax.Array  # bool [chunks, B]
    state: jax.Array  # [chunks, B, H, K, V]


class _Passed(NamedTuple):
    """What the pass over chunks yields, for every chunk but the last item."""

    read: jax.Array  # scale (Q * exp G) S
    corrected: jax.Array  # X
    left: jax.Array | None  # S', where it is wanted
    last: jax.Array  # S' of the last chunk


class _How(NamedTuple):
    scale: float
    bounded: bool  # every g is at least LOWEST_SINGLE_REFERENCE
    chunk_size: int | None
    chunk_scan: ChunkScan
    segments: int

    def chunk(self, mean_length: int) -> int:
        return self.chunk_size or min(CHUNK, _round_up(mean_length, RUN))


@partial(jax.jit, static_argnames=("num_segments", "scale", "gate_lower_bound", "chunk_size", "chunk_scan", "segments"))
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
    state_positions: jax.Array | None,
    scale: float,
    gate_lower_bound: float | None,
    chunk_size: int | None,
    chunk_scan: ChunkScan,
    segments: int = 1,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """See `pallas_kernels.kda.kda`; returns (o, final_state, states)."""
    tokens = _Tokens(q, k, v, g, beta)
    batch, length, heads, width = q.shape
    bounded = gate_lower_bound is not None and gate_lower_bound >= LOWEST_SINGLE_REFERENCE
    how = _How(scale, bounded, chunk_size, chunk_scan, segments)
    if initial_state is None:
        many = () if num_segments is None else (num_segments,)
        initial_state = jnp.zeros((batch, *many, heads, width, v.shape[-1]), at_least_float32(*tokens))

    if segment_ids is not None and num_segments is not None:
        ids = jnp.where(segment_ids < 0, num_segments, segment_ids)
        ends = jax.vmap(lambda row: jnp.searchsorted(row, jnp.arange(num_segments), side="right"))(ids)
        o, (_, states) = _in_pieces(tokens, jnp.zeros_like(initial_state[:, 0]), ends, how, starts=initial_state)
        return o, states, None
    if state_positions is not None:
        stop = jnp.full((batch, 1), length) if lengths is None else lengths[:, None]
        wanted = jnp.clip(state_positions, 0, stop)
        ends = jnp.sort(jnp.concatenate([wanted, stop], axis=1), axis=1)
        o, (state, states) = _in_pieces(tokens, initial_state, ends, how)
        # Where ends are equal, the first of their pieces holds the tokens and the others none.
        piece = jax.vmap(jnp.searchsorted)(ends, wanted)
        return o, state, states[jnp.arange(batch)[:, None], piece]

    valid = None
    if segment_ids is not None:
        # No state is asked for at the boundaries, so that a decay to nothing is all it takes to separate the sequences.
        valid = segment_ids >= 0
        begins = jnp.diff(segment_ids, axis=1, prepend=-1) != 0
        tokens = tokens._replace(g=jnp.where(begins[..., None, None], FORGET, g))
        how = how._replace(bounded=False)
    elif lengths is not None:
        valid = jnp.arange(length) < lengths[:, None]
    if length == 1:
        return *_one_token(tokens, initial_state, valid, scale), None
    o, (state, _) = _all_chunks(tokens, initial_state, how, how.chunk(length), valid=valid)
    return o, state, None


def _in_pieces(
    tokens: _Tokens, state: jax.Array, ends: jax.Array, how: _How, starts: jax.Array | None = None
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """The pieces [0, ends_0), [ends_0, ends_1), ... of every row, in chunks of their own.

    `starts` [B, pieces, H, K, V] makes every piece begin from a state of its own and not where the one before it ended.

    Returns (o, (last state, states [B, pieces, H, K, V] after the pieces)). A piece without tokens reports the state it
    would have begun from, without `starts` that of the row.
    """
    length, pieces = tokens.q.shape[1], ends.shape[1]
    chunk = how.chunk(-(-length // pieces))
    token, place, layout = _lay_out(ends, length, chunk)
    states = jnp.repeat(state[:, None], pieces, axis=1) if starts is None else starts
    placed = _Tokens(*(_take(x, token) for x in tokens))
    o, carry = _all_chunks(placed, state, how, chunk, pieces=layout, states=states, restart=starts is not None)
    return _take(o, place), carry


def _one_token(tokens: _Tokens, state: jax.Array, valid: jax.Array | None, scale: float) -> tuple[jax.Array, jax.Array]:
    """One step of the recurrence that reads the state once: S'^T k = S^T (k * exp g), and so for q."""
    q, k, v, g, beta = (x[:, 0] for x in _prepare(tokens, valid, state.dtype))
    decay = jnp.exp(g)
    read = _matmul(jnp.stack([q * decay, k * decay], axis=2), state)
    corrected = beta * (v - read[:, :, 1])
    o = scale * (read[:, :, 0] + jnp.sum(q * k, axis=-1, keepdims=True) * corrected)
    state = decay[..., None] * state + k[..., None] * corrected[..., None, :]
    return _finish(o[:, None], valid, tokens.v.dtype), state


def _all_chunks(
    tokens: _Tokens,
    state: jax.Array,
    how: _How,
    chunk: int,
    *,
    valid: jax.Array | None = None,
    pieces: _Pieces | None = None,
    states: jax.Array | None = None,
    restart: bool = False,
) -> tuple[jax.Array, Any]:
    """A group of chunks at a time; returns (o, (last state, states [B, pieces, H, K, V] after the pieces)).

    What `states` hold is overwritten when their piece ends. With `restart` a piece begins from it.
    """
    batch, length, heads, _ = tokens.q.shape
    chunks = -(-length // chunk)
    group = max(1, _chunks_in_flight(tokens.q.shape[-1]) // (batch * heads))
    if how.chunk_scan == "associative":
        group = min(chunks, max(1, PAIRS // _pair_bytes(tokens, state)))
    else:
        group *= how.segments
    groups = -(-chunks // group)
    group = _round_up(-(-chunks // groups), how.segments)
    rows = jnp.arange(batch)

    def by_token(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, [(0, 0), (0, groups * group * chunk - length)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(batch, groups, group * chunk, *x.shape[2:]), 1, 0)

    def by_chunk(x: jax.Array) -> jax.Array:
        return jnp.pad(x, [(0, groups * group - chunks), (0, 0)]).reshape(groups, group, batch)

    # Reverse mode keeps the state that enters a group and computes the inside of the group again.
    @partial(jax.checkpoint, prevent_cse=groups == 1)
    def advance(
        state: jax.Array, tokens: _Tokens, valid: jax.Array | None, restarts: _Restart | None
    ) -> tuple[jax.Array, jax.Array | None, jax.Array]:
        work = _solve(_by_head(_prepare(tokens, valid, state.dtype), chunk), how)
        passed = _pass_over_chunks(work, state, restarts, how, keep=pieces is not None)
        o = jnp.transpose(passed.read + _matmul(work.attention, passed.corrected), (1, 0, 3, 2, 4))
        return _finish(o.reshape(batch, group * chunk, heads, -1), valid, tokens.v.dtype), passed.left, passed.last

    def step(carry: Any, xs: Any) -> Any:
        (state, states), (tokens, valid, pieces) = carry, xs
        restarts = None
        if restart:
            restarts = _Restart(pieces.first, starts.at[rows, pieces.number].get(mode="clip"))
        o, left, state = advance(state, tokens, valid, restarts)
        if pieces is not None:
            # Only a piece's last chunk stores its state. Places out of bounds are dropped, but have to differ.
            nowhere = states.shape[1] + jnp.arange(group)[:, None]
            places = jnp.where(pieces.last, pieces.number, nowhere)
            states = states.at[rows, places].set(left, mode="drop", unique_indices=True)
        return (state, states), o

    carry: Any
    carry, tokens = align((state, states), tokens)
    starts = carry[1]
    xs = (*jax.tree.map(by_token, (tokens, valid)), jax.tree.map(by_chunk, pieces))
    if groups == 1:
        carry, o = step(carry, jax.tree.map(lambda x: x[0], xs))
    else:
        carry, o = jax.lax.scan(step, carry, xs)
        o = jnp.moveaxis(o, 0, 1).reshape(batch, groups * group * chunk, heads, -1)
    return o[:, :length], carry


def _lay_out(ends: jax.Array, length: int, chunk: int) -> tuple[jax.Array, jax.Array, _Pieces]:
    """Places the pieces [0, ends_0), [ends_0, ends_1), ... of every row so that no chunk holds tokens of two.

    Returns (the token [B, chunks * C] in every place, T where there is none; the place [B, T] of every token,
    chunks * C for a token past the last piece; the pieces of the chunks).
    """
    batch, pieces = ends.shape
    chunks = (length + pieces * (chunk - 1)) // chunk  # at least sum_p ceil(size_p / C)
    sizes = jnp.diff(ends, axis=1, prepend=0)
    counts = -(-sizes // chunk)
    stops = jnp.cumsum(counts, axis=1)

    # A column for what lies behind the last piece: it has no size, and neither tokens nor chunks.
    def extend(x: jax.Array, fill: int) -> jax.Array:
        return jnp.pad(x, [(0, 0), (0, 1)], constant_values=fill)

    rows = jnp.arange(batch)[:, None]
    begins, sizes = extend(ends - sizes, length), extend(sizes, 0)
    first_chunk, counts = extend(stops - counts, 0), extend(counts, 0)

    index = jax.vmap(lambda row: jnp.searchsorted(row, jnp.arange(chunks), side="right"))(stops)
    nth = jnp.arange(chunks) - first_chunk[rows, index]
    offset = (nth * chunk)[..., None] + jnp.arange(chunk)
    token = jnp.where(offset < sizes[rows, index][..., None], begins[rows, index][..., None] + offset, length)

    of_token = jax.vmap(lambda row: jnp.searchsorted(row, jnp.arange(length), side="right"))(ends)
    place = first_chunk[rows, of_token] * chunk + jnp.arange(length) - begins[rows, of_token]
    place = jnp.where(of_token < pieces, place, chunks * chunk)

    exists = index < pieces
    of_chunk = _Pieces(index, exists & (nth == 0), exists & (nth == counts[rows, index] - 1))
    return token.reshape(batch, -1), place, jax.tree.map(jnp.transpose, of_chunk)


def _take(x: jax.Array, index: jax.Array) -> jax.Array:
    """Entries of x [B, n, ...] at index [B, m], 0 where the index is n."""
    return x.at[jnp.arange(x.shape[0])[:, None], index].get(mode="fill", fill_value=0)


def _prepare(tokens: _Tokens, valid: jax.Array | None, dtype: jnp.dtype) -> _Tokens:
    """In the dtype of the state, beta as [B, T, H, 1], and padding as tokens that change nothing."""
    tokens = _Tokens(*(x.astype(dtype) for x in tokens))
    tokens = tokens._replace(beta=tokens.beta[..., None])
    if valid is None:
        return tokens
    return _Tokens(*(jnp.where(valid[..., None, None], x, 0) for x in tokens))


def _finish(o: jax.Array, valid: jax.Array | None, dtype: jnp.dtype) -> jax.Array:
    return (o if valid is None else jnp.where(valid[..., None, None], o, 0)).astype(dtype)


def _by_head(tokens: _Tokens, chunk: int) -> _Tokens:
    """[B, T, H, *] -> [chunks, B, H, C, *]."""

    def split(x: jax.Array) -> jax.Array:
        batch, _, heads, width = x.shape
        return jnp.transpose(x.reshape(batch, -1, chunk, heads, width), (1, 0, 3, 2, 4))

    return _Tokens(*map(split, tokens))


def _solve(tokens: _Tokens, how: _How) -> _Chunk:
    """Everything about chunks [..., C, *] that doesn't depend on the state."""
    q, k, v, g, beta = tokens

    def split(x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:-2], -1, RUN, x.shape[-1])

    runs = _first_runs(split(q * how.scale), split(k), split(beta), split(g), how.bounded)
    while (count := runs.q.shape[-3]) % 2 == 0:
        runs = _join(_pick(runs, np.s_[::2]), _pick(runs, np.s_[1::2]))
    run = _pick(runs, 0)
    for i in range(1, count):
        run = _join(run, _pick(runs, i))
    into = jnp.exp(run.upto)
    return _Chunk(
        q=run.q * into,
        attention=run.attention,
        w=_matmul(run.inverse, beta * k * into),
        u=_matmul(run.inverse, beta * v),
        k=k * jnp.exp(run.after),
        decay=into[..., -1, :],
    )


def _first_runs(q: jax.Array, k: jax.Array, beta: jax.Array, g: jax.Array, bounded: bool) -> _Run:
    """Runs of 16 tokens [..., 16, *], solved."""
    row, col = np.arange(RUN)[:, None], np.arange(RUN)
    # A token meets itself without decay. Were it among the products below, g would get two large gradients for it that
    # cancel, and next to strong decay their rounding is all that remains.
    attention = jnp.where(row == col, _products(q, k), 0)
    if bounded:
        # Two factors of opposite exponents, up to 15 · 5.5, make one of any size: rounding their sums would show in it.
        # Sums of multiples of 1 / GRID are exact, and those of what is left are small.
        coarse = jax.lax.stop_gradient(jnp.round(g * GRID) / GRID)
        from_first = (col > 0) & (col <= row)
        whole, rest = _add_up(coarse, from_first), _add_up(g - coarse, from_first)
        rows = jnp.exp(whole) * jnp.exp(rest) * BALANCE
        cols = k * (jnp.exp(-whole) * jnp.exp(-rest) / BALANCE)
        attention += jnp.where(col < row, _products(q * rows, cols), 0)
        lower = jnp.where(col < row, _products(k * rows, cols), 0)
    else:
        lower = jnp.zeros_like(attention)
        for size in (1, 2, 4, 8):
            # Joins neighbours of this size, all at once. A token of the earlier one decays over what follows it there,
            # a token of the later one over what precedes it there and itself.
            begin = row // (2 * size) * 2 * size
            middle = begin + size
            earlier, later = (row < col) & (col < middle), (middle <= col) & (col <= row)
            decay = jnp.exp(_add_up(g, np.where(row < middle, earlier, later)))
            pairs = (middle <= row) & (begin <= col) & (col < middle)
            attention += jnp.where(pairs, _products(q * decay, k * decay), 0)
            lower += jnp.where(pairs, _products(k * decay, k * decay), 0)
    return _Run(q, k, beta, _add_up(g, col <= row), _add_up(g, col > row), attention, _unit_lower_inverse(beta * lower))


def _join(a: _Run, b: _Run) -> _Run:
    """The run of a's tokens and then b's."""
    rows, cols = jnp.exp(b.upto), a.k * jnp.exp(a.after)
    corner = -_matmul(b.inverse, _matmul(b.beta * _products(b.k * rows, cols), a.inverse))
    return _Run(
        q=jnp.concatenate([a.q, b.q], axis=-2),
        k=jnp.concatenate([a.k, b.k], axis=-2),
        beta=jnp.concatenate([a.beta, b.beta], axis=-2),
        upto=jnp.concatenate([a.upto, a.upto[..., -1:, :] + b.upto], axis=-2),
        after=jnp.concatenate([a.after + b.upto[..., -1:, :], b.after], axis=-2),
        attention=_lower_block(a.attention, _products(b.q * rows, cols), b.attention),
        inverse=_lower_block(a.inverse, corner, b.inverse),
    )


@jax.custom_jvp
def _unit_lower_inverse(lower: jax.Array) -> jax.Array:
    """(I + lower)^-1 by block substitution: [[A, 0], [L, B]]^-1 = [[A^-1, 0], [-B^-1 L A^-1, B^-1]].

    Its entries are at most 1, being products of contractions between two keys of length 1, so little cancels. XLA's
    triangular solve is no choice: on CPU two batched solves that run at the same time can wait for each other forever.
    """
    n = lower.shape[-1]
    inverse = jnp.ones((*lower.shape[:-2], n, 1, 1), lower.dtype)
    size = 1
    while size < n:
        corner = jnp.stack([lower[..., i + size : i + 2 * size, i : i + size] for i in range(0, n, 2 * size)], axis=-3)
        a, b = _pick(inverse, np.s_[::2]), _pick(inverse, np.s_[1::2])
        inverse = _lower_block(a, -_matmul(b, _matmul(corner, a)), b)
        size *= 2
    return _pick(inverse, 0)


@_unit_lower_inverse.defjvp
def _unit_lower_inverse_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    inverse = _unit_lower_inverse(*primals)
    return inverse, -_matmul(inverse, _matmul(tangents[0], inverse))


def _pass_over_chunks(work: _Chunk, state: jax.Array, restart: _Restart | None, how: _How, *, keep: bool) -> _Passed:
    """S' = M S + B from chunk to chunk, M = diag(exp G_C) - (K * exp(G_C - G))^T W, B = (K * exp(G_C - G))^T U.

    "sequential" goes one by one, "associative" combines pairs (M, B) as a tree, and segments run side by side: once to
    find every one's (M, B), and again from the state that then enters it.
    """
    if how.chunk_scan == "associative":
        return _associative(work, state, restart)
    if how.segments == 1:
        return _sequential(work, state, restart, keep)

    def cut(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(how.segments, -1, *x.shape[1:]), 0, 1)

    def uncut(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x, 1, 0).reshape(-1, *x.shape[2:])

    def widen(x: jax.Array) -> jax.Array:
        return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width)])

    # The columns of (B, M) are states that start from 0 and from the identity; only the former have values to write.
    width, values = state.shape[-2:]
    work, restart = jax.tree.map(cut, (work, restart))
    pair = jnp.eye(width, width + values, k=values, dtype=state.dtype)
    pair = jnp.broadcast_to(pair, (how.segments, *state.shape[:-2], *pair.shape))
    wide = restart and restart._replace(state=widen(restart.state))
    pair = _sequential(work._replace(u=widen(work.u)), pair, wide, keep=False).last
    entering = [state]
    for part in pair[:-1]:
        entering.append(_matmul(part[..., values:], entering[-1]) + part[..., :values])
    passed = _sequential(work, jnp.stack(entering), restart, keep)
    read, corrected, left = jax.tree.map(uncut, (passed.read, passed.corrected, passed.left))
    return _Passed(read, corrected, left, passed.last[-1])


def _sequential(work: _Chunk, state: jax.Array, restart: _Restart | None, keep: bool) -> _Passed:
    def step(state: jax.Array, xs: tuple[_Chunk, _Restart | None]) -> Any:
        work, restart = xs
        state = _enter(state, restart)
        read = _matmul(work.q, state)
        corrected = work.u - _matmul(work.w, state)
        state = einsum("...k,...kv->...kv", work.decay, state) + _outer(work.k, corrected)
        return state, (read, corrected, state if keep else None)

    state, work, restart = align(state, work, restart)
    last, (read, corrected, left) = jax.lax.scan(step, state, (work, restart))
    return _Passed(read, corrected, left, last)


def _associative(work: _Chunk, state: jax.Array, restart: _Restart | None) -> _Passed:
    transition = work.decay[..., None] * jnp.eye(work.decay.shape[-1], dtype=state.dtype) - _outer(work.k, work.w)
    offset = _outer(work.k, work.u)
    if restart is not None:
        first = _over_states(restart.first)
        offset += jnp.where(first, _matmul(transition, restart.state), 0)
        transition = jnp.where(first, 0, transition)

    def combine(a: Any, b: Any) -> Any:
        return _matmul(b[0], a[0]), _matmul(b[0], a[1]) + b[1]

    transition, offset = jax.lax.associative_scan(combine, (transition, offset))
    left = _matmul(transition, state) + offset
    entering = _enter(jnp.concatenate([state[None], left[:-1]]), restart)
    return _Passed(_matmul(work.q, entering), work.u - _matmul(work.w, entering), left, left[-1])


def _enter(state: jax.Array, restart: _Restart | None) -> jax.Array:
    """The state that a chunk works on, given the one that the chunk before it left."""
    return state if restart is None else jnp.where(_over_states(restart.first), restart.state, state)


def _over_states(x: jax.Array) -> jax.Array:
    return x[..., None, None, None]


def _matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    return einsum("...ij,...jk->...ik", a, b)


def _products(a: jax.Array, b: jax.Array) -> jax.Array:
    """Of every row of a with every row of b."""
    return einsum("...ik,...jk->...ij", a, b)


def _outer(k: jax.Array, x: jax.Array) -> jax.Array:
    """Sum over the tokens of a chunk of k_i x_i^T."""
    return einsum("...ck,...cv->...kv", k, x)


def _add_up(g: jax.Array, which: np.ndarray) -> jax.Array:
    """sum_j which_ij g_j over the tokens of a run, as a product: the fastest cumulative sum of 16 rows."""
    return _matmul(jnp.broadcast_to(jnp.asarray(which, g.dtype), (*g.shape[:-2], *which.shape)), g)


def _lower_block(a: jax.Array, corner: jax.Array, b: jax.Array) -> jax.Array:
    """[[a, 0], [corner, b]]."""
    top = jnp.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, b.shape[-1])])
    return jnp.concatenate([top, jnp.concatenate([corner, b], axis=-1)], axis=-2)


def _pick(runs: Tree, which: Any) -> Tree:
    """Some of the runs [..., runs, tokens, *]."""
    return jax.tree.map(lambda x: x[..., which, :, :], runs)


def _pair_bytes(tokens: _Tokens, state: jax.Array) -> int:
    """Of the pairs (M, B) of one chunk of every row and head."""
    batch, _, heads, width = tokens.k.shape
    return batch * heads * width * (width + tokens.v.shape[-1]) * state.dtype.itemsize


def best_chunk_scan(sequences: int) -> ChunkScan:
    """The form of the pass over chunks that suits the machine, for so many rows times heads."""
    return "associative" if platform() == "gpu" and sequences <= FEW else "sequential"


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _chunks_in_flight(width: int) -> int:
    """Chunks times heads times rows that are computed at once; the rest of a sequence waits its turn.

    A CPU wants them in its cache (1024 tokens of 8 heads on one core: 19 ms with 16, 49 ms with 64), an accelerator
    wants enough to fill it: about 1 GiB of them.
    """
    return 16 if platform() == "cpu" else 2**18 // width
