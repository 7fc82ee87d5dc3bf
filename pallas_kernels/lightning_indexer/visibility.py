"""Which keys a query may see: one rule for the indexer, sparse attention and dense attention."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def visible_keys(
    q_positions: Int[Array, "B T"],
    key_positions: Int[Array, " S"],
    q_segments: Int[Array, "B T"] | None = None,
    key_segments: Int[Array, "B S"] | None = None,
) -> Bool[Array, "B T S"]:
    """True where `key_position <= q_position` and, with segments, where both sides carry the same segment id >= 0."""
    visible = key_positions <= q_positions[..., None]
    if q_segments is not None and key_segments is not None:
        visible &= (q_segments[..., None] == key_segments[:, None, :]) & (key_segments[:, None, :] >= 0)
    return visible


class Visibility(NamedTuple):
    """The arguments of `visible_keys` for a block of queries, evaluated a tile of keys at a time."""

    q_positions: jax.Array
    q_segments: jax.Array | None = None
    key_segments: jax.Array | None = None

    def end(self, num_keys: int) -> jax.Array:
        """No query of this block sees a key at or past this position."""
        return jnp.clip(jnp.max(self.q_positions) + 1, 0, num_keys)

    def tile(self, start: jax.Array, size: int) -> Bool[Array, "B T S"]:
        """Visibility of the keys `start .. start + size - 1`."""
        segments = self.key_segments
        if segments is not None:
            segments = jax.lax.dynamic_slice_in_dim(segments, start, size, axis=1)
        return visible_keys(self.q_positions, start + jnp.arange(size), self.q_segments, segments)
