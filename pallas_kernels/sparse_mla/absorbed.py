"""The absorbed form of MLA: projections moved to the queries and outputs, one latent key for all heads."""

import jax
import jax.numpy as jnp

from pallas_kernels.fp8_latent import Fp8Latent
from pallas_kernels.precision import einsum
from pallas_kernels.sparse_mla.attend import Mask, Settings, attend_tiles
from pallas_kernels.target import platform


def product_rows() -> int:
    """Query heads that share one product: enough for full throughput, few enough to skip what causality hides.

    A CPU wants what it works on in its caches; an accelerator is idle between short steps.
    """
    return 1024 if platform() == "cpu" else 16384


def key_tile(num_keys: int, key_bytes: int, budget_bytes: int) -> int:
    """Keys per tile; fewer where three copies of the tile would fill more than half the budget."""
    wanted = 256 if platform() == "cpu" else 2048
    return max(1, min(wanted, num_keys, budget_bytes // (6 * key_bytes)))


def absorb(q: jax.Array, w_uk: jax.Array) -> jax.Array:
    """[B, T, H, N + R] -> [B, T, H, L + R]: the key projection moves to the query side."""
    nope, slot = jnp.split(q, [w_uk.shape[1]], axis=-1)
    # Heads first: asked for "bthl", jnp.einsum builds a bfloat16 product that XLA can't run on CPUs.
    content = jnp.moveaxis(einsum("bthn,hnl->hbtl", nope, w_uk, out=q.dtype), 0, 2)
    return jnp.concatenate([content, slot], axis=-1)


def expand(o: jax.Array, w_uv: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """[B, T, H, L] -> [B, T, H, V]."""
    return einsum("bthl,hvl->bthv", o.astype(dtype), w_uv, out=dtype)


def attend_latent(settings: Settings, q: jax.Array, latent: jax.Array | Fp8Latent, mask: Mask) -> jax.Array:
    """Absorbed attention over all keys; every head shares the latent."""
    return attend_tiles(settings, q[:, None], latent, None, mask)[:, 0]
