"""KDA token by token: the definition."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.manual_axes import align
from pallas_kernels.precision import at_least_float32, einsum


@partial(jax.jit, static_argnames=("num_segments", "scale"))
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
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """See `pallas_kernels.kda.kda`; returns (o, final_state, states)."""
    batch, length, heads, width = q.shape
    dtype = at_least_float32(q, k, v, g, beta)
    # One state for every sequence of a row; a row that isn't packed holds one sequence.
    shape = (batch, num_segments or 1, heads, width, v.shape[-1])
    state = jnp.zeros(shape, dtype) if initial_state is None else initial_state.reshape(shape)

    valid = jnp.ones((batch, length), bool)
    owner = jnp.zeros((batch, length), int)
    fresh = jnp.zeros((batch, length), bool)
    if lengths is not None:
        valid = jnp.arange(length) < lengths[:, None]
    elif segment_ids is not None:
        valid = segment_ids >= 0
        if num_segments is None:
            fresh = valid & (jnp.diff(segment_ids, axis=1, prepend=-1) != 0)
        else:
            owner = jnp.maximum(segment_ids, 0)

    def mask(x: jax.Array) -> jax.Array:
        # Padding may hold anything; masked only afterwards, its gradient would be 0 · NaN.
        return jnp.where(valid.reshape(valid.shape + (1,) * (x.ndim - 2)), x.astype(dtype), 0)

    rows = jnp.arange(batch)
    if state_positions is not None:
        state_positions = jnp.minimum(state_positions, jnp.sum(valid, axis=1)[:, None])
    states = None if state_positions is None else jnp.repeat(state, state_positions.shape[1], axis=1)

    def step(carry: Any, token: Any) -> Any:
        (state, states), (q, k, v, g, beta, valid, owner, fresh, count) = carry, token
        before = jnp.where(_over_state(fresh), 0, state[rows, owner])
        decayed = jnp.exp(g)[..., None] * before
        u = beta[..., None] * (v - einsum("bhkv,bhk->bhv", decayed, k))
        after = jnp.where(_over_state(valid), decayed + k[..., None] * u[..., None, :], before)
        o = jnp.where(valid[:, None, None], scale * einsum("bhkv,bhk->bhv", after, q), 0)
        if states is not None:
            states = jnp.where(_over_state(state_positions == count), after[:, None], states)
        return (state.at[rows, owner].set(after), states), o

    carry, tokens = align((state, states), tuple(map(mask, (q, k, v, g, beta))))
    by_time = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (*tokens, valid, owner, fresh))
    (state, states), o = jax.lax.scan(step, carry, (*by_time, jnp.arange(1, length + 1)))
    return jnp.moveaxis(o, 0, 1).astype(v.dtype), state if num_segments else state[:, 0], states


def _over_state(x: jax.Array) -> jax.Array:
    return x[..., None, None, None]
