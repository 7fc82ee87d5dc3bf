"""How the tokens of a call lie in their sequences."""

import jax.numpy as jnp
from jaxtyping import Array, Int

from kimi_jax.cache import Cache
from kimi_jax.pytree import pytree


@pytree
class Rows:
    """How the tokens of a call lie in their sequences.

    Attributes:
        positions: [B, T] place of each token among its row's keys; -1 for padding.
        lengths: [B] valid tokens of each row (they come first), or None when all are valid or `segment_ids` says.
        segment_ids: [B, T] ids of packed sequences, -1 for padding, or None.
    """

    positions: Int[Array, "B T"]
    lengths: Int[Array, " B"] | None
    segment_ids: Int[Array, "B T"] | None


def fresh_rows(
    token_ids: Int[Array, "B T"],
    lengths: Int[Array, " B"] | None,
    segment_ids: Int[Array, "B T"] | None,
) -> Rows:
    """Rows of whole sequences, without earlier tokens."""
    steps = jnp.arange(token_ids.shape[1], dtype=jnp.int32)
    valid = jnp.ones(token_ids.shape, bool)
    if segment_ids is not None:
        valid = segment_ids >= 0
    elif lengths is not None:
        valid = steps < lengths[:, None]
    return Rows(jnp.where(valid, steps, -1), lengths, segment_ids)


def further_rows(
    token_ids: Int[Array, "B T"], cache: Cache, lengths: Int[Array, " B"] | None
) -> tuple[Int[Array, " B"], Rows]:
    """(valid new tokens of each row, the rows), for tokens that follow those in the cache.

    Raises:
        ValueError: more rows or more new tokens than the cache could ever hold.
    """
    batch, tokens = token_ids.shape
    if batch != cache.batch:
        raise ValueError(f"token_ids has {batch} rows, the cache {cache.batch}: they must be equal.")
    if tokens > cache.capacity:
        raise ValueError(f"{tokens} new tokens a row don't fit a cache of capacity {cache.capacity}.")
    lengths = jnp.full(batch, tokens, jnp.int32) if lengths is None else lengths.astype(jnp.int32)
    return lengths, Rows(cache.positions(lengths, tokens), lengths, None)
