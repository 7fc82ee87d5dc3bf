"""KDA on slots of a pool in plain JAX: one token, a window of tokens without writing states, and folding records."""

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.kda.decode_reference import commit, put, put_records
from pallas_kernels.precision import at_least_float32, einsum

__all__ = ["commit", "decode", "verify"]


@partial(jax.jit, static_argnames="scale")
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
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.kda.decode.kda_decode`."""
    dtype = at_least_float32(q, k, v, g, beta, pool)
    values = v.dtype
    q, k, v, g, beta = _real(slots, dtype, q, k, v, g, beta)
    decayed = jnp.exp(g)[..., None] * pool[jnp.maximum(slots, 0)]
    # Both products in one pass over the states: S q after the write is S q before it and q·k of what is written.
    read = einsum("bhkv,bhkx->bhxv", decayed, jnp.stack([k, q], axis=-1))
    u = beta[..., None] * (v - read[:, :, 0])
    o = scale * (read[:, :, 1] + jnp.sum(q * k, axis=-1, keepdims=True) * u)
    o = jnp.where((slots >= 0)[:, None, None], o, 0).astype(values)
    return o, put(pool, slots, decayed + k[..., None] * u[:, :, None, :])


@partial(jax.jit, static_argnames="scale")
def verify(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    pool: jax.Array,
    recorded: tuple[jax.Array, jax.Array, jax.Array],
    slots: jax.Array,
    committed: jax.Array,
    *,
    scale: float,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    """See `pallas_kernels.kda.decode.kda_verify`: the state is read once for all tokens.

    Row i of the window meets the state as x_i ⊙ exp G_i, and record or token j as ⟨x_i, k_j ⊙ exp(G_i - G_j)⟩.
    """
    dtype = at_least_float32(q, k, v, g, beta, pool)
    values = v.dtype
    q, k, v, g, beta = _real(slots, dtype, q, k, v, g, beta)
    chosen = jnp.maximum(slots, 0)
    tokens, capacity = q.shape[1], recorded[0].shape[2]
    old = jnp.arange(capacity) < jnp.where(slots < 0, 0, committed)[:, None]
    past_k, past_u, past_g = (
        jnp.where(old[:, :, None, None], x[chosen].astype(dtype).swapaxes(1, 2), 0) for x in recorded
    )
    total = jnp.cumsum(jnp.concatenate([past_g, g], axis=1), axis=1)
    keys = jnp.concatenate([past_k, k], axis=1)
    own = total[:, capacity:]
    rows = jnp.stack([k, q])  # [2, B, n, H, K]
    read = einsum("xbthk,bhkv->xbthv", rows * jnp.exp(own), pool[chosen].astype(dtype))
    # Pair by pair, masked before the exponential: no bound is asked of the gate.
    order = jnp.arange(capacity + tokens) - capacity - jnp.arange(tokens)[:, None]
    between = jnp.where(order[:, :, None, None] <= 0, own[:, :, None] - total[:, None], -jnp.inf)
    mixes = jnp.sum(rows[:, :, :, None] * keys[:, None] * jnp.exp(between), axis=-1)  # [2, B, n, R + n, H]
    known = read + einsum("xbtsh,bshv->xbthv", mixes[:, :, :, :capacity], past_u)
    own_mixes = mixes[:, :, :, capacity:]
    written: list[jax.Array] = []
    for token in range(tokens):
        expected = known[0, :, token]
        if written:
            expected = expected + einsum("bsh,bshv->bhv", own_mixes[0, :, token, :token], jnp.stack(written, axis=1))
        written.append(beta[:, token, :, None] * (v[:, token] - expected))
    u = jnp.stack(written, axis=1)
    o = scale * (known[1] + einsum("btsh,bshv->bthv", own_mixes[1], u))
    o = jnp.where((slots >= 0)[:, None, None, None], o, 0).astype(values)
    return o, put_records(recorded, slots, committed, (k, u, g))


def _real(slots: jax.Array, dtype: jnp.dtype, *tokens: jax.Array) -> list[jax.Array]:
    """The tokens' arrays with zeros at padding, which may hold anything."""
    real = slots >= 0
    return [jnp.where(real.reshape(-1, *(1,) * (x.ndim - 1)), x.astype(dtype), 0) for x in tokens]
