"""Real shapes of the lightning indexer, for tests, benchmarks and ahead-of-time compilation."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class IndexerSpec:
    """One call of `lightning_indexer`; the defaults are Kimi K3.1 Pro's. With `page`, its keys lie in pages of as many."""

    name: str
    batch: int
    queries: int
    keys: int
    heads: int = 32
    key_width: int = 128
    top_k: int = 2048
    dtype: str = "bfloat16"
    page: int = 0

    def arguments(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Abstract array arguments by name."""
        dtype = jnp.dtype(self.dtype)
        arrays = {
            "q": jax.ShapeDtypeStruct((self.batch, self.queries, self.heads, self.key_width), dtype),
            "k": jax.ShapeDtypeStruct((self.batch, self.keys, self.key_width), dtype),
            "w": jax.ShapeDtypeStruct((self.batch, self.queries, self.heads), jnp.dtype("float32")),
            "q_positions": jax.ShapeDtypeStruct((self.batch, self.queries), jnp.dtype("int32")),
        }
        if self.page:
            pages = self.keys // self.page
            arrays["k"] = jax.ShapeDtypeStruct((self.batch * pages, self.page, self.key_width), dtype)
            arrays["page_table"] = jax.ShapeDtypeStruct((self.batch, pages), jnp.dtype("int32"))
        return arrays


PREFILL_KEYS = (8192, 32768, 131072)
DECODE_BATCHES = ((1, 1), (64, 1), (128, 1), (64, 4), (1, 16))  # sequences, queries of each

PREFILL = tuple(IndexerSpec(f"k31-prefill-4096x{keys}", 1, 4096, keys) for keys in PREFILL_KEYS)
DECODE = tuple(IndexerSpec(f"k31-decode-{b}x{t}", b, t, 32768) for b, t in DECODE_BATCHES)
PAGED = (
    *(replace(spec, name=f"{spec.name}-pages-of-64", page=64) for spec in (PREFILL[2], DECODE[1], DECODE[3])),
    replace(DECODE[1], name="k31-decode-64x1-pages-of-256", page=256),
)
LONG = IndexerSpec("k31-64k", 1, 65536, 65536)
MILLION = (
    IndexerSpec("k31-prefill-4096x1048576", 1, 4096, 2**20),
    IndexerSpec("k31-decode-16x1-1048576", 16, 1, 2**20),
)
TINY = (
    IndexerSpec("tiny", 2, 40, 40, heads=4, key_width=16, top_k=8, dtype="float32"),
    IndexerSpec("tiny-odd", 3, 37, 53, heads=3, key_width=7, top_k=5, dtype="float32"),
    IndexerSpec("tiny-short", 1, 6, 6, heads=2, key_width=8, top_k=11, dtype="float32"),
)
SPECS = (*PREFILL, *DECODE, *PAGED, LONG, *TINY)
