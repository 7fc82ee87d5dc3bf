"""Gradient of KDA's prefill on Hopper: two passes over the chunks for the states and their gradients, then all chunks."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.kda.gate import gate, l2_normalize
from pallas_kernels.kda.gpu_backward_chunk import LEAST_BETA, Around, Laid, pull
from pallas_kernels.kda.gpu_backward_pass import pass_over
from pallas_kernels.kda.gpu_prefill import ALIGNED, Plan, plan
from pallas_kernels.kda.gpu_prefill_chunk import Form, prepare
from pallas_kernels.kda.gpu_prefill_warp import CHUNK, WIDTH

IN_FLIGHT = 4096  # chunks times heads whose insides are worked out at once


class Inputs(NamedTuple):
    """Of `gpu_prefill.kda`; and their gradients."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    g: jax.Array
    beta: jax.Array
    A_log: jax.Array | None
    dt_bias: jax.Array | None
    initial_state: jax.Array | None


class _Tokens(NamedTuple):
    q: jax.Array
    k: jax.Array
    g: jax.Array
    beta: jax.Array


@partial(jax.jit, static_argnames=("num_segments", "scale", "gate_lower_bound", "interpret"))
def gradients(
    inputs: Inputs,
    d_o: jax.Array,
    d_state: jax.Array,
    *,
    lengths: jax.Array | None,
    segment_ids: jax.Array | None,
    num_segments: int | None,
    scale: float,
    gate_lower_bound: float,
    interpret: Any = None,
) -> Inputs:
    """Pulls the gradients of (o, final_state) back. The gate has to be bounded, from `xla.LOWEST_SINGLE_REFERENCE` up."""
    q, k, v, g, beta, a_log, bias, initial_state = inputs
    batch, length, heads, width = q.shape
    sequences = batch * (num_segments or 1)
    raw = a_log is not None and bias is not None
    # The gradient divides by beta.
    least = float(np.log(LEAST_BETA)) if raw else LEAST_BETA
    strengths = jnp.maximum(beta, jnp.asarray(least, beta.dtype))
    work = plan(batch, length, lengths, segment_ids, num_segments)
    known = lengths is None and (segment_ids is None or num_segments is None)
    if initial_state is None:
        state = jnp.zeros((sequences, heads, width, WIDTH), jnp.float32)
    else:
        state = initial_state.reshape(sequences, heads, width, WIDTH).astype(jnp.float32)
    rates, biases = jnp.zeros(heads, jnp.float32), jnp.zeros((heads, width), jnp.float32)
    if a_log is not None and bias is not None:
        rates, biases = a_log.astype(jnp.float32), bias.astype(jnp.float32)
    d_o = d_o.astype(jnp.bfloat16)

    arrays: tuple[jax.Array, ...] = (q, k, g, strengths, v, d_o)
    # The copy engine gives zeros past the end, where the interpreter refuses to read.
    if padding := -length % ALIGNED if interpret is None else CHUNK:
        arrays = tuple(jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2)) for x in arrays)
    form = Form(scale, raw, gate_lower_bound, True)
    query, key, decay, strength = arrays[:4]
    same = length if known else None
    chunks = prepare(query, key, decay, strength, rates, biases, work.tokens, same, form, interpret)
    processors = getattr(jax.devices()[0], "core_count", 132) if interpret is None else 1
    groups = 1 if 2 * work.parts.shape[1] * heads <= processors else 2
    d_state = d_state.astype(jnp.float32).reshape(state.shape)
    passes = [
        pass_over(chunks, x, work.tokens, work.parts, start, back=back, groups=groups, stages=2, interpret=interpret)
        for x, start, back in ((arrays[4], state, False), (arrays[5], d_state, True))
    ]
    there, back = passes

    packed = segment_ids is not None and num_segments is not None
    lay, unlay = _layout(work, batch, length, packed)
    laid = _Tokens(lay(q), lay(k), lay(g), lay(strengths))
    valid = _valid(work)

    def prepared(tokens: _Tokens, a_log: Any, bias: Any) -> _Tokens:
        """[n, 64, H, *], of which padding is 0 in the end."""
        q, k, g, beta = tokens
        if raw:
            q, k = l2_normalize(q), l2_normalize(k)
            g, beta = gate(g, a_log, bias, gate_lower_bound), jax.nn.sigmoid(beta.astype(jnp.float32))
        return _Tokens(*(x.astype(jnp.float32) for x in (q, k, g, beta)))

    def inside(xs: Any) -> Any:
        tokens, d_o, valid, (states, d_states, y, d_y) = xs
        tokens = _clear(tokens, valid)
        wide, pull_back = jax.vjp(prepared, tokens, a_log, bias)
        wide = _clear(wide, valid)
        by_head = Laid(*(_turn(x) for x in wide._replace(beta=wide.beta[..., None])))
        around = Around(states, d_states, y, d_y, _turn(_clear(d_o, valid)))
        found = pull(by_head, around, scale, interpret)
        d_tokens = _Tokens(_turn(found.q), _turn(found.k), _turn(found.g), _turn(found.beta)[..., 0])
        return pull_back(_clear(d_tokens, valid))

    xs = (laid, lay(d_o), valid, (there.states, back.states, there.values, back.values))
    d_tokens, d_rate, d_bias = _in_groups(inside, xs, max(1, IN_FLIGHT // heads))
    if raw:
        d_rate, d_bias = jnp.sum(d_rate, axis=0), jnp.sum(d_bias, axis=0)
    d_q, d_k, d_g, d_beta = (unlay(x) for x in d_tokens)
    d_v = unlay(jnp.swapaxes(back.values, 1, 2))
    d_initial = None if initial_state is None else back.last.reshape(initial_state.shape).astype(initial_state.dtype)
    return Inputs(d_q, d_k, d_v.astype(v.dtype), d_g, d_beta, d_rate, d_bias, d_initial)


def _turn(x: jax.Array) -> jax.Array:
    """[n, 64, H, *] to [n, H, 64, *] and back."""
    return jnp.swapaxes(x, 1, 2)


def _valid(work: Plan) -> jax.Array:
    """Which places hold tokens, [N, 64]."""
    place = jnp.arange(CHUNK)
    _, _, begin, end, _ = work.tokens
    return (begin[:, None] <= place) & (place < end[:, None])


def _clear(tree: Any, valid: jax.Array) -> Any:
    def clear(x: jax.Array) -> jax.Array:
        return jnp.where(valid.reshape(*valid.shape, *(1,) * (x.ndim - 2)), x, jnp.zeros((), x.dtype))

    return jax.tree.map(clear, tree)


def _layout(work: Plan, batch: int, length: int, packed: bool) -> Any:
    """Functions from [B, T, *] to chunks [N, 64, *] and back; the way back leaves zeros at padding."""
    number = work.tokens.shape[1]
    if not packed:
        padded = number // batch * CHUNK

        def lay(x: jax.Array) -> jax.Array:
            x = jnp.pad(x, [(0, 0), (0, padded - length)] + [(0, 0)] * (x.ndim - 2))
            return x.reshape(number, CHUNK, *x.shape[2:])

        def unlay(x: jax.Array) -> jax.Array:
            return x.reshape(batch, padded, *x.shape[2:])[:, :length]

        return lay, unlay
    row, first = work.tokens[0][:, None], work.tokens[1][:, None]
    index = jnp.minimum(first + jnp.arange(CHUNK), length - 1) + row * length
    valid = _valid(work)
    nowhere = batch * length + jnp.arange(number * CHUNK).reshape(number, CHUNK)
    place = jnp.full(batch * length, number * CHUNK)
    place = place.at[jnp.where(valid, index, nowhere)].set(
        jnp.arange(number * CHUNK).reshape(number, CHUNK), mode="drop", unique_indices=True
    )

    def gather(x: jax.Array) -> jax.Array:
        return x.reshape(batch * length, *x.shape[2:])[index]

    def scatter(x: jax.Array) -> jax.Array:
        x = x.reshape(number * CHUNK, *x.shape[2:])
        return x.at[place].get(mode="fill", fill_value=0).reshape(batch, length, *x.shape[1:])

    return gather, scatter


def _in_groups(f: Any, xs: Any, size: int) -> Any:
    """f(xs) of `size` chunks at a time; of its results (tokens, rates, biases) the last two come a group."""
    number = jax.tree.leaves(xs)[0].shape[0]
    least = -(-number // size)
    # Equal groups need no padding, which would copy everything.
    groups = next((n for n in range(least, min(2 * least, number) + 1) if number % n == 0), least)
    size = -(-number // groups)

    def cut(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, [(0, groups * size - number)] + [(0, 0)] * (x.ndim - 1))
        return x.reshape(groups, size, *x.shape[1:])

    if groups == 1:
        tokens, rates, biases = f(xs)
        return tokens, *(None if x is None else x[None] for x in (rates, biases))
    tokens, rates, biases = jax.lax.map(f, jax.tree.map(cut, xs))
    tokens = jax.tree.map(lambda x: x.reshape(groups * size, *x.shape[2:])[:number], tokens)
    return tokens, rates, biases
