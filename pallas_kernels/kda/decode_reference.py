"""KDA on slots of a pool by the token recurrence: the definition."""

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.kda import reference
from pallas_kernels.precision import at_least_float32, einsum


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
    """See `pallas_kernels.kda.decode.kda_decode`: one token of `kda` on the states of the slots."""
    tokens = (x[:, None] for x in (q, k, v, g, beta))
    o, states, _ = reference.kda(
        *tokens,
        initial_state=pool[jnp.maximum(slots, 0)],
        lengths=(slots >= 0).astype(jnp.int32),
        segment_ids=None,
        num_segments=None,
        state_positions=None,
        scale=scale,
    )
    return o[:, 0], put(pool, slots, states)


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
    """See `pallas_kernels.kda.decode.kda_verify`: folds what is committed, then goes on token by token."""
    state = commit(pool, recorded, slots, committed)[jnp.maximum(slots, 0)]
    dtype = at_least_float32(q, k, v, g, beta, pool)
    real = slots >= 0
    q, k, v, g, beta = (
        jnp.where(real.reshape(-1, *(1,) * (x.ndim - 1)), x, 0).astype(dtype) for x in (q, k, v, g, beta)
    )
    outputs, written = [], []
    for token in range(q.shape[1]):
        decayed = jnp.exp(g[:, token])[..., None] * state
        u = beta[:, token, :, None] * (v[:, token] - einsum("bhkv,bhk->bhv", decayed, k[:, token]))
        state = decayed + k[:, token, :, :, None] * u[:, :, None, :]
        outputs.append(jnp.where(real[:, None, None], scale * einsum("bhkv,bhk->bhv", state, q[:, token]), 0))
        written.append(u)
    return jnp.stack(outputs, axis=1), put_records(recorded, slots, committed, (k, jnp.stack(written, axis=1), g))


@jax.jit
def commit(
    pool: jax.Array, recorded: tuple[jax.Array, jax.Array, jax.Array], slots: jax.Array, counts: jax.Array
) -> jax.Array:
    """See `pallas_kernels.kda.decode.kda_commit`: S = diag(exp g) S + k uᵀ, record after record."""
    chosen = jnp.maximum(slots, 0)
    state = pool[chosen]
    keys, written, decays = (x[chosen].astype(pool.dtype) for x in recorded)

    def fold(token: jax.Array, state: jax.Array) -> jax.Array:
        key, u, decay = (
            jax.lax.dynamic_index_in_dim(x, token, axis=2, keepdims=False) for x in (keys, written, decays)
        )
        after = jnp.exp(decay)[..., None] * state + key[..., None] * u[:, :, None, :]
        return jnp.where((token < counts)[:, None, None, None], after, state)

    return put(pool, slots, jax.lax.fori_loop(0, keys.shape[2], fold, state))


def put(pool: jax.Array, slots: jax.Array, states: jax.Array) -> jax.Array:
    """The pool with the slots' states replaced; negative slots name nothing."""
    return pool.at[jnp.where(slots < 0, pool.shape[0], slots)].set(states.astype(pool.dtype), mode="drop")


def put_records(
    recorded: tuple[jax.Array, jax.Array, jax.Array],
    slots: jax.Array,
    committed: jax.Array,
    fresh: tuple[jax.Array, jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The records with those of a window behind what is committed."""
    rows = jnp.where(slots < 0, recorded[0].shape[0], slots)[:, None]
    places = committed[:, None] + jnp.arange(fresh[0].shape[1])
    k, u, g = (
        old.at[rows, :, places].set(new.astype(old.dtype), mode="drop")
        for old, new in zip(recorded, fresh, strict=True)
    )
    return k, u, g
