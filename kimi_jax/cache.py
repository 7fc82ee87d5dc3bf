"""What lives between calls: recurrent states, convolution tails, latents and index keys, in one pytree.

This is the contiguous form: every row of the batch owns `capacity` places. All reading and writing goes through the
methods, so a paged form can stand behind the same calls.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from kimi_jax.config import KimiConfig
from kimi_jax.modules.kda import KdaState
from kimi_jax.modules.mla import MlaKeys
from kimi_jax.pytree import pytree
from pallas_kernels.precision import at_least_float32


@pytree
class Cache:
    """State of a batch of sequences between calls.

    Attributes:
        lengths: [B] tokens each row has seen.
        kda_state: [KDA layers, B, H, K, V] float32, key channels first.
        conv_tail: [KDA layers, B, W-1, 3, P] last convolution inputs, oldest first, of the q, k and v projections.
        latent: [MLA layers, B, S, L+R] normalised latents and the unrotated slot.
        index_key: [MLA layers, B, S, KI], or None for models without an indexer.
    """

    lengths: Int[Array, " B"]
    kda_state: Float[Array, "Lk B H K V"]
    conv_tail: Float[Array, "Lk B W 3 P"]
    latent: Float[Array, "Lm B S L"]
    index_key: Float[Array, "Lm B S KI"] | None

    @staticmethod
    def allocate(
        config: KimiConfig, batch: int, capacity: int, dtype: DTypeLike = jnp.bfloat16, parts: int = 1
    ) -> "Cache":
        """An empty cache.

        Args:
            config: of the model.
            batch: rows.
            capacity: tokens each row can hold.
            dtype: of tails, latents and index keys; states are float32 (float64 for a float64 model).
            parts: equal parts that the places of a row shall fall into; `capacity` is rounded up.

        Raises:
            ValueError: `batch` or `capacity` isn't positive, or `capacity` exceeds max_position_embeddings.
        """
        if batch < 1:
            raise ValueError(f"batch={batch}: a cache needs at least one row.")
        if not 1 <= capacity <= config.max_position_embeddings:
            raise ValueError(
                f"capacity={capacity}: a row must hold between 1 and max_position_embeddings="
                f"{config.max_position_embeddings} tokens."
            )
        capacity = -(-capacity // parts) * parts
        kda, mla, dsa = config.kda, config.mla, config.dsa
        width = kda.num_heads * kda.head_dim
        return Cache(
            lengths=jnp.zeros(batch, jnp.int32),
            kda_state=jnp.zeros(
                (len(kda.layers), batch, kda.num_heads, kda.head_dim, kda.head_dim), at_least_float32(dtype)
            ),
            conv_tail=jnp.zeros((len(kda.layers), batch, kda.conv_kernel_size - 1, 3, width), dtype),
            latent=jnp.zeros((len(mla.layers), batch, capacity, mla.kv_lora_rank + mla.qk_rope_head_dim), dtype),
            index_key=None if dsa is None else jnp.zeros((len(mla.layers), batch, capacity, dsa.head_dim), dtype),
        )

    @property
    def batch(self) -> int:
        """Rows."""
        return self.lengths.shape[0]

    @property
    def capacity(self) -> int:
        """Tokens each row can hold."""
        return self.latent.shape[2]

    def advance(self, lengths: Int[Array, " B"]) -> "Cache":
        """The cache after `lengths` new tokens were written."""
        return replace(self, lengths=self.lengths + lengths)

    def read_kda(self, layer: Int[Array, ""] | int) -> KdaState:
        """State of one KDA layer, counted among the KDA layers."""
        tail = _at(self.conv_tail, layer)
        return KdaState(_at(self.kda_state, layer), tail.reshape(*tail.shape[:2], -1))

    def write_kda(self, layer: Int[Array, ""] | int, state: KdaState) -> "Cache":
        """The cache with one KDA layer's state replaced."""
        return replace(
            self,
            kda_state=self.kda_state.at[layer].set(state.state.astype(self.kda_state.dtype)),
            conv_tail=self.conv_tail.at[layer].set(
                state.conv_tail.reshape(self.conv_tail.shape[1:]).astype(self.conv_tail.dtype)
            ),
        )

    def read_keys(self, layer: Int[Array, ""] | int) -> MlaKeys:
        """All keys of one MLA layer, counted among the MLA layers; places past a row's length hold anything."""
        return MlaKeys(_at(self.latent, layer), None if self.index_key is None else _at(self.index_key, layer))

    def write_keys(self, layer: Int[Array, ""] | int, keys: MlaKeys, positions: Int[Array, "B T"]) -> "Cache":
        """The cache with new tokens' keys at their places; padding (-1) is dropped."""
        rows = jnp.arange(self.batch)[:, None]
        places = jnp.where(positions < 0, self.capacity, positions)
        latent = self.latent.at[layer, rows, places].set(keys.latent.astype(self.latent.dtype), mode="drop")
        if self.index_key is None or keys.index_key is None:
            return replace(self, latent=latent)
        index_key = self.index_key.at[layer, rows, places].set(keys.index_key.astype(self.index_key.dtype), mode="drop")
        return replace(self, latent=latent, index_key=index_key)


def _at(stack: jax.Array, layer: Int[Array, ""] | int) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(stack, layer, keepdims=False)
