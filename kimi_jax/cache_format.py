"""How the keys of earlier tokens are kept, and what that takes: formats of latents and index keys."""

from dataclasses import dataclass
from typing import Literal, get_args

import jax.numpy as jnp
from jax.typing import DTypeLike

from kimi_jax.config import KimiConfig
from pallas_kernels.fp8_latent import TILE, bytes_per_token
from pallas_kernels.mxfp8 import BLOCK
from pallas_kernels.precision import at_least_float32

KvCache = Literal["bfloat16", "fp8"]
IndexCache = Literal["bfloat16", "mxfp8"]


@dataclass(frozen=True)
class TokenBytes:
    """Bytes that a cache grows by with every token of a row, all layers together.

    Attributes:
        latent: of the latents.
        index_key: of the index keys; 0 without an indexer.
    """

    latent: int
    index_key: int

    @property
    def total(self) -> int:
        """Of both."""
        return self.latent + self.index_key

    def __str__(self) -> str:
        index = f" and {self.index_key:,} of index keys" if self.index_key else ""
        return f"{self.latent:,} bytes of latents{index} a token"


@dataclass(frozen=True)
class CacheFormat:
    """In which form a cache keeps what grows with its tokens.

    Attributes:
        kv_cache: of latents: "bfloat16"; "fp8", an e4m3 number for each latent channel with a scale for 128 of them, and
            bfloat16 for the channels of the slot (656 bytes a layer in the public models); None: the dtype of the cache.
        index_cache: of index keys: "bfloat16"; "mxfp8", an e4m3 number for each channel with a scale for 32 of them (132
            bytes a layer), and index queries are then rounded likewise; None: the dtype of the cache.

    Raises:
        ValueError: another value; the message has the field.
    """

    kv_cache: KvCache | None = None
    index_cache: IndexCache | None = None

    def __post_init__(self) -> None:
        for name, kinds in (("kv_cache", KvCache), ("index_cache", IndexCache)):
            value, legal = getattr(self, name), get_args(kinds)
            if value is not None and value not in legal:
                raise ValueError(
                    f"{name}={value!r}; it must be {', '.join(map(repr, legal))} or None, the compute dtype."
                )

    def check(self, config: KimiConfig) -> None:
        """Raises ValueError, with the field in it, where a model's keys can't be kept so."""
        mla, dsa = config.mla, config.dsa
        if self.kv_cache == "fp8" and mla.kv_lora_rank % TILE:
            raise ValueError(
                f"kv_cache='fp8' needs kv_lora_rank to be a multiple of {TILE}, channels that share a scale; the config "
                f"has kv_lora_rank={mla.kv_lora_rank}. Legal are 'bfloat16' and None."
            )
        if self.index_cache is None:
            return
        if dsa is None:
            raise ValueError(
                f"index_cache={self.index_cache!r}: {config.model_type!r} has no indexer (no dsa_config), and so no index "
                "keys; it must be None."
            )
        if self.index_cache == "mxfp8" and dsa.head_dim % BLOCK:
            raise ValueError(
                f"index_cache='mxfp8' needs index_head_dim to be a multiple of {BLOCK}, channels that share a scale; the "
                f"config has index_head_dim={dsa.head_dim}. Legal are 'bfloat16' and None."
            )

    def token_bytes(self, config: KimiConfig, dtype: DTypeLike = jnp.bfloat16) -> TokenBytes:
        """Bytes a token, given the dtype of what isn't quantised.

        Raises:
            ValueError: as `check`.
        """
        self.check(config)
        mla, dsa, layers = config.mla, config.dsa, len(config.mla.layers)
        plain = [jnp.dtype(kind or dtype).itemsize for kind in (_plain(self.kv_cache), _plain(self.index_cache))]
        latent = mla.cache_width * plain[0]
        if self.kv_cache == "fp8":
            latent = bytes_per_token(mla.kv_lora_rank, mla.qk_rope_head_dim)
        index_key = 0 if dsa is None else dsa.head_dim * plain[1]
        if dsa is not None and self.index_cache == "mxfp8":
            index_key = dsa.head_dim + dsa.head_dim // BLOCK
        return TokenBytes(layers * latent, layers * index_key)

    def __str__(self) -> str:
        return f"latents in {self.kv_cache or 'the compute dtype'}, index keys in {self.index_cache or 'the compute dtype'}"


DEFAULT_FORMAT = CacheFormat()
"""Everything in the compute dtype."""


def row_bytes(config: KimiConfig, dtype: DTypeLike = jnp.bfloat16) -> int:
    """Bytes of a cache's row whatever its length: recurrent states in float32 or better, and convolution tails."""
    kda, width = config.kda, config.kda.width
    state = kda.num_heads * kda.head_dim**2 * at_least_float32(dtype).itemsize
    return len(kda.layers) * (state + (kda.conv_kernel_size - 1) * 3 * width * jnp.dtype(dtype).itemsize)


def _plain(kind: str | None) -> str | None:
    return "bfloat16" if kind == "bfloat16" else None
