"""What lives between calls: recurrent states, convolution tails, latents and index keys, in one pytree.

This is the contiguous form: every row of the batch owns `capacity` places. All reading and writing goes through the
methods, so a paged form can stand behind the same calls. Keys are quantised once, before they're written, and every reader
has the same bytes.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from kimi_jax.cache_format import CacheFormat, IndexCache, KvCache
from kimi_jax.config import KimiConfig
from kimi_jax.modules.kda import KdaState
from kimi_jax.modules.mla import MlaKeys
from kimi_jax.pytree import pytree
from pallas_kernels.fp8_latent import Fp8Latent
from pallas_kernels.mxfp8 import BLOCK, Mxfp8
from pallas_kernels.precision import at_least_float32


@pytree
class Cache:
    """State of a batch of sequences between calls.

    Attributes:
        lengths: [B] tokens each row has seen.
        kda_state: [KDA layers, B, H, K, V] float32, key channels first.
        conv_tail: [KDA layers, B, W-1, 3, P] last convolution inputs, oldest first, of the q, k and v projections.
        latent: [MLA layers, B, S, L+R] normalised latents and the unrotated slot, also in FP8.
        index_key: [MLA layers, B, S, KI], also in MXFP8, or None for models without an indexer.
    """

    lengths: Int[Array, " B"]
    kda_state: Float[Array, "Lk B H K V"]
    conv_tail: Float[Array, "Lk B W 3 P"]
    latent: Float[Array, "Lm B S L"] | Fp8Latent
    index_key: Float[Array, "Lm B S KI"] | Mxfp8 | None

    @staticmethod
    def allocate(
        config: KimiConfig,
        batch: int,
        capacity: int,
        dtype: DTypeLike = jnp.bfloat16,
        parts: int = 1,
        *,
        kv_cache: KvCache | None = None,
        index_cache: IndexCache | None = None,
    ) -> "Cache":
        """An empty cache.

        Args:
            config: of the model.
            batch: rows.
            capacity: tokens each row can hold.
            dtype: of activations, and so of tails, and of latents and index keys that have no format of their own; states
                are float32 (float64 for a float64 model).
            parts: equal parts that the places of a row shall fall into; `capacity` is rounded up.
            kv_cache: of latents, "bfloat16" or "fp8" (see `CacheFormat`); None: `dtype`.
            index_cache: of index keys, "bfloat16" or "mxfp8"; None: `dtype`.

        Raises:
            ValueError: `batch` or `capacity` isn't positive, `capacity` exceeds max_position_embeddings, or the model's
                sizes don't fit a format.
        """
        CacheFormat(kv_cache, index_cache).check(config)
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
        places = len(mla.layers), batch, capacity
        latent: Any = Fp8Latent.zeros(places, mla.kv_lora_rank, mla.qk_rope_head_dim) if kv_cache == "fp8" else None
        if latent is None:
            latent = jnp.zeros((*places, mla.cache_width), kv_cache or dtype)
        index_key: Any = None
        if dsa is not None and index_cache == "mxfp8":
            # Bytes of zero stand for numbers of zero, and nobody reads them before they are written.
            scale = jnp.zeros((*places, dsa.head_dim // BLOCK), jnp.uint8)
            index_key = Mxfp8(jnp.zeros((*places, dsa.head_dim), jnp.float8_e4m3fn), scale)
        elif dsa is not None:
            index_key = jnp.zeros((*places, dsa.head_dim), index_cache or dtype)
        return Cache(
            lengths=jnp.zeros(batch, jnp.int32),
            kda_state=jnp.zeros(
                (len(kda.layers), batch, kda.num_heads, kda.head_dim, kda.head_dim), at_least_float32(dtype)
            ),
            conv_tail=jnp.zeros((len(kda.layers), batch, kda.conv_kernel_size - 1, 3, width), dtype),
            latent=latent,
            index_key=index_key,
        )

    @property
    def batch(self) -> int:
        """Rows."""
        return self.lengths.shape[0]

    @property
    def capacity(self) -> int:
        """Tokens each row can hold."""
        return self.latent.shape[2]

    @property
    def dtype(self) -> jnp.dtype:
        """Of activations."""
        return self.conv_tail.dtype

    @property
    def format(self) -> CacheFormat:
        """How keys are kept; None where they have the dtype of activations."""
        latent: Any = self.latent
        index_key: Any = self.index_key
        plain: list[Any] = [
            None if isinstance(x, Fp8Latent | Mxfp8) or x is None or x.dtype == self.dtype else x.dtype.name
            for x in (latent, index_key)
        ]
        return CacheFormat(
            "fp8" if isinstance(latent, Fp8Latent) else plain[0],
            "mxfp8" if isinstance(index_key, Mxfp8) else plain[1],
        )

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

    def kda_pools(self) -> KdaState:
        """States and tails of all layers and rows as pools; slot l · batch + b is row b of the l-th KDA layer."""
        state, tail = self.kda_state, self.conv_tail
        slots = state.shape[0] * state.shape[1]
        return KdaState(state.reshape(slots, *state.shape[2:]), tail.reshape(slots, tail.shape[2], -1))

    def with_kda_pools(self, pools: KdaState) -> "Cache":
        """The cache with what `kda_pools` gave replaced."""
        return replace(
            self,
            kda_state=pools.state.reshape(self.kda_state.shape),
            conv_tail=pools.conv_tail.reshape(self.conv_tail.shape),
        )

    def read_keys(self, layer: Int[Array, ""] | int) -> MlaKeys:
        """All keys of one MLA layer, counted among the MLA layers; places past a row's length hold anything."""
        return MlaKeys(_at(self.latent, layer), None if self.index_key is None else _at(self.index_key, layer))

    def encode(self, keys: MlaKeys) -> MlaKeys:
        """Keys as this cache keeps them: what it is given to write, and what devices send to each other."""
        index_key = None if self.index_key is None or keys.index_key is None else _like(self.index_key, keys.index_key)
        return MlaKeys(_like(self.latent, keys.latent), index_key)

    def write_keys(self, layer: Int[Array, ""] | int, keys: MlaKeys, positions: Int[Array, "B T"]) -> "Cache":
        """The cache with new tokens' keys at their places; padding (-1) is dropped. Keys are encoded if they aren't."""
        rows = jnp.arange(self.batch)[:, None]
        places = jnp.where(positions < 0, self.capacity, positions)
        keys = self.encode(keys)

        def write(stored: Any, new: Any) -> Any:
            return jax.tree.map(lambda old, x: old.at[layer, rows, places].set(x, mode="drop"), stored, new)

        latent = write(self.latent, keys.latent)
        if self.index_key is None or keys.index_key is None:
            return replace(self, latent=latent)
        return replace(self, latent=latent, index_key=write(self.index_key, keys.index_key))


def _like(stored: Any, values: Any) -> Any:
    """Values in the format of a stored array."""
    if isinstance(values, Fp8Latent | Mxfp8):
        return values
    if isinstance(stored, Fp8Latent):
        return Fp8Latent.quantize(values, stored.latent_width)
    return Mxfp8.quantize(values) if isinstance(stored, Mxfp8) else values.astype(stored.dtype)


def _at(stack: Any, layer: Int[Array, ""] | int) -> Any:
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, layer, keepdims=False), stack)
