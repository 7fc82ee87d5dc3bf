"""How the tokens of a call lie in their sequences."""

import jax.numpy as jnp
from jaxtyping import Array, Int

from kimi_jax.cache import Cache
from kimi_jax.pytree import pytree
from kimi_jax.shards import ALONE, Shards


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
    shards: Shards = ALONE,
) -> Rows:
    """Rows of whole sequences, without earlier tokens."""
    steps = shards.first_token(token_ids.shape[1]) + jnp.arange(token_ids.shape[1], dtype=jnp.int32)
    valid = jnp.ones(token_ids.shape, bool)
    if segment_ids is not None:
        valid = segment_ids >= 0
    elif lengths is not None:
        valid = steps < lengths[:, None]
    return Rows(jnp.where(valid, steps, -1), lengths, segment_ids)


def further_rows(
    token_ids: Int[Array, "B T"], cache: Cache, lengths: Int[Array, " B"] | None, shards: Shards = ALONE
) -> tuple[Int[Array, " B"], Rows]:
    """(valid new tokens of each row, the rows), for tokens that follow those in the cache.

    Raises:
        ValueError: other rows than the cache has.
    """
    batch, tokens = token_ids.shape
    if batch != cache.batch:
        raise ValueError(f"token_ids has {batch} rows, the cache {cache.batch}: they must be equal.")
    if lengths is None:
        lengths = jnp.full(batch, shards.row_tokens(tokens), jnp.int32)
    lengths = lengths.astype(jnp.int32)
    steps = shards.first_token(tokens) + jnp.arange(tokens, dtype=jnp.int32)
    positions = jnp.where(steps < lengths[:, None], cache.lengths[:, None] + steps, -1)
    return lengths, Rows(positions, lengths, None)


def check_room(tokens: int, capacity: int) -> None:
    """Raises a ValueError where a call has more new tokens than a cache could ever hold."""
    if tokens > capacity:
        raise ValueError(f"{tokens} new tokens a row don't fit a cache of capacity {capacity}.")
