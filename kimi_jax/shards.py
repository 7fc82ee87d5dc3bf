"""What a decoder asks of the devices that share its work. `Shards` is one device that does all of it.

A decoder's functions run on local arrays: the part of every parameter, cache and activation that one device holds. Where
a result needs the other devices, the decoder asks its shards; `kimi_jax.parallel.MeshShards` asks them with collectives.
"""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kimi_jax.modules.experts import ExpertStack, Routing, run_experts
from kimi_jax.modules.mlp import GatedActivation
from pallas_kernels.dispatch import Implementation
from pallas_kernels.fp8_latent import Fp8Latent
from pallas_kernels.kda import KdaOutput, kda_from_raw
from pallas_kernels.mxfp8 import Mxfp8
from pallas_kernels.short_conv import short_conv
from pallas_kernels.sparse_mla import dense_mla, dsa_mla

Keys = TypeVar("Keys")


class Shards:
    """One device that holds everything. Operations take what those of `pallas_kernels` take, and differ where said."""

    @property
    def whole_rows(self) -> bool:
        """Whether this device has all tokens of its rows, and all heads."""
        return True

    # Tokens

    def first_token(self, tokens: int) -> Int[Array, ""] | int:
        """Number of the first of this device's `tokens` tokens in its row."""
        return 0

    def row_tokens(self, tokens: int) -> int:
        """Tokens of a whole row of which this device holds `tokens`."""
        return tokens

    def last_token(self, x: Float[Array, "*N B T D"], lengths: Int[Array, " B"]) -> Float[Array, "*N B 1 D"]:
        """Each row's last valid token (its first one where there is none)."""
        last = jnp.maximum(lengths - 1, 0)[:, None, None]
        return jnp.take_along_axis(x, last.reshape((1,) * (x.ndim - 3) + last.shape), axis=-2)

    # Heads, widths, vocabulary

    def embed(self, table: Float[Array, "V D"], token_ids: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Rows of the embedding."""
        return table[token_ids]

    def total(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        """The sum over devices that hold different heads of a mixer or different channels of an MLP."""
        return x

    def surprise(self, logits: Float[Array, "*rows V"], tokens: Int[Array, "*rows"]) -> Float[Array, "*rows"]:
        """−log p(token) in nats, given this device's part of the vocabulary's logits."""
        chosen = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
        return jax.nn.logsumexp(logits, axis=-1) - chosen

    # Keys

    def new_keys(self, keys: Keys, positions: Int[Array, "B T"]) -> tuple[Keys, Int[Array, "B S"]]:
        """The keys of all new tokens of the rows, with their places: what the caches are written from."""
        return keys, positions

    def places(self, positions: Int[Array, "B T"], capacity: int) -> Int[Array, "B T"]:
        """Where in this device's part of the cache, of `capacity` places, the keys belong; -1: not in this part."""
        return positions

    # Operations

    def short_conv(self, x: Float[Array, "B T X"], weight: Float[Array, "X W"], **options: Any) -> tuple[Array, Array]:
        """`pallas_kernels.short_conv`; `lengths`, `tail` and the new tail are those of whole rows."""
        return short_conv(x, weight, **options)

    def kda(
        self,
        q: Float[Array, "B T H K"],
        k: Float[Array, "B T H K"],
        v: Float[Array, "B T H V"],
        raw: Float[Array, "B T H K"],
        beta_logits: Float[Array, "B T H"],
        A_log: Float[Array, " H"],
        dt_bias: Float[Array, "H K"],
        **options: Any,
    ) -> KdaOutput:
        """`pallas_kernels.kda_from_raw`; `lengths`, `initial_state` and the final state are those of whole rows."""
        return kda_from_raw(q, k, v, raw, beta_logits, A_log, dt_bias, **options)

    def dense_mla(
        self,
        q: Float[Array, "B T H Q"],
        latent: Float[Array, "B S R"] | Fp8Latent,
        w_uk: Float[Array, "H N L"],
        w_uv: Float[Array, "H V L"],
        *,
        cached: bool,
        **options: Any,
    ) -> Float[Array, "B T H V"]:
        """`pallas_kernels.sparse_mla.dense_mla` over a cache, or over the new tokens' own keys."""
        return dense_mla(q, latent, w_uk, w_uv, **options)

    def dsa_mla(
        self,
        index_q: Float[Array, "B T I K"] | Mxfp8,
        index_k: Float[Array, "B S K"] | Mxfp8,
        index_w: Float[Array, "B T I"],
        q: Float[Array, "B T H Q"],
        latent: Float[Array, "B S R"] | Fp8Latent,
        w_uk: Float[Array, "H N L"],
        w_uv: Float[Array, "H V L"],
        *,
        cached: bool,
        **options: Any,
    ) -> Any:
        """`pallas_kernels.sparse_mla.dsa_mla` over a cache, or over the new tokens' own keys."""
        return dsa_mla(index_q, index_k, index_w, q, latent, w_uk, w_uv, **options)

    def experts(
        self,
        x: Float[Array, "M D"],
        routing: Routing,
        valid: Bool[Array, " M"],
        stack: ExpertStack,
        num_experts: int,
        activation: GatedActivation,
        implementation: Implementation | None,
        beside: Float[Array, "M W"] | None = None,
    ) -> tuple[Float[Array, "M D"], Float[Array, "M W"] | None]:
        """`run_experts`, and the `total` of what is beside them.

        `routing` names experts of the whole model, `stack` holds this device's.
        """
        mixed = run_experts(x, routing, valid, stack, num_experts, activation, implementation)
        return mixed, None if beside is None else self.total(beside)


ALONE = Shards()
