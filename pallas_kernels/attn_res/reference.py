"""The definition: a softmax over the rows that are there."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.precision import at_least_float32, einsum


def attn_res(
    partial: Float[Array, "B T D"],
    bank: Float[Array, "R B T D"],
    num_rows: Int[Array, ""],
    query: Float[Array, "D"],
    norm_weight: Float[Array, "D"],
    eps: float,
) -> Float[Array, "B T D"]:
    """See `pallas_kernels.attn_res.attn_res`."""
    dtype = at_least_float32(partial, bank, query, norm_weight)
    there = jnp.append(jnp.arange(bank.shape[0]) < num_rows, True)[:, None, None]
    rows = jnp.concatenate([bank.astype(dtype), partial[None].astype(dtype)])
    rows = jnp.where(there[..., None], rows, 0)
    normed = rows * jax.lax.rsqrt(jnp.mean(rows**2, axis=-1, keepdims=True) + eps) * norm_weight
    scores = einsum("rbtd,d->rbt", normed, query)
    weights = jax.nn.softmax(jnp.where(there, scores, -jnp.inf), axis=0)
    return einsum("rbt,rbtd->btd", weights, rows, out=partial.dtype)
