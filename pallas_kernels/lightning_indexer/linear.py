"""One vector a query whose product with a key comes close to the key's score: the first stage's cheapest form.

relu(x) of a head is replaced by a · x, a the part of a sample of keys whose product is positive. Heads that are positive for
almost all keys, or for almost none, lose nothing by that; they carry most of the scores of trained models.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.lightning_indexer.blocks import in_blocks, plan
from pallas_kernels.lightning_indexer.select import plain, score_dtype
from pallas_kernels.mxfp8 import Mxfp8
from pallas_kernels.precision import einsum

SLOPE_KEYS = 256
"""Keys from which the slopes are taken."""


def sampled(q_positions: Int[Array, "B T"], count: int) -> Int[Array, "B C"]:
    """`count` places spread evenly over what the last query of each row sees."""
    seen = jnp.maximum(jnp.max(q_positions, axis=1), 0)[:, None] + 1
    number = jnp.arange(count, dtype=jnp.int32)
    return number * (seen // count) + number * (seen % count) // count


def taken(
    k: Float[Array, "R S K"] | Mxfp8, places: Int[Array, "B C"], first_row: Int[Array, ""] | int = 0
) -> Float[Array, "B C K"]:
    """The keys at these places of the rows first_row .. first_row + B - 1."""
    rows = first_row + jnp.arange(places.shape[0])[:, None]
    places = jnp.minimum(places, k.shape[1] - 1)
    return plain(jax.tree.map(lambda x: x[rows, places], k))


def linear_queries(
    q: Float[Array, "B T H K"] | Mxfp8,
    k: Float[Array, "R S K"] | Mxfp8,
    w: Float[Array, "B T H"],
    q_positions: Int[Array, "B T"],
    places: Int[Array, "B C"] | None = None,
    first_row: Int[Array, ""] | int = 0,
) -> Float[Array, "B T K"]:
    """Σ_h a_h w_h q_h, float32 or better, with a_h the part of the sampled keys that the query sees where q_h · k > 0.

    Where these are only some of a row's queries, `places` are those of the sample of all of them; they are queries of the
    keys' rows first_row .. first_row + B - 1.
    """
    places = sampled(q_positions, SLOPE_KEYS) if places is None else places
    return linear_by(taken(k, places, first_row), places, q, w, q_positions)


def linear_by(
    keys: Float[Array, "B C K"],
    places: Int[Array, "B C"],
    q: Float[Array, "B T H K"] | Mxfp8,
    w: Float[Array, "B T H"],
    q_positions: Int[Array, "B T"],
) -> Float[Array, "B T K"]:
    """`linear_queries` with slopes from these keys, which are at these places."""
    batch, num_queries, heads, _ = q.shape

    def block(given: tuple, sample: tuple, _: tuple) -> jax.Array:
        some_q, some_w, positions = given
        some_q, (keys, places) = plain(some_q), sample
        seen = places[:, None, :] <= positions[..., None]
        dots = einsum("bthk,bsk->bths", some_q, keys)
        positive = jnp.sum((dots > 0) & seen[:, :, None, :], axis=-1)
        slopes = positive / jnp.maximum(jnp.sum(seen, axis=-1), 1)[..., None]
        dtype = score_dtype(some_q, keys, some_w)
        return einsum("bth,bthk->btk", (some_w * slopes).astype(dtype), some_q.astype(dtype))

    fits = 2**25 // (batch * heads * SLOPE_KEYS * 4)
    return in_blocks(
        block, plan(1, num_queries, fits=max(1, fits), wanted=1024), (q, w, q_positions), (keys, places), ((), ())
    )
