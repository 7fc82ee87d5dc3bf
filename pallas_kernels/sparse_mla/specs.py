"""Real shapes of sparse and dense MLA, for tests, benchmarks and ahead-of-time compilation."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.lightning_indexer.specs import DECODE_BATCHES, PREFILL_KEYS


@dataclass(frozen=True)
class MlaSpec:
    """One call of `dsa_mla`, `sparse_mla` or (top_k None) `dense_mla`; the widths are those of the Kimi models."""

    name: str
    batch: int
    queries: int
    keys: int
    heads: int = 96
    nope: int = 128
    slot: int = 64
    value: int = 128
    latent: int = 512
    top_k: int | None = 2048
    index_heads: int = 32
    index_width: int = 128
    dtype: str = "bfloat16"

    @property
    def scale(self) -> float:
        """Factor of the scores."""
        return (self.nope + self.slot) ** -0.5

    def dense_arguments(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Abstract array arguments of `dense_mla`."""
        return {
            "q": self._float(self.batch, self.queries, self.heads, self.nope + self.slot),
            "latent": self._float(self.batch, self.keys, self.latent + self.slot),
            "w_uk": self._float(self.heads, self.nope, self.latent),
            "w_uv": self._float(self.heads, self.value, self.latent),
            "q_positions": jax.ShapeDtypeStruct((self.batch, self.queries), jnp.dtype("int32")),
        }

    def dsa_arguments(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Abstract array arguments of `dsa_mla`."""
        return {
            "index_q": self._float(self.batch, self.queries, self.index_heads, self.index_width),
            "index_k": self._float(self.batch, self.keys, self.index_width),
            "index_w": jax.ShapeDtypeStruct((self.batch, self.queries, self.index_heads), jnp.dtype("float32")),
            **self.dense_arguments(),
        }

    def sparse_arguments(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Abstract array arguments of `sparse_mla`."""
        if self.top_k is None:
            raise ValueError(f"MlaSpec {self.name!r} has top_k=None: it describes dense attention only.")
        return {
            "q": self._float(self.batch, self.queries, self.heads, self.latent + self.slot),
            "latent": self._float(self.batch, self.keys, self.latent + self.slot),
            "indices": jax.ShapeDtypeStruct((self.batch, self.queries, self.top_k), jnp.dtype("int32")),
        }

    def _float(self, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(self.dtype))


K31_HEADS = (96, 48, 24, 12)  # all of them, and a shard's over 2, 4 and 8 devices
PREFILL = tuple(
    MlaSpec(f"k31-prefill-4096x{keys}-h{heads}", 1, 4096, keys, heads) for keys in PREFILL_KEYS for heads in K31_HEADS
)
DECODE = tuple(
    MlaSpec(f"k31-decode-{b}x{t}-h{heads}", b, t, 32768, heads) for b, t in DECODE_BATCHES for heads in K31_HEADS
)
LONG = MlaSpec("k31-64k-h8", 1, 65536, 65536, 8)
DENSE = (
    MlaSpec("48b-prefill-4096x4096", 1, 4096, 4096, 32, top_k=None),
    MlaSpec("48b-prefill-4096x32768", 1, 4096, 32768, 32, top_k=None),
    MlaSpec("48b-decode-64x1", 64, 1, 32768, 32, top_k=None),
    MlaSpec("k3-prefill-4096x8192-h12", 1, 4096, 8192, 12, top_k=None),
)
TINY = (
    MlaSpec("tiny", 2, 40, 40, 4, 6, 3, 5, 10, top_k=8, index_heads=4, index_width=8, dtype="float32"),
    MlaSpec("tiny-odd", 3, 21, 53, 3, 7, 2, 9, 11, top_k=5, index_heads=3, index_width=7, dtype="float32"),
    MlaSpec("tiny-short", 1, 6, 6, 2, 4, 4, 4, 8, top_k=11, index_heads=2, index_width=4, dtype="float32"),
)
SPECS = (*PREFILL, *DECODE, LONG, *DENSE, *TINY)
